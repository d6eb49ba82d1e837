// out[lane, i] = register i of ldmatrix, of kMatrices 8x8 matrices as they lie or transposed.
// instantiate: matrices<1, false>
// instantiate: matrices<1, true>
// instantiate: matrices<2, false>
// instantiate: matrices<2, true>
// instantiate: matrices<4, false>
// instantiate: matrices<4, true>
// needs: 80
#include "device/hw.cuh"

namespace cufuse {

struct MatricesArgs {
  const uint4* x;  // [kMatrices, 8] rows of 8 values of 16 bits
  u32* out;        // [32, kMatrices]
};

template <int kMatrices, bool kTransposed>
__global__ void matrices(const MatricesArgs args) {
  // The rows lie apart, in an order of their own.
  uint4* rows = dynamic_shared<uint4>();  // [64]
  const int lane = threadIdx.x;
  if (lane < kMatrices * 8) rows[lane * 5 % 64] = args.x[lane];
  __syncwarp();
  const int row = lane % (kMatrices * 8);
  u32 r[kMatrices];
  if constexpr (kTransposed) {
    load_matrix_transposed(r, rows + row * 5 % 64);
  } else {
    load_matrix(r, rows + row * 5 % 64);
  }
  for (int i = 0; i < kMatrices; ++i) args.out[lane * kMatrices + i] = r[i];
}

}  // namespace cufuse
