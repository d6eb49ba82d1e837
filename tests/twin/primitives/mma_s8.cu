// out = a bT of 8-bit integers, one warp, one instruction.
// instantiate: mma_s8
// needs: 80
#include "device/hw.cuh"

namespace cufuse {

struct MmaIntArgs {
  const u32* a;  // [16, 8] words of four elements
  const u32* b;  // [8, 8] words of four elements
  int* out;      // [16, 8]; added to
};

__global__ void mma_s8(const MmaIntArgs args) {
  const int row = threadIdx.x / 4;
  const int quad = threadIdx.x % 4;
  const u32 a[4] = {args.a[row * 8 + quad], args.a[(row + 8) * 8 + quad],
                    args.a[row * 8 + quad + 4], args.a[(row + 8) * 8 + quad + 4]};
  int c[4];
  for (int i = 0; i < 4; ++i) c[i] = args.out[(row + i / 2 * 8) * 8 + quad * 2 + i % 2];
  mma_m16n8k32_s8(c, a, args.b[row * 8 + quad], args.b[row * 8 + quad + 4]);
  for (int i = 0; i < 4; ++i) args.out[(row + i / 2 * 8) * 8 + quad * 2 + i % 2] = c[i];
}

}  // namespace cufuse
