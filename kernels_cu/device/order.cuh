// Floats as whole numbers: maxima and selections with integer arithmetic, exact in any order.
#pragma once

#include "device/hw.cuh"

namespace cufuse {

// A word that orders floats as numbers do: NaN first, then -inf upwards; -0 is 0. No comparison of
// floats takes part, for those count denormals as 0.
CUFUSE_DEVICE u32 order_of(float v) {
  u32 bits = __float_as_uint(v);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0;
  if (bits == 0x80000000u) bits = 0;
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

CUFUSE_DEVICE float value_of(u32 order) {
  if (order == 0) return __uint_as_float(0x7fc00000u);
  return __uint_as_float(order & 0x80000000u ? order & 0x7fffffffu : ~order);
}

constexpr u32 kOrderOfMinusInfinity = 0x007fffffu;

// A value and its place in one word: the larger value is larger, of equal ones the lower id.
CUFUSE_DEVICE u64 rank_of(u32 order, int id) {
  return static_cast<u64>(order) << 32 | ~static_cast<u32>(id);
}
CUFUSE_DEVICE u64 rank_of(float v, int id) { return rank_of(order_of(v), id); }
CUFUSE_DEVICE int id_of(u64 rank) { return static_cast<int>(~static_cast<u32>(rank)); }
CUFUSE_DEVICE float value_of(u64 rank) { return value_of(static_cast<u32>(rank >> 32)); }

CUFUSE_DEVICE u64 warp_max(u64 rank) {
  const u32 high = static_cast<u32>(rank >> 32);
  const u32 top = __reduce_max_sync(kFullMask, high);
  const u32 low = __reduce_max_sync(kFullMask, high == top ? static_cast<u32>(rank) : 0u);
  return static_cast<u64>(top) << 32 | low;
}

// The largest rank of a CTA, to every thread; `partial` holds a word for each warp and may be used
// again at once.
template <int kThreads>
CUFUSE_DEVICE u64 block_max(u64 rank, u64* partial) {
  static_assert(kThreads % 32 == 0 && kThreads <= 1024, "a CTA is made of whole warps");
  const int lane = threadIdx.x % 32;
  rank = warp_max(rank);
  if (lane == 0) partial[threadIdx.x / 32] = rank;
  __syncthreads();
  rank = warp_max(lane < kThreads / 32 ? partial[lane] : 0ull);
  __syncthreads();
  return rank;
}

constexpr u64 kRankOfNan = ~0ull;  // above the rank of every number

// What the CTAs that share a row have found so far. All zeros between launches.
struct BestOfRow {
  u64 rank;
  u32 arrived;
  u32 unused;
};

// The id of the best rank that the `splits` CTAs of a row bring; the last one to arrive writes it
// and leaves zeros behind. -1 when a rank is that of NaN, or when there is none at all. `rank` is
// the CTA's; one thread calls.
CUFUSE_DEVICE void write_best(u64 rank, int splits, BestOfRow* best, int* id) {
  if (splits > 1) {
    atomicMax(&best->rank, rank);
    if (add_acq_rel(&best->arrived, 1) + 1 != static_cast<u32>(splits)) return;
    rank = atomicExch(&best->rank, 0ull);
    best->arrived = 0;
  }
  *id = rank == 0 || rank == kRankOfNan ? -1 : id_of(rank);
}

}  // namespace cufuse
