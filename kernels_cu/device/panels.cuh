// y = W x for one x, W packed in panels of 16 rows (device/packed.cuh) that come through a ring.
//
// A panel is cut along K into blocks, a stage each, and block b goes to the group of warps
// (b + base) % 4, whose warps take a quarter of it each. So a warp waits for every fourth stage
// only, and up to 16 chains of sums make a row: chain 4 (b % 4) + quarter adds its blocks in
// ascending order, in two interleaved sums, and the chains are added as `panel_sum` says. All that
// comes from k and the dtype alone: the order of a row's sum depends on nothing else.
#pragma once

#include "device/packed.cuh"
#include "device/ring.cuh"

namespace cufuse {

constexpr int kPanelRows = 16;
constexpr int kPanelGroups = 4;
constexpr int kPanelWarps = kPanelGroups * kGroupWarps;

constexpr int round_up(int n, int to) { return (n + to - 1) / to * to; }

template <typename T, int kK, int kStageBytes>
struct PanelShape {
  static constexpr int kTiles = Packing<T>::tiles(kK);
  static constexpr int kMostTiles = kStageBytes / Packing<T>::kTileBytes;
  static constexpr int kBlocks = (kTiles + kMostTiles - 1) / kMostTiles;
  static constexpr int kBlockTiles = round_up((kTiles + kBlocks - 1) / kBlocks, 2);
  static constexpr int kLastTiles = kTiles - (kBlocks - 1) * kBlockTiles;
  static constexpr int kQuarterTiles = round_up((kBlockTiles + 3) / 4, 2);
  static constexpr int kChains = kGroupWarps * (kBlocks < kPanelGroups ? kBlocks : kPanelGroups);
  static constexpr bool kWhole = kLastTiles == 4 * kQuarterTiles && kBlockTiles == kLastTiles;
  static constexpr i64 kBytes = static_cast<i64>(kTiles) * Packing<T>::kTileBytes;
  static_assert(kTiles % 2 == 0 && kLastTiles > 0, "blocks cover a panel");

  static CUFUSE_DEVICE int block_bytes(int block) {
    return (block + 1 < kBlocks ? kBlockTiles : kLastTiles) * Packing<T>::kTileBytes;
  }
};

// x in shared memory, in the order in which a warp multiplies: entry [tile / 2][lane % 4] has the
// 16 bytes that lane needs for two tiles. Where words 2 i and 2 i + 1 of x (4 bytes of its values
// each) go; every 16 words of x fill 16 words there.
template <typename T>
CUFUSE_DEVICE u32 fragment_place(u32 i) {
  const u32 tile = i / 4, w = i % 4 * 2;
  const u32 t = sizeof(T) == 4 ? w / 2 : w % 4;
  const u32 part = sizeof(T) == 4 ? 0 : w / 4;
  return tile / 2 * 16 + t * 4 + tile % 2 * 2 + part;
}
template <typename T>
constexpr int kNextFragment = sizeof(T) == 4 ? 1 : 4;  // from the first to the second

// The sums of a lane over the tiles that its warp multiplies.
template <typename T>
struct PanelSums {
  float even[4] = {}, odd[4] = {};

  CUFUSE_DEVICE void add(const uint4& a0, const uint4& a1, const uint4& x) {
    const u32 first[4] = {a0.x, a0.y, a0.z, a0.w};
    const u32 second[4] = {a1.x, a1.y, a1.z, a1.w};
    mma_m16n8k16<T>(even, first, x.x, x.y);
    mma_m16n8k16<T>(odd, second, x.z, x.w);
  }

  // Of rows g and g + 8, g = lane / 4, in the lanes that are multiples of 4: every column is x.
  CUFUSE_DEVICE float2 rows() const { return make_float2(even[0] + odd[0], even[2] + odd[2]); }
};

template <>
struct PanelSums<float> {
  float even[2] = {}, odd[2] = {};

