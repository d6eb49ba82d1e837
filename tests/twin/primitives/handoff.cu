// A value of each CTA goes through `steps` rounds: v[c] = sum over all CTAs of v, times 3, plus c.
// No barrier: each word carries its step's number beside the value. Two slots of words are enough,
// because a CTA that writes step s + 2 has read every word of step s + 1, whose writers had all
// read step s.
// instantiate: handoff
// needs: 80
#include "device/hw.cuh"

namespace cufuse {

struct HandoffArgs {
  u64* words;  // [2, 64]; value below, step above; zeroed
  u32* out;    // [n_ctas]
  u32* order;  // [n_ctas + 1]; a counter, then who ended at which place
  int steps;
};

// 32 threads; the grid is an even number of CTAs, at most 64, all resident.
__global__ void handoff(const HandoffArgs args) {
  const int lane = threadIdx.x;
  const int n_pairs = gridDim.x / 2;
  u32 value = blockIdx.x + 1;
  for (int step = 1; step <= args.steps; ++step) {
    u64* slot = args.words + (step % 2) * 64;
    if (lane == 0) {
      store_word<Order::relaxed>(slot + blockIdx.x, static_cast<u64>(step) << 32 | value);
    }
    u32 sum = 0;
    if (lane < n_pairs) {
      ulonglong2 pair;
      do {
        pair = load_word<Order::relaxed>(reinterpret_cast<const ulonglong2*>(slot) + lane);
      } while (pair.x >> 32 != step || pair.y >> 32 != step);
      sum = static_cast<u32>(pair.x) + static_cast<u32>(pair.y);
    }
    for (int offset = 16; offset > 0; offset /= 2) {
      sum += __shfl_xor_sync(kFullMask, sum, offset);
    }
    value = sum * 3 + blockIdx.x;
  }
  if (lane == 0) {
    args.out[blockIdx.x] = value;
    const u32 place = atomic_add<Order::acq_rel, Scope::sys>(args.order, 1);
    store_word<Order::release, Scope::sys>(args.order + 1 + place, blockIdx.x);
  }
}

}  // namespace cufuse
