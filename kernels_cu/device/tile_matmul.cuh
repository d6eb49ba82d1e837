// y = x w^T for many rows: a CTA multiplies kBlockM rows of x by kBlockN weight rows, a block of K
// at a time. 16-bit values go through cp.async, a ring of kStages blocks, ldmatrix and
// mma.m16n8k16; float32 goes through FFMA, never TF32.
//
// Every sum runs over K in ascending steps into one accumulator, so that the choice of a tile does
// not change a bit, and neither do the other rows.
#pragma once

#include "device/staging.cuh"

namespace cufuse {

// Warps that an SM shall hold at once: what a kernel may use of the registers. With half of them
// the FFMA path spills.
template <typename T>
constexpr int kTileWarps = sizeof(T) == 2 ? 16 : 8;

// How a CTA cuts its tile: kWarpsM x kWarpsN warps. kVec is kPer16<T>, or 1 when k or an address
// forbids accesses of 16 bytes.
template <typename T,
          int kBlockM_,
          int kBlockN_,
          int kBlockK_,
          int kWarpsM_,
          int kWarpsN_,
          int kStages_,
          int kVec_>
struct TileShape {
  static constexpr int kBlockM = kBlockM_, kBlockN = kBlockN_, kBlockK = kBlockK_;
  static constexpr int kWarpsM = kWarpsM_, kWarpsN = kWarpsN_;
  static constexpr int kStages = kStages_, kVec = kVec_;
  static constexpr int kThreads = kWarpsM * kWarpsN * 32;
  static constexpr int kWarpM = kBlockM / kWarpsM, kWarpN = kBlockN / kWarpsN;
  static constexpr bool kTensorCores = sizeof(T) == 2;
  static constexpr int kWide = kTensorCores ? 2 : 4;  // neighbouring columns in one thread
  // The FFMA path keeps blocks transposed, padded so that a vector read stays aligned.
  static constexpr int kPitchM = kBlockM + 4, kPitchN = kBlockN + 4;
  static constexpr int kShared =  // elements
      kTensorCores ? kStages * (kBlockM + kBlockN) * kBlockK : 2 * kBlockK * (kPitchM + kPitchN);

  // A gated tile holds gate and up rows; this is where tile row r comes from, chosen so that gate
  // and up of one output meet in one thread.
  static CUFUSE_DEVICE bool is_up(int r) {
    return kTensorCores ? r % kWarpN >= kWarpN / 2 : r >= kBlockN / 2;
  }
  static CUFUSE_DEVICE int gated_column(int r) {
    return kTensorCores ? r / kWarpN * (kWarpN / 2) + r % (kWarpN / 2) : r % (kBlockN / 2);
  }
};

// ---- 16-bit values: tensor cores

// The accumulators of one thread.
template <typename Shape, bool kTensorCores = Shape::kTensorCores>
struct TileSums {
  static_assert(Shape::kWarpM % 16 == 0, "a warp's tile is made of mma's 16 rows");
  static_assert(Shape::kWarpN % 16 == 0, "one ldmatrix brings 16 weight rows");
  static constexpr int kTilesM = Shape::kWarpM / 16, kTilesN = Shape::kWarpN / 8;
  float c[kTilesM][kTilesN][4];