  CUFUSE_DEVICE void add(const uint4& a0, const uint4& a1, const uint4& x) {
    add(even, a0, x.x, x.y);
    add(odd, a1, x.z, x.w);
  }
  CUFUSE_DEVICE float2 rows() const {
    float2 sum = make_float2(even[0] + odd[0], even[1] + odd[1]);
#pragma unroll
    for (int offset = 1; offset < 4; offset *= 2) {
      sum.x += __shfl_xor_sync(kFullMask, sum.x, offset);
      sum.y += __shfl_xor_sync(kFullMask, sum.y, offset);
    }
    return sum;
  }

 private:
  static CUFUSE_DEVICE void add(float (&sum)[2], const uint4& a, u32 x0, u32 x1) {
    sum[0] = fmaf(__uint_as_float(a.x), __uint_as_float(x0), sum[0]);
    sum[0] = fmaf(__uint_as_float(a.y), __uint_as_float(x1), sum[0]);
    sum[1] = fmaf(__uint_as_float(a.z), __uint_as_float(x0), sum[1]);
    sum[1] = fmaf(__uint_as_float(a.w), __uint_as_float(x1), sum[1]);
  }
};

// A warp's quarter of a block, in registers from when it has left its stage to when x is there.
template <typename Shape>
struct PanelQuarter {
  uint4 weights[Shape::kQuarterTiles] = {};

  CUFUSE_DEVICE void load(const unsigned char* stage, int block, int quarter) {
    const auto* source = reinterpret_cast<const uint4*>(stage) + first(quarter) * 32 + lane();
#pragma unroll
    for (int i = 0; i < Shape::kQuarterTiles; ++i) {
      if (has(i, block, quarter)) weights[i] = source[i * 32];
    }
  }

  template <typename T>
  CUFUSE_DEVICE void multiply(PanelSums<T>& sums, const uint4* x, int block, int quarter) const {
    x += (block * Shape::kBlockTiles + first(quarter)) / 2 * 4 + lane() % 4;
#pragma unroll
    for (int i = 0; i < Shape::kQuarterTiles; i += 2) {
      if (has(i, block, quarter)) sums.add(weights[i], weights[i + 1], x[i * 2]);
    }
  }

 private:
  static CUFUSE_DEVICE int lane() { return lane_here(); }
  static CUFUSE_DEVICE int first(int quarter) { return quarter * Shape::kQuarterTiles; }
  static CUFUSE_DEVICE bool has(int i, int block, int quarter) {
    const int tiles = block + 1 < Shape::kBlocks ? Shape::kBlockTiles : Shape::kLastTiles;
    return Shape::kWhole || i < tiles - first(quarter);
  }
};

// The partial sums of a panel: [kChains, kPanelRows] floats. What a warp brings goes in with
// `store_chain`, row `lane % 16` comes out with `panel_sum`, to both lanes.
template <typename T>
CUFUSE_DEVICE void store_chain(float* partial, int chain, const PanelSums<T>& sums) {
  const int lane = lane_here();
  const float2 rows = sums.rows();
  if (lane % 4 == 0) {
    partial[chain * kPanelRows + lane / 4] = rows.x;
    partial[chain * kPanelRows + lane / 4 + 8] = rows.y;
  }
}

template <int kChains>
CUFUSE_DEVICE float panel_sum(const float* partial) {
  constexpr int kHalf = kChains / 2;
  const int lane = lane_here();
  partial += lane / 16 * kHalf * kPanelRows + lane % 16;
  float sums[kHalf];
#pragma unroll
  for (int chain = 0; chain < kHalf; ++chain) sums[chain] = partial[chain * kPanelRows];
  // Neighbours first: fewer sums wait for each other.
#pragma unroll
  for (int apart = 1; apart < kHalf; apart *= 2) {
#pragma unroll
    for (int chain = 0; chain + apart < kHalf; chain += 2 * apart)
      sums[chain] += sums[chain + apart];
  }
  return sums[0] + __shfl_xor_sync(kFullMask, sums[0], 16);
}

}  // namespace cufuse
