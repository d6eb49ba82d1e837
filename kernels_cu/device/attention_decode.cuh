// Attention of few queries: 128 threads take one split of the keys of one KV head and up to kHeads
// query heads of its group, so that a key is read once for all of them; then the splits are merged.
// Sums run in an order that depends on head_dim and the number of visible keys alone.
#pragma once

#include "device/attention.cuh"

namespace cufuse {

// Sizes and shared memory of one such tile.
template <typename T, int kHeadDim, int kHeads>
struct DecodeTile {
  static constexpr int kThreads = 128;
  static constexpr int kVec = kPer16<T>;
  static constexpr int kGroups = (kHeadDim + kVec - 1) / kVec;  // 16-byte groups of a row
  static constexpr int kColumns = kGroups * kVec;
  // An odd number of 16-byte groups between rows: eight rows lie in eight different banks.
  static constexpr int kRow = (kGroups | 1) * kVec;
  static constexpr int kFit = 16384 / (kColumns * static_cast<int>(sizeof(T)));
  static constexpr int kKeys = kFit >= 64 ? 64 : kFit >= 32 ? 32 : 16;
  static constexpr int kKeyGroups = kThreads / kGroups;   // that P V is summed in, side by side
  static constexpr int kOutputs = kHeads * kColumns / 4;  // in groups of four
  static constexpr int kOutputsPerThread = (kOutputs + kThreads - 1) / kThreads;
  static constexpr int kTileBytes = 2 * kKeys * kRow * static_cast<int>(sizeof(T));
  static constexpr int kSumBytes = kHeads * kKeyGroups * kColumns * 4;
  static constexpr int kSharedBytes = (kTileBytes > kSumBytes ? kTileBytes : kSumBytes) +
                                      (kHeads * kColumns + kHeads * kKeys + 3 * kHeads + 1) * 4;
  static_assert(kGroups <= kThreads, "a thread sums 16 bytes of a head");

  T* keys;         // [kKeys, kRow]
  T* values;       // [kKeys, kRow]
  float* sum;      // [kHeads, kKeyGroups, kColumns]; takes the place of keys and values at the end
  float* q;        // [kHeads, kColumns]
  float* p;        // [kHeads, kKeys]; logits, then exp
  float* max;      // [kHeads]
  float* total;    // [kHeads]
  float* rescale;  // [kHeads]
  u32* is_last;    // whether this CTA merges

  CUFUSE_DEVICE explicit DecodeTile(unsigned char* shared) {
    keys = reinterpret_cast<T*>(shared);
    values = keys + kKeys * kRow;
    sum = reinterpret_cast<float*>(shared);
    q = reinterpret_cast<float*>(shared + (kTileBytes > kSumBytes ? kTileBytes : kSumBytes));
    p = q + kHeads * kColumns;
    max = p + kHeads * kKeys;
    total = max + kHeads;
    rescale = total + kHeads;
    is_last = reinterpret_cast<u32*>(rescale + kHeads);
  }
};

// Start loading rows [first, first + count) of one head into a tile; the rest of it is not touched.
template <int kVec, typename T, int kHeadDim, int kHeads>
CUFUSE_DEVICE void load_rows(const DecodeTile<T, kHeadDim, kHeads>&,
                             T* tile,
                             const T* source,
                             i64 stride,
                             int count,
                             int t) {
  using Tile = DecodeTile<T, kHeadDim, kHeads>;
  constexpr int kStep = kVec == 1 ? 1 : Tile::kVec;
  constexpr int kPerRow = Tile::kColumns / kStep;
  for (int i = t; i < count * kPerRow; i += Tile::kThreads) {
    const int row = i / kPerRow;
    const int column = (i - row * kPerRow) * kStep;
    T* target = tile + row * Tile::kRow + column;
    const T* from = source + row * stride + column;
    if constexpr (kVec == 1) {
      *target = column < kHeadDim ? *from : from_float<T>(0.0f);
    } else {
      static_assert(kHeadDim % Tile::kVec == 0, "16-byte copies take whole groups of a row");
      copy_async(target, from, 16);
    }
  }
}

// Attend from the tile's queries, already in tile.q, over `span`: leaves max and total in the tile
// and gives each thread its unnormalised outputs, group i = t + kThreads * index of four columns.
// k and v point to row 0 of the sequence; `sync` is a barrier of the 128 threads, `t` their number.
template <int kVec, typename T, int kHeadDim, int kHeads, typename Sync>
CUFUSE_DEVICE void attend_span(const DecodeTile<T, kHeadDim, kHeads>& tile,
                               const T* k,
                               const T* v,
                               i64 k_stride,
                               i64 v_stride,
                               KeySpan span,
                               int n_heads,
                               Logit logit,
                               int t,
                               const Sync& sync,
                               float4 (&out)[DecodeTile<T, kHeadDim, kHeads>::kOutputsPerThread]) {
  using Tile = DecodeTile<T, kHeadDim, kHeads>;
  constexpr int kKeys = Tile::kKeys;
  constexpr int kHeadStep = Tile::kThreads / kKeys;
  constexpr int kHeadsPerThread = (kHeads + kHeadStep - 1) / kHeadStep;
  const int lane = t % 32, warp = t / 32;
  const int group = t % Tile::kGroups, key_group = t / Tile::kGroups;

  float acc[kHeads][Tile::kVec];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
#pragma unroll
    for (int j = 0; j < Tile::kVec; ++j) acc[h][j] = 0.0f;
  }
  if (t < kHeads) {
    tile.max[t] = minus_infinity();
    tile.total[t] = 0.0f;
  }

