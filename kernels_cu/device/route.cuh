// The experts a token goes to: the k largest of its router logits, their weights, their order.
#pragma once

#include "device/order.cuh"
#include "device/reduce.cuh"

namespace cufuse {

// The largest rank below `bound` among every 32nd of n values from `lane` on; 0 when there is none.
template <typename T>
CUFUSE_DEVICE u64 best_below(u64 bound, const T* values, int n, int lane) {
  u64 best = 0;
  for (int i = lane; i < n; i += 32) {
    const u64 rank = rank_of(to_float(values[i]), i);
    if (rank < bound && rank > best) best = rank;
  }
  return best;
}

// One warp: the ids of the k largest of n logits and exp(logit - max) / sum, where the sum runs
// over all n logits or over the k chosen. `shared` holds n + k floats.
CUFUSE_DEVICE void route_row(
    const float* logits, int n, int k, bool over_all, float* shared, int* ids, float* weights) {
  const int lane = threadIdx.x % 32;
  float* values = shared;          // [n]; a lane touches only what it wrote itself
  float* numerators = values + n;  // [k]; likewise
  for (int i = lane; i < n; i += 32) values[i] = logits[i];
  u64 best = best_below(~0ull, values, n, lane);
  u64 top = warp_max(best);
  const float max = value_of(top);
  float sum = 0.0f;
  for (int r = 0; r < k; ++r) {
    const float numerator = expf(value_of(top) - max);
    if (lane == r % 32) {
      ids[r] = id_of(top);
      numerators[r] = numerator;
    }
    sum += numerator;
    if (best == top) best = best_below(top, values, n, lane);
    top = warp_max(best);
  }
  if (over_all) {
    sum = 0.0f;
    for (int i = lane; i < n; i += 32) sum += expf(values[i] - max);
    sum = warp_sum(sum);
  }
  for (int r = lane; r < k; r += 32) weights[r] = numerators[r] / sum;
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
