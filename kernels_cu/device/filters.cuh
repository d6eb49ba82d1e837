// Top-k, top-p and min-p over a row of logits, then the draw. The cuts are found by radix
// selection, counts and probability masses being whole numbers, so what is kept does not depend on
// how many threads look for it or in which order they add.
#pragma once

#include "device/sampling.cuh"
#include "device/vec.cuh"

namespace cufuse {

// As cufuse/ops/sample.py says them to a kernel.
struct Filters {
  u64 share;  // top_p in units of 2^-32; 2^32 for no top-p
  int top_k;  // the length of the row for no top-k
  float inverse_temperature;
  float min_p;
  float mass_scale;  // the mass of probability 1
};

constexpr int log2_of(int n) { return n > 1 ? 1 + log2_of(n / 2) : 0; }

// 64-bit sums as two words: shared memory adds words at once, but 64 bits only by trying.
template <int kThreads>
struct Bins {
  static constexpr int kCount = 2 * kThreads;  // a thread looks after two
  static constexpr int kBits = log2_of(kCount);
  static_assert(kCount == 1 << kBits && kThreads <= 1024, "a bin for each value of a digit");
  u32 low[kCount], high[kCount];
  u64 partial[kThreads / 32];
  u64 left;
  int found, last;
};

// Bins in shared memory and the threads that fill them together. `Team` tells which: kThreads of
// them, index() of this one, from 0, and sync(), a barrier of theirs alone.
template <typename Team>
struct Selection {
  static constexpr int kThreads = Team::kThreads;
  using Bins = cufuse::Bins<kThreads>;
  static constexpr int kBins = Bins::kCount, kBinBits = Bins::kBits;
  Bins& bins;

  // The largest rank of all threads, to each of them.
  CUFUSE_DEVICE u64 largest(u64 rank) const {
    const int lane = Team::index() % 32;
    rank = warp_max(rank);
    if (lane == 0) bins.partial[Team::index() / 32] = rank;
    Team::sync();
    rank = warp_max(lane < kThreads / 32 ? bins.partial[lane] : 0ull);
    Team::sync();
    return rank;
  }

  CUFUSE_DEVICE void clear() const {
    for (int bin = Team::index(); bin < kBins; bin += kThreads) bins.low[bin] = bins.high[bin] = 0;
    Team::sync();
  }

  CUFUSE_DEVICE void add(u32 bin, u64 amount) const {
    const u32 word = static_cast<u32>(amount);
    const u32 old = atomicAdd(&bins.low[bin], word);
    const u32 upper = static_cast<u32>(amount >> 32) + (old + word < old ? 1u : 0u);
    if (upper) atomicAdd(&bins.high[bin], upper);
  }

  // The bin in which the sum from the last bin downwards reaches wanted(total); `left` is what that
  // bin has to bring. -1 if it is never reached. Comes after and before a barrier of its own.
  template <typename Wanted>
  CUFUSE_DEVICE int find(Wanted wanted_of, u64& wanted) const {
    Team::sync();
    const int lane = Team::index() % 32, warp = Team::index() / 32;
    const int bin = kBins - 1 - 2 * Team::index();
    const u64 first = sum_of(bin);
    const u64 both = first + sum_of(bin - 1);
    u64 through = both;  // the sum of this warp's bins, this thread's included
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const u64 other = __shfl_up_sync(kFullMask, through, offset);
      if (lane >= offset) through += other;
    }
    if (lane == 31) bins.partial[warp] = through;
    if (Team::index() == 0) bins.found = -1;
    Team::sync();
    u64 total = 0, before = through - both;
    for (int w = 0; w < kThreads / 32; ++w) {
      if (w < warp) before += bins.partial[w];
      total += bins.partial[w];
    }
    wanted = wanted_of(total);
    if (before < wanted && wanted <= before + both) {
      const bool second = wanted > before + first;
      bins.found = bin - (second ? 1 : 0);
      bins.left = wanted - before - (second ? first : 0);
    }
    Team::sync();
    wanted = bins.left;
    return bins.found;
  }

 private:
  CUFUSE_DEVICE u64 sum_of(int bin) const {
    return static_cast<u64>(bins.high[bin]) << 32 | bins.low[bin];
  }
};

// What is kept of a row: orders above `order`, and of those equal to it the first `ties`.
struct Cut {
  u32 order;
  u64 ties;
};

