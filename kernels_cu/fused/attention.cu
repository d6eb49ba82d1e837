// out = softmax(scale q k^T) v over the keys that each query sees (causal, window, lengths), with
// an optional soft cap and sinks; logits, softmax and sums never leave the SM.
//
// attention_decode, for few queries: keys are split over CTAs by the length of each sequence; the
// last CTA of a row and head group merges the splits. The grid is sized from the capacity, CTAs
// beyond the length leave at once: a captured launch stays right while the cache grows. Bounded by
// the bytes of K and V, each read once for up to 8 query heads.
// attention_prefill, for many queries: 64 queries of a head a CTA, tensor cores; blocks of keys
// that nobody sees are skipped. Bounded by tensor cores and exp.
// instantiate: attention_decode<bfloat16, 128, 4, 8>
// instantiate: attention_decode<bfloat16, 64, 8, 8>
// instantiate: attention_decode<half, 80, 1, 8>
// instantiate: attention_decode<bfloat16, 256, 8, 8>
// instantiate: attention_decode<float, 256, 8, 4>
// instantiate: attention_decode<float, 33, 2, 1>
// instantiate: attention_prefill<bfloat16, 128, 8>
// instantiate: attention_prefill<half, 56, 8>
// instantiate: attention_prefill<bfloat16, 256, 8>
// instantiate: attention_prefill<half, 33, 1>
#include "device/attention_decode.cuh"
#include "device/attention_prefill.cuh"

