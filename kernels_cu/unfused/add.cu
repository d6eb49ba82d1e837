// y = a + b, element by element; b may be one row for all rows of a. The sum is rounded once.
// Bounded by memory.
// instantiate: add<bfloat16, 8>
// instantiate: add<half, 1>
// instantiate: add<float, 4>
#include "device/elementwise.cuh"

namespace cufuse {

template <typename T>
struct AddArgs {
  const T* a;  // [rows, n]
  const T* b;  // [n]
  T* y;        // [rows, n]; may be a, or b if there is one row
  i64 rows;
  i64 n;
};

template <typename T, int kVec>
__global__ void __launch_bounds__(256) add(const AddArgs<T> args) {
  for_each_pair<kVec>(args.a, args.b, args.y, args.rows, args.n,
                      [](float a, float b) { return a + b; });
}

}  // namespace cufuse
