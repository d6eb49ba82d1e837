// The three roles of a CTA in a decode step. Each walks over the same phases in the same order:
//
//   Filler      streams what the CTA will need through the ring, far ahead of the others
//   Multiplier  16 warps: gather x, multiply panels; attention
//   Finisher    one warp: adds a panel's sums, bias, activation, residual; hands the result on
//
// and a warp of its own looks at the clock (device/exchange.cuh).
//
// A phase's tiles go round robin over the CTAs, and the next phase goes on where the last one
// ended, so that no CTA always has the extra tile.
#pragma once

#include "device/decode_filler.cuh"
#include "device/decode_finisher.cuh"
#include "device/decode_multiplier.cuh"

namespace cufuse {

// Every warp in its role: walk(role) by all of its lanes.
template <typename Shape, typename Walk>
CUFUSE_DEVICE void run_roles(const DecodeArgs<typename Shape::T>& args, const Walk& walk) {
  if (threadIdx.x == 0) begin_launch<Shape>(args);
  __syncthreads();
  if (threadIdx.x == 0) {
    atomic_add<Order::release>(args.control + kControlArrived, 1u);
  }
  const int warp = uniform(threadIdx.x / 32);
  if (warp == Shape::kFiller) {
    walk(Filler<Shape>(args));
  } else if (warp == Shape::kFinisher) {
    walk(Finisher<Shape>(args));
  } else if (warp == Shape::kWatchdog) {
    if (threadIdx.x % 32 == 0) keep_deadline();
    return;
  } else {
    walk(Multiplier<Shape>(args));
  }
  __syncwarp();
  if (threadIdx.x % 32 == 0) mbarrier_arrive(&Deadline::here().finished);
}

}  // namespace cufuse
