// y = x / sqrt(mean(x^2) + eps) * weight, row by row. A CTA takes one row and reads it twice, the
// second time from cache. Bounded by memory: one read and one write of x.
// instantiate: rmsnorm<bfloat16, Rounding::cast_first, 8>
// instantiate: rmsnorm<half, Rounding::scale_first, 1>
// instantiate: rmsnorm<float, Rounding::one_plus, 4>
#include "device/norm.cuh"

namespace cufuse {

template <typename T>
struct RmsnormArgs {
  const T* x;       // [rows, n]
  const T* weight;  // [n]; null for a weight of ones
  T* y;             // [rows, n]; may be x
  i64 rows;
  int n;
  float eps;
};

template <typename T, Rounding kRounding, int kVec>
__global__ void __launch_bounds__(256) rmsnorm(const RmsnormArgs<T> args) {
  constexpr int kThreads = 256;
  __shared__ float partial[kThreads / 32];
  const T* x = args.x + static_cast<i64>(blockIdx.x) * args.n;
  T* y = args.y + static_cast<i64>(blockIdx.x) * args.n;
  const float scale = rms_scale<kThreads, kVec>(x, args.n, args.eps, partial);
  const float identity = kRounding == Rounding::one_plus ? 0.0f : 1.0f;
  for (int i = threadIdx.x * kVec; i < args.n; i += kThreads * kVec) {
    const auto group = load_vec<kVec>(x + i);
    Vec<T, kVec> result;
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      const float weight = args.weight ? to_float(args.weight[i + j]) : identity;
      result.v[j] = normalized<T, kRounding>(to_float(group.v[j]), scale, weight);
    }
    store_vec<kVec>(y + i, result);
  }
}

}  // namespace cufuse
