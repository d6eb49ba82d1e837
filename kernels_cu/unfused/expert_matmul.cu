// y[token, j] = w[ids[token, j]] x + b for every slot (token, j), x being the token's row or the
// slot's own. CTA (c, s) takes every gridDim.x-th group of rows of slot s, a warp a row at a time.
// Bounded by reading the experts' weights, once for each slot.
// instantiate: expert_matmul<bfloat16, 8>
// instantiate: expert_matmul<half, 1>
// instantiate: expert_matmul<float, 4>
#include "device/matvec.cuh"

namespace cufuse {

template <typename T>
struct ExpertMatmulArgs {
  const T* x;      // [slots / per_row, dim]
  const int* ids;  // [slots]
  const T* w;      // [n_experts, n, dim]
  const T* b;      // [n_experts, n]; may be null
  T* y;            // [slots, n]
  i64 slots;
  int per_row;  // slots that share a row of x: k, or 1
  int n_experts;
  int n;
  int dim;
};

template <typename T, int kVec>
__global__ void __launch_bounds__(256) expert_matmul(const ExpertMatmulArgs<T> args) {
  using Shape = MatvecShape<1, 1, 4, 8, 1, kVec>;
  __shared__ float partial[Shape::kPartials];
  T* staged = dynamic_shared<T>();  // [chunk_count * kChunk]
  for (i64 slot = blockIdx.y; slot < args.slots; slot += gridDim.y) {
    const int expert = args.ids[slot];
    T* y = args.y + slot * args.n;
    if (static_cast<u32>(expert) >= static_cast<u32>(args.n_experts)) {
      for (int i = blockIdx.x * Shape::kThreads + threadIdx.x; i < args.n;
           i += gridDim.x * Shape::kThreads) {
        y[i] = from_float<T>(__uint_as_float(0x7fc00000u));
      }
      continue;
    }
    const i64 first = static_cast<i64>(expert) * args.n;  // of the expert's rows
    auto row = [&](int r, int) { return args.w + (first + r) * static_cast<i64>(args.dim); };
    auto fill = [&] {
      stage_x<Shape::kThreads, 1, kVec, Rounding::cast_first, T>(
          staged, args.x + slot / args.per_row * args.dim, 1, args.dim, nullptr, 0.0f, partial);
    };
    auto finish = [&](int r, int lane, MatvecSums<Shape> sums) {
      if (lane != 0) return;
      const float bias = args.b ? to_float(args.b[first + r]) : 0.0f;
      y[r] = from_float<T>(sums(0, 0) + bias);
    };
    matvec<Shape>(args.n, args.dim, staged, partial, row, fill, finish);
    __syncthreads();
  }
}

}  // namespace cufuse
