// sum = x + residual, rounded to T; y = layernorm(sum) * weight + bias. A CTA takes one row: x and
// residual are read once, and the sum stays in registers for the norm. Bounded by memory.
// instantiate: add_layernorm<bfloat16, 8>
// instantiate: add_layernorm<half, 1>
// instantiate: add_layernorm<float, 4>
#include "device/norm.cuh"

namespace cufuse {

template <typename T>
struct AddLayernormArgs {
  const T* x;         // [rows, n]
  const T* residual;  // [rows, n]
  const T* weight;    // [n]; null for a weight of ones
  const T* bias;      // [n]; null for none
  T* y;               // [rows, n]; may be x or residual
  T* sum;             // [rows, n]; may be x or residual
  i64 rows;
  int n;
  float eps;
};

template <typename T, int kVec>
__global__ void __launch_bounds__(256) add_layernorm(const AddLayernormArgs<T> args) {
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
  layernorm_row<T, kThreads, kVec>(args.y + row, args.weight, args.bias, args.n, args.eps, partial,
                                   add, reload);
}

}  // namespace cufuse
