// Does nothing for a while: what is enqueued behind it meanwhile starts without waiting for the
// host. For benchmarks.
// instantiate: pause
#include "device/hw.cuh"

namespace cufuse {

struct PauseArgs {
  u64 ns;
};

__global__ void __launch_bounds__(32) pause(const PauseArgs args) {
  const u64 begin = timer_ns();
  while (timer_ns() - begin < args.ns) {
  }
}

}  // namespace cufuse
