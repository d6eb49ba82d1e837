// Reads an array and does nothing with it: the speed that a kernel bound by memory can reach on
// this device. A CTA takes chunks of 256 threads x kUnroll vectors of 16 bytes, a grid apart; all
// kUnroll loads of a thread are in flight at once. The words are folded into one that is stored
// only if it equals `never`, so that the loads cannot be left out.
// instantiate: read<4>
// instantiate: read<8>
// instantiate: read<16>
#include "device/hw.cuh"

namespace cufuse {

struct ReadArgs {
  const uint4* data;  // [count]
  u32* sink;          // [1]
  i64 count;          // vectors of 16 bytes
  u32 never;          // a value that the folded words do not have
};

template <int kUnroll>
__global__ void __launch_bounds__(256) read(const ReadArgs args) {
  constexpr int kThreads = 256;
  constexpr i64 kChunk = kThreads * kUnroll;
  u32 folded = 0;
  for (i64 chunk = blockIdx.x * kChunk; chunk < args.count; chunk += gridDim.x * kChunk) {
    const i64 first = chunk + threadIdx.x;
    uint4 words[kUnroll];
    if (chunk + kChunk <= args.count) {
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) words[i] = load_stream(args.data + first + i * kThreads);
    } else {
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        const i64 at = first + i * kThreads;
        words[i] = at < args.count ? load_stream(args.data + at) : make_uint4(0, 0, 0, 0);
      }
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) folded ^= words[i].x ^ words[i].y ^ words[i].z ^ words[i].w;
  }
  if (folded == args.never) *args.sink = folded;
}

}  // namespace cufuse
