// logits = norm(x) w^T + b in float32, the best k of each row and their weights: the softmax over
// all logits or over the k, or sigmoids; a correction and groups may have a say in the choice. CTA
// (c, t) takes every gridDim.x-th group of experts for tile t of tokens; the one that arrives last
// at a tile chooses. Bounded by latency for few tokens, by instructions for many. How the grid is
// cut does not change a bit of the result.
// instantiate: moe_route<bfloat16, Rounding::cast_first, 1, 8>
// instantiate: moe_route<bfloat16, Rounding::scale_first, 8, 8>
// instantiate: moe_route<half, Rounding::one_plus, 4, 1>
// instantiate: moe_route<float, Rounding::cast_first, 1, 4>
// instantiate: moe_route<float, Rounding::cast_first, 8, 1>
#include "device/matvec.cuh"
#include "device/route.cuh"

namespace cufuse {

template <typename T>
struct MoeRouteArgs {
  const T* x;               // [rows, dim]
  const T* norm_weight;     // [dim]; null: x as it is
  const T* w;               // [n_experts, dim]
  const T* b;               // [n_experts]; may be null
  const float* correction;  // [n_experts]; may be null
  float* logits;            // [rows, n_experts]; scratch
  u32* arrived;             // [tiles]; scratch, zero before and after
  int* ids;                 // [rows, k]
  float* weights;           // [rows, k]
  i64 rows;
  int dim;
  int n_experts;
  int k;
  int groups;
  int top_groups;
  float eps;
  float scale;
  bool sigmoid;  // these three as in Routing
  bool over_all;
  bool over_chosen;
};

template <typename T, Rounding kRounding, int kTokens, int kVec>
__global__ void __launch_bounds__(256, 1) moe_route(const MoeRouteArgs<T> args) {
  using Shape = MatvecShape<kTokens, 1, 8, 8, 1, kVec>;
  __shared__ float partial[Shape::kPartials];
  __shared__ bool is_last;
  T* x = dynamic_shared<T>();  // [kTokens, chunk_count * kChunk]
  const int n_experts = args.n_experts;
  const i64 tiles = (args.rows + kTokens - 1) / kTokens;
  for (i64 tile = blockIdx.y; tile < tiles; tile += gridDim.y) {
    const i64 first = tile * kTokens;
    const int tokens = static_cast<int>(min(args.rows - first, static_cast<i64>(kTokens)));
    float* logits = args.logits + first * n_experts;

    // A warp sums an expert at a time.
    auto row = [&](int expert, int) { return args.w + static_cast<i64>(expert) * args.dim; };
    auto fill = [&] {
      stage_x<Shape::kThreads, kTokens, kVec, kRounding>(
          x, args.x + first * args.dim, tokens, args.dim, args.norm_weight, args.eps, partial);
    };
    auto finish = [&](int expert, int lane, MatvecSums<Shape> sums) {
      if (lane >= tokens) return;
      const float bias = args.b ? to_float(args.b[expert]) : 0.0f;
      logits[static_cast<i64>(lane) * n_experts + expert] = sums(0, lane) + bias;
    };
    matvec<Shape>(n_experts, args.dim, x, partial, row, fill, finish);

    // The last CTA of the tile sees all logits; it leaves the counter as it was.
    __syncthreads();
    if (threadIdx.x == 0) {
      is_last = add_acq_rel(args.arrived + tile, 1) == gridDim.x - 1;
      if (is_last) args.arrived[tile] = 0;
    }
    __syncthreads();
    if (is_last) {
      const Routing routing = {args.correction, n_experts,       args.k,
                               args.groups,     args.top_groups, args.scale,
                               args.sigmoid,    args.over_all,   args.over_chosen};
      for (int t = threadIdx.x / 32; t < tokens; t += Shape::kWarps) {
        route_row(routing, logits + static_cast<i64>(t) * n_experts,
                  dynamic_shared<u32>() + t * route_words(routing), args.ids + (first + t) * args.k,
                  args.weights + (first + t) * args.k);
      }
    }
    __syncthreads();
  }
}

}  // namespace cufuse
