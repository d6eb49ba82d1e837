// logits = x w^T + b, kept in float32: two logits that round to one value would be a tie between
// experts. A warp sums one expert against kTokens rows of x in shared memory, in moe_route's order.
// Bounded by reading x for many tokens, by latency for few.
// instantiate: router_logits<bfloat16, 1, 8>
// instantiate: router_logits<half, 8, 1>
// instantiate: router_logits<float, 8, 4>
#include "device/matvec.cuh"

namespace cufuse {

template <typename T>
struct RouterLogitsArgs {
  const T* x;     // [rows, dim]
  const T* w;     // [n_experts, dim]
  const T* b;     // [n_experts]; may be null
  float* logits;  // [rows, n_experts]
  i64 rows;
  int dim;
  int n_experts;
};

template <typename T, int kTokens, int kVec>
__global__ void __launch_bounds__(256, 1) router_logits(const RouterLogitsArgs<T> args) {
  using Shape = MatvecShape<kTokens, 1, 8, 8, 1, kVec>;
  __shared__ float partial[Shape::kPartials];
  T* x = dynamic_shared<T>();  // [kTokens, chunk_count * kChunk]
  for (i64 first = static_cast<i64>(blockIdx.y) * kTokens; first < args.rows;
       first += static_cast<i64>(gridDim.y) * kTokens) {
    const int tokens = static_cast<int>(min(args.rows - first, static_cast<i64>(kTokens)));
    float* logits = args.logits + first * args.n_experts;
    auto row = [&](int expert, int) { return args.w + static_cast<i64>(expert) * args.dim; };
    auto fill = [&] {
      stage_x<Shape::kThreads, kTokens, kVec, Rounding::cast_first, T>(
          x, args.x + first * args.dim, tokens, args.dim, nullptr, 0.0f, partial);
    };
    auto finish = [&](int expert, int lane, MatvecSums<Shape> sums) {
      if (lane >= tokens) return;
      const float bias = args.b ? to_float(args.b[expert]) : 0.0f;
      logits[static_cast<i64>(lane) * args.n_experts + expert] = sums(0, lane) + bias;
    };
    matvec<Shape>(args.n_experts, args.dim, x, partial, row, fill, finish);
    __syncthreads();
  }
}

}  // namespace cufuse
