// out = out + a bT by wgmma, a block of K at a time through shared memory: a comes from there or
// from registers, both lie with k or with the row running fastest, under one swizzle.
// instantiate: product<bfloat16, 64, 128, From::shared, Major::k, Major::k>
// instantiate: product<half, 64, 128, From::registers, Major::k, Major::k>
// instantiate: product<half, 64, 64, From::shared, Major::k, Major::k>
// instantiate: product<bfloat16, 24, 64, From::registers, Major::k, Major::k>
// instantiate: product<bfloat16, 40, 32, From::shared, Major::k, Major::k>
// instantiate: product<half, 16, 32, From::registers, Major::k, Major::k>
// instantiate: product<half, 32, 16, From::shared, Major::k, Major::k>
// instantiate: product<bfloat16, 8, 16, From::registers, Major::k, Major::k>
// instantiate: product<bfloat16, 128, 128, From::shared, Major::mn, Major::mn>
// instantiate: product<half, 256, 128, From::registers, Major::k, Major::k>
// instantiate: product<half, 200, 64, From::shared, Major::k, Major::mn>
// instantiate: product<bfloat16, 64, 32, From::shared, Major::mn, Major::k>
// instantiate: product<half, 24, 16, From::shared, Major::mn, Major::mn>
// needs: 90a
#include "device/hw.cuh"

namespace cufuse {

enum class From { registers, shared };

template <typename T>
struct ProductArgs {
  const T* a;  // [64, k]
  const T* b;  // [n, k]
  float* out;  // [64, n]; added to
  int k;       // a multiple of kBlockK
};

// Where an operand's block of K lies in shared memory.
template <int kSwizzle, Major kMajor>
struct Placed {
  static constexpr int kLine = kSwizzle / 2;  // elements
  static constexpr int kBlockK = kSwizzle == 16 ? 32 : kMajor == Major::mn ? 64 : kLine;
  // Blocks of 8 lines.
  static constexpr u32 kBlockBytes = 8 * kSwizzle;
  static constexpr u32 kNextK = kBlockBytes;
  static constexpr u32 kNextRows =
      kMajor == Major::mn || kSwizzle == 16 ? kBlockK / 8 * kBlockBytes : kBlockBytes;
  static constexpr bool kStrideIsK = kMajor == Major::mn && kSwizzle != 16;
  static constexpr u32 kStride = kStrideIsK ? kNextK : kNextRows;
  static constexpr u32 kLeading = kStrideIsK ? kNextRows : kNextK;
  static constexpr u32 kStep = kMajor == Major::k && kSwizzle != 16 ? 32 : 2 * kNextK;  // 16 of k

  static CUFUSE_DEVICE u32 offset(int row, int k) {
    if (kMajor == Major::mn) {
      return row / kLine * kNextRows + k / 8 * kNextK +
             swizzle<kSwizzle>(k % 8 * kSwizzle + row % kLine * 2);
    }
    return row / 8 * kNextRows + k / kLine * kNextK +
           swizzle<kSwizzle>(row % 8 * kSwizzle + k % kLine * 2);
  }
  static constexpr u32 size_bytes(int rows) {
    return kMajor == Major::mn ? (rows + kLine - 1) / kLine * kBlockK / 8 * kBlockBytes
                               : rows * kBlockK * 2;
  }
};

// 128 threads.
template <typename T, int kN, int kSwizzle, From kFrom, Major kMajorA, Major kMajorB>
__global__ void __launch_bounds__(128) product(const ProductArgs<T> args) {
  using PlacedA = Placed<kSwizzle, kMajorA>;
  using PlacedB = Placed<kSwizzle, kMajorB>;
  constexpr int kBlockK = PlacedA::kBlockK < PlacedB::kBlockK ? PlacedA::kBlockK : PlacedB::kBlockK;
  unsigned char* b = dynamic_shared<unsigned char>();
  unsigned char* a = b + (PlacedB::size_bytes(kN) + 1023) / 1024 * 1024;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row = warp * 16 + lane / 4, column = lane % 4 * 2;

  float sums[kN / 2];
#pragma unroll
  for (int j = 0; j < kN / 2; ++j) {
    sums[j] = args.out[(row + j % 4 / 2 * 8) * kN + j / 4 * 8 + column + j % 2];
  }
  for (int first = 0; first < args.k; first += kBlockK) {
    __syncthreads();  // the block before was read
    for (int i = threadIdx.x; i < kN * kBlockK; i += 128) {
      const int r = i / kBlockK, k = i % kBlockK;
      *reinterpret_cast<T*>(b + PlacedB::offset(r, k)) = args.b[r * args.k + first + k];
    }
    for (int i = threadIdx.x; i < 64 * kBlockK; i += 128) {
      const int r = i / kBlockK, k = i % kBlockK;
      *reinterpret_cast<T*>(a + PlacedA::offset(r, k)) = args.a[r * args.k + first + k];
    }
    fence_proxy_async();
    __syncthreads();  // the block is written

    const u64 from_a = wgmma_descriptor<kSwizzle>(a, PlacedA::kLeading, PlacedA::kStride);
    const u64 from_b = wgmma_descriptor<kSwizzle>(b, PlacedB::kLeading, PlacedB::kStride);
    u32 registers[kBlockK / 16][4];
    if constexpr (kFrom == From::registers) {
#pragma unroll
      for (int step = 0; step < kBlockK / 16; ++step) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          registers[step][i] = *reinterpret_cast<const u32*>(
              a + PlacedA::offset(row + i % 2 * 8, step * 16 + column + i / 2 * 8));
        }
      }
      wgmma_fence(sums, registers);
    } else {
      wgmma_fence(sums);
    }
#pragma unroll
    for (int step = 0; step < kBlockK / 16; ++step) {
      const u64 step_b = wgmma_advance(from_b, step * PlacedB::kStep);
      if constexpr (kFrom == From::registers) {
        wgmma<T, kMajorB>(sums, registers[step], step_b, true);
      } else {
        const u64 step_a = wgmma_advance(from_a, step * PlacedA::kStep);
        wgmma<T, kMajorA, kMajorB>(sums, step_a, step_b, true);
      }
    }
    wgmma_commit();
    wgmma_wait<0>(sums);
  }
#pragma unroll
  for (int j = 0; j < kN / 2; ++j) {
    args.out[(row + j % 4 / 2 * 8) * kN + j / 4 * 8 + column + j % 2] = sums[j];
  }
}

}  // namespace cufuse
