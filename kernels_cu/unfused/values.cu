// out = p v: the values of all keys, weighted.
//
// values_rows, for few queries: a CTA takes a split of the keys of one query and head and reads
// those that have a weight; the last one adds the splits in order. Bounded by reading V once for
// each query head.
// values_tile, for many queries: a CTA takes 64 queries of a head on tensor cores and leaves out
// tiles of keys that have no weight. Bounded by reading p.
// instantiate: values_rows<bfloat16, 8>
// instantiate: values_rows<half, 1>
// instantiate: values_rows<float, 4>
// instantiate: values_tile<bfloat16, 128, 8>
// instantiate: values_tile<half, 33, 1>
// instantiate: values_tile<bfloat16, 256, 8>
#include "device/attention_prefill.cuh"

namespace cufuse {

template <typename T>
struct ValuesArgs {
  const T* p;          // [batch, n_heads, q_len, kv_len]
  const T* v;          // [batch, kv_len, n_kv_heads, head_dim]; at the strides below
  const int* start;    // [batch]; keys from start + q_len on are not looked at; null: all are
  const int* lengths;  // [batch]; keys from lengths on are not looked at; null: start decides
  T* out;              // [batch, q_len, n_heads, head_dim]
  float* partial;      // [rows, max_splits, head_dim], rows = [batch, n_heads, q_len]
  u32* arrived;        // [rows]; zeros between launches
  i64 v_batch_stride;  // strides count elements
  i64 v_pos_stride;
  i64 v_head_stride;
  i64 first_row;  // of this launch
  int q_len;
  int kv_len;
  int n_heads;
  int n_kv_heads;
  int head_dim;
  int max_splits;
};

template <typename T>
CUFUSE_DEVICE int live_keys(const ValuesArgs<T>& args, int batch) {
  i64 live = args.kv_len;
  if (args.lengths) {
    live = args.lengths[batch];
  } else if (args.start) {
    live = static_cast<i64>(args.start[batch]) + args.q_len;
  }
  return static_cast<int>(max(min(live, static_cast<i64>(args.kv_len)), static_cast<i64>(0)));
}

template <typename T, int kVec>
__global__ void __launch_bounds__(128, 8) values_rows(const ValuesArgs<T> args) {
  constexpr int kThreads = 128, kKeyGroups = kThreads / 32;
  constexpr int kColumns = 32 * kVec;  // of a head, at a time
  __shared__ float sums[kKeyGroups][kColumns];
  __shared__ bool is_last;
  const int launch_row = blockIdx.x / args.max_splits;
  const int split = blockIdx.x - launch_row * args.max_splits;
  const i64 row = args.first_row + launch_row;
  const int query = static_cast<int>(row % args.q_len);
  const int head = static_cast<int>(row / args.q_len % args.n_heads);
  const int batch = static_cast<int>(row / args.q_len / args.n_heads);
  const int n_keys = live_keys(args, batch);
  const int per_split = args.max_splits == 1 ? max(n_keys, 1) : keys_per_split(n_keys);
  const int n_splits = max((n_keys + per_split - 1) / per_split, 1);
  if (split >= n_splits) return;
  const int first = split * per_split, last = min(first + per_split, n_keys);
  const T* p = args.p + row * args.kv_len;
  const T* v = args.v + batch * args.v_batch_stride +
               head / (args.n_heads / args.n_kv_heads) * args.v_head_stride;
  T* out = args.out +
           ((static_cast<i64>(batch) * args.q_len + query) * args.n_heads + head) * args.head_dim;
  float* partial =
      n_splits > 1 ? args.partial + static_cast<i64>(launch_row) * args.max_splits * args.head_dim
                   : nullptr;
  const int lane = threadIdx.x % 32, key_group = threadIdx.x / 32;

  // A warp takes every kKeyGroups-th key, a lane kVec of its values.
  for (int base = 0; base < args.head_dim; base += kColumns) {
    const int column = base + lane * kVec;
    float acc[kVec];
#pragma unroll
    for (int j = 0; j < kVec; ++j) acc[j] = 0.0f;
    if (column < args.head_dim) {
#pragma unroll 4
      for (int key = first + key_group; key < last; key += kKeyGroups) {
        const float weight = to_float(p[key]);
        if (weight != 0.0f) {
          const auto group = load_vec<kVec>(v + key * args.v_pos_stride + column);
#pragma unroll
          for (int j = 0; j < kVec; ++j) acc[j] = fmaf(weight, to_float(group.v[j]), acc[j]);
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kVec; ++j) sums[key_group][lane * kVec + j] = acc[j];
    __syncthreads();
    for (int i = threadIdx.x; i < kColumns && base + i < args.head_dim; i += kThreads) {
      float sum = 0.0f;
#pragma unroll
      for (int g = 0; g < kKeyGroups; ++g) sum += sums[g][i];
      if (partial) {
        partial[static_cast<i64>(split) * args.head_dim + base + i] = sum;
      } else {
        out[base + i] = from_float<T>(sum);
      }
    }
    __syncthreads();
  }
  if (!partial) return;

  // The last CTA of a row adds the splits in their order.
  if (threadIdx.x == 0) {
    is_last = add_acq_rel(args.arrived + launch_row, 1) == static_cast<u32>(n_splits - 1);
    if (is_last) args.arrived[launch_row] = 0;
  }
  __syncthreads();
  if (!is_last) return;
  for (int i = threadIdx.x; i < args.head_dim; i += kThreads) {
    float sum = 0.0f;
#pragma unroll 4
    for (int s = 0; s < n_splits; ++s) sum += partial[static_cast<i64>(s) * args.head_dim + i];
    out[i] = from_float<T>(sum);
  }
}

template <typename T, int kHeadDim, int kVec>
__global__ void __launch_bounds__(128) values_tile(const ValuesArgs<T> args) {
  using Tile = PrefillTile<T, kHeadDim>;
  constexpr int kKeys = Tile::kKeys, kRow = Tile::kRow, kDim = Tile::kDim;
  constexpr int kWeightRow = kKeys + 8;
  T* weights = dynamic_shared<T>();  // [kQueries, kWeightRow]
  T* values = weights + Tile::kQueries * kWeightRow;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int q_tiles = (args.q_len + Tile::kQueries - 1) / Tile::kQueries;
  const int batch = blockIdx.x / q_tiles;
  const int query = (blockIdx.x - batch * q_tiles) * Tile::kQueries;
  const int head = blockIdx.y;
  const int n_queries = min(Tile::kQueries, args.q_len - query);
  const int n_keys = live_keys(args, batch);
  const T* p =
      args.p + ((static_cast<i64>(batch) * args.n_heads + head) * args.q_len + query) * args.kv_len;
  const T* v = args.v + batch * args.v_batch_stride +
               head / (args.n_heads / args.n_kv_heads) * args.v_head_stride;
  float out[kDim / 8][4];
#pragma unroll
  for (int n = 0; n < kDim / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) out[n][i] = 0.0f;
  }

  for (int key = 0; key < n_keys; key += kKeys) {
    // The weights; a tile without any is done.
    bool any = false;
    for (int i = threadIdx.x; i < Tile::kQueries * kKeys; i += Tile::kThreads) {
      const int row = i / kKeys, column = i % kKeys;
      const bool inside = row < n_queries && key + column < n_keys;
      const T weight =
          inside ? p[static_cast<i64>(row) * args.kv_len + key + column] : from_float<T>(0.0f);
      weights[row * kWeightRow + column] = weight;
      any |= to_float(weight) != 0.0f;
    }
    if (!__syncthreads_or(any)) continue;
    load_tile<kVec, kKeys>(Tile(), values, v + key * args.v_pos_stride, args.v_pos_stride, 0,
                           n_keys - key);
    copy_async_commit();
    copy_async_wait<0>();
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
      u32 a[4];
      load_matrix(a, weights + (warp * 16 + lane % 16) * kWeightRow + k * 16 + lane / 16 * 8);
      weight_value_products(Tile(), a, values + k * 16 * kRow, out);
    }
    __syncthreads();
  }

#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = warp * 16 + lane / 4 + i * 8;
    if (row >= n_queries) continue;
    T* target =
        args.out +
        ((static_cast<i64>(batch) * args.q_len + query + row) * args.n_heads + head) * kHeadDim;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int column = n * 8 + lane % 4 * 2 + j;
        if (column < kHeadDim) target[column] = from_float<T>(out[n][2 * i + j]);
      }
    }
  }
}

}  // namespace cufuse
