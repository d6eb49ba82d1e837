// y = x w^T for many rows on sm_90a: CTAs that walk over tiles of kBlockM rows of x by kBlockN
// weight rows. One thread fills a ring of kStages blocks of K by tensor copies, far ahead and into
// the next tile; the other warpgroups multiply by wgmma and finish their part of a tile.
//
// The weights are wgmma's left operand, so that a few rows of x make a narrow product and not an
// empty one. Row-major weights are read from shared memory; packed ones (device/packed.cuh) are
// fragments already and go through registers, as gates and ups do, of which a fragment has 8 rows
// each: a thread that has a gate has its up too.
//
// Every sum runs over K in ascending steps into one accumulator, as in device/tile_matmul.cuh, or
// into kChains in turn; with kSplit the CTAs of a cluster have equal parts of K. Such sums are
// added up in ascending order. Pairs of CTAs that shared their rows of x by multicast were no
// faster (H200, bfloat16, back to back, 4096 x 2048 x 8192: 176.0 us instead of 174.9).
#pragma once

#include "device/activation.cuh"
#include "device/packed.cuh"
#include "device/ring.cuh"

namespace cufuse {

// Where results go, and residuals come from: tensor copies, or the threads, where rows are not
// multiples of 16 bytes.
enum class Stores { tensor, threads };

// kWarpgroups are a team and multiply a tile; kGroupM tiles below each other are walked over side
// by side. kTeams teams take tiles in turn: while one finishes its tile, the next, whose blocks
// come after in the ring, has the tensor cores.
template <Layout kLayout_,
          bool kGated_,
          int kBlockM_,
          int kBlockN_,
          int kWarpgroups_,
          int kStages_,
          int kGroupM_,
          int kTeams_,
          int kSplit_>
struct WarpgroupShape {
  static constexpr Layout kLayout = kLayout_;
  static constexpr bool kGated = kGated_;
  static constexpr int kBlockM = kBlockM_, kBlockN = kBlockN_, kBlockK = 64;
  static constexpr int kTeam = kWarpgroups_, kTeams = kTeams_, kMultipliers = kTeam * kTeams;
  static constexpr int kStages = kStages_, kGroupM = kGroupM_, kSplit = kSplit_;
  static constexpr int kThreads = (kMultipliers + 1) * 128;
  static constexpr int kColumns = kBlockN / (kGated ? 2 : 1);  // of y
  static constexpr int kSlabs = kBlockN / kTeam / 64;    // of a warpgroup, 64 weight rows each
  static constexpr int kSlabColumns = kGated ? 32 : 64;  // of y
  static constexpr int kSums = kBlockM / 2;              // of a thread and a slab
  // Narrow products would wait for each other: those of a block go to sums of their own.
  static constexpr int kRoom = 128 / (kSlabs * kSums);
  static constexpr int kChains = kRoom >= 4 ? 4 : kRoom >= 2 ? 2 : 1;
  static constexpr bool kFromRegisters = kGated || kLayout == Layout::packed;
  static constexpr int kLineBytes = kBlockK * 2;
  static constexpr int kLeftBytes = kBlockN * kLineBytes;
  static constexpr int kStageBytes = (kBlockM + kBlockN) * kLineBytes;
  // Of a cluster's sums each CTA finishes those of kOwnRows rows of x.
  static constexpr int kOwners = kSplit < kBlockM / 8 ? kSplit : kBlockM / 8;
  static constexpr int kOwnRows = kBlockM / kOwners;
  // A warpgroup's results wait in boxes for the copies that store them.
  static constexpr int kBoxRows = kOwnRows < 64 ? kOwnRows : 64, kBoxes = 2;
  static constexpr int kBoxLineBytes = kSlabColumns * 2;
  static constexpr int kBoxBytes =
      kBoxRows * kBoxLineBytes < 1024 ? 1024 : kBoxRows * kBoxLineBytes;
  static constexpr int kBoxesAt = kStages * kStageBytes;
  static constexpr int kBarriersAt = kBoxesAt + kMultipliers * kBoxes * kBoxBytes;
  static constexpr int kSharedBytes = kBarriersAt + (2 * kStages + kMultipliers * kBoxes) * 8;
  // What 64 K registers leave: the warpgroup that copies needs few.
  static constexpr int kFew = kMultipliers == 2 ? 40 : 32;
  static constexpr int kMany = kMultipliers == 2 ? 232 : 160;
  static_assert(kBlockN % (kTeam * 64) == 0, "a warpgroup has whole slabs");
  static_assert(kBlockM % 8 == 0 && kBlockM <= 256 && kBlockN <= 256, "boxes of a copy");
  static_assert(kOwnRows % 8 == 0 && kOwnRows % kBoxRows == 0, "owners finish whole boxes");
  static_assert(kSlabs * kSums <= 128, "the sums have to fit into registers");
  static_assert(kMultipliers >= 1 && kMultipliers <= 3, "registers are for three at most");
  static_assert(kSplit == 1 || kTeams == 1, "a CTA of a cluster has one tile");
  static_assert(kSplit == 1 || kBlockM * kBlockN * 4 <= kBoxesAt, "sums are exchanged in the ring");
};

// What a tile's copies move; `up` is there for row-major gates alone.
struct WarpgroupMaps {
  const TensorMap& x;
  const TensorMap& w;
  const TensorMap& up;
  const TensorMap& y;
  const TensorMap& residual;
  const TensorMap& pre;
};

// y, the residual and a second result for the threads, where there are no maps.
template <typename T>
struct WarpgroupOutput {
  T* y;               // [rows, n]
  const T* residual;  // [rows, n]
  T* pre;             // [rows, n]
  int rows, n, k;
};

#if defined(CUFUSE_HOST) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

template <typename Shape>
struct WarpgroupRing {
  using Cursor = RingCursor<Shape::kStages>;

