// out = sum over a token's slots, in ascending expert id, of weight * y, plus a residual. A CTA
// takes a token, a thread every 256th group of kVec columns. Bounded by reading y.
// instantiate: combine<bfloat16, bfloat16, 8>
// instantiate: combine<float, bfloat16, 8>
// instantiate: combine<float, half, 1>
// instantiate: combine<float, float, 4>
#include "device/route.cuh"
#include "device/vec.cuh"

namespace cufuse {

template <typename TIn, typename T>
struct CombineArgs {
  const TIn* y;          // [rows, k, n]
  const int* ids;        // [rows, k]
  const float* weights;  // [rows, k]
  const T* residual;     // [rows, n]; may be null
  T* out;                // [rows, n]; may be residual
  int k;
  int n;
  int n_experts;  // a row with an id that is not below becomes NaN
};

template <typename TIn, typename T, int kVec>
__global__ void __launch_bounds__(256) combine(const CombineArgs<TIn, T> args) {
  constexpr int kThreads = 256;
  int* order = dynamic_shared<int>();  // [k]
  const int k = args.k, n = args.n;
  const i64 row = blockIdx.x;
  const bool valid = sort_slots<kThreads>(args.ids + row * k, k, args.n_experts, order);
  const float* weights = args.weights + row * k;
  for (int i = threadIdx.x * kVec; i < n; i += kThreads * kVec) {
    float total[kVec] = {};
    for (int j = 0; j < k; ++j) {
      const auto y = load_vec<kVec>(args.y + (row * k + order[j]) * n + i);
      const float weight = weights[order[j]];
#pragma unroll
      for (int v = 0; v < kVec; ++v) total[v] = fmaf(weight, to_float(y.v[v]), total[v]);
    }
    Vec<T, kVec> sum;
    if (args.residual) {
      const auto residual = load_vec<kVec>(args.residual + row * n + i);
#pragma unroll
      for (int v = 0; v < kVec; ++v) total[v] += to_float(residual.v[v]);
    }
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      sum.v[v] = from_float<T>(valid ? total[v] : __uint_as_float(0x7fc00000u));
    }
    store_vec<kVec>(args.out + row * n + i, sum);
  }
}

}  // namespace cufuse
