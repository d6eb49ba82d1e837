// out[i] = x[i] through two stages of 16-byte copies, where a thread reads what its neighbour
// copied.
// instantiate: copies
// needs: 80
#include "device/hw.cuh"

namespace cufuse {

struct CopiesArgs {
  const uint4* x;  // [rounds, threads]
  uint4* out;      // [rounds, threads]; each row's threads shifted by one
  int rounds;
};

__global__ void copies(const CopiesArgs args) {
  uint4* stages = dynamic_shared<uint4>();  // [2, threads]
  const int thread = threadIdx.x;
  const int threads = blockDim.x;
  copy_async(stages + thread, args.x + thread, 16);
  copy_async_commit();
  for (int round = 0; round < args.rounds; ++round) {
    if (round + 1 < args.rounds) {
      const int next = round + 1;
      copy_async(stages + next % 2 * threads + thread, args.x + next * threads + thread, 16);
    }
    copy_async_commit();
    copy_async_wait<1>();
    __syncthreads();
    args.out[round * threads + thread] = stages[round % 2 * threads + (thread + 1) % threads];
    __syncthreads();
  }
}

}  // namespace cufuse
