// y = W x for one x, W in panels of 16 rows that come through a ring: packed (device/packed.cuh),
// row-major in lines of 128 bytes, or of 4 bits a weight (device/mxfp4.cuh).
//
// A panel is cut along K into blocks, a stage each, and block b goes to the group of warps
// (b + base) % 4, whose warps take a quarter of it each. So a warp waits for every fourth stage
// only, and up to 16 chains of sums make a row: chain 4 (b % 4) + quarter adds its blocks in
// ascending order, in two interleaved sums (of 4-bit weights, and of rows beside them, in one), and
// the chains are added as `panel_sum` says. All that comes from k, the dtype and the layout alone:
// the order of a row's sum depends on nothing else.
#pragma once

#include "device/mxfp4.cuh"
#include "device/packed.cuh"
#include "device/ring.cuh"

namespace cufuse {

constexpr int kPanelRows = 16;
constexpr int kPanelGroups = 4;
constexpr int kPanelWarps = kPanelGroups * kGroupWarps;

constexpr int round_up(int n, int to) { return (n + to - 1) / to * to; }

// kParts matrices of kK columns side by side make K, as chosen experts do; each is cut for itself.
// With kGated 8 rows of each of two matrices make a panel.
template <typename T,
          int kK_,
          int kStageBytes,
          Layout kLayout_ = Layout::packed,
          bool kGated_ = false,
          int kParts_ = 1>
struct PanelShape {
  static constexpr Layout kLayout = kLayout_;
  static constexpr bool kGated = kGated_;
  static constexpr int kK = kK_;
  static constexpr int kParts = kParts_;
  static constexpr bool kInRows = kLayout == Layout::rows;
  static constexpr bool kFourBits = kLayout == Layout::mxfp4;
  static constexpr int kTileBytes = kFourBits ? Mxfp4::kTileBytes : Packing<T>::kTileBytes;
  static constexpr int kTileX = kFourBits ? Mxfp4::kTileK / Packing<T>::kTileK : 1;  // x's tiles
  static constexpr int kLineTiles = 4;
  static constexpr int kLineColumns = kLineTiles * Packing<T>::kTileK;
  static constexpr int kTogether = kFourBits ? 1 : 2;             // tiles that a warp multiplies
  static constexpr int kUnit = kInRows ? kLineTiles : kTogether;  // that are of one block
  static constexpr int kTiles = kInRows     ? (kK + kLineColumns - 1) / kLineColumns * kLineTiles
                                : kFourBits ? Mxfp4::tiles(kK)
                                            : Packing<T>::tiles(kK);
  static constexpr int kMostTiles = kStageBytes / kTileBytes;
  static constexpr int kPartBlocks = (kTiles + kMostTiles - 1) / kMostTiles;
  static constexpr int kBlocks = kParts * kPartBlocks;
  static constexpr int kBlockTiles = round_up((kTiles + kPartBlocks - 1) / kPartBlocks, kUnit);
  static constexpr int kLastTiles = kTiles - (kPartBlocks - 1) * kBlockTiles;
  static constexpr int kQuarterTiles = round_up((kBlockTiles + 3) / 4, kTogether);
  static constexpr int kChains = kGroupWarps * (kBlocks < kPanelGroups ? kBlocks : kPanelGroups);
  static constexpr bool kWhole = kLastTiles == 4 * kQuarterTiles && kBlockTiles == kLastTiles;
  static constexpr i64 kBytes = static_cast<i64>(kTiles) * kTileBytes;  // of a part
  static_assert(kTiles % kTogether == 0 && kLastTiles > 0, "blocks cover a panel");

  // Of a part's x, and of all parts'.
  static constexpr int kPartXTiles = kTiles * kTileX;
  static constexpr int kXTiles = kParts * kPartXTiles;

  // What else an EitherPanel tells of its shape.
  static CUFUSE_DEVICE int blocks() { return kBlocks; }
  static CUFUSE_DEVICE int chains() { return kChains; }
  static CUFUSE_DEVICE int parts() { return kParts; }
  static CUFUSE_DEVICE int part_blocks() { return kPartBlocks; }
  static CUFUSE_DEVICE i64 part_bytes() { return kBytes; }
  static CUFUSE_DEVICE int quarter_tiles() { return kQuarterTiles; }
  template <typename Cursor>
  static CUFUSE_DEVICE void pass(Cursor& cursor) {  // a panel's stages
    cursor.template advance<kBlocks>();
  }

