// Eight warps change one word of shared memory in turns, each waiting for the mbarrier before its
// own; then everybody sees that a phase that never comes can be given up. Atomics count along.
// instantiate: turns
// needs: 80
#include "device/hw.cuh"

namespace cufuse {

struct TurnsArgs {
  u32* out;   // [4]; sum, given up, exchanged, compared and exchanged
  u64* wide;  // [3]; sum, exchanged, compared and exchanged
};

__global__ void turns(const TurnsArgs args) {
  u64* turns = dynamic_shared<u64>();  // [8]
  u32* sum = reinterpret_cast<u32*>(turns + 8);
  const u32 warp = threadIdx.x / 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < 8; ++i) mbarrier_init(turns + i, 32);
    fence_mbarrier_init();
    *sum = 1;
  }
  __syncthreads();
  constexpr u32 kRounds = 3;
  for (u32 round = 0; round < kRounds; ++round) {
    if (warp > 0) mbarrier_wait(turns + warp - 1, round & 1);
    if (warp == 0 && round > 0) mbarrier_wait(turns + 7, (round - 1) & 1);
    if (threadIdx.x % 32 == 0) *sum = *sum * 3 + warp;
    __syncwarp();
    mbarrier_arrive(turns + warp);
  }
  while (!mbarrier_test_wait(turns + 7, (kRounds - 1) & 1)) {
  }
  if (threadIdx.x == 0) args.out[0] = *sum;
  if (!mbarrier_wait_bounded(turns, kRounds & 1, 5)) {
    atomic_add<Order::relaxed>(args.out + 1, 1);
    atomic_add<Order::release>(args.wide, static_cast<u64>(1) << 33);
  }
  if (threadIdx.x == 0) {
    args.out[2] = atomic_exchange<Order::acquire>(args.out + 2, 7);
    args.out[3] = atomic_compare_exchange<Order::acq_rel>(args.out + 3, 5, 6);
    args.wide[1] = atomic_exchange<Order::relaxed, Scope::sys>(args.wide + 1, 7);
    args.wide[2] = atomic_compare_exchange<Order::acq_rel, Scope::sys>(args.wide + 2, 5, 6);
  }
}

}  // namespace cufuse
