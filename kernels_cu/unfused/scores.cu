// s = scale q k^T, soft-capped, with -inf where a query does not see a key.
//
// scores_rows, for few queries: a CTA takes 64 keys of one query and head, eight lanes a key.
// Bounded by reading K once for each query head.
// scores_tile, for many queries: a CTA takes 64 queries and a tile of keys on tensor cores. Bounded
// by writing s.
// instantiate: scores_rows<bfloat16, 8>
// instantiate: scores_rows<half, 1>
// instantiate: scores_rows<float, 4>
// instantiate: scores_tile<bfloat16, 128, 8>
// instantiate: scores_tile<half, 33, 1>
// instantiate: scores_tile<bfloat16, 256, 8>
#include "device/attention_prefill.cuh"

namespace cufuse {

template <typename T>
struct ScoresArgs {
  const T* q;          // [batch, q_len, n_heads, head_dim]
  const T* k;          // [batch, kv_len, n_kv_heads, head_dim]; at the strides below
  const int* start;    // [batch], the position of query 0; null: default_start
  const int* lengths;  // [batch], keys of each sequence; null: causal ? start + q_len : kv_len
  T* s;                // [batch, n_heads, q_len, kv_len]
  i64 k_batch_stride;  // strides count elements
  i64 k_pos_stride;
  i64 k_head_stride;
  int q_len;
  int kv_len;
  int n_heads;
  int n_kv_heads;
  int head_dim;
  int default_start;
  int window;  // 0: none
  bool causal;
  float scale;
  float softcap;      // 0: none
  float inv_softcap;  // 1 / softcap
};

// What a query sees, and where its sequence's keys of one head lie.
template <typename T>
struct ScoresHead {
  i64 start;
  i64 length;
  const T* k;  // [kv_len, head_dim] at k_pos_stride

  CUFUSE_DEVICE ScoresHead(const ScoresArgs<T>& args, int batch, int head) {
    start = args.start ? args.start[batch] : args.default_start;
    length = args.lengths ? args.lengths[batch] : args.causal ? start + args.q_len : args.kv_len;
    k = args.k + batch * args.k_batch_stride +
        head / (args.n_heads / args.n_kv_heads) * args.k_head_stride;
  }

  CUFUSE_DEVICE KeySpan span(const ScoresArgs<T>& args, int query) const {
    return visible_keys(start + query, length, args.kv_len, args.causal, args.window);
  }
};

template <typename T, int kVec>
__global__ void __launch_bounds__(128) scores_rows(const ScoresArgs<T> args) {
  constexpr int kThreads = 128, kKeys = 64, kLanes = 8;
  const int blocks = (args.kv_len + kKeys - 1) / kKeys;
  const i64 row = blockIdx.x / blocks;  // of [batch, n_heads, q_len]
  const int first = (blockIdx.x - static_cast<int>(row) * blocks) * kKeys;
  const int query = static_cast<int>(row % args.q_len);
  const int head = static_cast<int>(row / args.q_len % args.n_heads);
  const int batch = static_cast<int>(row / args.q_len / args.n_heads);
  const ScoresHead<T> work(args, batch, head);
  const KeySpan span = work.span(args, query);
  const Logit logit{args.scale, args.softcap, args.inv_softcap};
  const T* q = args.q + ((static_cast<i64>(batch) * args.q_len + query) * args.n_heads + head) *
                            args.head_dim;
  T* s = args.s + row * args.kv_len;
  const int lane = threadIdx.x % kLanes;
  const int last = min(first + kKeys, args.kv_len);
  // Every lane of a warp goes round equally often: the shuffles want all of them.
  for (int base = first; base < last; base += kThreads / kLanes) {
    const int key = base + threadIdx.x / kLanes;
    const bool seen = key >= span.first && key < span.last;
    float dot = 0.0f;
    if (seen) {
      const T* k = work.k + key * args.k_pos_stride;
      for (int c = lane * kVec; c < args.head_dim; c += kLanes * kVec) {
        const auto a = load_vec<kVec>(q + c);
        const auto b = load_vec<kVec>(k + c);
#pragma unroll
        for (int j = 0; j < kVec; ++j) dot = fmaf(to_float(a.v[j]), to_float(b.v[j]), dot);
      }
    }
#pragma unroll
    for (int offset = kLanes / 2; offset > 0; offset /= 2) {
      dot += __shfl_xor_sync(kFullMask, dot, offset);
    }
    if (lane == 0 && key < last) s[key] = from_float<T>(seen ? logit(dot) : minus_infinity());
  }
}

template <typename T, int kHeadDim, int kVec>
__global__ void __launch_bounds__(128) scores_tile(const ScoresArgs<T> args) {
  using Tile = PrefillTile<T, kHeadDim>;
  constexpr int kKeys = Tile::kKeys, kRow = Tile::kRow;
  T* queries = dynamic_shared<T>();
  T* keys = queries + Tile::kQueries * kRow;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int blocks = (args.kv_len + kKeys - 1) / kKeys;
  const int q_tiles = (args.q_len + Tile::kQueries - 1) / Tile::kQueries;
  const int key = blockIdx.x % blocks * kKeys;
  const int query = static_cast<int>(blockIdx.x / blocks % q_tiles) * Tile::kQueries;
  const int batch = static_cast<int>(blockIdx.x / blocks / q_tiles);
  const int head = blockIdx.y;
  const int n_queries = min(Tile::kQueries, args.q_len - query);
  const ScoresHead<T> work(args, batch, head);
  const Logit logit{args.scale, args.softcap, args.inv_softcap};

  // Load what any query of the tile sees.
  const int first = max(work.span(args, query).first, key);
  const int last = min(work.span(args, query + n_queries - 1).last, key + kKeys);
  const bool empty = first >= last;
  if (!empty) {
    const i64 q_stride = static_cast<i64>(args.n_heads) * kHeadDim;
    load_tile<kVec, Tile::kQueries>(
        Tile(), queries,
        args.q + ((static_cast<i64>(batch) * args.q_len + query) * args.n_heads + head) * kHeadDim,
        q_stride, 0, n_queries);
    load_tile<kVec, kKeys>(Tile(), keys, work.k + key * args.k_pos_stride, args.k_pos_stride,
                           first - key, last - key);
    copy_async_commit();
    copy_async_wait<0>();
    __syncthreads();
  }

  float s[kKeys / 8][4];
  if (!empty) query_key_products(Tile(), queries, keys, s);

  // Mask and store: a thread holds pairs of two rows.
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = warp * 16 + lane / 4 + i * 8;
    if (row >= n_queries) continue;
    const KeySpan span = work.span(args, query + row);
    T* target =
        args.s +
        ((static_cast<i64>(batch) * args.n_heads + head) * args.q_len + query + row) * args.kv_len;
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int column = key + n * 8 + lane % 4 * 2 + j;
        const bool seen = column >= span.first && column < span.last;
        if (column < args.kv_len) {
          target[column] = from_float<T>(seen ? logit(s[n][2 * i + j]) : minus_infinity());
        }
      }
    }
  }
}

}  // namespace cufuse
