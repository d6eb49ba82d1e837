// out[step, j] = in[step, j] reversed within the row: two warps write rows into shared memory, two
// others read them; named barriers hand the one buffer to and fro.
// instantiate: groups
// needs: 80
#include "device/hw.cuh"

namespace cufuse {

struct GroupsArgs {
  const u32* in;  // [steps, 64]
  u32* out;       // [steps, 64]
  int steps;
};

// 128 threads.
__global__ void groups(const GroupsArgs args) {
  u32* row = dynamic_shared<u32>();  // [64]
  constexpr u32 kFilled = 1;
  constexpr u32 kFree = 2;
  const int j = threadIdx.x % 64;
  if (threadIdx.x < 64) {
    for (int step = 0; step < args.steps; ++step) {
      if (step > 0) barrier_sync(kFree, 128);
      row[j] = args.in[step * 64 + j];
      barrier_arrive(kFilled, 128);
    }
  } else {
    for (int step = 0; step < args.steps; ++step) {
      barrier_sync(kFilled, 128);
      args.out[step * 64 + j] = row[63 - j];
      if (step + 1 < args.steps) barrier_arrive(kFree, 128);
    }
  }
}

}  // namespace cufuse
