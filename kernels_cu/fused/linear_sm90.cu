// y = act(x w^T + b) + residual for many rows of 16-bit values, on sm_90a: CTAs that stay walk over
// the tiles, copies and products run beside each other (device/warpgroup_tiles.cuh), and everything
// between the sum and the store happens in float32. Bounded by the tensor cores.
// instantiate: linear_warpgroups<bfloat16, Act::gelu, Stores::tensor, 128, 256, 2, 1, 4, 8, 1>
// instantiate: linear_warpgroups<half, Act::none, Stores::tensor, 128, 128, 1, 1, 6, 16, 2>
// instantiate: linear_warpgroups<bfloat16, Act::silu, Stores::threads, 128, 128, 2, 1, 6, 8, 1>
// instantiate: linear_warpgroups<bfloat16, Act::gelu_tanh, Stores::tensor, 256, 128, 2, 1, 4, 8, 1>
// instantiate: linear_warpgroups<half, Act::quick_gelu, Stores::tensor, 64, 128, 1, 1, 8, 8, 1>
#include "device/tile_epilogue.cuh"
#include "device/warpgroup_tiles.cuh"

namespace cufuse {

template <typename T>
struct LinearWarpgroupsArgs {
  TensorMap x_map;    // x in boxes of kBlockM rows
  TensorMap w_map;    // w in boxes of kBlockN rows
  TensorMap y_map;    // y in boxes of 64 rows; none for Stores::threads
  const T* x;         // [rows, k]
  const T* w;         // [n, k]
  const T* b;         // [n]; may be null
  const T* residual;  // [rows, n]; may be null
  T* y;               // [rows, n]; may be residual
  int rows;
  int n;
  int k;
};

template <typename T,
          Act kAct,
          Stores kStores,
          int kBlockM,
          int kBlockN,
          int kWarpgroupsM,
          int kWarpgroupsN,
          int kStages,
          int kGroupM,
          int kTeams>
__global__ void __launch_bounds__((kWarpgroupsM * kWarpgroupsN * kTeams + 1) * 128, 1)
    linear_warpgroups(const __grid_constant__ LinearWarpgroupsArgs<T> args) {
#if defined(CUFUSE_HOST) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Shape =
      WarpgroupShape<kBlockM, kBlockN, kWarpgroupsM, kWarpgroupsN, kStages, kGroupM, kTeams>;
  using Ring = WarpgroupRing<Shape>;
  const int thread = static_cast<int>(threadIdx.x);
  const int warpgroup = uniform(thread / 128);
  if (thread == 0) {
    prefetch_map(args.x_map);
    prefetch_map(args.w_map);
    Ring::init();
  }
  __syncthreads();

  WarpgroupTiles<Shape> tiles(args.rows, args.n, args.k);
  if (warpgroup == Shape::kMultipliers) {
    if constexpr (Shape::kMultipliers > 1) give_registers<Shape::kFew>();
    if (thread == Shape::kMultipliers * 128) {
      fill_warpgroup_ring<Shape>(tiles, args.x_map, args.w_map);
    }
  } else {
    if constexpr (Shape::kMultipliers > 1) take_registers<Shape::kMany>();
    WarpgroupSums<Shape> sums;
    typename Ring::Cursor cursor;
    WarpgroupPlace tile;
    int box = 0;
    const int team = warpgroup / Shape::kTeam;
    int turn = 0;
    bool first = true;  // tile of all
    while (tiles.take(tile)) {
      if constexpr (kTeams > 1) {
        const bool mine = turn == team, waits = !first;
        turn = turn + 1 == kTeams ? 0 : turn + 1;
        first = false;
        if (!mine) {
          cursor.skip(tiles.blocks);
          continue;
        }
        if (waits) wait_for_turn<Shape>(team);
      }
      u32 word = 0;
      if constexpr (kStores == Stores::tensor) {
        word = load_bias<Shape>(args.b, args.n, tile.column, warpgroup);
      }
      multiply_warpgroup_tile<Shape, T>(sums, cursor, warpgroup, tiles.blocks, [&] {
        if constexpr (kTeams > 1) {
          if (tiles.are_left()) end_turn<Shape>(team);
        }
      });
      if constexpr (kStores == Stores::tensor) {
        store_warpgroup_tile<Shape, T>(
            sums, args.y_map, tile.row, tile.column, warpgroup, share_bias<Shape>(word, warpgroup),
            box, [&](u32(&results)[8][2], int row, int column, const u32* bias, const float* c) {
              finish_columns<kAct>(results, args, row, column, bias, c);
            });
      } else {
        visit_warpgroup_tile<Shape>(sums, tile.row, tile.column, warpgroup,
                                    [&](int row, int column, float low, float high) {
                                      const float values[2] = {low, high};
                                      store_linear<kAct>(args, row, column, values);
                                    });
      }
    }
    if constexpr (kStores == Stores::tensor) {
      if (thread % 128 == 0) store_bulk_wait<0>();
    }
  }
#endif
}

}  // namespace cufuse