namespace cufuse {

template <typename T>
struct AttentionArgs {
  const T* q;          // [batch, q_len, n_heads, head_dim]
  const T* k;          // [batch, kv_len, n_kv_heads, head_dim]; at the strides below
  const T* v;          // [batch, kv_len, n_kv_heads, head_dim]; at the strides below
  const int* start;    // [batch], the position of query 0; null: default_start
  const int* lengths;  // [batch], keys of each sequence; null: causal ? start + q_len : kv_len
  const T* sinks;      // [n_heads]; null: none
  T* out;              // [batch, q_len, n_heads, head_dim]
  float* partial;      // [rows, n_heads, max_splits, columns]; decode only
  float* stats;        // [rows, n_heads, max_splits, 2]: max, total; decode only
  u32* arrived;        // [rows, n_kv_heads, head_tiles]; zeros between launches; decode only
  i64 k_batch_stride;  // strides count elements
  i64 k_pos_stride;
  i64 k_head_stride;
  i64 v_batch_stride;
  i64 v_pos_stride;
  i64 v_head_stride;
  i64 first_row;  // of this launch, of batch * q_len; decode only
  int q_len;
  int kv_len;
  int n_heads;
  int n_kv_heads;
  int default_start;
  int max_splits;  // 1: nothing is split; decode only
  int window;      // 0: none
  bool causal;
  float scale;
  float softcap;      // 0: none
  float inv_softcap;  // 1 / softcap
};

// The length of a sequence whose first query stands at `start`.
template <typename T>
CUFUSE_DEVICE i64 sequence_length(const AttentionArgs<T>& args, int batch, i64 start) {
  if (args.lengths) return args.lengths[batch];
  return args.causal ? start + args.q_len : args.kv_len;
}

template <typename T, int kHeadDim, int kHeads, int kVec>
__global__ void __launch_bounds__(128, 4) attention_decode(const AttentionArgs<T> args) {
  using Tile = DecodeTile<T, kHeadDim, kHeads>;
  const Tile tile(dynamic_shared<unsigned char>());
  const int t = threadIdx.x;
  const auto sync = [] { __syncthreads(); };

  // Which row, which split, which heads.
  const int launch_row = blockIdx.x / args.max_splits;
  const int split = blockIdx.x - launch_row * args.max_splits;
  const i64 row = args.first_row + launch_row;
  const int batch = static_cast<int>(row / args.q_len);
  const int query = static_cast<int>(row - static_cast<i64>(batch) * args.q_len);
  const int group_heads = args.n_heads / args.n_kv_heads;
  const int head_tiles = (group_heads + kHeads - 1) / kHeads;
  const int kv_head = blockIdx.y / head_tiles;
  const int tile_head = (blockIdx.y - kv_head * head_tiles) * kHeads;
  const int n_heads = min(kHeads, group_heads - tile_head);
  const int first_head = kv_head * group_heads + tile_head;

  // Which keys.
  const i64 start = args.start ? args.start[batch] : args.default_start;
  const KeySpan all = visible_keys(start + query, sequence_length(args, batch, start), args.kv_len,
                                   args.causal, args.window);
  const int n_keys = all.last - all.first;
  const int per_split = args.max_splits == 1 ? max(n_keys, 1) : keys_per_split(n_keys);
  const int n_splits = (n_keys + per_split - 1) / per_split;
  if (split >= max(n_splits, 1)) return;
  const int first_key = all.first + split * per_split;
  const KeySpan span{first_key, min(first_key + per_split, all.last)};

  // The queries, as float32.
  const i64 base = (row * args.n_heads + first_head) * kHeadDim;
  for (int i = t; i < kHeads * Tile::kColumns; i += Tile::kThreads) {
    const int h = i / Tile::kColumns, column = i % Tile::kColumns;
    tile.q[i] =
        h < n_heads && column < kHeadDim ? to_float(args.q[base + h * kHeadDim + column]) : 0.0f;
  }
  float4 result[Tile::kOutputsPerThread];
  attend_span<kVec>(tile, args.k + batch * args.k_batch_stride + kv_head * args.k_head_stride,
                    args.v + batch * args.v_batch_stride + kv_head * args.v_head_stride,
                    args.k_pos_stride, args.v_pos_stride, span, n_heads,
                    Logit{args.scale, args.softcap, args.inv_softcap}, t, sync, result);

  if (n_splits > 1) {
    // Hand the partial result over; whoever comes last merges.
    const i64 cell = (static_cast<i64>(launch_row) * args.n_heads + first_head) * args.max_splits;
    float* partial = args.partial + cell * Tile::kColumns;
    float* stats = args.stats + cell * 2;
#pragma unroll
    for (int n = 0; n < Tile::kOutputsPerThread; ++n) {
      const int i = t + n * Tile::kThreads;
      const int h = i / (Tile::kColumns / 4);
      if (h >= n_heads) continue;
      float* target = partial + (static_cast<i64>(h) * args.max_splits + split) * Tile::kColumns +
                      (i * 4 - h * Tile::kColumns);
      store_vec<4>(target, Vec<float, 4>{{result[n].x, result[n].y, result[n].z, result[n].w}});
    }
    if (t < n_heads) {
      stats[(static_cast<i64>(t) * args.max_splits + split) * 2] = tile.max[t];
      stats[(static_cast<i64>(t) * args.max_splits + split) * 2 + 1] = tile.total[t];
    }
    __syncthreads();
    if (t == 0) {
      u32* arrived = args.arrived + static_cast<i64>(launch_row) * gridDim.y + blockIdx.y;
      *tile.is_last = add_acq_rel(arrived, 1) == static_cast<u32>(n_splits - 1);
      if (*tile.is_last) *arrived = 0;
    }
    __syncthreads();
    if (!*tile.is_last) return;
    merge_splits(tile, partial, stats, n_splits, args.max_splits, n_heads, t, sync, result);
  }
  store_heads(tile, result, args.out + base, args.sinks ? args.sinks + first_head : nullptr,
              n_heads, t);
}

template <typename T, int kHeadDim, int kVec>
__global__ void __launch_bounds__(128) attention_prefill(const AttentionArgs<T> args) {
  using Tile = PrefillTile<T, kHeadDim>;
  const int tiles = (args.q_len + Tile::kQueries - 1) / Tile::kQueries;
  const int batch = blockIdx.x / tiles;
  // The last queries see most keys: they start first.
  const int tile = tiles - 1 - (blockIdx.x - batch * tiles);
  const int query = tile * Tile::kQueries;
  const int head = blockIdx.y;
  const int kv_head = head / (args.n_heads / args.n_kv_heads);
  const i64 start = args.start ? args.start[batch] : args.default_start;
  const i64 base =
      ((static_cast<i64>(batch) * args.q_len + query) * args.n_heads + head) * kHeadDim;
  PrefillHead<T> work;
  work.q = args.q + base;
  work.k = args.k + batch * args.k_batch_stride + kv_head * args.k_head_stride;
  work.v = args.v + batch * args.v_batch_stride + kv_head * args.v_head_stride;
  work.out = args.out + base;
  work.q_stride = static_cast<i64>(args.n_heads) * kHeadDim;
  work.k_stride = args.k_pos_stride;
  work.v_stride = args.v_pos_stride;
  work.position = start + query;
  work.length = sequence_length(args, batch, start);
  work.n_queries = min(Tile::kQueries, args.q_len - query);
  work.kv_len = args.kv_len;
  work.window = args.window;
  work.causal = args.causal;
  work.has_sink = args.sinks != nullptr;
  work.logit = {args.scale, args.softcap, args.inv_softcap};
  work.sink = args.sinks ? to_float(args.sinks[head]) : 0.0f;
  attend_queries<kVec>(Tile(), work, dynamic_shared<T>());
}

}  // namespace cufuse