  // f(row, column, values): kWide sums of neighbouring columns of the tile.
  template <typename F>
  CUFUSE_DEVICE void visit(F f) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int row = warp / Shape::kWarpsN * Shape::kWarpM + lane / 4;
    const int column = warp % Shape::kWarpsN * Shape::kWarpN + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < kTilesM; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int j = 0; j < kTilesN; ++j) {
          const float values[2] = {c[i][j][2 * h], c[i][j][2 * h + 1]};
          f(row + i * 16 + h * 8, column + j * 8, values);
        }
      }
    }
  }

  // f(row, column, gates, ups) of a gated tile; column counts its kBlockN / 2 outputs.
  template <typename F>
  CUFUSE_DEVICE void visit_gated(F f) {
    static_assert(kTilesN % 2 == 0, "half of a warp's columns are gates");
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int row = warp / Shape::kWarpsN * Shape::kWarpM + lane / 4;
    const int column = warp % Shape::kWarpsN * (Shape::kWarpN / 2) + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < kTilesM; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int j = 0; j < kTilesN / 2; ++j) {
          const float gates[2] = {c[i][j][2 * h], c[i][j][2 * h + 1]};
          const float ups[2] = {c[i][j + kTilesN / 2][2 * h], c[i][j + kTilesN / 2][2 * h + 1]};
          f(row + i * 16 + h * 8, column + j * 8, gates, ups);
        }
      }
    }
  }
};

// Where 16-byte group `group` of a tile row lies: groups are permuted within a row so that the
// eight rows that ldmatrix reads at once lie in different banks.
template <int kBlockK>
CUFUSE_DEVICE int swizzled(int row, int group) {
  static_assert(kBlockK % 64 == 0, "the permutation is over the eight groups of 128 bytes");
  return row * kBlockK + (group ^ (row & 7)) * 8;
}

// Start the copy of kRows tile rows, K from `from` on; source(r) is the start of row r.
template <typename Shape, int kRows, typename T, typename Source>
CUFUSE_DEVICE void copy_tile(T* shared, Source source, int from, int k) {
  constexpr int kGroups = Shape::kBlockK / 8;  // of a row
  static_assert(Shape::kThreads % kGroups == 0, "each thread copies one column of groups");
  const int group = threadIdx.x % kGroups;
  const int at = from + group * 8;
#pragma unroll
  for (int r = threadIdx.x / kGroups; r < kRows; r += Shape::kThreads / kGroups) {
    T* to = shared + swizzled<Shape::kBlockK>(r, group);
    const T* row = source(r);
    if constexpr (Shape::kVec == 8) {
      copy_async(to, at < k ? row + at : row, at < k ? 16 : 0);
    } else {
      *reinterpret_cast<uint4*>(to) = load_group<1>(row + from, group, k - from);
    }
  }
}