  static CUFUSE_DEVICE int part(int block) { return kParts == 1 ? 0 : block / kPartBlocks; }
  static CUFUSE_DEVICE int block_in_part(int block) {
    return kParts == 1 ? block : block % kPartBlocks;
  }
  static CUFUSE_DEVICE int first_x_tile(int block) {
    return (part(block) * kTiles + block_in_part(block) * kBlockTiles) * kTileX;
  }
  static CUFUSE_DEVICE int block_tiles(int block) {
    return block_in_part(block) + 1 < kPartBlocks ? kBlockTiles : kLastTiles;
  }
  static CUFUSE_DEVICE int block_bytes(int block) { return block_tiles(block) * kTileBytes; }

  // The tiles of a quarter of a block: where they begin, and whether it has an i-th.
  static CUFUSE_DEVICE int first_tile(int quarter) { return quarter * kQuarterTiles; }
  static CUFUSE_DEVICE bool has(int i, int block, int quarter) {
    return kWhole || i < block_tiles(block) - first_tile(quarter);
  }
};

// Panels of one of two shapes, which one is known when it runs: one code for both.
template <typename First, typename Second>
struct EitherPanel {
  static constexpr Layout kLayout =
      First::kLayout == Second::kLayout ? First::kLayout : Layout::mixed;
  static constexpr int kTileX = First::kTileX;  // where the layout is the same
  bool is_second;
  First first = {};
  Second second = {};

  CUFUSE_DEVICE int blocks() const { return is_second ? second.blocks() : first.blocks(); }
  CUFUSE_DEVICE int chains() const { return is_second ? second.chains() : first.chains(); }
  CUFUSE_DEVICE int parts() const { return is_second ? second.parts() : first.parts(); }
  CUFUSE_DEVICE int part_blocks() const {
    return is_second ? second.part_blocks() : first.part_blocks();
  }
  CUFUSE_DEVICE i64 part_bytes() const {
    return is_second ? second.part_bytes() : first.part_bytes();
  }
  CUFUSE_DEVICE int quarter_tiles() const {
    return is_second ? second.quarter_tiles() : first.quarter_tiles();
  }
  CUFUSE_DEVICE int first_x_tile(int block) const {
    return is_second ? second.first_x_tile(block) : first.first_x_tile(block);
  }
  CUFUSE_DEVICE int block_tiles(int block) const {
    return is_second ? second.block_tiles(block) : first.block_tiles(block);
  }
  CUFUSE_DEVICE int block_bytes(int block) const {
    return is_second ? second.block_bytes(block) : first.block_bytes(block);
  }
  template <typename Cursor>
  CUFUSE_DEVICE void pass(Cursor& cursor) const {
    is_second ? second.pass(cursor) : first.pass(cursor);
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

  // Of rows g and g + 8, g = lane / 4: what the lane has, which is all, for every column is x.
  CUFUSE_DEVICE float2 of_lane() const { return make_float2(even[0] + odd[0], even[2] + odd[2]); }
  CUFUSE_DEVICE float2 rows() const { return of_lane(); }
};

template <>
struct PanelSums<float> {
  float even[2] = {}, odd[2] = {};

