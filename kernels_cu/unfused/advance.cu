// start += n for every sequence: the cache holds n tokens more. It closes a step, on the device, so
// that a captured step can be replayed. Bounded by the launch.
// instantiate: advance
#include "device/hw.cuh"

namespace cufuse {

struct AdvanceArgs {
  int* start;  // [batch]
  int batch;
  int n;
};

__global__ void __launch_bounds__(32) advance(const AdvanceArgs args) {
  const int b = blockIdx.x * 32 + threadIdx.x;
  if (b < args.batch) args.start[b] += args.n;
}

}  // namespace cufuse