  static CUFUSE_DEVICE unsigned char* left(const Cursor& cursor) {
    return dynamic_shared<unsigned char>() + cursor.stage * Shape::kStageBytes;
  }
  static CUFUSE_DEVICE unsigned char* right(const Cursor& cursor) {
    return left(cursor) + Shape::kLeftBytes;
  }
  static CUFUSE_DEVICE u64* full(int stage) {
    return reinterpret_cast<u64*>(dynamic_shared<unsigned char>() + Shape::kBarriersAt) + stage;
  }
  static CUFUSE_DEVICE u64* empty(int stage) { return full(Shape::kStages + stage); }
  // A warpgroup's box has its residual.
  static CUFUSE_DEVICE u64* there(int warpgroup, int box) {
    return full(2 * Shape::kStages + warpgroup * Shape::kBoxes + box);
  }

  // By one thread, before a barrier of the CTA.
  static CUFUSE_DEVICE void init() {
    for (int stage = 0; stage < Shape::kStages; ++stage) {
      mbarrier_init(full(stage), 1);
      mbarrier_init(empty(stage), Shape::kTeam * 4);
    }
    for (int i = 0; i < Shape::kMultipliers * Shape::kBoxes; ++i) mbarrier_init(there(0, i), 1);
    fence_mbarrier_init();
  }

  // By each warp of the team.
  static CUFUSE_DEVICE void release(const Cursor& cursor) {
    if (threadIdx.x % 32 == 0) mbarrier_arrive(empty(cursor.stage));
  }
};

struct WarpgroupPlace {
  int row, column;  // of y, the first ones
};

// The tiles of a CTA in their order, and its blocks of K.
template <typename Shape>
struct WarpgroupTiles {
  int tiles_m, tiles_n, first_block, blocks, next;

