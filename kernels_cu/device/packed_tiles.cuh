// y = x w^T for many rows, w packed in panels of 16 rows (device/packed.cuh): a CTA multiplies
// kBlockN weight rows, whole panels, by kBlockM rows of x, a block of K at a time. The weights are
// mma's left operand: a block of a panel is one contiguous piece of memory, and a lane has its
// fragment with one access of 16 bytes. x comes through ldmatrix. float32 goes through FFMA.
//
// Every sum runs over K in ascending steps into one accumulator, as in device/tile_matmul.cuh.
#pragma once

#include "device/packed.cuh"
#include "device/tile_matmul.cuh"

namespace cufuse {

// A packed weight, and the panels of it that a CTA takes.
template <typename T>
struct PanelSource {
  const T* w;
  int first;  // panel
  int panels;
  int k;

  // Panels past the last repeat it and are not stored.
  CUFUSE_DEVICE const T* panel(int i) const {
    return w + min(first + i, panels - 1) * Packing<T>::panel_elements(k);
  }
};

// ---- 16-bit values: tensor cores

// The accumulators of one thread: of rows g and g + 8 of a panel, g = lane / 4, for two rows of x.
template <typename Shape, bool kTensorCores = Shape::kTensorCores>
struct PackedSums {
  static_assert(Shape::kWarpN % 16 == 0, "a warp takes whole panels");
  static_assert(Shape::kWarpM % 16 == 0, "one ldmatrix brings 16 rows of x");
  static constexpr int kPanels = Shape::kWarpN / 16, kColumns = Shape::kWarpM / 8;
  float c[kPanels][kColumns][4];

  // f(row, column, values): two sums of neighbouring columns of the tile.
  template <typename F>
  CUFUSE_DEVICE void visit(F f) {
    const int column = warp_column(Shape::kWarpN);
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
#pragma unroll
      for (int i = 0; i < kPanels; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float values[2];
          turn(values, c[i][j][2 * h], c[i][j][2 * h + 1]);
          f(warp_row() + j * 8, column + i * 16 + h * 8, values);
        }
      }
    }
  }

  // f(row, column, gates, ups) of gated panels; column counts the tile's kBlockN / 2 outputs.
  template <typename F>
  CUFUSE_DEVICE void visit_gated(F f) {
    const int column = warp_column(Shape::kWarpN / 2);
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
#pragma unroll
      for (int i = 0; i < kPanels; ++i) {
        float gates[2], ups[2];
        turn(gates, c[i][j][0], c[i][j][1]);
        turn(ups, c[i][j][2], c[i][j][3]);
        f(warp_row() + j * 8, column + i * 8, gates, ups);
      }
    }
  }

 private:
  static CUFUSE_DEVICE int lane() { return threadIdx.x % 32; }
  static CUFUSE_DEVICE int warp_row() {
    const int warp = threadIdx.x / 32;
    return warp / Shape::kWarpsN * Shape::kWarpM + lane() % 4 * 2 + lane() / 4 % 2;
  }
  static CUFUSE_DEVICE int warp_column(int columns) {
    const int warp = threadIdx.x / 32;
    return warp % Shape::kWarpsN * columns + lane() / 8 * 2;
  }
  // From two rows of x in one column to two columns in one row: lanes of neighbouring columns g
  // swap a value, the even one keeps the first row and the odd one the second.
  static CUFUSE_DEVICE void turn(float (&values)[2], float first, float second) {
    const bool odd = lane() / 4 % 2;
    const float got = __shfl_xor_sync(kFullMask, odd ? first : second, 4);
    values[0] = odd ? got : first;
    values[1] = odd ? second : got;
  }
};

// Start the copy of a block of K of the CTA's panels, tiles past the last one as zeros.
template <typename Shape, typename T>
CUFUSE_DEVICE void copy_panels(T* shared, const PanelSource<T>& source, int first_tile) {
  using P = Packing<T>;
  constexpr int kBlockTiles = Shape::kBlockK / P::kTileK;
  constexpr int kGroups = kBlockTiles * 32;  // of 16 bytes, of a panel
  constexpr int kAll = Shape::kBlockN / P::kTileRows * kGroups;
  static_assert(Shape::kBlockN % P::kTileRows == 0 && Shape::kBlockK % P::kTileK == 0,
                "a block is made of whole tiles");
  static_assert(kAll % Shape::kThreads == 0, "threads copy equal shares of w");
  const int tiles = P::tiles(source.k);
#pragma unroll
  for (int i = 0; i < kAll / Shape::kThreads; ++i) {
    const int at = i * Shape::kThreads + static_cast<int>(threadIdx.x);
    const int panel = at / kGroups, group = at % kGroups;
    const int tile = first_tile + group / 32;
    const T* from = source.panel(panel);
    const bool there = tile < tiles;
    copy_async(
        shared + at * kPer16<T>,
        there ? from + static_cast<i64>(first_tile) * P::kTileElements + group * kPer16<T> : from,
        there ? 16 : 0);
  }
}

