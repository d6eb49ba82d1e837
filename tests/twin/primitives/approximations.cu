// The functions that the hardware, and the C library, only come close to.
// instantiate: approximations
// needs: 80
#include "device/hw.cuh"

namespace cufuse {

struct ApproximationsArgs {
  const float* x;  // [n]; between -10 and 10
  float* out;      // [4, n]
  int n;
};

__global__ void approximations(const ApproximationsArgs args) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  const int n = args.n;
  if (i >= n) return;
  const float x = args.x[i];
  args.out[i] = rsqrtf(x * x + 1e-5f);
  args.out[n + i] = expf(8.0f * x);
  args.out[2 * n + i] = tanhf(x);
  args.out[3 * n + i] = erff(0.4f * x);
}

}  // namespace cufuse