  CUFUSE_DEVICE WarpgroupTiles(int rows, int n, int k) {
    const int all = (k + Shape::kBlockK - 1) / Shape::kBlockK;
    const int rank = static_cast<int>(blockIdx.x) % Shape::kSplit;
    first_block = all * rank / Shape::kSplit;
    blocks = all * (rank + 1) / Shape::kSplit - first_block;
    tiles_m = (rows + Shape::kBlockM - 1) / Shape::kBlockM;
    tiles_n = (n + Shape::kColumns - 1) / Shape::kColumns;
    next = static_cast<int>(blockIdx.x) / Shape::kSplit;
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
    tile.column = rest / height * Shape::kColumns;
    next += static_cast<int>(gridDim.x) / Shape::kSplit;
    return true;
  }
};

// By one thread: all blocks of all tiles.
template <typename Shape, typename T>
CUFUSE_DEVICE void fill_warpgroup_ring(WarpgroupTiles<Shape> tiles, const WarpgroupMaps& maps) {
  using Ring = WarpgroupRing<Shape>;
  using P = Packing<T>;
  typename Ring::Cursor cursor;
  WarpgroupPlace tile;
  while (tiles.take(tile)) {
#pragma unroll 1
    for (int i = 0; i < tiles.blocks; ++i) {
      mbarrier_wait(Ring::empty(cursor.stage), cursor.round ^ 1);
      u64* full = Ring::full(cursor.stage);
      mbarrier_arrive_expect_tx(full, Shape::kStageBytes);
      unsigned char* left = Ring::left(cursor);
      const int k = (tiles.first_block + i) * Shape::kBlockK;
      if constexpr (Shape::kLayout == Layout::packed) {
        constexpr int kPanelColumns = Shape::kGated ? P::kGatedRows : P::kTileRows;
        copy_tensor(left, maps.w, full, 0, k / P::kTileK, tile.column / kPanelColumns);
      } else {
        copy_tensor(left, maps.w, full, k, tile.column);
        if constexpr (Shape::kGated) {
          copy_tensor(left + Shape::kLeftBytes / 2, maps.up, full, k, tile.column);
        }
      }
      copy_tensor(Ring::right(cursor), maps.x, full, k, tile.row);
      cursor.template advance<1>();
    }
  }
}

// The accumulators of a thread: of the weight rows g and g + 8 of its warp's 16 in a slab, g =
// lane / 4; four of each eight rows of x, as wgmma leaves them.
template <typename Shape>
struct WarpgroupSums {
  float d[Shape::kSlabs][Shape::kChains][Shape::kSums];  // afterwards all are in the first chain

  CUFUSE_DEVICE void add_chains() {
#pragma unroll
    for (int slab = 0; slab < Shape::kSlabs; ++slab) {
#pragma unroll
      for (int chain = 1; chain < Shape::kChains; ++chain) {
#pragma unroll
        for (int i = 0; i < Shape::kSums; ++i) d[slab][0][i] += d[slab][chain][i];
      }
    }
  }
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

// A warp's fragments of a block of weights.
template <typename Shape, typename T>
struct WarpgroupFragments {
  static constexpr int kSteps = Shape::kBlockK / 16;
  u32 a[Shape::kSlabs][kSteps][4];

  // `slab` is the warpgroup's first one in the tile.
  CUFUSE_DEVICE void load(const unsigned char* left, int slab) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
#pragma unroll
    for (int s = 0; s < Shape::kSlabs; ++s) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        if constexpr (Shape::kLayout == Layout::packed) {
          const unsigned char* panel = left + ((slab + s) * 4 + warp) * Shape::kLineBytes * 16;
          const uint4 bits =
              *reinterpret_cast<const uint4*>(panel + step * Packing<T>::kTileBytes + lane * 16);
          a[s][step][0] = bits.x;
          a[s][step][1] = bits.y;
          a[s][step][2] = bits.z;
          a[s][step][3] = bits.w;
        } else {
          // Matrices 0 and 2 are 8 gates, 1 and 3 their ups.
          const int row = (slab + s) * 32 + warp * 8 + lane % 8;
          const unsigned char* from = left + lane / 8 % 2 * (Shape::kLeftBytes / 2);
          load_matrix(a[s][step],
                      from + swizzle<128>(row * Shape::kLineBytes + step * 32 + lane / 16 * 16));
        }
      }
    }
  }
};

