// y = x w^T for a few rows x: every weight is read once, so the time is that of the bytes. A warp
// multiplies kOut weight rows by kM rows of x that lie in shared memory, and keeps kUnroll loads of
// 16 bytes a lane and weight row in flight, across the end of a row and into its next ones.
//
// The order in which a sum is taken belongs to k and kSplit: lane l of warp s adds up groups l of
// chunks s, s + kSplit, ... (staging.cuh) one after the other, then come the lanes, then the kSplit
// warps in ascending order. kM, kOut, kUnroll, kVec and the grid do not enter.
#pragma once

#include "device/reduce.cuh"
#include "device/staging.cuh"

namespace cufuse {

// How a CTA is cut: kWarps warps, of which kSplit share the K of the same kOut weight rows.
template <int kM_, int kOut_, int kUnroll_, int kWarps_, int kSplit_, int kVec_>
struct MatvecShape {
  static constexpr int kM = kM_, kOut = kOut_, kUnroll = kUnroll_, kWarps = kWarps_;
  static constexpr int kSplit = kSplit_, kVec = kVec_;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kSlots = kWarps / kSplit;  // groups of kOut weight rows that a CTA takes
  static constexpr int kSums = kM * kOut;
  static constexpr int kPartials = 2 * kWarps * kSums;  // floats of shared memory
  static_assert(kWarps % kSplit == 0, "the warps that share a K are all in one CTA");
};

// Warps that an SM shall hold at once: what a kernel may use of the registers.
template <int kM>
constexpr int kResidentWarps = kM == 1 ? 24 : 16;

// What the calling lane's slot sums to, for the `finish` of `matvec`.
template <typename Shape>
struct MatvecSums {
  const float* partial;  // [kSplit, kOut, kM]

  CUFUSE_DEVICE float operator()(int o, int m) const {
    float sum = partial[o * Shape::kM + m];
#pragma unroll
    for (int split = 1; split < Shape::kSplit; ++split) {
      sum += partial[split * Shape::kSums + o * Shape::kM + m];
    }
    return sum;
  }
};

// acc[o][m] += weight group o times group `at` of row m of x, value after value.
template <int kM, int kOut, typename T>
CUFUSE_DEVICE void multiply_group(float (&acc)[kOut][kM],
                                  const uint4 (&weights)[kOut],
                                  const T* x,
                                  int stride) {
  constexpr int kGroup = kPer16<T>;
  float w[kOut][kGroup];
#pragma unroll
  for (int o = 0; o < kOut; ++o) unpack<T>(w[o], weights[o]);
#pragma unroll
  for (int m = 0; m < kM; ++m) {
    float v[kGroup];
    unpack<T>(v, *reinterpret_cast<const uint4*>(x + m * stride));
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
#pragma unroll
      for (int o = 0; o < kOut; ++o) acc[o][m] = fmaf(w[o][j], v[j], acc[o][m]);
    }
  }
}

