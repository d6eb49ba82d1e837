// y = act(x w_gate^T + b_gate) * (x w_up^T + b_up) for more than a few rows of 16-bit values, on
// sm_90a: what fused/linear_sm90.cu does for one weight. A thread has a gate and its up.
// instantiate: gated_warpgroups<bfloat16, Layout::rows, Gate::plain, Act::silu, Stores::tensor, 256, 128, 2, 4, 8, 1, 1>
// instantiate: gated_warpgroups<half, Layout::packed, Gate::plain, Act::silu, Stores::tensor, 256, 128, 2, 4, 8, 1, 1>
// instantiate: gated_warpgroups<bfloat16, Layout::packed, Gate::clamped, Act::none, Stores::threads, 128, 128, 1, 6, 16, 2, 1>
// instantiate: gated_warpgroups<half, Layout::rows, Gate::plain, Act::gelu, Stores::tensor, 64, 128, 2, 8, 8, 1, 2>
#include "device/epilogue.cuh"
#include "device/warpgroup_tiles.cuh"

namespace cufuse {

template <typename T>
struct GatedWarpgroupsArgs {
  TensorMap x_map;   // x in boxes of kBlockM rows
  TensorMap w_map;   // w_gate in boxes of kBlockN / 2 rows; packed: both in panels
  TensorMap up_map;  // w_up, like it; none for packed ones
  TensorMap y_map;   // y in a warpgroup's boxes; none for Stores::threads
  const T* x;        // [rows, k]
  const T* w_gate;   // [n, k]; packed: both
  const T* w_up;     // [n, k]; null when packed
  const T* b_gate;   // [n]; may be null
  const T* b_up;     // [n]; may be null
  T* y;              // [rows, n]
  int rows;
  int n;
  int k;
  float limit;  // of the clamped gate, like alpha
  float alpha;
};

template <typename T,
          Layout kLayout,
          Gate kGate,
          Act kAct,
          Stores kStores,
          int kBlockM,
          int kBlockN,
          int kWarpgroups,
          int kStages,
          int kGroupM,
          int kTeams,
          int kSplit>
__global__ void __launch_bounds__((kWarpgroups * kTeams + 1) * 128, 1)
    gated_warpgroups(const __grid_constant__ GatedWarpgroupsArgs<T> args) {
#if defined(CUFUSE_HOST) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Shape = WarpgroupShape<kLayout, true, kBlockM, kBlockN, kWarpgroups, kStages, kGroupM,
                               kTeams, kSplit>;
  const WarpgroupMaps maps{args.x_map, args.w_map, args.up_map, args.y_map, args.y_map, args.y_map};
  const WarpgroupOutput<T> out{args.y, nullptr, nullptr, args.rows, args.n, args.k};
  run_warpgroup_tiles<Shape, T, false, false, kStores>(
      maps, out,
      [&](float (&bias)[2], int column) {
        const bool inside = column < args.n;
        bias[0] = args.b_gate && inside ? to_float(args.b_gate[column]) : 0.0f;
        bias[1] = args.b_up && inside ? to_float(args.b_up[column]) : 0.0f;
      },
      [&](u32* results, const u32*, const float (&bias)[2], const float* c) {
        float y[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          y[i] = gated_for_16_bits<kGate, kAct, T>(c[i] + bias[0], c[2 + i] + bias[1], args.limit,
                                                   args.alpha);
        }
        results[0] = pair_from_floats<T>(y[0], y[1]);
      },
      [](u32*, const float (&)[2], const float*) {});
#endif
}

}  // namespace cufuse