// By a warpgroup: its part of one tile. It says `done()` when it needs no block any more, but its
// last products are still on their way.
template <typename Shape, typename T, typename F>
CUFUSE_DEVICE void multiply_warpgroup_tile(WarpgroupSums<Shape>& sums,
                                           typename WarpgroupRing<Shape>::Cursor& cursor,
                                           int warpgroup,
                                           int blocks,
                                           F done) {
  using Ring = WarpgroupRing<Shape>;
  constexpr int kSlabs = Shape::kSlabs, kChains = Shape::kChains, kSteps = Shape::kBlockK / 16;
  const int first_slab = warpgroup % Shape::kTeam * kSlabs;
  typename Ring::Cursor before = cursor;
  auto end = [&] {
    done();
    wgmma_wait<0>(sums.d);
    Ring::release(before);
    sums.add_chains();
  };
  wgmma_fence(sums.d);
  if constexpr (!Shape::kFromRegisters) {
    const int left = first_slab * 64 * Shape::kLineBytes;
#pragma unroll 1
    for (int block = 0; block < blocks; ++block) {
      mbarrier_wait(Ring::full(cursor.stage), cursor.round);
      const u64 a = wgmma_descriptor<128>(Ring::left(cursor) + left, 0, 1024);
      const u64 b = wgmma_descriptor<128>(Ring::right(cursor), 0, 1024);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int slab = 0; slab < kSlabs; ++slab) {
          wgmma<T>(sums.d[slab][step % kChains],
                   wgmma_advance(a, slab * 64 * Shape::kLineBytes + step * 32),
                   wgmma_advance(b, step * 32), block > 0 || step >= kChains);
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
    end();
  } else {
    // The next block's fragments are loaded while this one is multiplied.
    WarpgroupFragments<Shape, T> fragments[2];
    mbarrier_wait(Ring::full(cursor.stage), cursor.round);
    fragments[0].load(Ring::left(cursor), first_slab);
#pragma unroll 1
    for (int first = 0; first < blocks; first += 2) {
#pragma unroll
      for (int set = 0; set < 2; ++set) {
        const int block = first + set;
        if (block >= blocks) break;
        auto& a = fragments[set].a;
        const u64 b = wgmma_descriptor<128>(Ring::right(cursor), 0, 1024);
#pragma unroll
        for (int slab = 0; slab < kSlabs; ++slab) wgmma_fence(a[slab]);
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
#pragma unroll
          for (int slab = 0; slab < kSlabs; ++slab) {
            wgmma<T>(sums.d[slab][step % kChains], a[slab][step], wgmma_advance(b, step * 32),
                     block > 0 || step >= kChains);
          }
        }
        wgmma_commit();
        if (block > 0) {
          wgmma_wait<1>();  // the block before this one, whose fragments are free too
          Ring::release(before);
        }
        before = cursor;
        cursor.template advance<1>();
        if (block + 1 < blocks) {
          mbarrier_wait(Ring::full(cursor.stage), cursor.round);
          fragments[set ^ 1].load(Ring::left(cursor), first_slab);
        }
      }
    }
    end();
  }
}

// By the warpgroups of a CTA: add up the sums of the cluster's CTAs, in the order of their parts of
// K. Those of the rows of x that this CTA finishes are the first ones afterwards. All other threads
// of the cluster call `pass_exchange`.
template <typename Shape>
CUFUSE_DEVICE void exchange_sums(WarpgroupSums<Shape>& sums) {
  constexpr int kThreads = Shape::kTeam * 128, kGroups = Shape::kBlockM / 8;
  constexpr int kOwnGroups = Shape::kOwnRows / 8;
  float4* mine = reinterpret_cast<float4*>(dynamic_shared<unsigned char>()) + threadIdx.x;
  barrier_sync(1 + Shape::kMultipliers, kThreads);  // nobody reads the ring any more
#pragma unroll
  for (int slab = 0; slab < Shape::kSlabs; ++slab) {
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
      const float* c = &sums.d[slab][0][j * 4];
      mine[(slab * kGroups + j) * kThreads] = make_float4(c[0], c[1], c[2], c[3]);
    }
  }
  cluster_sync();
  const int own = static_cast<int>(cluster_rank()) * kOwnGroups;
  if (own < kGroups) {
#pragma unroll
    for (int part = 0; part < Shape::kSplit; ++part) {
      const float4* theirs = map_shared(mine, part);
#pragma unroll
      for (int slab = 0; slab < Shape::kSlabs; ++slab) {
#pragma unroll
        for (int j = 0; j < kOwnGroups; ++j) {
          const float4 c = theirs[(slab * kGroups + own + j) * kThreads];
          float* d = &sums.d[slab][0][j * 4];
          d[0] = part == 0 ? c.x : d[0] + c.x;
          d[1] = part == 0 ? c.y : d[1] + c.y;
          d[2] = part == 0 ? c.z : d[2] + c.z;
          d[3] = part == 0 ? c.w : d[3] + c.w;
        }
      }
    }
  }
  cluster_arrive();
}
CUFUSE_DEVICE void pass_exchange() {
  cluster_sync();
  cluster_arrive();
}