// Multiply `slots` groups of kOut weight rows by the rows of x. CTA b takes slots b * kSlots .. and
// goes on by the grid.
//   row(slot, o) -> const T*   weight row o of a slot, valid for every slot < slots
//   fill()                     puts x into shared memory [kM, chunk_count * kChunk] and ends with a
//                              __syncthreads; the first weights are on their way meanwhile
//   finish(slot, lane, sums)   called by the 32 lanes of one warp for each slot; sums(o, m)
// `partial` holds Shape::kPartials floats of shared memory.
template <typename Shape, typename T, typename Row, typename Fill, typename Finish>
CUFUSE_DEVICE void matvec(
    int slots, int k, const T* x, float* partial, Row row, Fill fill, Finish finish) {
  constexpr int kM = Shape::kM, kOut = Shape::kOut, kUnroll = Shape::kUnroll;
  constexpr int kSplit = Shape::kSplit, kVec = Shape::kVec, kGroup = kPer16<T>;
  constexpr int kBatch = kUnroll * kSplit;  // chunks from one batch of a warp to its next
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int split = warp % kSplit;
  const int chunks = chunk_count<T>(k);
  const int stride = chunks * kChunk<T>;
  x += lane * kGroup;

  // Whole chunks are loaded a batch ahead, the rest of a row (one chunk at most, if loads are 16
  // bytes wide) a tile ahead.
  const int full = kVec == 1 ? 0 : k / kChunk<T>;
  const bool has_rest = full < chunks && full % kSplit == split;
  const T* rows[kOut];
  uint4 batch[kUnroll][kOut], rest[kOut];

  auto point_at = [&](int tile) {
    // A warp without a slot of its own repeats the last one: it has to reach the barriers.
    const int slot = min(tile * Shape::kSlots + warp / kSplit, slots - 1);
#pragma unroll
    for (int o = 0; o < kOut; ++o) rows[o] = row(slot, o);
  };
  auto load = [&](uint4(&to)[kOut], int chunk) {
#pragma unroll
    for (int o = 0; o < kOut; ++o) {
      to[o] = load_stream(rows[o] + (static_cast<i64>(chunk) * kChunk<T> + lane * kGroup));
    }
  };
  auto load_rest = [&](int chunk) {
#pragma unroll
    for (int o = 0; o < kOut; ++o) {
      rest[o] = load_weight_group<kVec>(rows[o], chunk * 32 + lane, k);
    }
  };

  // The first loads go out before anything is waited for.
  const int tiles = (slots + Shape::kSlots - 1) / Shape::kSlots;
  point_at(blockIdx.x);
  if constexpr (kVec != 1) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (split + u * kSplit < full) load(batch[u], split + u * kSplit);
    }
    if (has_rest) load_rest(full);
  }
  fill();

  int parity = 0;
#pragma unroll 1
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, parity ^= 1) {
    const int next_tile = tile + gridDim.x;
    float acc[kOut][kM] = {};
    if constexpr (kVec == 1) {
      if (tile != blockIdx.x) point_at(tile);
#pragma unroll 1
      for (int chunk = split; chunk < chunks; chunk += kSplit) {
        load_rest(chunk);
        multiply_group<kM, kOut>(acc, rest, x + chunk * kChunk<T>, stride);
      }
    } else {
#pragma unroll 1
      for (int first = split; first < full; first += kBatch) {
        // A slot of the batch is loaded again when it was used: from this row or the next tile's.
        int next = first + kBatch;
        if (next >= full) {
          next = next_tile < tiles ? split : full;
          point_at(min(next_tile, tiles - 1));
        }
        const T* group = x + first * kChunk<T>;
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          if (first + u * kSplit < full) {
            multiply_group<kM, kOut>(acc, batch[u], group + u * kSplit * kChunk<T>, stride);
          }
          if (next + u * kSplit < full) load(batch[u], next + u * kSplit);
        }
      }
      if (has_rest) {
        multiply_group<kM, kOut>(acc, rest, x + full * kChunk<T>, stride);
        if (next_tile < tiles) {
          // Rows of less than a batch were not turned to the next tile above.
          if (full <= split) point_at(next_tile);
          load_rest(full);
        }
      }
    }

    // Lanes first, then the warps; two buffers in turn need one barrier a tile.
    float* mine = partial + (parity * Shape::kWarps + warp) * Shape::kSums;
#pragma unroll
    for (int o = 0; o < kOut; ++o) {
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        const float sum = warp_sum(acc[o][m]);
        if (lane == 0) mine[o * kM + m] = sum;
      }
    }
    if constexpr (kSplit == 1) {
      __syncwarp();
    } else {
      __syncthreads();
    }
    const int slot = tile * Shape::kSlots + warp / kSplit;
    if (split == 0 && slot < slots) finish(slot, lane, MatvecSums<Shape>{mine});
  }
}

}  // namespace cufuse
