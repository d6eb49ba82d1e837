// y = x w^T for many rows on sm_90a: CTAs that walk over tiles of kBlockM rows of x by kBlockN
// weight rows. One thread fills a ring of kStages blocks of K by tensor copies, far ahead and into
// the next tile; the other warpgroups multiply by wgmma and finish their part of a tile.
//
// Every sum runs over K in ascending steps into one accumulator, as in device/tile_matmul.cuh.
// Pairs of CTAs that share weights by multicast, or K, were no faster (H200, bfloat16: 4096 x 14336
// x 4096 632 us instead of 629; 256 x 4096 x 4096 21.7 us instead of 17.9).
#pragma once

#include "device/ring.cuh"
#include "device/tile_matmul.cuh"

namespace cufuse {

// kWarpgroupsM x kWarpgroupsN warpgroups are a team and multiply a tile; kGroupM tiles below each
// other are walked over side by side. kTeams teams take tiles in turn: while one finishes its tile,
// the next, whose blocks come after in the ring, has the tensor cores.
template <int kBlockM_,
          int kBlockN_,
          int kWarpgroupsM_,
          int kWarpgroupsN_,
          int kStages_,
          int kGroupM_,
          int kTeams_>
struct WarpgroupShape {
  static constexpr int kBlockM = kBlockM_, kBlockN = kBlockN_, kBlockK = 64;
  static constexpr int kWarpgroupsM = kWarpgroupsM_, kWarpgroupsN = kWarpgroupsN_;
  static constexpr int kStages = kStages_, kGroupM = kGroupM_, kTeams = kTeams_;
  static constexpr int kTeam = kWarpgroupsM * kWarpgroupsN, kMultipliers = kTeam * kTeams;
  static constexpr int kThreads = (kMultipliers + 1) * 128;
  static constexpr int kRows = kBlockM / kWarpgroupsM, kColumns = kBlockN / kWarpgroupsN;
  static constexpr int kSlabs = kRows / 64, kSums = kColumns / 2;
  static constexpr int kRowBytes = kBlockK * 2;
  static constexpr int kStageBytes = (kBlockM + kBlockN) * kRowBytes;
  // A warpgroup's results wait in boxes of 64 rows and columns for the copies that store them.
  static constexpr int kBoxBytes = 64 * 128, kBoxes = 2;
  static constexpr int kBoxesAt = kStages * kStageBytes;
  static constexpr int kBarriersAt = kBoxesAt + kMultipliers * kBoxes * kBoxBytes;
  static constexpr int kBiasAt = kBarriersAt + 2 * kStages * 8;
  static constexpr int kBiasBytes = kColumns * 2;  // of a warpgroup
  static constexpr int kSharedBytes = kBiasAt + kMultipliers * kBiasBytes;
  // What 64 K registers leave: the warpgroup that copies needs few.
  static constexpr int kFew = kMultipliers == 2 ? 40 : 32;
  static constexpr int kMany = kMultipliers == 2 ? 232 : 160;
  static_assert(kRows % 64 == 0 && kColumns % 64 == 0, "a warpgroup has whole boxes");
  static_assert(kSlabs * kSums <= 128, "the sums have to fit into registers");
  static_assert(kMultipliers >= 1 && kMultipliers <= 3, "registers are for three at most");
  static_assert(kBlockM <= 256 && kBlockN <= 256, "boxes of a copy");
};

// Where results go: by tensor copies, or by the threads, where rows are not multiples of 16 bytes.
enum class Stores { tensor, threads };

#if defined(CUFUSE_HOST) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

template <typename Shape>
struct WarpgroupRing {
  using Cursor = RingCursor<Shape::kStages>;

  static CUFUSE_DEVICE unsigned char* left(const Cursor& cursor) {
    return dynamic_shared<unsigned char>() + cursor.stage * Shape::kStageBytes;
  }
  static CUFUSE_DEVICE unsigned char* right(const Cursor& cursor) {
    return left(cursor) + Shape::kBlockM * Shape::kRowBytes;
  }
  static CUFUSE_DEVICE u64* full(int stage) {
    return reinterpret_cast<u64*>(dynamic_shared<unsigned char>() + Shape::kBarriersAt) + stage;
  }
  static CUFUSE_DEVICE u64* empty(int stage) { return full(Shape::kStages + stage); }

  // By one thread, before a barrier of the CTA.
  static CUFUSE_DEVICE void init() {
    for (int stage = 0; stage < Shape::kStages; ++stage) {
      mbarrier_init(full(stage), 1);
      mbarrier_init(empty(stage), Shape::kTeam * 4);
    }
    fence_mbarrier_init();
  }