template <typename Shape, typename T, typename SourceA, typename SourceB>
CUFUSE_DEVICE void multiply_tile(
    TileSums<Shape, true>& sums, T* shared, int k, SourceA a, SourceB b) {
  constexpr int kBlockK = Shape::kBlockK, kStages = Shape::kStages;
  constexpr int kStage = (Shape::kBlockM + Shape::kBlockN) * kBlockK;
  constexpr int kTilesM = Shape::kWarpM / 16, kTilesN = Shape::kWarpN / 8;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int blocks = (k + kBlockK - 1) / kBlockK;
  auto copy = [&](int block) {
    T* stage = shared + block % kStages * kStage;
    copy_tile<Shape, Shape::kBlockM>(stage, a, block * kBlockK, k);
    copy_tile<Shape, Shape::kBlockN>(stage + Shape::kBlockM * kBlockK, b, block * kBlockK, k);
  };
#pragma unroll
  for (int i = 0; i < kTilesM; ++i) {
#pragma unroll
    for (int j = 0; j < kTilesN; ++j) {
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
  // The row of an 8x8 matrix that this lane names to ldmatrix, and its 8 values of K.
  const int a_row = warp / Shape::kWarpsN * Shape::kWarpM + lane % 16, a_group = lane / 16;
  const int b_row = warp % Shape::kWarpsN * Shape::kWarpN + lane / 16 * 8 + lane % 8;
  const int b_group = lane / 8 % 2;
#pragma unroll 1
  for (int block = 0; block < blocks; ++block) {
    copy_async_wait<kStages - 2>();
    __syncthreads();  // the block has landed, and all warps have left the one before
    if (block + kStages - 1 < blocks) copy(block + kStages - 1);
    copy_async_commit();
    const T* left = shared + block % kStages * kStage;
    const T* right = left + Shape::kBlockM * kBlockK;
#pragma unroll
    for (int step = 0; step < kBlockK / 16; ++step) {
      u32 x[kTilesM][4], w[kTilesN / 2][4];
#pragma unroll
      for (int i = 0; i < kTilesM; ++i) {
        load_matrix(x[i], left + swizzled<kBlockK>(a_row + i * 16, step * 2 + a_group));
      }
#pragma unroll
      for (int j = 0; j < kTilesN / 2; ++j) {
        load_matrix(w[j], right + swizzled<kBlockK>(b_row + j * 16, step * 2 + b_group));
      }
#pragma unroll
      for (int i = 0; i < kTilesM; ++i) {
#pragma unroll
        for (int j = 0; j < kTilesN; ++j) {
          mma_m16n8k16<T>(sums.c[i][j], x[i], w[j / 2][j % 2 * 2], w[j / 2][j % 2 * 2 + 1]);
        }
      }
    }
  }
}

// ---- float32: FFMA

// A thread holds 4 rows of each of kHalvesM parts of the tile and 4 columns of each of its halves.
template <typename Shape>
struct TileSums<Shape, false> {
  static constexpr int kColumns = Shape::kBlockN / 8;  // threads side by side
  static constexpr int kHalvesM = Shape::kBlockM / 4 / (Shape::kThreads / kColumns);
  static_assert(kHalvesM * 4 * (Shape::kThreads / kColumns) == Shape::kBlockM,
                "each thread takes 4 or 8 rows and 8 columns");
  float c[kHalvesM][4][2][4];

  template <typename F>
  CUFUSE_DEVICE void visit(F f) {
    visit_rows([&](int row, int column, int h, int i) {
      f(row, column, c[h][i][0]);
      f(row, column + Shape::kBlockN / 2, c[h][i][1]);
    });
  }

  template <typename F>
  CUFUSE_DEVICE void visit_gated(F f) {
    visit_rows([&](int row, int column, int h, int i) { f(row, column, c[h][i][0], c[h][i][1]); });
  }

 private:
  template <typename F>
  CUFUSE_DEVICE void visit_rows(F f) {
    const int column = threadIdx.x % kColumns * 4;
    const int row = threadIdx.x / kColumns * 4;
#pragma unroll
    for (int h = 0; h < kHalvesM; ++h) {
#pragma unroll
      for (int i = 0; i < 4; ++i) f(h * (Shape::kBlockM / kHalvesM) + row + i, column, h, i);
    }
  }
};

template <typename Shape>
CUFUSE_DEVICE void clear(TileSums<Shape, false>& sums) {
  constexpr int kHalvesM = TileSums<Shape, false>::kHalvesM;
#pragma unroll
  for (int h = 0; h < kHalvesM; ++h) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) sums.c[h][i][0][j] = sums.c[h][i][1][j] = 0.0f;
    }
  }
}

// sums += a block of x times a block of w, both transposed, one behind the other in `buffer`.
template <typename Shape>
CUFUSE_DEVICE void multiply_buffer(TileSums<Shape, false>& sums, const float* buffer) {
  constexpr int kBlockK = Shape::kBlockK, kHalvesM = TileSums<Shape, false>::kHalvesM;
  constexpr int kColumns = TileSums<Shape, false>::kColumns;
  const int column = threadIdx.x % kColumns * 4, row = threadIdx.x / kColumns * 4;
#pragma unroll
  for (int step = 0; step < kBlockK; ++step) {
    const float* left = buffer + step * Shape::kPitchM + row;
    const float* right = buffer + kBlockK * Shape::kPitchM + step * Shape::kPitchN + column;
    Vec<float, 4> x[kHalvesM], w[2];
#pragma unroll
    for (int h = 0; h < kHalvesM; ++h) {
      x[h] = load_vec<4>(left + h * (Shape::kBlockM / kHalvesM));
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) w[h] = load_vec<4>(right + h * (Shape::kBlockN / 2));
#pragma unroll
    for (int h = 0; h < kHalvesM; ++h) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int g = 0; g < 2; ++g) {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            sums.c[h][i][g][j] = fmaf(x[h].v[i], w[g].v[j], sums.c[h][i][g][j]);
          }
        }
      }
    }
  }
}