// Rows are given as `Row`: T and kN of them or n(), at(i), and visit<Team>(floor, f), which calls
// f(i, logit) once for each logit of an order of at least `floor`, by any thread, and may do so for
// smaller ones.

// All of a row in memory.
template <typename T_, int kVec>
struct PlainRow {
  using T = T_;
  const T* logits;
  int n;

  CUFUSE_DEVICE float at(int i) const { return to_float(logits[i]); }
  template <typename Team, typename Visit>
  CUFUSE_DEVICE void visit(u32, Visit visit) const {
    for (i64 i = static_cast<i64>(Team::index()) * kVec; i < n; i += Team::kThreads * kVec) {
      const auto group = load_vec<kVec>(logits + i);
#pragma unroll
      for (int j = 0; j < kVec; ++j) visit(static_cast<int>(i) + j, to_float(group.v[j]));
    }
  }
};

// Bits of an order that tell values of T apart; the ones behind them repeat the sign.
template <typename T>
constexpr int kOrderBits = 32;
template <>
constexpr int kOrderBits<half> = 19;
template <>
constexpr int kOrderBits<bfloat16> = 16;

// Move the cut up until the amounts of what it keeps just reach wanted_of(their sum): a radix
// selection, a digit of the order at a time. Orders below `floor` are known not to matter, also to
// the sum. Those below `likely` count in the sum but not in the bins, where many threads would wait
// for each other; should one of them be kept after all, the first digit is done again.
template <typename Team, typename Row, typename Amount, typename Wanted>
CUFUSE_DEVICE Cut raise(const Row& row,
                        Cut cut,
                        u32 floor,
                        u32 likely,
                        Selection<Team> selection,
                        Amount amount,
                        Wanted wanted_of) {
  constexpr int kDigit = Selection<Team>::kBinBits;
  constexpr int kBinOfRest = 0;  // of NaN's order, which no row has here
  constexpr int kDigits = (kOrderBits<typename Row::T> + kDigit - 1) / kDigit;
  u32 prefix = 0;
  u64 wanted = 0;
  int digit = 0;
#pragma unroll 1
  while (digit < kDigits) {
    const int above = 32 - digit * kDigit;  // bits of this digit and of those behind it
    const int shift = max(above - kDigit, 0);
    const u32 mask = (1u << (above - shift)) - 1;
    const auto matches = [&](u32 order) { return digit == 0 || order >> above == prefix; };
    const u32 lowest = max(max(floor, cut.order), digit == 0 ? 0u : prefix << above);
    u64 rest = 0;
    selection.clear();
    row.template visit<Team>(lowest, [&](int, float logit) {
      const u32 order = order_of(logit);
      if (order <= cut.order || order < floor || !matches(order)) return;
      if (order < likely) {
        rest += amount(logit);
      } else {
        selection.add(order >> shift & mask, amount(logit));
      }
    });
    if (Team::index() == 0 && cut.ties && matches(cut.order)) {
      const u64 ties = cut.ties * amount(value_of(cut.order));
      if (cut.order < likely) {
        rest += ties;
      } else {
        selection.add(cut.order >> shift & mask, ties);
      }
    }
    if (digit == 0 && rest) selection.add(kBinOfRest, rest);
    const u64 so_far = wanted;
    const int bin = digit == 0 ? selection.find(wanted_of, wanted)
                               : selection.find([=](u64) { return so_far; }, wanted);
    if (digit == 0 && bin == kBinOfRest && likely > 0) {
      likely = 0;
      continue;
    }
    prefix = prefix << (above - shift) | static_cast<u32>(bin);
    ++digit;
  }
  constexpr int kRest = 32 - kDigits * kDigit;
  if constexpr (kRest > 0) {
    prefix = prefix << kRest | (prefix >> (31 - kRest) ? 0u : (1u << kRest) - 1);
  }
  const u64 each = max(amount(value_of(prefix)), 1ull);  // 0 only when the logits are overwritten
  return {prefix, (wanted + each - 1) / each};
}

