// v[c] = sum of all v, times 3, plus c, once a step; a last CTA listens and adds up the sums.
// Values travel as words with the step's number, in four slots by step. A slot is free again when
// everybody has read it, which a CTA knows of those whose later words it has read: so the listener
// has to say something too, although nobody needs it.
// instantiate: slots
// needs: 80
#include "device/hw.cuh"

namespace cufuse {

constexpr u32 kSlots = 4;

struct SlotsArgs {
  u64* words;  // [kSlots, ctas]; value below, step above; zeroed
  u32* out;    // [ctas]
  int steps;
};

// 32 threads; at most 32 CTAs, all resident.
__global__ void slots(const SlotsArgs args) {
  const u32 lane = threadIdx.x;
  const bool listens = blockIdx.x == gridDim.x - 1;
  const u32 awaited = gridDim.x;
  u32 value = blockIdx.x + 1;
  for (u32 step = 1; step <= static_cast<u32>(args.steps); ++step) {
    u64* slot = args.words + step % kSlots * gridDim.x;
    if (lane == 0) {
      store_word<Order::relaxed>(slot + blockIdx.x, static_cast<u64>(step) << 32 | value);
    }
    u64 word = 0;
    if (lane < (listens ? gridDim.x - 1 : awaited)) {
      do {
        word = load_word<Order::relaxed>(slot + lane);
      } while (word >> 32 != step);
    }
    u32 sum = lane < gridDim.x - 1 ? static_cast<u32>(word) : 0;
    for (int offset = 16; offset > 0; offset /= 2) {
      sum += __shfl_xor_sync(kFullMask, sum, offset);
    }
    value = listens ? value + sum : sum * 3 + blockIdx.x;
  }
  if (lane == 0) args.out[blockIdx.x] = value;
}

}  // namespace cufuse
