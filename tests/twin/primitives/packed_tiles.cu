// y^T = W x^T from packed weight tiles: a tile of 16 x 16 is 512 bytes, 16 for each lane, in the
// order of mma_m16n8k16's left operand. packed_wgmma takes four panels of 16 rows as wgmma's 64,
// packed_mma takes one a warp; both have x as [tokens, k], each row's k side by side.
// instantiate: packed_wgmma<bfloat16, 8>
// instantiate: packed_wgmma<half, 64>
// instantiate: packed_mma<bfloat16>
// instantiate: packed_mma<half>
// needs: 90a
#include "device/hw.cuh"

namespace cufuse {

template <typename T>
struct PackedArgs {
  const uint4* w;  // [panels, k / 16, 32]
  const T* x;      // [tokens, k]
  float* y;        // [tokens, panels * 16]
  int k;           // a multiple of 64
};

// 128 threads; the grid is panels / 4.
template <typename T, int kTokens>
__global__ void __launch_bounds__(128) packed_wgmma(const PackedArgs<T> args) {
  constexpr int kBlockK = 64;
  constexpr u32 kStageBytes = kTokens * kBlockK * 2;
  unsigned char* stages = dynamic_shared<unsigned char>();  // [2, kTokens, kBlockK]
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int k_tiles = args.k / 16;
  const int panel = blockIdx.x * 4 + warp;
  const uint4* tiles = args.w + static_cast<i64>(panel) * k_tiles * 32 + lane;

  float sums[kTokens / 2];
  for (int first = 0; first < args.k; first += kBlockK) {
    unsigned char* stage = stages + first / kBlockK % 2 * kStageBytes;
    for (int i = threadIdx.x; i < kTokens * 8; i += 128) {
      const int token = i / 8, chunk = i % 8;
      *reinterpret_cast<uint4*>(stage + swizzle<128>(token * 128 + chunk * 16)) =
          *reinterpret_cast<const uint4*>(args.x + token * args.k + first + chunk * 8);
    }
    u32 w[4][4];
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const uint4 tile = load_stream(tiles + (first / 16 + step) * 32);
      w[step][0] = tile.x;
      w[step][1] = tile.y;
      w[step][2] = tile.z;
      w[step][3] = tile.w;
    }
    fence_proxy_async();
    __syncthreads();
    const u64 x = wgmma_descriptor<128>(stage, 0, 1024);
    wgmma_fence(sums, w);
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      wgmma<T>(sums, w[step], wgmma_advance(x, step * 32), first + step > 0);
    }
    wgmma_commit();
    wgmma_wait<0>(sums);
  }
  const int n = gridDim.x * 64;
#pragma unroll
  for (int j = 0; j < kTokens / 2; ++j) {
    const int token = j / 4 * 8 + lane % 4 * 2 + j % 2;
    args.y[token * n + panel * 16 + lane / 4 + j % 4 / 2 * 8] = sums[j];
  }
}

// Eight tokens; a warp takes a panel.
template <typename T>
__global__ void packed_mma(const PackedArgs<T> args) {
  const int lane = threadIdx.x % 32;
  const int panel = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
  const int k_tiles = args.k / 16;
  float sums[4] = {};
  for (int tile = 0; tile < k_tiles; ++tile) {
    const uint4 w = load_stream(args.w + (static_cast<i64>(panel) * k_tiles + tile) * 32 + lane);
    const u32 a[4] = {w.x, w.y, w.z, w.w};
    const u32* x = reinterpret_cast<const u32*>(args.x + lane / 4 * args.k + tile * 16);
    mma_m16n8k16<T>(sums, a, x[lane % 4], x[lane % 4 + 4]);
  }
  const int n = gridDim.x * blockDim.x / 2;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    args.y[(lane % 4 * 2 + i % 2) * n + panel * 16 + lane / 4 + i / 2 * 8] = sums[i];
  }
}

}  // namespace cufuse
