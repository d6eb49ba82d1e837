// Small kernels for tests/test_twin_faults.py. Each is right as it stands; a fault is planted by
// replacing one line.
#include "device/hw.cuh"

namespace cufuse {

struct ExchangeArgs {
  const float* x;  // [block]
  float* y;        // [block]
  u32* flag;       // [1]
};

// y = x reversed, through dynamic shared memory.
__global__ void reverse(const ExchangeArgs args) {
  float* row = dynamic_shared<float>();
  const u32 i = threadIdx.x;
  row[i] = args.x[i];
  __syncthreads();  // written
  args.y[i] = row[blockDim.x - 1 - i];
}

// The same within each warp.
__global__ void reverse_warp(const ExchangeArgs args) {
  float* row = dynamic_shared<float>() + threadIdx.x / 32 * 32;
  const u32 lane = threadIdx.x % 32;
  row[lane] = args.x[threadIdx.x];
  __syncwarp();  // written
  args.y[threadIdx.x] = row[31 - lane];
}

// The same for 16 bytes a thread, by copies that land late.
__global__ void reverse_copied(const ExchangeArgs args) {
  float* row = dynamic_shared<float>();
  const u32 i = threadIdx.x;
  copy_async(row + i * 4, args.x + i * 4, 16);
  copy_async_commit();
  copy_async_wait<0>();
  __syncthreads();
  for (u32 j = 0; j < 4; ++j) args.y[i * 4 + j] = row[(blockDim.x - i) * 4 - 1 - j];
}

// y[0] = sum of x over a warp.
__global__ void sum_warp(const ExchangeArgs args) {
  float sum = args.x[threadIdx.x];
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(kFullMask, sum, step);
  args.y[threadIdx.x] = sum;
}

// Every CTA waits for all; the last one's threads then write.
__global__ void meet(const ExchangeArgs args) {
  if (threadIdx.x == 0) {
    add_acq_rel(args.flag, 1);
    while (load_acquire(args.flag) < gridDim.x) {
    }
  }
  __syncthreads();  // all CTAs came
  if (blockIdx.x == 0) args.y[threadIdx.x] = args.x[threadIdx.x];
}

// y = x in steps of 256 floats through two stages: a producer warp copies, the others read.
__global__ void pipeline(const ExchangeArgs args) {
  float* stages = dynamic_shared<float>();  // [2, 256]
  u64* full = reinterpret_cast<u64*>(stages + 512);
  u64* empty = full + 2;
  const u32 warp = threadIdx.x / 32;
  const u32 lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (u32 s = 0; s < 2; ++s) {
      mbarrier_init(full + s, 1);
      mbarrier_init(empty + s, 2);
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  for (u32 step = 0; step < 8; ++step) {
    const u32 s = step % 2;
    const u32 parity = step / 2 % 2;
    float* stage = stages + s * 256;
    if (warp == 0) {
      if (lane == 0) {
        if (step >= 2) mbarrier_wait(empty + s, parity ^ 1);
        mbarrier_arrive_expect_tx(full + s, 1024);
        copy_bulk(stage, args.x + step * 256, 1024, full + s);
      }
    } else {
      mbarrier_wait(full + s, parity);
      for (u32 i = threadIdx.x - 32; i < 256; i += 64) args.y[step * 256 + i] = stage[i];
      __syncwarp();
      if (lane == 0) mbarrier_arrive(empty + s);
    }
  }
}

}  // namespace cufuse