  // Each buffer is refilled as soon as it was read: K under the softmax and P V, V under Q K.
  const auto load = [&](T* buffer, const T* source, i64 stride, int first) {
    if (first < span.last) {
      load_rows<kVec>(tile, buffer, source + first * stride, stride, min(kKeys, span.last - first),
                      t);
    }
    copy_async_commit();
  };
  load(tile.keys, k, k_stride, span.first);
  load(tile.values, v, v_stride, span.first);

  for (int first = span.first; first < span.last; first += kKeys) {
    const int count = min(kKeys, span.last - first);
    copy_async_wait<1>();
    sync();

    // Logits: a thread takes one key and every kHeadStep-th head.
    const int key = t % kKeys;
    if (key < count) {
      float dot[kHeadsPerThread][4];
#pragma unroll
      for (int i = 0; i < kHeadsPerThread; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) dot[i][j] = 0.0f;
      }
#pragma unroll 4
      for (int c = 0; c < Tile::kColumns; c += Tile::kVec) {
        const auto row = load_vec<Tile::kVec>(tile.keys + key * Tile::kRow + c);
#pragma unroll
        for (int i = 0; i < kHeadsPerThread; ++i) {
          const int h = t / kKeys + i * kHeadStep;
          if (h < n_heads) {
#pragma unroll
            for (int part = 0; part < Tile::kVec; part += 4) {
              const auto q = load_vec<4>(tile.q + h * Tile::kColumns + c + part);
#pragma unroll
              for (int j = 0; j < 4; ++j) {
                dot[i][j] = fmaf(to_float(row.v[part + j]), q.v[j], dot[i][j]);
              }
            }
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kHeadsPerThread; ++i) {
        const int h = t / kKeys + i * kHeadStep;
        if (h < n_heads) {
          tile.p[h * kKeys + key] = logit((dot[i][0] + dot[i][1]) + (dot[i][2] + dot[i][3]));
        }
      }
    }
    sync();
    load(tile.keys, k, k_stride, first + kKeys);

    // Online softmax: a warp takes a head.
    for (int h = warp; h < n_heads; h += Tile::kThreads / 32) {
      float* p = tile.p + h * kKeys;
      const float before = tile.max[h];
      float max = before;
      for (int i = lane; i < count; i += 32) max = fmaxf(max, p[i]);
      max = warp_max(max);
      const float shift = softmax_shift(max);
      float sum = 0.0f;
      for (int i = lane; i < count; i += 32) {
        p[i] = expf(p[i] - shift);
        sum += p[i];
      }
      sum = warp_sum(sum);
      __syncwarp();  // every lane has read tile.max[h]
      if (lane == 0) {
        const float rescale = expf(before - shift);
        tile.max[h] = max;
        tile.total[h] = fmaf(tile.total[h], rescale, sum);
        tile.rescale[h] = rescale;
      }
    }
    copy_async_wait<1>();
    sync();

    // P V: a thread takes 16 bytes of a row and every kKeyGroups-th key, for all heads.
    if (key_group < Tile::kKeyGroups) {
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        const float rescale = h < n_heads ? tile.rescale[h] : 0.0f;
#pragma unroll
        for (int j = 0; j < Tile::kVec; ++j) acc[h][j] *= rescale;
      }
#pragma unroll 2
      for (int i = key_group; i < count; i += Tile::kKeyGroups) {
        const auto row = load_vec<Tile::kVec>(tile.values + i * Tile::kRow + group * Tile::kVec);
        float value[Tile::kVec];
#pragma unroll
        for (int j = 0; j < Tile::kVec; ++j) value[j] = to_float(row.v[j]);
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
          if (h < n_heads) {
            const float p = tile.p[h * kKeys + i];
#pragma unroll
            for (int j = 0; j < Tile::kVec; ++j) acc[h][j] = fmaf(p, value[j], acc[h][j]);
          }
        }
      }
    }
    sync();
    load(tile.values, v, v_stride, first + kKeys);
  }
  copy_async_wait<0>();
  sync();

  // Sum over the key groups, in their order.
  if (key_group < Tile::kKeyGroups) {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
#pragma unroll
      for (int j = 0; j < Tile::kVec; j += 4) {
        store_vec<4>(
            tile.sum + (h * Tile::kKeyGroups + key_group) * Tile::kColumns + group * Tile::kVec + j,
            Vec<float, 4>{{acc[h][j], acc[h][j + 1], acc[h][j + 2], acc[h][j + 3]}});
      }
    }
  }
  sync();