// A warpgroup's boxes: results on their way to y, and residuals that come before them. With kPre
// there is a second result.
template <typename Shape, typename T, bool kResidual, bool kPre, Stores kStores>
struct WarpgroupBoxes {
  static constexpr int kWords = Shape::kGated ? 1 : 2;  // of 8 rows of x, of a thread
  static constexpr int kStep = 4 / kWords;              // groups of 8 rows that an access takes
  static constexpr int kGroups = Shape::kBoxRows / 8;
  static constexpr int kChunks = Shape::kOwnRows / Shape::kBoxRows;
  static constexpr bool kFetches = kResidual && kStores == Stores::tensor;
  const WarpgroupMaps& maps;
  const WarpgroupOutput<T>& out;
  int warpgroup;
  u32 used = 0;  // boxes so far
  u32 held = 0;  // a bit a box: whether its residuals so far are odd in number

  CUFUSE_DEVICE unsigned char* box(u32 i) const {
    return dynamic_shared<unsigned char>() + Shape::kBoxesAt +
           (warpgroup * Shape::kBoxes + i % Shape::kBoxes) * Shape::kBoxBytes;
  }
  static CUFUSE_DEVICE bool is_first() { return threadIdx.x % 128 == 0; }
  CUFUSE_DEVICE void sync() const { barrier_sync(1 + warpgroup, 128); }

  // By one thread: let the residual of the next box come, or of the one behind it.
  CUFUSE_DEVICE void fetch(u32 i, int row, int column) const {
    store_bulk_wait_read<0>();
    u64* there = WarpgroupRing<Shape>::there(warpgroup, i % Shape::kBoxes);
    mbarrier_arrive_expect_tx(there, Shape::kBoxRows * Shape::kBoxLineBytes);
    copy_tensor(box(i), maps.residual, there, column, row);
  }

  // Before a tile's products: what its first box needs.
  CUFUSE_DEVICE void begin(int row, int column) const {
    if constexpr (kFetches && !kPre) {
      if (is_first()) fetch(used, row, column);
    }
  }

  // f(row, column, element of the box) for those of this thread that lie in y.
  template <typename F>
  CUFUSE_DEVICE void each(int row, int column, F f) const {
    constexpr int kColumns = Shape::kSlabColumns;
    for (int i = threadIdx.x % 128; i < Shape::kBoxRows * kColumns; i += 128) {
      const int r = i / kColumns, c = i % kColumns;
      if (row + r >= out.rows || column + c >= out.n) continue;
      f(static_cast<i64>(row + r) * out.n + column + c,
        *reinterpret_cast<T*>(box(used) + swizzle<Shape::kBoxLineBytes>(i * 2)));
    }
  }

  // Store the sums of a tile's part that begins at (row, column): f(results, residuals, slab, c)
  // makes the words of two rows of x from four sums c.
  template <typename F>
  CUFUSE_DEVICE void store(const WarpgroupSums<Shape>& sums, int row, int column, F f) {
    if constexpr (kFetches && kPre) {
      if (is_first()) fetch(used, row, column);
    }
    store<kResidual>(maps.y, out.y, sums, row, column, f);
  }

