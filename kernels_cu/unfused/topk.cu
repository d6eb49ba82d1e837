// The k largest values of each row and their ids, in descending order, as they are, over their sum,
// or as their softmax. A warp takes a row and reads it k times, from cache. Bounded by latency.
// instantiate: topk<bfloat16, Normalize::none>
// instantiate: topk<half, Normalize::softmax>
// instantiate: topk<float, Normalize::sum>
#include "device/route.cuh"

namespace cufuse {

enum class Normalize { none, sum, softmax };

template <typename T>
struct TopkArgs {
  const T* x;  // [rows, n]
  T* values;   // [rows, k]
  int* ids;    // [rows, k]
  i64 rows;
  int n;
  int k;
};

template <typename T, Normalize kNormalize>
__global__ void __launch_bounds__(128) topk(const TopkArgs<T> args) {
  const int lane = threadIdx.x % 32;
  const i64 row = static_cast<i64>(blockIdx.x) * 4 + threadIdx.x / 32;
  if (row >= args.rows) return;
  const T* x = args.x + row * args.n;
  T* values = args.values + row * args.k;
  int* ids = args.ids + row * args.k;

  u64 best = best_below(~0ull, x, args.n, lane);
  u64 top = warp_max(best);
  const float max = value_of(top);
  auto numerator = [&](float v) { return kNormalize == Normalize::softmax ? expf(v - max) : v; };
  float sum = 0.0f;
  for (int r = 0; r < args.k; ++r) {
    if (lane == r % 32) ids[r] = id_of(top);
    sum += numerator(value_of(top));
    if (best == top) best = best_below(top, x, args.n, lane);
    top = warp_max(best);
  }
  for (int r = lane; r < args.k; r += 32) {  // a lane reads the ids that it wrote itself
    const float v = numerator(to_float(x[ids[r]]));
    values[r] = from_float<T>(kNormalize == Normalize::none ? v : v / sum);
  }
}

}  // namespace cufuse
