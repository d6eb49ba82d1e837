// The experts a token goes to: the k largest of its router logits, and their weights.
#pragma once

#include "device/reduce.cuh"

namespace cufuse {

// A word that orders floats as numbers do: NaN first, then -inf upwards; -0 is 0.
CUFUSE_DEVICE u32 order_of(float v) {
  if (v != v) return 0;
  const u32 bits = __float_as_uint(v == 0.0f ? 0.0f : v);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

CUFUSE_DEVICE float value_of(u32 order) {
  if (order == 0) return __uint_as_float(0x7fc00000u);
  return __uint_as_float(order & 0x80000000u ? order & 0x7fffffffu : ~order);
}

// A value and its place in one word: the larger value is larger, of equal ones the lower id.
CUFUSE_DEVICE u64 rank_of(float v, int id) {
  return static_cast<u64>(order_of(v)) << 32 | ~static_cast<u32>(id);
}
CUFUSE_DEVICE int id_of(u64 rank) { return static_cast<int>(~static_cast<u32>(rank)); }
CUFUSE_DEVICE float value_of(u64 rank) { return value_of(static_cast<u32>(rank >> 32)); }

CUFUSE_DEVICE u64 warp_max(u64 rank) {
  const u32 high = static_cast<u32>(rank >> 32);
  const u32 top = __reduce_max_sync(kFullMask, high);
  const u32 low = __reduce_max_sync(kFullMask, high == top ? static_cast<u32>(rank) : 0u);
  return static_cast<u64>(top) << 32 | low;
}

// The largest rank below `bound` among every 32nd of n values from `lane` on; 0 when there is none.
CUFUSE_DEVICE u64 best_below(u64 bound, const float* values, int n, int lane) {
  u64 best = 0;
  for (int i = lane; i < n; i += 32) {
    const u64 rank = rank_of(values[i], i);
    if (rank < bound && rank > best) best = rank;
  }
  return best;
}

// One warp: the ids of the k largest of n logits and exp(logit - max) / sum, where the sum runs
// over all n logits or over the k chosen. `shared` holds n + k floats.
CUFUSE_DEVICE void route_row(
    const float* logits, int n, int k, bool over_all, float* shared, i32* ids, float* weights) {
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

}  // namespace cufuse
