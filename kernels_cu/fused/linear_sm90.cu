// y = act(x w^T + b) + residual for more than a few rows of 16-bit values, on sm_90a
// (device/warpgroup_tiles.cuh): copies and products run beside each other, and everything between
// the sum and the store happens in float32. Bounded by the tensor cores, for up to some 100 rows by
// reading w once.
// instantiate: linear_warpgroups<bfloat16, Layout::rows, Act::gelu, false, Stores::tensor, 256, 128, 2, 4, 8, 1, 1>
// instantiate: linear_warpgroups<half, Layout::rows, Act::none, true, Stores::tensor, 128, 128, 1, 6, 16, 2, 1>
// instantiate: linear_warpgroups<bfloat16, Layout::packed, Act::silu, true, Stores::threads, 128, 128, 2, 6, 8, 1, 1>
// instantiate: linear_warpgroups<bfloat16, Layout::packed, Act::none, true, Stores::tensor, 256, 128, 2, 4, 8, 1, 1>
// instantiate: linear_warpgroups<half, Layout::packed, Act::gelu_tanh, false, Stores::tensor, 128, 256, 2, 4, 8, 1, 1>
// instantiate: linear_warpgroups<bfloat16, Layout::rows, Act::quick_gelu, false, Stores::tensor, 64, 128, 2, 8, 8, 1, 4>
// instantiate: linear_warpgroups<bfloat16, Layout::packed, Act::relu, true, Stores::tensor, 8, 64, 1, 12, 8, 1, 2>
#include "device/epilogue.cuh"
#include "device/warpgroup_tiles.cuh"

namespace cufuse {

template <typename T>
struct LinearWarpgroupsArgs {
  TensorMap x_map;         // x in boxes of kBlockM rows
  TensorMap w_map;         // w in boxes of kBlockN rows, or of so many in panels
  TensorMap y_map;         // y in a warpgroup's boxes; none for Stores::threads
  TensorMap residual_map;  // like y's; none without a residual
  const T* x;              // [rows, k]
  const T* w;              // [n, k]; may be packed
  const T* b;              // [n]; may be null
  const T* residual;       // [rows, n]; null without one
  T* y;                    // [rows, n]; may be residual
  int rows;
  int n;
  int k;
};

template <typename T,
          Layout kLayout,
          Act kAct,
          bool kResidual,
          Stores kStores,
          int kBlockM,
          int kBlockN,
          int kWarpgroups,
          int kStages,
          int kGroupM,
          int kTeams,
          int kSplit>
__global__ void __launch_bounds__((kWarpgroups * kTeams + 1) * 128, 1)
    linear_warpgroups(const __grid_constant__ LinearWarpgroupsArgs<T> args) {
#if defined(CUFUSE_HOST) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Shape = WarpgroupShape<kLayout, false, kBlockM, kBlockN, kWarpgroups, kStages, kGroupM,
                               kTeams, kSplit>;
  const WarpgroupMaps maps{args.x_map, args.w_map, args.w_map, args.y_map, args.residual_map};
  const WarpgroupOutput<T> out{args.y, args.residual, args.rows, args.n, args.k};
  run_warpgroup_tiles<Shape, T, kResidual, kStores>(
      maps, out,
      [&](float (&bias)[2], int column) {
        bias[0] = args.b && column < args.n ? to_float(args.b[column]) : 0.0f;
        bias[1] = args.b && column + 8 < args.n ? to_float(args.b[column + 8]) : 0.0f;
      },
      [](u32* results, const u32* residuals, const float (&bias)[2], const float* c) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float first = activate_for_16_bits<kAct, T>(c[h * 2] + bias[h]);
          float second = activate_for_16_bits<kAct, T>(c[h * 2 + 1] + bias[h]);
          if constexpr (kResidual) {
            float more[2];
            unpack_pair(more[0], more[1], residuals[h], T{});
            first += more[0];
            second += more[1];
          }
          results[h] = pair_from_floats<T>(first, second);
        }
      });
#endif
}

}  // namespace cufuse