// The last id that a cut keeps of those equal to it.
template <typename Team, typename Row>
CUFUSE_DEVICE int last_tie(const Row& row, Cut cut, Selection<Team> selection) {
  constexpr int kBins = Selection<Team>::kBins;
  int shift = 0;
  while ((row.n - 1) >> shift >= kBins) ++shift;
  selection.clear();
  row.template visit<Team>(cut.order, [&](int i, float logit) {
    if (order_of(logit) == cut.order) selection.add(kBins - 1 - (i >> shift), 1);
  });
  u64 left;
  const int bin = selection.find([=](u64) { return cut.ties; }, left);
  const int begin = (kBins - 1 - bin) << shift;
  // One warp goes through the bin's ids in order.
  if (Team::index() < 32) {
    const int lane = Team::index();
    for (int base = 0; base < 1 << shift; base += 32) {
      const int i = begin + base + lane;
      const bool equal = base + lane < 1 << shift && i < row.n && order_of(row.at(i)) == cut.order;
      const u32 votes = __ballot_sync(kFullMask, equal);
      const u32 rank = __popc(votes & ((2u << lane) - 1));
      if (equal && rank == left) selection.bins.last = i;
      const u32 count = __popc(votes);
      if (left <= count) break;
      left -= count;
    }
  }
  Team::sync();
  return selection.bins.last;
}

// An order below which no logit has min_p times the probability of the top one: logarithms are of
// the power of 2 below min_p, and a little less.
CUFUSE_DEVICE u32 floor_of(float min_p, float top, float inverse_temperature) {
  const int exponent = static_cast<int>(__float_as_uint(min_p) >> 23);
  if (exponent == 0) return 0;
  const float log = static_cast<float>(exponent - 127) * 0.69314718f - 0.01f;
  return order_of(top + log / inverse_temperature);
}

// What top-p keeps is likely above e^-kLikely of the top probability.
constexpr float kLikely = 10.0f;

// The largest order of a thread's share of a row: that of NaN is above all others.
constexpr u32 kHighestOfNan = ~0u;

// The id of a row that is drawn, to every thread of the team; -1 when the row holds a NaN or
// nothing above -inf. The row's logits are shared out among threads, and `highest` is the largest
// order of this thread's.
template <typename Team, typename Row>
CUFUSE_DEVICE int draw_filtered(
    const Row& row, u32 highest, const Filters& filters, HashKey key, Bins<Team::kThreads>& bins) {
  const Selection<Team> selection{bins};
  const u64 top_rank = selection.largest(static_cast<u64>(highest) << 32);
  const u32 top_order = static_cast<u32>(top_rank >> 32);
  if (top_order == kHighestOfNan || top_order <= kOrderOfMinusInfinity) return -1;
  const float top = value_of(top_order);

  // top-k. The k-th of the threads' largest logits bounds the k-th of the row from below, which
  // spares most logits their place in the bins.
  Cut cut{0, 0};
  if (filters.top_k < row.n) {
    const u64 k = filters.top_k;
    const auto constant = [=](u64) { return k; };
    constexpr int kShift = 32 - Selection<Team>::kBinBits;
    u64 left;
    selection.clear();
    if (highest) selection.add(highest >> kShift, 1);
    const int bin = selection.find(constant, left);
    const u32 floor = bin < 0 ? 0 : static_cast<u32>(bin) << kShift;
    const auto one = [](float) { return 1ull; };
    cut = raise(row, cut, floor, 0, selection, one, constant);
  }

  // top-p, of the mass that top-k left
  const auto probability = [&](float logit) {
    return relative_probability(logit, top, filters.inverse_temperature);
  };
  if (filters.share >> 32 == 0) {
    const auto mass = [&](float logit) {
      return static_cast<u64>(probability(logit) * filters.mass_scale);
    };
    const u64 share = filters.share;
    const auto share_of = [=](u64 total) {
      return (total >> 32) * share + (((total & 0xffffffffu) * share + 0xffffffffu) >> 32);
    };
    const u32 likely = order_of(top - kLikely / filters.inverse_temperature);
    cut = raise(row, cut, 0, likely, selection, mass, share_of);
  }
  const int last = cut.ties ? last_tie(row, cut, selection) : -1;

  // The draw, with min-p
  u64 best = 0;
  const u32 floor = max(cut.order, floor_of(filters.min_p, top, filters.inverse_temperature));
  row.template visit<Team>(floor, [&](int i, float logit) {
    const u32 order = order_of(logit);
    if (order < cut.order || (order == cut.order && i > last)) return;
    if (order <= kOrderOfMinusInfinity || probability(logit) < filters.min_p) return;
    best = max(best, draw_rank(logit, i, filters.inverse_temperature, key));
  });
  return id_of(selection.largest(best));
}

}  // namespace cufuse
