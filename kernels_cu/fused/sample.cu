// A token id from each row of logits: temperature, then top-k, top-p and min-p, then a Gumbel-max
// draw with numbers hashed from (seed, step, row, id). Without a filter many CTAs share a row and
// read it once; with one, a CTA takes a row and finds the cuts by radix selection, counts and
// probability masses being whole numbers. Bounded by the read of the logits, and by latency.
// instantiate: sample<bfloat16, 8>
// instantiate: sample<float, 1>
// instantiate: sample_filtered<bfloat16, 8>
// instantiate: sample_filtered<half, 1>
// instantiate: sample_filtered<float, 4>
#include "device/filters.cuh"

namespace cufuse {

template <typename T>
struct SampleArgs {
  const T* logits;   // [rows, n]
  const int* steps;  // [rows]; null for `step` in every row
  int* ids;          // [rows]; -1 when a row holds a NaN, or nothing above -inf
  u64* scratch;      // [rows, 2]; a BestOfRow each
  u64 seed;
  int step;
  int n;
  int splits;   // CTAs of a row
  int per_cta;  // logits of a CTA, a multiple of 256 * kVec
  float inverse_temperature;
};

CUFUSE_DEVICE HashKey draw_key(u64 seed, const int* steps, int step, int row) {
  return hash_key(seed, static_cast<u64>(steps ? steps[row] : step), static_cast<u64>(row));
}

template <typename T, int kVec>
__global__ void __launch_bounds__(256) sample(const SampleArgs<T> args) {
  constexpr int kThreads = 256;
  __shared__ u64 partial[kThreads / 32];
  const int row = static_cast<int>(blockIdx.x) / args.splits;
  const int split = static_cast<int>(blockIdx.x) % args.splits;
  const T* logits = args.logits + static_cast<i64>(row) * args.n;
  const HashKey key = draw_key(args.seed, args.steps, args.step, row);

  const i64 begin = static_cast<i64>(split) * args.per_cta;
  const i64 end = min(begin + args.per_cta, static_cast<i64>(args.n));
  u64 best = 0;
  for (i64 i = begin + threadIdx.x * kVec; i < end; i += kThreads * kVec) {
    const auto group = load_vec<kVec>(logits + i);
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      const float logit = to_float(group.v[j]);
      const u32 order = order_of(logit);
      u64 rank = 0;
      if (order == 0) rank = kRankOfNan;
      if (order > kOrderOfMinusInfinity) {
        rank = draw_rank(logit, static_cast<int>(i) + j, args.inverse_temperature, key);
      }
      best = max(best, rank);
    }
  }
  best = block_max<kThreads>(best, partial);
  if (threadIdx.x == 0) {
    auto* shared_best = reinterpret_cast<BestOfRow*>(args.scratch) + row;
    write_best(best, args.splits, shared_best, args.ids + row);
  }
}

template <typename T>
struct SampleFilteredArgs {
  const T* logits;   // [rows, n]
  const int* steps;  // [rows]; null for `step` in every row
  int* ids;          // [rows]; -1 when a row holds a NaN, or nothing above -inf
  u64 seed;
  u64 share;  // top_p in units of 2^-32; 2^32 for no top-p
  int step;
  int n;
  int top_k;  // n for no top-k
  float inverse_temperature;
  float min_p;
  float mass_scale;  // the mass of probability 1
};

// The threads of a CTA, which takes a row.
struct RowTeam {
  static constexpr int kThreads = 1024;
  static CUFUSE_DEVICE int index() { return static_cast<int>(threadIdx.x); }
  static CUFUSE_DEVICE void sync() { __syncthreads(); }
};

template <typename T, int kVec>
__global__ void __launch_bounds__(RowTeam::kThreads, 1)
    sample_filtered(const SampleFilteredArgs<T> args) {
  __shared__ Bins<RowTeam::kThreads> bins;
  const int i = static_cast<int>(blockIdx.x);
  const PlainRow<T, kVec> row{args.logits + static_cast<i64>(i) * args.n, args.n};
  u32 highest = 0;
  row.template visit<RowTeam>(0, [&](int, float logit) {
    const u32 order = order_of(logit);
    highest = max(highest, order ? order : kHighestOfNan);
  });
  const Filters filters{args.share, args.top_k, args.inverse_temperature, args.min_p,
                        args.mass_scale};
  const HashKey key = draw_key(args.seed, args.steps, args.step, i);
  const int id = draw_filtered<RowTeam>(row, highest, filters, key, bins);
  if (threadIdx.x == 0) args.ids[i] = id;
}

}  // namespace cufuse
