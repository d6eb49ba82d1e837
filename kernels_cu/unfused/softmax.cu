// y = exp(x - max) / sum(exp(x - max)), row by row; a sink joins the sum and is dropped after. A
// CTA takes one row and reads it three times, twice from cache. Bounded by memory: one read and one
// write of x.
// instantiate: softmax<bfloat16, 8>
// instantiate: softmax<half, 1>
// instantiate: softmax<float, 4>
#include "device/attention.cuh"

namespace cufuse {

template <typename T>
struct SoftmaxArgs {
  const T* x;          // [rows, n]; of scores: rows = [batch, heads, q_len]
  const T* sinks;      // [heads]; null: none
  const int* start;    // [batch]; entries from start + q_len on become zeros; null: none do
  const int* lengths;  // [batch]; entries from lengths on become zeros; null: start decides
  T* y;                // [rows, n]; may be x
  i64 rows;
  int heads;
  int q_len;
  int n;
};

template <typename T, int kVec>
__global__ void __launch_bounds__(256) softmax(const SoftmaxArgs<T> args) {
  constexpr int kThreads = 256;
  __shared__ float partial[kThreads / 32];
  const i64 row = blockIdx.x;
  const T* x = args.x + row * args.n;
  T* y = args.y + row * args.n;
  const int head = static_cast<int>(row / args.q_len % args.heads);
  const int batch = static_cast<int>(row / args.q_len / args.heads);
  i64 live = args.n;
  if (args.lengths) {
    live = args.lengths[batch];
  } else if (args.start) {
    live = static_cast<i64>(args.start[batch]) + args.q_len;
  }
  const int n = static_cast<int>(max(min(live, static_cast<i64>(args.n)), static_cast<i64>(0)));
  // Whole groups are live or not, but for one; its dead values count as -inf.
  const auto load = [&](int i) {
    auto group = load_vec<kVec>(x + i);
    Vec<float, kVec> v;
#pragma unroll
    for (int j = 0; j < kVec; ++j) v.v[j] = i + j < n ? to_float(group.v[j]) : minus_infinity();
    return v;
  };

  const float sink = args.sinks ? to_float(args.sinks[head]) : minus_infinity();
  float top = sink;
  for (int i = threadIdx.x * kVec; i < n; i += kThreads * kVec) {
    const auto v = load(i);
#pragma unroll
    for (int j = 0; j < kVec; ++j) top = fmaxf(top, v.v[j]);
  }
  const float shift = softmax_shift(block_max<kThreads>(top, partial));
  float sum = 0.0f;
  for (int i = threadIdx.x * kVec; i < n; i += kThreads * kVec) {
    const auto v = load(i);
#pragma unroll
    for (int j = 0; j < kVec; ++j) sum += expf(v.v[j] - shift);
  }
  sum = block_sum<kThreads>(sum, partial) + expf(sink - shift);
  const float scale = sum == 0.0f ? 0.0f : 1.0f / sum;
  for (int i = threadIdx.x * kVec; i < args.n; i += kThreads * kVec) {
    Vec<T, kVec> result;
    if (i < n) {
      const auto v = load(i);
#pragma unroll
      for (int j = 0; j < kVec; ++j) result.v[j] = from_float<T>(expf(v.v[j] - shift) * scale);
    } else {
#pragma unroll
      for (int j = 0; j < kVec; ++j) result.v[j] = from_float<T>(0.0f);
    }
    store_vec<kVec>(y + i, result);
  }
}

}  // namespace cufuse
