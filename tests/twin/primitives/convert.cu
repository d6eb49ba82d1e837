// Round floats to 16 bits, and widen all 65536 values of the type.
// instantiate: convert<half>
// instantiate: convert<bfloat16>
// needs: 80
#include "device/hw.cuh"

namespace cufuse {

template <typename T>
struct ConvertArgs {
  const float* x;  // [n]
  T* narrow;       // [n]
  const T* every;  // [65536]
  float* wide;     // [65536]
  int n;
};

template <typename T>
__global__ void convert(const ConvertArgs<T> args) {
  const int thread = blockIdx.x * blockDim.x + threadIdx.x;
  const int threads = gridDim.x * blockDim.x;
  for (int i = thread; i < args.n; i += threads) args.narrow[i] = from_float<T>(args.x[i]);
  for (int i = thread; i < 65536; i += threads) args.wide[i] = to_float(args.every[i]);
}

}  // namespace cufuse