template <typename Shape, typename SourceA, typename SourceB>
CUFUSE_DEVICE void multiply_tile(
    TileSums<Shape, false>& sums, float* shared, int k, SourceA a, SourceB b) {
  constexpr int kBlockK = Shape::kBlockK, kThreads = Shape::kThreads;
  constexpr int kGroups = kBlockK / 4;  // 16-byte groups of a tile row
  constexpr int kRowsM = Shape::kBlockM * kGroups / kThreads;
  constexpr int kRowsN = Shape::kBlockN * kGroups / kThreads;
  constexpr int kBuffer = kBlockK * (Shape::kPitchM + Shape::kPitchN);
  static_assert(kRowsM * kThreads == Shape::kBlockM * kGroups, "threads copy equal shares of x");
  static_assert(kRowsN * kThreads == Shape::kBlockN * kGroups, "threads copy equal shares of w");
  const int group = threadIdx.x % kGroups, first_row = threadIdx.x / kGroups;
  const int blocks = (k + kBlockK - 1) / kBlockK;

  uint4 next_a[kRowsM], next_b[kRowsN];
  auto load = [&](int block) {
    const int from = block * kBlockK;
#pragma unroll
    for (int i = 0; i < kRowsM; ++i) {
      const float* source = a(first_row + i * (kThreads / kGroups));
      next_a[i] = load_group<Shape::kVec>(source + from, group, k - from);
    }
#pragma unroll
    for (int i = 0; i < kRowsN; ++i) {
      const float* source = b(first_row + i * (kThreads / kGroups));
      next_b[i] = load_group<Shape::kVec>(source + from, group, k - from);
    }
  };
  auto store = [&](float* to) {
#pragma unroll
    for (int i = 0; i < kRowsM; ++i) {
      float v[4];
      unpack<float>(v, next_a[i]);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        to[(group * 4 + j) * Shape::kPitchM + first_row + i * (kThreads / kGroups)] = v[j];
      }
    }
    to += kBlockK * Shape::kPitchM;
#pragma unroll
    for (int i = 0; i < kRowsN; ++i) {
      float v[4];
      unpack<float>(v, next_b[i]);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        to[(group * 4 + j) * Shape::kPitchN + first_row + i * (kThreads / kGroups)] = v[j];
      }
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

// ---- which tile a CTA takes

struct TileIndex {
  int m, n;
};

// Tiles are numbered so that CTAs which run together share rows of x and weight rows in L2: down
// eight tiles of M, then to the next column.
CUFUSE_DEVICE TileIndex tile_index(int index, int tiles_m, int tiles_n) {
  constexpr int kGroupM = 8;
  const int per_group = kGroupM * tiles_n;
  const int group = index / per_group;
  const int height = min(tiles_m - group * kGroupM, kGroupM);
  const int rest = index - group * per_group;
  return {group * kGroupM + rest % height, rest / height};
}

// Store kWide neighbouring values of a row, as one access where that is possible.
template <int kWide, typename T>
CUFUSE_DEVICE void store_columns(T* y, const T (&values)[kWide], int column, int n) {
  constexpr u64 kMask = kWide * sizeof(T) - 1;
  if (column + kWide <= n && (reinterpret_cast<u64>(y) & kMask) == 0) {
    Vec<T, kWide> vec;
#pragma unroll
    for (int j = 0; j < kWide; ++j) vec.v[j] = values[j];
    store_vec<kWide>(y, vec);
    return;
  }
#pragma unroll
  for (int j = 0; j < kWide; ++j) {
    if (column + j < n) y[j] = values[j];
  }
}

}  // namespace cufuse
