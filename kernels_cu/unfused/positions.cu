// positions[b, i] = start[b] + i: where the next n tokens of every sequence stand. Made on the
// device, so that a captured step can be replayed. Bounded by the launch.
// instantiate: positions
#include "device/hw.cuh"

namespace cufuse {

struct PositionsArgs {
  const int* start;  // [batch]
  int* positions;    // [batch, n]
  int rows;          // batch * n
  int n;
};

__global__ void __launch_bounds__(128) positions(const PositionsArgs args) {
  const int row = blockIdx.x * 128 + threadIdx.x;
  if (row < args.rows) args.positions[row] = args.start[row / args.n] + row % args.n;
}

}  // namespace cufuse
