// id = argmax(x), row by row; the lower index of equal values, -1 when the row holds a NaN. Several
// CTAs share a row and meet in one 64-bit maximum of (value, index). Bounded by the read of x.
// instantiate: argmax<bfloat16, 8>
// instantiate: argmax<half, 1>
// instantiate: argmax<float, 4>
#include "device/order.cuh"
#include "device/vec.cuh"

namespace cufuse {

template <typename T>
struct ArgmaxArgs {
  const T* x;    // [rows, n]
  int* ids;      // [rows]
  u64* scratch;  // [rows, 2]; a BestOfRow each
  int n;
  int splits;   // CTAs of a row
  int per_cta;  // values of a CTA, a multiple of 256 * kVec
};

template <typename T, int kVec>
__global__ void __launch_bounds__(256) argmax(const ArgmaxArgs<T> args) {
  constexpr int kThreads = 256;
  __shared__ u64 partial[kThreads / 32];
  const int row = static_cast<int>(blockIdx.x) / args.splits;
  const int split = static_cast<int>(blockIdx.x) % args.splits;
  const T* x = args.x + static_cast<i64>(row) * args.n;

  // This thread's best: of equal values the first it meets, which has the lowest index.
  const i64 begin = static_cast<i64>(split) * args.per_cta;
  const i64 end = min(begin + args.per_cta, static_cast<i64>(args.n));
  u32 best = 0;
  int id = 0;
  bool nan = false;
#pragma unroll 4
  for (i64 i = begin + threadIdx.x * kVec; i < end; i += kThreads * kVec) {
    const auto group = load_vec<kVec>(x + i);
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      const u32 order = order_of(to_float(group.v[j]));
      nan = nan || order == 0;
      if (order > best) {
        best = order;
        id = static_cast<int>(i) + j;
      }
    }
  }

  u64 rank = best ? rank_of(best, id) : 0;
  if (nan) rank = kRankOfNan;
  rank = block_max<kThreads>(rank, partial);
  if (threadIdx.x == 0) {
    auto* shared_best = reinterpret_cast<BestOfRow*>(args.scratch) + row;
    write_best(rank, args.splits, shared_best, args.ids + row);
  }
}

}  // namespace cufuse
