// A token id from each row of logits: temperature, then top-k, top-p and min-p, then a Gumbel-max
// draw with numbers hashed from (seed, step, row, id). Without a filter many CTAs share a row and
// read it once; with one, a CTA takes a row and finds the cuts by radix selection, counts and
// probability masses being whole numbers. Bounded by the read of the logits, and by latency.
// instantiate: sample<bfloat16, 8>
// instantiate: sample<float, 1>
// instantiate: sample_filtered<bfloat16, 8>
// instantiate: sample_filtered<half, 1>
// instantiate: sample_filtered<float, 4>
#include "device/sampling.cuh"
#include "device/vec.cuh"

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

constexpr int kSelectThreads = 1024;
constexpr int kBinBits = 11;
constexpr int kBins = 1 << kBinBits;
static_assert(kBins == 2 * kSelectThreads, "a thread looks after two bins");

// 64-bit sums as two words: shared memory adds words at once, but 64 bits only by trying.
struct Bins {
  u32 low[kBins], high[kBins];
  u64 partial[kSelectThreads / 32];
  u64 left;
  int found, last;

  CUFUSE_DEVICE void clear() {
    for (int bin = threadIdx.x; bin < kBins; bin += kSelectThreads) low[bin] = high[bin] = 0;
    __syncthreads();
  }

  CUFUSE_DEVICE void add(u32 bin, u64 amount) {
    const u32 word = static_cast<u32>(amount);
    const u32 old = atomicAdd(&low[bin], word);
    const u32 upper = static_cast<u32>(amount >> 32) + (old + word < old ? 1u : 0u);
    if (upper) atomicAdd(&high[bin], upper);
  }

  // The bin in which the sum from the last bin downwards reaches wanted(total); `left` is what that
  // bin has to bring. -1 if it is never reached. Comes after and before a barrier of its own.
  template <typename Wanted>
  CUFUSE_DEVICE int find(Wanted wanted_of, u64& wanted) {
    __syncthreads();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int bin = kBins - 1 - 2 * static_cast<int>(threadIdx.x);
    const u64 first = static_cast<u64>(high[bin]) << 32 | low[bin];
    const u64 both = first + (static_cast<u64>(high[bin - 1]) << 32 | low[bin - 1]);
    u64 through = both;  // the sum of this warp's bins, this thread's included
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const u64 other = __shfl_up_sync(kFullMask, through, offset);
      if (lane >= offset) through += other;
    }
    if (lane == 31) partial[warp] = through;
    if (threadIdx.x == 0) found = -1;
    __syncthreads();
    u64 total = 0, before = through - both;
    for (int w = 0; w < kSelectThreads / 32; ++w) {
      if (w < warp) before += partial[w];
      total += partial[w];
    }
    wanted = wanted_of(total);
    if (before < wanted && wanted <= before + both) {
      const bool second = wanted > before + first;
      found = bin - (second ? 1 : 0);
      left = wanted - before - (second ? first : 0);
    }
    __syncthreads();
    wanted = left;
    return found;
  }
};

// What is kept of a row: orders above `order`, and of those equal to it the first `ties`.
struct Cut {
  u32 order;
  u64 ties;
};

template <int kVec, typename T, typename Visit>
CUFUSE_DEVICE void visit_row(const T* logits, int n, Visit visit) {
  for (i64 i = static_cast<i64>(threadIdx.x) * kVec; i < n; i += kSelectThreads * kVec) {
    const auto group = load_vec<kVec>(logits + i);
#pragma unroll
    for (int j = 0; j < kVec; ++j) visit(static_cast<int>(i) + j, to_float(group.v[j]));
  }
}

// Move the cut up until the amounts of what it keeps just reach wanted_of(their sum): a radix
// selection, 11 bits of the order at a time. Orders below `floor` are known not to matter.
template <int kVec, typename T, typename Amount, typename Wanted>
CUFUSE_DEVICE Cut
raise(const T* logits, int n, Cut cut, u32 floor, Bins& bins, Amount amount, Wanted wanted_of) {
  u32 prefix = 0;
  u64 wanted = 0;
  // 16-bit types fill 19 bits of a float at most; the rest repeats the sign.
  constexpr int kDigits = sizeof(T) == 4 ? 3 : 2;
#pragma unroll 1
  for (int digit = 0; digit < kDigits; ++digit) {
    const int shift = digit == 0 ? 21 : digit == 1 ? 10 : 0;
    const u32 mask = digit == 2 ? 0x3ffu : 0x7ffu;
    const auto matches = [&](u32 order) {
      return digit == 0 || order >> (digit == 1 ? 21 : 10) == prefix;
    };
    bins.clear();
    visit_row<kVec>(logits, n, [&](int, float logit) {
      const u32 order = order_of(logit);
      if (order > cut.order && order >= floor && matches(order)) {
        bins.add(order >> shift & mask, amount(logit));
      }
    });
    if (threadIdx.x == 0 && cut.ties && matches(cut.order)) {
      bins.add(cut.order >> shift & mask, cut.ties * amount(value_of(cut.order)));
    }
    const u64 so_far = wanted;
    const int bin =
        digit == 0 ? bins.find(wanted_of, wanted) : bins.find([=](u64) { return so_far; }, wanted);
    prefix = prefix << (digit == 2 ? 10 : kBinBits) | static_cast<u32>(bin);
  }
  if (kDigits == 2) prefix = prefix << 10 | (prefix >> 21 ? 0u : 0x3ffu);
  const u64 each = amount(value_of(prefix));
  return {prefix, (wanted + each - 1) / each};
}

