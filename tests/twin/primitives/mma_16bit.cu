// out += a bT of 16-bit floats, one warp, one instruction.
// instantiate: mma_16bit<half>
// instantiate: mma_16bit<bfloat16>
// needs: 80
#include "device/hw.cuh"

namespace cufuse {

struct MmaHalfArgs {
  const u32* a;  // [16, 8] words of two elements
  const u32* b;  // [8, 8] words of two elements
  float* out;    // [16, 8]; added to
};

template <typename T>
__global__ void mma_16bit(const MmaHalfArgs args) {
  const int row = threadIdx.x / 4;
  const int quad = threadIdx.x % 4;
  const u32 a[4] = {args.a[row * 8 + quad], args.a[(row + 8) * 8 + quad],
                    args.a[row * 8 + quad + 4], args.a[(row + 8) * 8 + quad + 4]};
  float c[4];
  for (int i = 0; i < 4; ++i) c[i] = args.out[(row + i / 2 * 8) * 8 + quad * 2 + i % 2];
  mma_m16n8k16<T>(c, a, args.b[row * 8 + quad], args.b[row * 8 + quad + 4]);
  for (int i = 0; i < 4; ++i) args.out[(row + i / 2 * 8) * 8 + quad * 2 + i % 2] = c[i];
}

}  // namespace cufuse
