// Which experts a token goes to in a decode step: one warp chooses from logits in its registers.
#pragma once

#include "device/activation.cuh"
#include "device/exchange.cuh"
#include "device/order.cuh"
#include "device/reduce.cuh"

namespace cufuse {

// How experts are weighed: by the softmax over all, the softmax over those chosen, or a sigmoid.
enum class Router { softmax_topk, topk_softmax, sigmoid_topk };

// The MLP of every layer is one.
struct OneMlp {
  static constexpr bool kRoutes = false;
  static constexpr int kTop = 0;
  static constexpr int kExperts = 0;
  static constexpr int kShared = 0;
  static constexpr int kDense = 0;
  static constexpr bool kSharedGated = false;
  static constexpr bool kBiased = true;
  static constexpr bool kFourBits = false;
  static constexpr int kLogits = 0;
};

// Experts of which a router chooses kTop. kShared: width of an MLP that every token goes through,
// kSharedGated with a gate of its own; kDense: width of the one MLP of layers without experts;
// kBiased: experts have biases; kFourBits: and weights of 4 bits (device/mxfp4.cuh).
template <int kExperts_,
          int kTop_,
          Router kRouter_,
          bool kRenormalize_,
          int kGroups_,
          int kTopGroups_,
          bool kCorrects_,
          int kShared_,
          bool kSharedGated_,
          int kDense_,
          bool kBiased_,
          bool kFourBits_ = false>
struct Mixture {
  static constexpr bool kRoutes = true;
  static constexpr int kExperts = kExperts_;
  static constexpr int kTop = kTop_;
  static constexpr Router kRouter = kRouter_;
  static constexpr bool kRenormalize = kRenormalize_;
  static constexpr int kGroups = kGroups_;
  static constexpr int kTopGroups = kTopGroups_;
  static constexpr bool kCorrects = kCorrects_;
  static constexpr int kShared = kShared_;
  static constexpr bool kSharedGated = kSharedGated_;
  static constexpr int kDense = kDense_;
  static constexpr bool kBiased = kBiased_;
  static constexpr bool kFourBits = kFourBits_;
  static constexpr int kLogits = kExperts + (kSharedGated ? 1 : 0);
  static_assert(kTop >= 1 && kTop <= kExperts && kExperts % kGroups == 0, "experts to choose from");
  static_assert(kTopGroups <= kGroups && kTopGroups * (kExperts / kGroups) >= kTop,
                "groups hold enough experts");
  static_assert(!kFourBits || kShared == 0, "what is shared has rows");
};

// What was chosen for a layer, in ascending ids, in shared memory.
template <typename Mlp>
struct Choice {
  u64 made;  // an mbarrier: a phase for each layer of which this CTA asks
  u64 read;  // another: the finisher needs it no more
  int expert[Mlp::kTop > 0 ? Mlp::kTop : 1];
  float weight[Mlp::kTop > 0 ? Mlp::kTop : 1];
};

// Lane l has the logits of experts [l kMine, (l + 1) kMine).
template <typename Mlp>
struct Chooser {
  static constexpr int kMine = (Mlp::kExperts + 31) / 32;
  static_assert(kMine <= 32, "a bit for each");
  float logits[kMine];

  static CUFUSE_DEVICE int expert(int i) { return lane_here() * kMine + i; }
  static CUFUSE_DEVICE bool has(int i) { return expert(i) < Mlp::kExperts; }

