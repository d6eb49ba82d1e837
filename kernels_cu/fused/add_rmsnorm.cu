// sum = x + residual, rounded to T; y = sum / sqrt(mean(sum^2) + eps) * weight. A CTA takes a row:
// x and residual are read once, and the sum stays in registers for the norm. Bounded by memory.
// instantiate: add_rmsnorm<bfloat16, Rounding::cast_first, 8>
// instantiate: add_rmsnorm<half, Rounding::scale_first, 1>
// instantiate: add_rmsnorm<float, Rounding::one_plus, 4>
#include "device/norm.cuh"

namespace cufuse {

template <typename T>
struct AddRmsnormArgs {
  const T* x;         // [rows, n]
  const T* residual;  // [rows, n]
  const T* weight;    // [n]; null for a weight of ones
  T* y;               // [rows, n]; may be x or residual
  T* sum;             // [rows, n]; may be x or residual
  i64 rows;
  int n;
  float eps;
};

template <typename T, Rounding kRounding, int kVec>
__global__ void __launch_bounds__(256) add_rmsnorm(const AddRmsnormArgs<T> args) {
  constexpr int kThreads = 256;
  __shared__ float partial[kThreads / 32];
  const i64 row = static_cast<i64>(blockIdx.x) * args.n;
  const auto add = [&](int i) {
    const auto sum =
        add_rounded(load_vec<kVec>(args.x + row + i), load_vec<kVec>(args.residual + row + i));
    store_vec<kVec>(args.sum + row + i, sum);
    return sum;
  };
  // What this thread stored itself: x or residual may be gone by then.
  const auto reload = [&](int i) { return load_vec<kVec>(args.sum + row + i); };
  rmsnorm_row<T, kRounding, kThreads, kVec>(args.y + row, args.weight, args.n, args.eps, partial,
                                            add, reload);
}

}  // namespace cufuse
