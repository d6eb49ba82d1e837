// The experts a token goes to: the best k of its router's choices, their weights, their order.
#pragma once

#include "device/activation.cuh"
#include "device/order.cuh"
#include "device/reduce.cuh"

namespace cufuse {

// Values that are chosen from, as words: order_of, with 1 for NaN, so that 0 is left for a value
// that cannot be chosen.
CUFUSE_DEVICE u32 choice_of(float v) { return max(order_of(v), 1u); }

// The largest rank below `bound` among every 32nd of n words from `lane` on; 0 when there is none.
template <typename Word>
CUFUSE_DEVICE u64 best_below(u64 bound, int n, int lane, Word word) {
  u64 best = 0;
  for (int i = lane; i < n; i += 32) {
    const u64 rank = rank_of(word(i), i);
    if (rank < bound && rank > best) best = rank;
  }
  return best;
}

// One warp: n words come in equal groups, and a group's score is its best value, or the sum of its
// best two. Writes the groups' scores, as words [groups], and returns the rank of the worst of the
// top_groups best groups. A lane may read the scores that it wrote; others after __syncwarp.
template <typename Word>
CUFUSE_DEVICE u64
worst_top_group(int n, int groups, int top_groups, bool best_two, u32* scores, Word word) {
  const int lane = threadIdx.x % 32, size = n / groups;
  for (int g = lane; g < groups; g += 32) {
    u32 first = 0, second = 0;
    for (int i = g * size; i < (g + 1) * size; ++i) {
      const u32 next = word(i);
      second = max(second, min(first, next));
      first = max(first, next);
    }
    const bool both = best_two && size > 1;
    scores[g] = both ? choice_of(value_of(first) + value_of(second)) : first;
  }
  u64 top = ~0ull;
  for (int r = 0; r < top_groups; ++r) {
    top = warp_max(best_below(top, groups, lane, [&](int g) { return scores[g]; }));
  }
  return top;
}

// How a router's logits become weights.
struct Routing {
  const float* correction;  // [n_experts]; added to sigmoids for the choice alone; may be null
  int n_experts;
  int k;
  int groups;        // experts are chosen from the best `top_groups` of so many; a group's score is
  int top_groups;    // its best logit, or the sum of its two best sigmoids
  float scale;       // multiplies the weights
  bool sigmoid;      // of each logit; else exp(logit - max)
  bool over_all;     // divide by the sum over all experts
  bool over_chosen;  // divide by the sum over the k chosen
};

// Words of shared memory that a row takes.
CUFUSE_DEVICE int route_words(const Routing& r) { return r.n_experts + r.k + r.groups; }

// One warp: the ids of the k best of a token's experts, best first, and their weights. `shared` has
// route_words; `logits` may be in global memory.
CUFUSE_DEVICE void route_row(
    const Routing& routing, const float* logits, u32* shared, int* ids, float* weights) {
  const int lane = threadIdx.x % 32, n = routing.n_experts, k = routing.k;
  u32* words = shared;                                      // [n]
  float* numerators = reinterpret_cast<float*>(words + n);  // [k]; a lane reads what it wrote
  for (int i = lane; i < n; i += 32) {
    float choice = logits[i];
    if (routing.sigmoid) choice = sigmoid(choice);
    if (routing.correction) choice += routing.correction[i];
    words[i] = choice_of(choice);
  }
  auto word = [&](int i) { return words[i]; };
  u64 best = best_below(~0ull, n, lane, word);
  u64 top = warp_max(best);
  const float max = value_of(top);
  float sum_all = 0.0f;
  if (routing.over_all) {
    for (int i = lane; i < n; i += 32) sum_all += expf(value_of(words[i]) - max);
    sum_all = warp_sum(sum_all);
  }

  if (routing.groups > 1) {
    u32* scores = words + n + k;  // [groups]
    __syncwarp();
    const u64 worst =
        worst_top_group(n, routing.groups, routing.top_groups, routing.sigmoid, scores, word);
    __syncwarp();
    const int size = n / routing.groups;
    for (int i = lane; i < n; i += 32) {
      const int group = i / size;
      if (rank_of(scores[group], group) < worst) words[i] = 0;
    }
    best = best_below(~0ull, n, lane, word);
    top = warp_max(best);
  }

  float sum = 0.0f;
  for (int r = 0; r < k; ++r) {
    const float numerator =
        routing.sigmoid ? sigmoid(logits[id_of(top)]) : expf(value_of(top) - max);
    if (lane == r % 32) {
      ids[r] = id_of(top);
      numerators[r] = numerator;
    }
    sum += numerator;
    if (best == top) best = best_below(top, n, lane, word);
    top = warp_max(best);
  }
  // All sigmoids may be 0; a sum of exponentials takes no notice of 1e-20.
  const float divisor = routing.over_all ? sum_all : routing.over_chosen ? sum + 1e-20f : 1.0f;
  for (int r = lane; r < k; r += 32) weights[r] = numerators[r] / divisor * routing.scale;
}

// The k experts of a token in ascending order of their ids; of equal ones the first slot comes
// first. `order` [k] is in shared memory. Returns whether all ids are experts.
template <int kThreads>
CUFUSE_DEVICE bool sort_slots(const int* ids, int k, int n_experts, int* order) {
  bool valid = true;
  for (int j = threadIdx.x; j < k; j += kThreads) {
    const int id = ids[j];
    valid = valid && static_cast<u32>(id) < static_cast<u32>(n_experts);
    int rank = 0;
    for (int i = 0; i < k; ++i) rank += ids[i] < id || (ids[i] == id && i < j);
    order[rank] = j;
  }
  return __syncthreads_and(valid);
}

}  // namespace cufuse