  // By each warp of the team.
  static CUFUSE_DEVICE void release(const Cursor& cursor) {
    if (threadIdx.x % 32 == 0) mbarrier_arrive(empty(cursor.stage));
  }
};

struct WarpgroupPlace {
  int row, column;  // the first ones
};

// The tiles of a CTA in their order, and the blocks of K of each.
template <typename Shape>
struct WarpgroupTiles {
  int tiles_m, tiles_n, blocks, next;

  CUFUSE_DEVICE WarpgroupTiles(int rows, int n, int k) {
    blocks = (k + Shape::kBlockK - 1) / Shape::kBlockK;
    tiles_m = (rows + Shape::kBlockM - 1) / Shape::kBlockM;
    tiles_n = (n + Shape::kBlockN - 1) / Shape::kBlockN;
    next = static_cast<int>(blockIdx.x);
  }

  CUFUSE_DEVICE bool are_left() const { return next < tiles_m * tiles_n; }

  // Neighbours in time are neighbours in the matrix: L2 serves them.
  CUFUSE_DEVICE bool take(WarpgroupPlace& tile) {
    if (!are_left()) return false;
    const int per_group = Shape::kGroupM * tiles_n;
    const int group = next / per_group;
    const int height = min(tiles_m - group * Shape::kGroupM, Shape::kGroupM);
    const int rest = next - group * per_group;
    tile.row = (group * Shape::kGroupM + rest % height) * Shape::kBlockM;
    tile.column = rest / height * Shape::kBlockN;
    next += static_cast<int>(gridDim.x);
    return true;
  }
};

// By one thread: all blocks of all tiles.
template <typename Shape>
CUFUSE_DEVICE void fill_warpgroup_ring(WarpgroupTiles<Shape> tiles,
                                       const TensorMap& x,
                                       const TensorMap& w) {
  using Ring = WarpgroupRing<Shape>;
  typename Ring::Cursor cursor;
  WarpgroupPlace tile;
  while (tiles.take(tile)) {
#pragma unroll 1
    for (int block = 0; block < tiles.blocks; ++block) {
      mbarrier_wait(Ring::empty(cursor.stage), cursor.round ^ 1);
      u64* full = Ring::full(cursor.stage);
      mbarrier_arrive_expect_tx(full, Shape::kStageBytes);
      const int column = block * Shape::kBlockK;
      copy_tensor(Ring::left(cursor), x, full, column, tile.row);
      copy_tensor(Ring::right(cursor), w, full, column, tile.column);
      cursor.template advance<1>();
    }
  }
}

// The accumulators of a thread.
template <typename Shape>
struct WarpgroupSums {
  float d[Shape::kSlabs][Shape::kSums];
};

// The teams wait for each other at a named barrier each, before a tile: a team that came to a stage
// rounds too early could not tell these from its own, and two would share the tensor cores.
template <typename Shape>
CUFUSE_DEVICE void wait_for_turn(int team) {
  barrier_sync(1 + Shape::kMultipliers + team, 2 * Shape::kTeam * 128);
}
template <typename Shape>
CUFUSE_DEVICE void end_turn(int team) {
  barrier_arrive(1 + Shape::kMultipliers + (team + 1) % Shape::kTeams, 2 * Shape::kTeam * 128);
}

// By a warpgroup: its part of one tile. It says `done()` when it needs no block any more, but its
// last products are still on their way.
template <typename Shape, typename T, typename F>
CUFUSE_DEVICE void multiply_warpgroup_tile(WarpgroupSums<Shape>& sums,
                                           typename WarpgroupRing<Shape>::Cursor& cursor,
                                           int warpgroup,
                                           int blocks,
                                           F done) {
  using Ring = WarpgroupRing<Shape>;
  constexpr int kSlabs = Shape::kSlabs;
  const int left = warpgroup % Shape::kTeam / Shape::kWarpgroupsN * Shape::kRows * Shape::kRowBytes;
  const int right = warpgroup % Shape::kWarpgroupsN * Shape::kColumns * Shape::kRowBytes;
  typename Ring::Cursor before = cursor;
  wgmma_fence(sums.d[0], sums.d[kSlabs - 1]);
#pragma unroll 1
  for (int block = 0; block < blocks; ++block) {
    mbarrier_wait(Ring::full(cursor.stage), cursor.round);
    const u64 a = wgmma_descriptor<128>(Ring::left(cursor) + left, 0, 1024);
    const u64 b = wgmma_descriptor<128>(Ring::right(cursor) + right, 0, 1024);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < Shape::kBlockK / 16; ++step) {
#pragma unroll
      for (int slab = 0; slab < kSlabs; ++slab) {
        wgmma<T>(sums.d[slab], wgmma_advance(a, slab * 64 * Shape::kRowBytes + step * 32),
                 wgmma_advance(b, step * 32), block + step > 0);
      }
    }
    wgmma_commit();
    if (block > 0) {
      wgmma_wait<1>();  // the block before this one
      Ring::release(before);
    }
    before = cursor;
    cursor.template advance<1>();
  }
  done();
  wgmma_wait<0>(sums.d[0], sums.d[kSlabs - 1]);
  Ring::release(before);
}

