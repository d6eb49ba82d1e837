// Attention of many queries on tensor cores: four warps take 64 queries of one head and walk over
// the keys in tiles, with logits, softmax and sums in registers (Dao 2023).
#pragma once

#include "device/attention.cuh"

namespace cufuse {

template <typename T, int kHeadDim>
struct PrefillTile {
  static constexpr int kThreads = 128;
  static constexpr int kQueries = 64;
  static constexpr int kDim = (kHeadDim + 15) / 16 * 16;  // columns beyond head_dim are zeros
  static constexpr int kKeys = kDim <= 128 ? 64 : 32;     // the outputs' registers decide
  // An odd number of 16-byte groups between rows: eight rows lie in eight different banks.
  static constexpr int kRow = kDim + 8;
  static constexpr int kSharedBytes = (kQueries + 2 * kKeys) * kRow * static_cast<int>(sizeof(T));
  static_assert(sizeof(T) == 2, "tensor cores take 16-bit values");
};

template <typename T>
CUFUSE_DEVICE u32 pack_pair(float low, float high) {
  union {
    T v[2];
    u32 word;
  } u{{from_float<T>(low), from_float<T>(high)}};
  return u.word;
}

// Start loading kRows rows of a head; row i comes from `source` + i * stride when
// begin <= i < end, all other rows and columns are zeros.
template <int kVec, int kRows, typename T, int kHeadDim>
CUFUSE_DEVICE void load_tile(
    PrefillTile<T, kHeadDim>, T* tile, const T* source, i64 stride, int begin, int end) {
  using Tile = PrefillTile<T, kHeadDim>;
  constexpr int kStep = kVec == 1 ? 1 : kPer16<T>;
  constexpr int kPerRow = Tile::kDim / kStep;
#pragma unroll 4
  for (int i = threadIdx.x; i < kRows * kPerRow; i += Tile::kThreads) {
    const int row = i / kPerRow;
    const int column = (i - row * kPerRow) * kStep;
    const bool inside = row >= begin && row < end && column < kHeadDim;
    T* target = tile + row * Tile::kRow + column;
    // A copy of no bytes still names an address: that of a row that is there.
    const T* from = source + (inside ? row * stride + column : begin * stride);
    if constexpr (kVec == 1) {
      *target = inside ? *from : from_float<T>(0.0f);
    } else {
      static_assert(kHeadDim % kPer16<T> == 0, "16-byte copies take whole groups of a row");
      copy_async(target, from, inside ? 16 : 0);
    }
  }
}

// s = queries keys^T, a warp's 16 rows in the accumulator fragments of m16n8k16.
template <typename T, int kHeadDim>
CUFUSE_DEVICE void query_key_products(PrefillTile<T, kHeadDim>,
                                      const T* queries,
                                      const T* keys,
                                      float (&s)[PrefillTile<T, kHeadDim>::kKeys / 8][4]) {
  using Tile = PrefillTile<T, kHeadDim>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int n = 0; n < Tile::kKeys / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) s[n][i] = 0.0f;
  }
#pragma unroll
  for (int c = 0; c < Tile::kDim; c += 16) {
    u32 a[4];
    load_matrix(a, queries + (warp * 16 + lane % 16) * Tile::kRow + c + lane / 16 * 8);
#pragma unroll
    for (int n = 0; n < Tile::kKeys / 16; ++n) {
      u32 b[4];
      load_matrix(b,
                  keys + (n * 16 + lane / 16 * 8 + lane % 8) * Tile::kRow + c + lane / 8 % 2 * 8);
      mma_m16n8k16<T>(s[2 * n], a, b[0], b[1]);
      mma_m16n8k16<T>(s[2 * n + 1], a, b[2], b[3]);
    }
  }
}

// out += weights values for 16 keys: `a` is the left fragment, `values` the first key's row.
template <typename T, int kHeadDim>
CUFUSE_DEVICE void weight_value_products(PrefillTile<T, kHeadDim>,
                                         const u32 (&a)[4],
                                         const T* values,
                                         float (&out)[PrefillTile<T, kHeadDim>::kDim / 8][4]) {
  using Tile = PrefillTile<T, kHeadDim>;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < Tile::kDim / 16; ++n) {
    u32 b[4];
    load_matrix_transposed(
        b, values + (lane / 8 % 2 * 8 + lane % 8) * Tile::kRow + n * 16 + lane / 16 * 8);
    mma_m16n8k16<T>(out[2 * n], a, b[0], b[1]);
    mma_m16n8k16<T>(out[2 * n + 1], a, b[2], b[3]);
  }
}

// Up to 64 queries of one head, and the keys of its sequence.
template <typename T>
struct PrefillHead {
  const T* q;  // [n_queries, head_dim] at q_stride
  const T* k;  // [kv_len, head_dim] at k_stride
  const T* v;  // [kv_len, head_dim] at v_stride
  T* out;      // [n_queries, head_dim] at q_stride
  i64 q_stride;
  i64 k_stride;
  i64 v_stride;
  i64 position;  // of the first query
  i64 length;    // keys of the sequence
  int n_queries;
  int kv_len;
  int window;  // 0: none
  bool causal;
  bool has_sink;
  Logit logit;
  float sink;
};