// The last id that a cut keeps of those equal to it.
template <int kVec, typename T>
CUFUSE_DEVICE int last_tie(const T* logits, int n, Cut cut, Bins& bins) {
  int shift = 0;
  while ((n - 1) >> shift >= kBins) ++shift;
  bins.clear();
  visit_row<kVec>(logits, n, [&](int i, float logit) {
    if (order_of(logit) == cut.order) bins.add(kBins - 1 - (i >> shift), 1);
  });
  u64 left;
  const int bin = bins.find([=](u64) { return cut.ties; }, left);
  const int begin = (kBins - 1 - bin) << shift;
  // One warp goes through the bin's ids in order.
  if (threadIdx.x < 32) {
    const int lane = threadIdx.x;
    for (int base = 0; base < 1 << shift; base += 32) {
      const int i = begin + base + lane;
      const bool equal =
          base + lane < 1 << shift && i < n && order_of(to_float(logits[i])) == cut.order;
      const u32 votes = __ballot_sync(kFullMask, equal);
      const u32 rank = __popc(votes & ((2u << lane) - 1));
      if (equal && rank == left) bins.last = i;
      const u32 count = __popc(votes);
      if (left <= count) break;
      left -= count;
    }
  }
  __syncthreads();
  return bins.last;
}

template <typename T, int kVec>
__global__ void __launch_bounds__(kSelectThreads, 1)
    sample_filtered(const SampleFilteredArgs<T> args) {
  __shared__ Bins bins;
  const int row = static_cast<int>(blockIdx.x), n = args.n;
  const T* logits = args.logits + static_cast<i64>(row) * n;

  // The largest logit, of this thread and of the row
  u32 highest = 0;
  bool nan = false;
  visit_row<kVec>(logits, n, [&](int, float logit) {
    const u32 order = order_of(logit);
    nan = nan || order == 0;
    highest = max(highest, order);
  });
  const u64 top_rank =
      block_max<kSelectThreads>(nan ? kRankOfNan : rank_of(highest, 0), bins.partial);
  const u32 top_order = static_cast<u32>(top_rank >> 32);
  if (top_rank == kRankOfNan || top_order <= kOrderOfMinusInfinity) {
    if (threadIdx.x == 0) args.ids[row] = -1;
    return;
  }
  const float top = value_of(top_order);

  // top-k. The k-th of the threads' largest logits bounds the k-th of the row from below, which
  // spares most logits their place in the bins.
  Cut cut{0, 0};
  if (args.top_k < n) {
    const u64 k = args.top_k;
    const auto constant = [=](u64) { return k; };
    u64 left;
    bins.clear();
    if (highest) bins.add(highest >> 21, 1);
    const int bin = bins.find(constant, left);
    const u32 floor = bin < 0 ? 0 : static_cast<u32>(bin) << 21;
    const auto one = [](float) { return 1ull; };
    cut = raise<kVec>(logits, n, cut, floor, bins, one, constant);
  }

  // top-p, of the mass that top-k left
  const auto probability = [&](float logit) {
    return relative_probability(logit, top, args.inverse_temperature);
  };
  if (args.share >> 32 == 0) {
    const auto mass = [&](float logit) {
      return static_cast<u64>(probability(logit) * args.mass_scale);
    };
    const u64 share = args.share;
    const auto share_of = [=](u64 total) {
      return (total >> 32) * share + (((total & 0xffffffffu) * share + 0xffffffffu) >> 32);
    };
    cut = raise<kVec>(logits, n, cut, 0, bins, mass, share_of);
  }
  const int last = cut.ties ? last_tie<kVec>(logits, n, cut, bins) : -1;

  // The draw, with min-p
  const HashKey key = draw_key(args.seed, args.steps, args.step, row);
  u64 best = 0;
  visit_row<kVec>(logits, n, [&](int i, float logit) {
    const u32 order = order_of(logit);
    if (order < cut.order || (order == cut.order && i > last)) return;
    if (order <= kOrderOfMinusInfinity || probability(logit) < args.min_p) return;
    best = max(best, draw_rank(logit, i, args.inverse_temperature, key));
  });
  best = block_max<kSelectThreads>(best, bins.partial);
  if (threadIdx.x == 0) args.ids[row] = id_of(best);
}

}  // namespace cufuse