  CUFUSE_DEVICE void add(const uint4& a0, const uint4& a1, const uint4& x) {
    add(even, a0, x.x, x.y);
    add(odd, a1, x.z, x.w);
  }
  CUFUSE_DEVICE float2 of_lane() const { return make_float2(even[0] + odd[0], even[1] + odd[1]); }
  CUFUSE_DEVICE float2 rows() const {
    float2 sum = of_lane();
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

// Whether rows of kK values are whole lines.
template <typename T, int kK>
constexpr bool kInLines = kK * static_cast<int>(sizeof(T)) % 128 == 0;

// A block of rows in its stage: lines of 128 bytes, of which those of the same columns lie together
// (16 rows, or 8 of a gate, and its up's behind all of the gate's), their 16-byte chunks swapped by
// the address as tensor copies do it.
template <typename Shape>
struct BlockRows {
  static constexpr int kLineBytes = 128;
  static constexpr int kLines = Shape::kBlockTiles / Shape::kLineTiles;  // of a row
  static constexpr int kRowsTogether = Shape::kGated ? 8 : 16;
  static constexpr int kColumnBytes = kRowsTogether * kLineBytes;  // from a line to the row's next
  static constexpr int kUpperAt = Shape::kGated ? kLines * kColumnBytes : 8 * kLineBytes;  // row 8

  // The line of row `row` of 0..7, or of that + 8; all its chunks are swapped alike.
  static CUFUSE_DEVICE const unsigned char* line(const unsigned char* stage, int row, bool upper) {
    return stage + row * kLineBytes + (upper ? kUpperAt : 0);
  }
  static CUFUSE_DEVICE int swap(const unsigned char* line) {
    return static_cast<int>(shared_address(line) / kLineBytes % 8);
  }
};

// What a lane has of a tile of a block in rows: as the packed tile (device/packed.cuh).
template <typename T, typename Shape>
struct RowsLane {
  using Rows = BlockRows<Shape>;
  const unsigned char* line;  // of the row whose address this lane gives, at the block's first line
  int chunk, swap;

  // Lane l gives the address of row l % 8 of the l / 8th of four 8 x 8 matrices.
  CUFUSE_DEVICE explicit RowsLane(const unsigned char* stage) {
    const int lane = lane_here();
    line = Rows::line(stage, lane % 8, lane / 8 % 2 != 0);
    chunk = lane / 16;
    swap = Rows::swap(line);
  }
  CUFUSE_DEVICE uint4 tile(int i) const {
    const int column = i / Shape::kLineTiles * Rows::kColumnBytes;
    const int at = (i % Shape::kLineTiles * 2 + chunk) ^ swap;
    u32 a[4];
    load_matrix(a, line + column + at * 16);
    return make_uint4(a[0], a[1], a[2], a[3]);
  }
};

template <typename Shape>
struct RowsLane<float, Shape> {
  using Rows = BlockRows<Shape>;
  const unsigned char *lower, *upper;
  int pair, lower_swap, upper_swap;

  CUFUSE_DEVICE explicit RowsLane(const unsigned char* stage) {
    const int lane = lane_here();
    lower = Rows::line(stage, lane / 4, false);
    upper = Rows::line(stage, lane / 4, true);
    pair = lane % 4;
    lower_swap = Rows::swap(lower);
    upper_swap = Rows::swap(upper);
  }
  CUFUSE_DEVICE uint4 tile(int i) const {
    const int column = i / Shape::kLineTiles * Rows::kColumnBytes + pair % 2 * 8;
    const int chunk = i % Shape::kLineTiles * 2 + pair / 2;
    const auto a = *reinterpret_cast<const uint2*>(lower + column + (chunk ^ lower_swap) * 16);
    const auto b = *reinterpret_cast<const uint2*>(upper + column + (chunk ^ upper_swap) * 16);
    return make_uint4(a.x, a.y, b.x, b.y);
  }
};

// A warp's quarter of a block, in registers from when it has left its stage to when x is there.
template <typename T, typename Shape, Layout = Shape::kLayout>
struct PanelQuarter {
  using Sums = PanelSums<T>;
  static constexpr bool kInStage = false;  // until it is multiplied
  uint4 weights[Shape::kQuarterTiles] = {};

  CUFUSE_DEVICE void load(const unsigned char* stage, Shape, int block, int quarter) {
    if constexpr (Shape::kInRows) {
      const RowsLane<T, Shape> rows(stage);
#pragma unroll
      for (int i = 0; i < Shape::kQuarterTiles; ++i) {
        if (Shape::has(i, block, quarter)) weights[i] = rows.tile(Shape::first_tile(quarter) + i);
      }
    } else {
      const auto* source =
          reinterpret_cast<const uint4*>(stage) + Shape::first_tile(quarter) * 32 + lane_here();
#pragma unroll
      for (int i = 0; i < Shape::kQuarterTiles; ++i) {
        if (Shape::has(i, block, quarter)) weights[i] = source[i * 32];
      }
    }
  }

  CUFUSE_DEVICE void multiply(Sums& sums, const uint4* x, Shape, int block, int quarter) const {
    x += (Shape::first_x_tile(block) + Shape::first_tile(quarter)) / 2 * 4 + lane_here() % 4;
#pragma unroll
    for (int i = 0; i < Shape::kQuarterTiles; i += 2) {
      if (Shape::has(i, block, quarter)) sums.add(weights[i], weights[i + 1], x[i * 2]);
    }
  }
};

// 4-bit weights stay in their stage until they are multiplied: registers would want the loop over
// tiles unrolled, and a tile takes about 60 instructions.
template <typename T, typename Shape>
struct PanelQuarter<T, Shape, Layout::mxfp4> {
  using Sums = Mxfp4Sums<T>;
  static constexpr bool kInStage = true;
  const unsigned char* stage = nullptr;

  CUFUSE_DEVICE void load(const unsigned char* landed, Shape, int, int) { stage = landed; }

  CUFUSE_DEVICE void multiply(
      Sums& sums, const uint4* x, Shape shape, int block, int quarter) const {
    constexpr int kTileEntries = Shape::kTileX / 2 * 4;
    const int lane = lane_here(), first = quarter * shape.quarter_tiles();
    const int tiles = min(shape.block_tiles(block) - first, shape.quarter_tiles());
    x += shape.first_x_tile(block) / 2 * 4 + first * kTileEntries + lane % 4;
    const unsigned char* tile = stage + first * Mxfp4::kTileBytes;
    const unsigned char* end = tile + tiles * Mxfp4::kTileBytes;
    uint4 next_values = {};
    u32 next_scales = 0;
    auto look_ahead = [&] {
      if (tile >= end) return;
      next_values = *reinterpret_cast<const uint4*>(tile + Mxfp4::value_place(lane));
      next_scales = *reinterpret_cast<const u32*>(tile + Mxfp4::scale_place(lane));
    };
    look_ahead();
#pragma unroll 1
    for (; tile < end; x += kTileEntries) {
      const uint4 values = next_values;
      const u32 scales = next_scales;
      tile += Mxfp4::kTileBytes;
      look_ahead();
      sums.add(values, scales, x);
    }
  }
};

// A router's rows beside 4-bit experts: both from the stage and to the same sums, so that a kernel
// has what is around them once.
template <typename T, typename Rows, typename Experts>
struct PanelQuarter<T, EitherPanel<Rows, Experts>, Layout::mixed> {
  using Shape = EitherPanel<Rows, Experts>;
  using Sums = Mxfp4Sums<T>;
  static constexpr bool kInStage = true;
  const unsigned char* stage = nullptr;

  CUFUSE_DEVICE void load(const unsigned char* landed, Shape, int, int) { stage = landed; }

  CUFUSE_DEVICE void multiply(
      Sums& sums, const uint4* x, Shape shape, int block, int quarter) const {
    if (shape.is_second) {
      PanelQuarter<T, Experts>{stage}.multiply(sums, x, shape.second, block, quarter);
    } else {
      multiply_rows(sums, x, block, quarter);
    }
  }

 private:
  // By whole lines.
  CUFUSE_DEVICE void multiply_rows(Sums& sums, const uint4* x, int block, int quarter) const {
    constexpr int kQuarterTiles = round_up(Rows::kQuarterTiles, Rows::kLineTiles);
    const int begin = quarter * kQuarterTiles;
    const int end = min(begin + kQuarterTiles, Rows::block_tiles(block));
    const RowsLane<T, Rows> rows(stage);
    x += Rows::first_x_tile(block) / 2 * 4 + lane_here() % 4;
    PanelSums<T> its;
#pragma unroll 1
    for (int line = begin; line < end; line += Rows::kLineTiles) {
#pragma unroll
      for (int i = line; i < line + Rows::kLineTiles; i += 2) {
        its.add(rows.tile(i), rows.tile(i + 1), x[i * 2]);
      }
    }
    sums.add(its.of_lane());
  }
};

// The partial sums of a panel: [kChains, kPanelRows] floats. What a warp brings goes in with
// `store_chain`, row `lane % 16` comes out with `panel_sum`, to both lanes.
template <typename Sums>
CUFUSE_DEVICE void store_chain(float* partial, int chain, const Sums& sums) {
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