template <typename Shape, typename T, typename SourceX>
CUFUSE_DEVICE void multiply_packed(
    PackedSums<Shape, true>& sums, T* shared, int k, SourceX x, const PanelSource<T>& w) {
  constexpr int kBlockK = Shape::kBlockK, kStages = Shape::kStages;
  constexpr int kStage = (Shape::kBlockM + Shape::kBlockN) * kBlockK;
  constexpr int kBlockTiles = kBlockK / 16;
  constexpr int kPanels = PackedSums<Shape>::kPanels, kColumns = PackedSums<Shape>::kColumns;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int blocks = (k + kBlockK - 1) / kBlockK;
  auto copy = [&](int block) {
    T* stage = shared + block % kStages * kStage;
    copy_panels<Shape>(stage, w, block * kBlockTiles);
    copy_tile<Shape, Shape::kBlockM>(stage + Shape::kBlockN * kBlockK, x, block * kBlockK, k);
  };
#pragma unroll
  for (int i = 0; i < kPanels; ++i) {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sums.c[i][j][e] = 0.0f;
    }
  }

  // Every iteration commits a group, empty or not: the count of pending groups stays the same.
#pragma unroll
  for (int block = 0; block < kStages - 1; ++block) {
    if (block < blocks) copy(block);
    copy_async_commit();
  }
  const int panel = warp % Shape::kWarpsN * kPanels;
  // The row of an 8x8 matrix that this lane names to ldmatrix, and its 8 values of K.
  const int x_row = warp / Shape::kWarpsN * Shape::kWarpM + lane / 16 * 8 + lane % 8;
  const int x_group = lane / 8 % 2;
#pragma unroll 1
  for (int block = 0; block < blocks; ++block) {
    copy_async_wait<kStages - 2>();
    __syncthreads();  // the block has landed, and all warps have left the one before
    if (block + kStages - 1 < blocks) copy(block + kStages - 1);
    copy_async_commit();
    const T* left = shared + block % kStages * kStage;
    const T* right = left + Shape::kBlockN * kBlockK;
#pragma unroll
    for (int step = 0; step < kBlockTiles; ++step) {
      u32 a[kPanels][4], b[kColumns / 2][4];
#pragma unroll
      for (int i = 0; i < kPanels; ++i) {
        const T* tile = left + ((panel + i) * kBlockTiles + step) * Packing<T>::kTileElements;
        const uint4 bits = *reinterpret_cast<const uint4*>(tile + lane * 8);
        a[i][0] = bits.x;
        a[i][1] = bits.y;
        a[i][2] = bits.z;
        a[i][3] = bits.w;
      }
#pragma unroll
      for (int j = 0; j < kColumns / 2; ++j) {
        load_matrix(b[j], right + swizzled<kBlockK>(x_row + j * 16, step * 2 + x_group));
      }
#pragma unroll
      for (int i = 0; i < kPanels; ++i) {
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
          mma_m16n8k16<T>(sums.c[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
        }
      }
    }
  }
}

// ---- float32: FFMA

template <typename Shape>
struct PackedSums<Shape, false> : TileSums<Shape, false> {};

