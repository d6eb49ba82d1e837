// y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias, row by row. A CTA takes one row and keeps
// it in registers between the passes, up to 4 groups a thread. Bounded by memory.
// instantiate: layernorm<bfloat16, 8>
// instantiate: layernorm<half, 1>
// instantiate: layernorm<float, 4>
#include "device/norm.cuh"

namespace cufuse {

template <typename T>
struct LayernormArgs {
  const T* x;       // [rows, n]
  const T* weight;  // [n]; null for a weight of ones
  const T* bias;    // [n]; null for none
  T* y;             // [rows, n]; may be x
  i64 rows;
  int n;
  float eps;
};

template <typename T, int kVec>
__global__ void __launch_bounds__(256) layernorm(const LayernormArgs<T> args) {
  constexpr int kThreads = 256;
  __shared__ float partial[kThreads / 32];
  const i64 row = static_cast<i64>(blockIdx.x) * args.n;
  const auto load = [&](int i) { return load_vec<kVec>(args.x + row + i); };
  layernorm_row<T, kThreads, kVec>(args.y + row, args.weight, args.bias, args.n, args.eps, partial,
                                   load, load);
}

}  // namespace cufuse