#pragma unroll
  for (int n = 0; n < Tile::kOutputsPerThread; ++n) {
    const int i = t + n * Tile::kThreads;
    out[n] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (i >= Tile::kOutputs) continue;
    const int h = i / (Tile::kColumns / 4);
    const float* sum =
        tile.sum + h * Tile::kKeyGroups * Tile::kColumns + i * 4 - h * Tile::kColumns;
#pragma unroll 4
    for (int g = 0; g < Tile::kKeyGroups; ++g) {
      const auto part = load_vec<4>(sum + g * Tile::kColumns);
      out[n].x += part.v[0];
      out[n].y += part.v[1];
      out[n].z += part.v[2];
      out[n].w += part.v[3];
    }
  }
}

// Merge n_splits partial results of the tile's heads in ascending order: gives each thread its
// outputs and leaves max and total in the tile.
//   partial: [heads, max_splits, kColumns]; stats: [heads, max_splits, 2] (max, total)
template <typename T, int kHeadDim, int kHeads, typename Sync>
CUFUSE_DEVICE void merge_splits(const DecodeTile<T, kHeadDim, kHeads>& tile,
                                const float* partial,
                                const float* stats,
                                int n_splits,
                                int max_splits,
                                int n_heads,
                                int t,
                                const Sync& sync,
                                float4 (&out)[DecodeTile<T, kHeadDim, kHeads>::kOutputsPerThread]) {
  using Tile = DecodeTile<T, kHeadDim, kHeads>;
  constexpr int kSplits = Tile::kKeys;  // at a time: tile.p holds their weights
  const int lane = t % 32, warp = t / 32;
#pragma unroll
  for (int n = 0; n < Tile::kOutputsPerThread; ++n) out[n] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);

  for (int h = warp; h < n_heads; h += Tile::kThreads / 32) {
    const float* head = stats + static_cast<i64>(h) * max_splits * 2;
    float max = minus_infinity();
    for (int i = lane; i < n_splits; i += 32) max = fmaxf(max, head[2 * i]);
    max = warp_max(max);
    const float shift = softmax_shift(max);
    float total = 0.0f;
    for (int i = lane; i < n_splits; i += 32) {
      total = fmaf(expf(head[2 * i] - shift), head[2 * i + 1], total);
    }
    total = warp_sum(total);
    if (lane == 0) {
      tile.max[h] = max;
      tile.total[h] = total;
    }
  }
  for (int first = 0; first < n_splits; first += kSplits) {
    const int count = min(kSplits, n_splits - first);
    sync();
    for (int i = t; i < n_heads * kSplits; i += Tile::kThreads) {
      const int h = i / kSplits, split = i % kSplits;
      if (split < count) {
        const float max = stats[(static_cast<i64>(h) * max_splits + first + split) * 2];
        tile.p[i] = expf(max - softmax_shift(tile.max[h]));
      }
    }
    sync();
#pragma unroll
    for (int n = 0; n < Tile::kOutputsPerThread; ++n) {
      const int i = t + n * Tile::kThreads;
      const int h = i / (Tile::kColumns / 4);
      if (h >= n_heads) continue;
      const float* part = partial + (static_cast<i64>(h) * max_splits + first) * Tile::kColumns +
                          (i * 4 - h * Tile::kColumns);
#pragma unroll 4
      for (int split = 0; split < count; ++split) {
        const float weight = tile.p[h * kSplits + split];
        const auto v = load_vec<4>(part + split * Tile::kColumns);
        out[n].x = fmaf(weight, v.v[0], out[n].x);
        out[n].y = fmaf(weight, v.v[1], out[n].y);
        out[n].z = fmaf(weight, v.v[2], out[n].z);
        out[n].w = fmaf(weight, v.v[3], out[n].w);
      }
    }
  }
}

// Divide by the total, a sink's share included, round and store: out [n_heads, head_dim]. Queries
// that see no key get zeros. sinks: [n_heads] or null.
template <typename T, int kHeadDim, int kHeads>
CUFUSE_DEVICE void store_heads(
    const DecodeTile<T, kHeadDim, kHeads>& tile,
    const float4 (&values)[DecodeTile<T, kHeadDim, kHeads>::kOutputsPerThread],
    T* out,
    const T* sinks,
    int n_heads,
    int t) {
  using Tile = DecodeTile<T, kHeadDim, kHeads>;
#pragma unroll
  for (int n = 0; n < Tile::kOutputsPerThread; ++n) {
    const int i = t + n * Tile::kThreads;
    const int h = i / (Tile::kColumns / 4);
    if (h >= n_heads) continue;
    const int column = i * 4 - h * Tile::kColumns;
    const float max = tile.max[h];
    float total = tile.total[h], scale = 1.0f;
    if (sinks) {
      const float sink = to_float(sinks[h]);
      const float shift = softmax_shift(fmaxf(max, sink));
      scale = expf(max - shift);
      total = fmaf(total, scale, expf(sink - shift));
    }
    scale = total == 0.0f ? 0.0f : scale / total;
    const float v[4] = {values[n].x, values[n].y, values[n].z, values[n].w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (column + j < kHeadDim) out[h * kHeadDim + column + j] = from_float<T>(v[j] * scale);
    }
  }
}

}  // namespace cufuse