// kGated: the first half of the tile's columns are gates, the second half are ups.
template <typename Shape, bool kGated, typename SourceX>
CUFUSE_DEVICE void multiply_packed(
    PackedSums<Shape, false>& sums, float* shared, int k, SourceX x, const PanelSource<float>& w) {
  using P = Packing<float>;
  constexpr int kBlockK = Shape::kBlockK, kThreads = Shape::kThreads;
  constexpr int kGroups = kBlockK / 4;  // 16-byte groups of a tile row
  constexpr int kRowsM = Shape::kBlockM * kGroups / kThreads;
  constexpr int kPanelGroups = kBlockK / P::kTileK * 32;  // of 16 bytes, of a panel
  constexpr int kGroupsN = Shape::kBlockN / P::kTileRows * kPanelGroups / kThreads;
  constexpr int kBuffer = kBlockK * (Shape::kPitchM + Shape::kPitchN);
  static_assert(kRowsM * kThreads == Shape::kBlockM * kGroups, "threads copy equal shares of x");
  static_assert(kGroupsN * kThreads == Shape::kBlockN * kGroups, "threads copy equal shares of w");
  static_assert(kBlockK == 2 * P::kTileK, "K is padded to two tiles: a block is never cut short");
  const int group = threadIdx.x % kGroups, first_row = threadIdx.x / kGroups;
  const int blocks = (k + kBlockK - 1) / kBlockK;

  uint4 next_x[kRowsM], next_w[kGroupsN];
  auto load = [&](int block) {
    const int from = block * kBlockK;
#pragma unroll
    for (int i = 0; i < kRowsM; ++i) {
      const float* source = x(first_row + i * (kThreads / kGroups));
      next_x[i] = load_group<Shape::kVec>(source + from, group, k - from);
    }
#pragma unroll
    for (int i = 0; i < kGroupsN; ++i) {
      const int at = i * kThreads + static_cast<int>(threadIdx.x);
      const float* source =
          w.panel(at / kPanelGroups) + static_cast<i64>(block) * 2 * P::kTileElements;
      next_w[i] = *reinterpret_cast<const uint4*>(source + at % kPanelGroups * 4);
    }
  };
  auto store = [&](float* to) {
#pragma unroll
    for (int i = 0; i < kRowsM; ++i) {
      float v[4];
      unpack<float>(v, next_x[i]);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        to[(group * 4 + j) * Shape::kPitchM + first_row + i * (kThreads / kGroups)] = v[j];
      }
    }
    to += kBlockK * Shape::kPitchM;
#pragma unroll
    for (int i = 0; i < kGroupsN; ++i) {
      const int at = i * kThreads + static_cast<int>(threadIdx.x);
      const int panel = at / kPanelGroups, lane = at % 32;
      const int column = at % kPanelGroups / 32 * P::kTileK + lane % 4 * 2;
      const int upper = panel * (kGated ? 8 : 16) + lane / 4;
      const int lower = upper + (kGated ? Shape::kBlockN / 2 : 8);
      float v[4];
      unpack<float>(v, next_w[i]);
      to[column * Shape::kPitchN + upper] = v[0];
      to[(column + 1) * Shape::kPitchN + upper] = v[1];
      to[column * Shape::kPitchN + lower] = v[2];
      to[(column + 1) * Shape::kPitchN + lower] = v[3];
    }
  };
  clear<Shape>(sums);

  // The next block is on its way to registers while this one is multiplied.
  load(0);
#pragma unroll 1
  for (int block = 0; block < blocks; ++block) {
    float* buffer = shared + block % 2 * kBuffer;
    store(buffer);
    __syncthreads();  // all have stored this block, and left the other buffer
    if (block + 1 < blocks) load(block + 1);
    multiply_buffer<Shape>(sums, buffer);
  }
}

// The same for both: the tile of rows of x and of panels that this CTA takes, and its sums.
template <typename Shape, bool kGated, typename T>
struct PackedTile {
  static constexpr int kColumns = Shape::kBlockN / (kGated ? 2 : 1);
  int first_row, first_column;
  PackedSums<Shape> sums;

  CUFUSE_DEVICE PackedTile(const T* x, const T* w, int rows, int n, int k) {
    const TileIndex tile = tile_index(blockIdx.x, (rows + Shape::kBlockM - 1) / Shape::kBlockM,
                                      (n + kColumns - 1) / kColumns);
    first_row = tile.m * Shape::kBlockM;
    first_column = tile.n * kColumns;
    const PanelSource<T> panels = {w, tile.n * (Shape::kBlockN / Packing<T>::kTileRows),
                                   Packing<T>::panels(n, kGated), k};
    // Rows past the last repeat it and are not stored.
    auto row = [&](int r) { return x + static_cast<i64>(min(first_row + r, rows - 1)) * k; };
    if constexpr (Shape::kTensorCores) {
      multiply_packed(sums, dynamic_shared<T>(), k, row, panels);
    } else {
      multiply_packed<Shape, kGated>(sums, dynamic_shared<T>(), k, row, panels);
    }
  }
};

}  // namespace cufuse
