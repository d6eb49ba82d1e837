// y = act(pre) + residual, pre = x w^T + b, for more than a few rows of 16-bit values, on sm_90a
// (device/warpgroup_tiles.cuh), and pre too where that is asked for: copies and products run beside
// each other, and everything between the sum and the store happens in float32. Bounded by the
// tensor cores, for up to some 100 rows by reading w once.
// instantiate: linear_warpgroups<bfloat16, Layout::rows, Act::gelu, false, false, Stores::tensor, 256, 128, 2, 4, 8, 1, 1>
// instantiate: linear_warpgroups<half, Layout::rows, Act::none, true, false, Stores::tensor, 128, 128, 1, 6, 16, 2, 1>
// instantiate: linear_warpgroups<bfloat16, Layout::packed, Act::silu, true, false, Stores::threads, 128, 128, 2, 6, 8, 1, 1>
// instantiate: linear_warpgroups<bfloat16, Layout::packed, Act::none, true, false, Stores::tensor, 256, 128, 2, 4, 8, 1, 1>
// instantiate: linear_warpgroups<half, Layout::packed, Act::gelu_tanh, false, false, Stores::tensor, 128, 256, 2, 4, 8, 1, 1>
// instantiate: linear_warpgroups<bfloat16, Layout::rows, Act::quick_gelu, false, false, Stores::tensor, 64, 128, 2, 8, 8, 1, 4>
// instantiate: linear_warpgroups<bfloat16, Layout::packed, Act::relu, true, false, Stores::tensor, 8, 64, 1, 12, 8, 1, 2>
// instantiate: linear_warpgroups<bfloat16, Layout::rows, Act::gelu, false, true, Stores::tensor, 256, 128, 2, 4, 8, 1, 1>
// instantiate: linear_warpgroups<half, Layout::packed, Act::silu, true, true, Stores::tensor, 128, 256, 2, 4, 8, 1, 1>
// instantiate: linear_warpgroups<bfloat16, Layout::packed, Act::relu, true, true, Stores::threads, 128, 128, 1, 6, 16, 2, 1>
#include "device/epilogue.cuh"
#include "device/warpgroup_tiles.cuh"

namespace cufuse {

template <typename T>
struct LinearWarpgroupsArgs {
  TensorMap x_map;         // x in boxes of kBlockM rows
  TensorMap w_map;         // w in boxes of kBlockN rows, or of so many in panels
  TensorMap y_map;         // y in a warpgroup's boxes; none for Stores::threads
  TensorMap residual_map;  // like y's; none without a residual
  TensorMap pre_map;       // like y's; none without pre
  const T* x;              // [rows, k]
  const T* w;              // [n, k]; may be packed
  const T* b;              // [n]; may be null
  const T* residual;       // [rows, n]; null without one
  T* y;                    // [rows, n]; may be residual
  T* pre;                  // [rows, n]; null: not asked for
  int rows;
  int n;
  int k;
};

template <typename T,
          Layout kLayout,
          Act kAct,
          bool kResidual,
          bool kPre,
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
  const WarpgroupMaps maps{args.x_map, args.w_map,        args.w_map,
                           args.y_map, args.residual_map, args.pre_map};
  const WarpgroupOutput<T> out{args.y, args.residual, args.pre, args.rows, args.n, args.k};
  run_warpgroup_tiles<Shape, T, kResidual, kPre, kStores>(
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
      },
      [](u32* results, const float (&bias)[2], const float* c) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          results[h] = pair_from_floats<T>(c[h * 2] + bias[h], c[h * 2 + 1] + bias[h]);
        }
      });
#endif
}

}  // namespace cufuse