  // correction: of each expert, added where it is chosen and not where it is weighed.
  CUFUSE_DEVICE void choose(const float* correction,
                            float routed_scale,
                            Choice<Mlp>& choice) const {
    float score[kMine];
    u32 order[kMine];
    rank(correction, score, order);
    u32 chosen = 0;
    float largest = 0.0f;
#pragma unroll 1
    for (int round = 0; round < Mlp::kTop; ++round) {
      const u32 top = take_largest(order, chosen);
      if (round == 0) largest = value_of(top - 1);
    }
    // Scores of softmax are taken relative to the largest.
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      if constexpr (Mlp::kRouter != Router::sigmoid_topk) score[i] = expf(logits[i] - largest);
      constexpr bool kOverAll = Mlp::kRouter == Router::softmax_topk && !Mlp::kRenormalize;
      if (has(i) && (kOverAll || chosen >> i & 1)) sum += score[i];
    }
    float scale = routed_scale;
    if constexpr (Mlp::kRouter != Router::sigmoid_topk) {
      scale /= warp_sum(sum);
    } else if constexpr (Mlp::kRenormalize) {
      scale /= warp_sum(sum) + 1e-20f;
    }
    const int count = __popc(chosen);
    int slot = count;
#pragma unroll
    for (int apart = 1; apart < 32; apart *= 2) {
      const int before = __shfl_up_sync(kFullMask, slot, apart);
      if (lane_here() >= apart) slot += before;
    }
    slot -= count;
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      if (chosen >> i & 1) {
        choice.expert[slot] = expert(i);
        choice.weight[slot] = score[i] * scale;
        ++slot;
      }
    }
  }

 private:
  // What experts are weighed by, and the order in which they are chosen, above 0; 0: cannot be.
  CUFUSE_DEVICE void rank(const float* correction,
                          float (&score)[kMine],
                          u32 (&order)[kMine]) const {
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      score[i] = Mlp::kRouter == Router::sigmoid_topk ? sigmoid(logits[i]) : logits[i];
      float by = score[i];
      if (Mlp::kCorrects && has(i)) by += correction[expert(i)];
      order[i] = has(i) ? order_of(by) + 1 : 0;
    }
    if constexpr (Mlp::kTopGroups < Mlp::kGroups) keep_groups(order);
  }

  // The largest order of all lanes, whose first holder marks it as taken.
  static CUFUSE_DEVICE u32 take_largest(u32 (&order)[kMine], u32& taken) {
    u32 mine = order[0];
#pragma unroll
    for (int i = 1; i < kMine; ++i) mine = max(mine, order[i]);
    const u32 top = __reduce_max_sync(kFullMask, mine);
    if (lane_here() == __ffs(static_cast<int>(__ballot_sync(kFullMask, mine == top))) - 1) {
      bool found = false;
#pragma unroll
      for (int i = 0; i < kMine; ++i) {
        if (!found && order[i] == top) {
          found = true;
          taken |= 1u << i;
          order[i] = 0;
        }
      }
    }
    return top;
  }

  // Only experts of the kTopGroups best groups can be chosen: by their best, of sigmoids by the sum
  // of their two best; ties to the first group.
  static CUFUSE_DEVICE void keep_groups(u32 (&order)[kMine]) {
    constexpr int kSize = Mlp::kExperts / Mlp::kGroups;
    u32 score[Mlp::kGroups];
#pragma unroll
    for (int group = 0; group < Mlp::kGroups; ++group) {
      u32 of_group[kMine], taken = 0;
#pragma unroll
      for (int i = 0; i < kMine; ++i) {
        of_group[i] = has(i) && expert(i) / kSize == group ? order[i] : 0;
      }
      const u32 best = take_largest(of_group, taken);
      score[group] = best;
      if (Mlp::kRouter == Router::sigmoid_topk && kSize > 1) {
        const u32 second = take_largest(of_group, taken);
        score[group] = order_of(value_of(best - 1) + value_of(second - 1)) + 1;
      }
    }
    u32 kept = 0;
#pragma unroll
    for (int round = 0; round < Mlp::kTopGroups; ++round) {
      u32 best = 0;
      int which = 0;
#pragma unroll
      for (int group = 0; group < Mlp::kGroups; ++group) {
        if (!(kept >> group & 1) && score[group] > best) {
          best = score[group];
          which = group;
        }
      }
      kept |= 1u << which;
    }
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      if (!(kept >> expert(i) / kSize & 1)) order[i] = 0;
    }
  }
};

}  // namespace cufuse