// out = softmax(q k^T) v. Keys that no query of the tile sees are not read. A key that some of them
// see enters the products of all, with weight 0 for the others, so it has to be finite.
template <int kVec, typename T, int kHeadDim>
CUFUSE_DEVICE void attend_queries(PrefillTile<T, kHeadDim> tile,
                                  const PrefillHead<T>& head,
                                  T* shared) {
  using Tile = PrefillTile<T, kHeadDim>;
  constexpr int kKeys = Tile::kKeys, kRow = Tile::kRow, kDim = Tile::kDim;
  T* queries = shared;
  T* keys = queries + Tile::kQueries * kRow;
  T* values = keys + kKeys * kRow;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

  // What this thread's two rows see, and what any row of the tile sees.
  KeySpan span[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = warp * 16 + lane / 4 + i * 8;
    span[i] = visible_keys(head.position + row, head.length, head.kv_len, head.causal, head.window);
  }
  const KeySpan of_first =
      visible_keys(head.position, head.length, head.kv_len, head.causal, head.window);
  const KeySpan of_last = visible_keys(head.position + head.n_queries - 1, head.length, head.kv_len,
                                       head.causal, head.window);
  // With a window the last query may see nothing, and the ones before it keys up to the length.
  const int first = of_first.first;
  const int last =
      visible_keys(head.position + head.n_queries - 1, head.length, head.kv_len, head.causal, 0)
          .last;

  float out[kDim / 8][4];
#pragma unroll
  for (int n = 0; n < kDim / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) out[n][i] = 0.0f;
  }
  float max[2] = {minus_infinity(), minus_infinity()};
  float total[2] = {0.0f, 0.0f};  // of this thread's columns

  const auto load = [&](T* buffer, const T* source, i64 stride, int key) {
    if (key < last) {
      load_tile<kVec, kKeys>(tile, buffer, source + key * stride, stride,
                             first > key ? first - key : 0, last - key);
    }
    copy_async_commit();
  };
  const int start = first / kKeys * kKeys;
  if (first < last) {
    load_tile<kVec, Tile::kQueries>(tile, queries, head.q, head.q_stride, 0, head.n_queries);
  }
  load(keys, head.k, head.k_stride, start);
  load(values, head.v, head.v_stride, start);

  for (int key = start; key < last; key += kKeys) {
    copy_async_wait<1>();
    __syncthreads();

    float s[kKeys / 8][4];
    query_key_products(tile, queries, keys, s);
    __syncthreads();
    load(keys, head.k, head.k_stride, key + kKeys);

    // Logits; only tiles at the edges of what is visible look at each key.
    const bool edge = key < of_last.first || key + kKeys > of_first.last;
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int j = key + n * 8 + lane % 4 * 2 + i % 2;
        const float v = head.logit(s[n][i]);
        const bool seen = !edge || (j >= span[i / 2].first && j < span[i / 2].last);
        s[n][i] = seen ? v : minus_infinity();
      }
    }

    // Online softmax: four lanes hold a row.
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float new_max = max[i];
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
        new_max = fmaxf(new_max, fmaxf(s[n][2 * i], s[n][2 * i + 1]));
      }
      new_max = fmaxf(new_max, __shfl_xor_sync(kFullMask, new_max, 1));
      new_max = fmaxf(new_max, __shfl_xor_sync(kFullMask, new_max, 2));
      const float shift = softmax_shift(new_max);
      const float rescale = expf(max[i] - shift);
      float sum = 0.0f;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
        s[n][2 * i] = expf(s[n][2 * i] - shift);
        s[n][2 * i + 1] = expf(s[n][2 * i + 1] - shift);
        sum += s[n][2 * i] + s[n][2 * i + 1];
      }
      max[i] = new_max;
      total[i] = fmaf(total[i], rescale, sum);
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) {
        out[n][2 * i] *= rescale;
        out[n][2 * i + 1] *= rescale;
      }
    }
    copy_async_wait<1>();
    __syncthreads();

    // O += P V: the logits' fragments, rounded, are the left operand.
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
      const u32 a[4] = {pack_pair<T>(s[2 * k][0], s[2 * k][1]),
                        pack_pair<T>(s[2 * k][2], s[2 * k][3]),
                        pack_pair<T>(s[2 * k + 1][0], s[2 * k + 1][1]),
                        pack_pair<T>(s[2 * k + 1][2], s[2 * k + 1][3])};
      weight_value_products(tile, a, values + k * 16 * kRow, out);
    }
    __syncthreads();
    load(values, head.v, head.v_stride, key + kKeys);
  }
  copy_async_wait<0>();

  // Divide by the total, a sink's share included; a query that sees no key gets zeros.
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = warp * 16 + lane / 4 + i * 8;
    total[i] += __shfl_xor_sync(kFullMask, total[i], 1);
    total[i] += __shfl_xor_sync(kFullMask, total[i], 2);
    float scale = 1.0f;
    if (head.has_sink) {
      const float shift = softmax_shift(fmaxf(max[i], head.sink));
      scale = expf(max[i] - shift);
      total[i] = fmaf(total[i], scale, expf(head.sink - shift));
    }
    scale = total[i] == 0.0f ? 0.0f : scale / total[i];
    if (row >= head.n_queries) continue;
    T* target = head.out + row * head.q_stride;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      const int column = n * 8 + lane % 4 * 2;
      const float low = out[n][2 * i] * scale, high = out[n][2 * i + 1] * scale;
      if constexpr (kVec == 1) {
        if (column < kHeadDim) target[column] = from_float<T>(low);
        if (column + 1 < kHeadDim) target[column + 1] = from_float<T>(high);
      } else {
        if (column < kHeadDim) {
          store_vec<2>(target + column, Vec<T, 2>{{from_float<T>(low), from_float<T>(high)}});
        }
      }
    }
  }
}

}  // namespace cufuse
