// Sums and maxima over a warp and over a CTA, in an order that depends on the thread count alone.
#pragma once

#include "device/hw.cuh"

namespace cufuse {

// The sum over each kLanes neighbouring lanes, kLanes a power of two, given to each of them.
template <int kLanes>
CUFUSE_DEVICE float lanes_sum(float v) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    v += __shfl_xor_sync(kFullMask, v, offset);
  }
  return v;
}

CUFUSE_DEVICE float warp_sum(float v) { return lanes_sum<32>(v); }

CUFUSE_DEVICE float warp_max(float v) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    v = fmaxf(v, __shfl_xor_sync(kFullMask, v, offset));
  }
  return v;
}

// The sum over all kThreads threads, given to each of them. `partial` holds kThreads / 32 floats of
// shared memory and may be used again at once.
template <int kThreads>
CUFUSE_DEVICE float block_sum(float v, float* partial) {
  static_assert(kThreads % 32 == 0, "a CTA is made of whole warps");
  constexpr int kWarps = kThreads / 32;
  v = warp_sum(v);
  if (kWarps == 1) return v;
  const int lane = threadIdx.x % 32;
  if (lane == 0) partial[threadIdx.x / 32] = v;
  __syncthreads();
  float sum = 0.0f;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) sum += partial[warp];
  __syncthreads();
  return sum;
}

template <int kThreads>
CUFUSE_DEVICE float block_max(float v, float* partial) {
  static_assert(kThreads % 32 == 0, "a CTA is made of whole warps");
  constexpr int kWarps = kThreads / 32;
  v = warp_max(v);
  if (kWarps == 1) return v;
  const int lane = threadIdx.x % 32;
  if (lane == 0) partial[threadIdx.x / 32] = v;
  __syncthreads();
  float max = partial[0];
#pragma unroll
  for (int warp = 1; warp < kWarps; ++warp) max = fmaxf(max, partial[warp]);
  __syncthreads();
  return max;
}

}  // namespace cufuse