  // The second result, before `store`: f has no residuals.
  template <typename F>
  CUFUSE_DEVICE void store_pre(const WarpgroupSums<Shape>& sums, int row, int column, F f) {
    store<false>(maps.pre, out.pre, sums, row, column, f);
  }

  // Before the CTA ends: the copies have read its boxes; what they write lands without it.
  CUFUSE_DEVICE void end() const {
    if constexpr (kStores == Stores::tensor) {
      if (is_first()) store_bulk_wait_read<0>();
    }
  }

 private:
  template <bool kHeld, typename F>
  CUFUSE_DEVICE void store(
      const TensorMap& map, T* to, const WarpgroupSums<Shape>& sums, int row, int column, F f) {
#pragma unroll
    for (int slab = 0; slab < Shape::kSlabs; ++slab) {
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        const int at_row = row + chunk * Shape::kBoxRows;
        const int at_column = column + slab * Shape::kSlabColumns;
        take_box<kHeld>(at_row, at_column);
        if constexpr (kHeld && kStores == Stores::tensor) {
          const int next = slab * kChunks + chunk + 1;
          if (is_first() && next < Shape::kSlabs * kChunks) {
            fetch(used + 1, row + next % kChunks * Shape::kBoxRows,
                  column + next / kChunks * Shape::kSlabColumns);
          }
          const u32 i = used % Shape::kBoxes;
          mbarrier_wait(WarpgroupRing<Shape>::there(warpgroup, i), held >> i & 1);
          held ^= 1u << i;
        }
        fill_box<kHeld>(&sums.d[slab][0][chunk * Shape::kBoxRows / 2], slab, f);
        give_box(map, to, at_row, at_column);
        ++used;
      }
    }
  }

  template <bool kHeld>
  CUFUSE_DEVICE void take_box(int row, int column) const {
    if constexpr (kStores == Stores::threads) {
      if constexpr (kHeld) {
        each(row, column, [&](i64 at, T& element) { element = out.residual[at]; });
        sync();
      }
    } else if constexpr (!kHeld) {
      // The box was read by the copy before the last.
      if (is_first()) store_bulk_wait_read<Shape::kBoxes - 1>();
      sync();
    }
  }

  // With kHeld the box holds residuals.
  template <bool kHeld, typename F>
  CUFUSE_DEVICE void fill_box(const float* sums, int slab, F f) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    // The line of 8 columns of y that this lane names to ldmatrix and stmatrix: its row, and where
    // in the row. Matrices are 8 columns by 8 rows of x.
    const int matrix = lane / 8;
    const int line = (Shape::kGated ? matrix : matrix / 2) * 8 + lane % 8;
    const int place = (Shape::kGated ? warp : warp * 2 + matrix % 2) * 16;
    constexpr int kAccess = kGroups < kStep ? kGroups : kStep;  // groups of one
    static_assert(kGroups % kAccess == 0, "accesses are whole");
#pragma unroll
    for (int j = 0; j < kGroups; j += kAccess) {
      unsigned char* at =
          box(used) + swizzle<Shape::kBoxLineBytes>((line + j * 8) * Shape::kBoxLineBytes + place);
      u32 residuals[kAccess * kWords] = {}, results[kAccess * kWords];
      if constexpr (kHeld) load_matrix_transposed(residuals, at);
#pragma unroll
      for (int i = 0; i < kAccess; ++i) {
        f(&results[i * kWords], &residuals[i * kWords], slab, sums + (j + i) * 4);
      }
      store_matrix_transposed(at, results);
    }
  }

  CUFUSE_DEVICE void give_box(const TensorMap& map, T* to, int row, int column) const {
    if constexpr (kStores == Stores::tensor) {
      fence_proxy_async_shared();
      sync();
      if (is_first()) {
        store_tensor(map, box(used), column, row);
        store_bulk_commit();
      }
    } else {
      sync();
      each(row, column, [&](i64 at, T& element) { to[at] = element; });
    }
  }
};

