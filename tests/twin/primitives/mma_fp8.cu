// out = a bT of 8-bit floats, one warp, one instruction.
// instantiate: mma_fp8<e4m3, e4m3>
// instantiate: mma_fp8<e5m2, e4m3>
// needs: 89
#include "device/hw.cuh"

namespace cufuse {

struct MmaFloatArgs {
  const u32* a;  // [16, 8] words of four elements
  const u32* b;  // [8, 8] words of four elements
  float* out;    // [16, 8]; added to
};

template <typename TA, typename TB>
__global__ void mma_fp8(const MmaFloatArgs args) {
  const int row = threadIdx.x / 4;
  const int quad = threadIdx.x % 4;
  const u32 a[4] = {args.a[row * 8 + quad], args.a[(row + 8) * 8 + quad],
                    args.a[row * 8 + quad + 4], args.a[(row + 8) * 8 + quad + 4]};
  float c[4];
  for (int i = 0; i < 4; ++i) c[i] = args.out[(row + i / 2 * 8) * 8 + quad * 2 + i % 2];
  mma_m16n8k32<TA, TB>(c, a, args.b[row * 8 + quad], args.b[row * 8 + quad + 4]);
  for (int i = 0; i < 4; ++i) args.out[(row + i / 2 * 8) * 8 + quad * 2 + i % 2] = c[i];
}

}  // namespace cufuse
