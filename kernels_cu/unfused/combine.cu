// out = sum over a token's slots, in ascending expert id, of weight * y, plus a residual. A CTA
// takes a token, a thread every 256th group of kVec columns. Bounded by reading y. instantiate:
// combine<bfloat16, 8> instantiate: combine<half, 1> instantiate: combine<float, 4>
#include "device/route.cuh"
#include "device/vec.cuh"

namespace cufuse {

template <typename T>
struct CombineArgs {
  const T* y;            // [rows, k, n]
  const i32* ids;        // [rows, k]
  const float* weights;  // [rows, k]
  const T* residual;     // [rows, n]; may be null
  T* out;                // [rows, n]; may be residual
  int k;
  int n;
};

template <typename T, int kVec>
__global__ void __launch_bounds__(256) combine(const CombineArgs<T> args) {
  constexpr int kThreads = 256;
  i32* order = dynamic_shared<i32>();  // [k]
  const int k = args.k, n = args.n;
  const i64 row = blockIdx.x;
  sort_slots<kThreads>(args.ids + row * k, k, 0, order);
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
    for (int v = 0; v < kVec; ++v) sum.v[v] = from_float<T>(total[v]);
    store_vec<kVec>(args.out + row * n + i, sum);
  }
}

}  // namespace cufuse
