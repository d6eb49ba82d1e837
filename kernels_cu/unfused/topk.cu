// The k largest values of each row and their ids, in descending order; what is returned for them,
// of the row or of another, as it is, over its sum, or as its softmax, times a factor. The choice
// may be from the best groups alone. A warp takes a row and reads it k times, from cache. Bounded
// by latency.
// instantiate: topk<bfloat16, Normalize::none>
// instantiate: topk<half, Normalize::softmax>
// instantiate: topk<float, Normalize::sum>
#include "device/route.cuh"

namespace cufuse {

enum class Normalize { none, sum, softmax };

template <typename T>
struct TopkArgs {
  const T* x;       // [rows, n]
  const T* source;  // [rows, n]; what is returned for the chosen; may be x
  T* values;        // [rows, k]
  int* ids;         // [rows, k]
  i64 rows;
  int n;
  int k;
  int groups;
  int top_groups;
  float scale;
  bool best_two;  // a group's score is the sum of its two best values, not its best
};

template <typename T, Normalize kNormalize>
__global__ void __launch_bounds__(128, 1) topk(const TopkArgs<T> args) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const i64 row = static_cast<i64>(blockIdx.x) * 4 + warp;
  if (row >= args.rows) return;
  const T* x = args.x + row * args.n;
  const T* source = args.source + row * args.n;
  T* values = args.values + row * args.k;
  int* ids = args.ids + row * args.k;

  // Groups that are left out: their experts' words are 0.
  u32* scores = dynamic_shared<u32>() + warp * args.groups;  // [groups]
  auto all = [&](int i) { return choice_of(to_float(x[i])); };
  u64 worst = 0;
  if (args.groups > 1) {
    worst = worst_top_group(args.n, args.groups, args.top_groups, args.best_two, scores, all);
    __syncwarp();
  }
  const int size = args.n / args.groups;
  auto word = [&](int i) {
    return worst && rank_of(scores[i / size], i / size) < worst ? 0u : all(i);
  };

  u64 best = best_below(~0ull, args.n, lane, word);
  u64 top = warp_max(best);
  const float max = to_float(source[id_of(top)]);
  auto numerator = [&](float v) { return kNormalize == Normalize::softmax ? expf(v - max) : v; };
  float sum = 0.0f;
  for (int r = 0; r < args.k; ++r) {
    if (lane == r % 32) ids[r] = id_of(top);
    sum += numerator(to_float(source[id_of(top)]));
    if (best == top) best = best_below(top, args.n, lane, word);
    top = warp_max(best);
  }
  // Sigmoids may all be 0; a sum of exponentials takes no notice of so little.
  const float floor = 1e-20f;
  for (int r = lane; r < args.k; r += 32) {  // a lane reads the ids that it wrote itself
    const float v = numerator(to_float(source[ids[r]]));
    values[r] = from_float<T>((kNormalize == Normalize::none ? v : v / (sum + floor)) * args.scale);
  }
}

}  // namespace cufuse