// The bias of a warpgroup's columns waits in shared memory: a load for each of them when the sums
// are there would be waited for. By a warpgroup before it multiplies: the word that a thread keeps.
template <typename Shape, typename T>
CUFUSE_DEVICE u32 load_bias(const T* b, int n, int first_column, int warpgroup) {
  const int thread = threadIdx.x % 128;
  const int column = first_column + warpgroup % Shape::kWarpgroupsN * Shape::kColumns + thread * 2;
  const bool there = b && thread < Shape::kColumns / 2 && column < n;
  return there ? *reinterpret_cast<const u32*>(b + column) : 0;
}
// And after: returns the words of the columns.
template <typename Shape>
CUFUSE_DEVICE const u32* share_bias(u32 word, int warpgroup) {
  const int thread = threadIdx.x % 128;
  u32* words = reinterpret_cast<u32*>(dynamic_shared<unsigned char>() + Shape::kBiasAt +
                                      warpgroup * Shape::kBiasBytes);
  if (thread < Shape::kColumns / 2) words[thread] = word;
  barrier_sync(1 + warpgroup, 128);
  return words;
}

// Finish a warpgroup's part of a tile: f(results, row, column, bias, sums) does so for 64 columns,
// as `finish_columns` has it. `box` counts the boxes of shared memory that were used, `bias` is
// what `share_bias` returned: all have read it before the last barrier here.
template <typename Shape, typename T, typename F>
CUFUSE_DEVICE void store_warpgroup_tile(WarpgroupSums<Shape>& sums,
                                        const TensorMap& y,
                                        int first_row,
                                        int first_column,
                                        int warpgroup,
                                        const u32* bias,
                                        int& box,
                                        F f) {
  const int thread = threadIdx.x % 128, lane = thread % 32, warp = thread / 32;
  unsigned char* boxes = dynamic_shared<unsigned char>() + Shape::kBoxesAt +
                         warpgroup * Shape::kBoxes * Shape::kBoxBytes;
  first_row += warpgroup % Shape::kTeam / Shape::kWarpgroupsN * Shape::kRows;
  first_column += warpgroup % Shape::kWarpgroupsN * Shape::kColumns;
  const u32 barrier = 1 + warpgroup;
#pragma unroll
  for (int slab = 0; slab < Shape::kSlabs; ++slab) {
#pragma unroll
    for (int chunk = 0; chunk < Shape::kColumns / 64; ++chunk) {
      const int row = first_row + slab * 64 + warp * 16 + lane / 4;
      const int column = first_column + chunk * 64 + lane % 4 * 2;
      u32 results[8][2];
      f(results, row, column, bias + chunk * 32 + lane % 4, &sums.d[slab][chunk * 32]);
      // The box was read by the copy before the last.
      if (thread == 0) store_bulk_wait_read<Shape::kBoxes - 1>();
      barrier_sync(barrier, 128);
      unsigned char* to = boxes + box * Shape::kBoxBytes;
      const int place = (warp * 16 + lane % 16) * 128;
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        const u32 pair[4] = {results[j][0], results[j][1], results[j + 1][0], results[j + 1][1]};
        store_matrix(to + swizzle<128>(place + (j + lane / 16) * 16), pair);
      }
      fence_proxy_async_shared();
      barrier_sync(barrier, 128);
      if (thread == 0) {
        store_tensor(y, to, first_column + chunk * 64, first_row + slab * 64);
        store_bulk_commit();
      }
      box ^= 1;
    }
  }
}

// The same by threads: f(row, column, low, high) stores.
template <typename Shape, typename F>
CUFUSE_DEVICE void visit_warpgroup_tile(
    WarpgroupSums<Shape>& sums, int first_row, int first_column, int warpgroup, F f) {
  const int thread = threadIdx.x % 128, lane = thread % 32, warp = thread / 32;
  const int row = first_row + warpgroup % Shape::kTeam / Shape::kWarpgroupsN * Shape::kRows +
                  warp * 16 + lane / 4;
  const int column =
      first_column + warpgroup % Shape::kWarpgroupsN * Shape::kColumns + lane % 4 * 2;
#pragma unroll
  for (int slab = 0; slab < Shape::kSlabs; ++slab) {
#pragma unroll
    for (int j = 0; j < Shape::kColumns / 8; ++j) {
      const float* c = &sums.d[slab][j * 4];
      f(row + slab * 64, column + j * 8, c[0], c[1]);
      f(row + slab * 64 + 8, column + j * 8, c[2], c[3]);
    }
  }
}

#endif  // sm_90a

}  // namespace cufuse