// The kernel: bias(column) has what is added to the sums of a column, for a gate and its up or for
// columns g and g + 8, read before the products; f(results, residuals, bias, c) finishes. With kPre
// before(results, bias, c) makes a second result.
template <typename Shape,
          typename T,
          bool kResidual,
          bool kPre,
          Stores kStores,
          typename B,
          typename F,
          typename P>
CUFUSE_DEVICE void run_warpgroup_tiles(
    const WarpgroupMaps& maps, const WarpgroupOutput<T>& out, B bias, F f, P before) {
  using Ring = WarpgroupRing<Shape>;
  const int thread = static_cast<int>(threadIdx.x);
  const int warpgroup = uniform(thread / 128);
  if (thread == 0) {
    prefetch_map(maps.x);
    prefetch_map(maps.w);
    Ring::init();
  }
  __syncthreads();

  WarpgroupTiles<Shape> tiles(out.rows, out.n, out.k);
  if (warpgroup == Shape::kMultipliers) {
    if constexpr (Shape::kMultipliers > 1) give_registers<Shape::kFew>();
    if (thread == Shape::kMultipliers * 128) fill_warpgroup_ring<Shape, T>(tiles, maps);
    if constexpr (Shape::kSplit > 1) {
      __syncwarp();
      pass_exchange();
    }
  } else {
    if constexpr (Shape::kMultipliers > 1) take_registers<Shape::kMany>();
    WarpgroupSums<Shape> sums;
    WarpgroupBoxes<Shape, T, kResidual, kPre, kStores> boxes{maps, out, warpgroup};
    typename Ring::Cursor cursor;
    WarpgroupPlace tile;
    const int team = warpgroup / Shape::kTeam;
    const int lane_column = thread / 32 % 4 * (Shape::kGated ? 8 : 16) + thread % 32 / 4;
    int turn = 0;
    bool first = true;  // tile of all
    while (tiles.take(tile)) {
      if constexpr (Shape::kTeams > 1) {
        const bool mine = turn == team, waits = !first;
        turn = turn + 1 == Shape::kTeams ? 0 : turn + 1;
        first = false;
        if (!mine) {
          cursor.skip(tiles.blocks);
          continue;
        }
        if (waits) wait_for_turn<Shape>(team);
      }
      const int column =
          tile.column + warpgroup % Shape::kTeam * Shape::kSlabs * Shape::kSlabColumns;
      int row = tile.row;
      bool owns = true;
      if constexpr (Shape::kSplit > 1) {
        row += static_cast<int>(cluster_rank()) * Shape::kOwnRows;
        owns = static_cast<int>(cluster_rank()) < Shape::kOwners;
      }
      float biases[Shape::kSlabs][2];
#pragma unroll
      for (int slab = 0; slab < Shape::kSlabs; ++slab) {
        bias(biases[slab], column + slab * Shape::kSlabColumns + lane_column);
      }
      if (owns) boxes.begin(row, column);
      multiply_warpgroup_tile<Shape, T>(sums, cursor, warpgroup, tiles.blocks, [&] {
        if constexpr (Shape::kTeams > 1) {
          if (tiles.are_left()) end_turn<Shape>(team);
        }
      });
      if constexpr (Shape::kSplit > 1) exchange_sums(sums);
      if (owns) {
        if constexpr (kPre) {
          boxes.store_pre(sums, row, column,
                          [&](u32* results, const u32*, int slab, const float* c) {
                            before(results, biases[slab], c);
                          });
          // A sum with its bias would be kept for y, and not all have a register.
#pragma unroll
          for (int slab = 0; slab < Shape::kSlabs; ++slab) {
            biases[slab][0] = __shfl_sync(kFullMask, biases[slab][0], thread % 32);
            biases[slab][1] = __shfl_sync(kFullMask, biases[slab][1], thread % 32);
          }
        }
        boxes.store(sums, row, column,
                    [&](u32* results, const u32* residuals, int slab, const float* c) {
                      f(results, residuals, biases[slab], c);
                    });
      }
    }
    boxes.end();
  }
  // No CTA of a cluster ends while others read its sums.
  if constexpr (Shape::kSplit > 1) cluster_wait();
}

#endif  // sm_90a

}  // namespace cufuse
