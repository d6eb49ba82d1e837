// Round floats to 8 bits and widen them again.
// instantiate: convert_fp8<e4m3>
// instantiate: convert_fp8<e5m2>
// needs: 80
#include "device/hw.cuh"

namespace cufuse {

struct ConvertArgs {
  const float* x;    // [n]
  u8* bits;          // [n]
  const u8* narrow;  // [256]
  float* wide;       // [256]
  int n;
};

template <typename T>
__global__ void convert_fp8(const ConvertArgs args) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < args.n) args.bits[i] = from_float<T>(args.x[i]).bits;
  if (i < 256) args.wide[i] = to_float(T{args.narrow[i]});
}

}  // namespace cufuse
