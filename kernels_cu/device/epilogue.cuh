// What happens to a sum before it is stored: everything in float32, one rounding at the end.
#pragma once

#include "device/activation.cuh"

namespace cufuse {

// What an activation is of: sum + bias [n], whose null pointer leaves it out.
template <typename T>
CUFUSE_DEVICE float add_bias(float sum, const T* bias, int column) {
  return bias ? sum + to_float(bias[column]) : sum;
}

// act(sum) + residual [rows, n] at `at`, whose null pointer leaves it out.
template <Act kAct, typename T>
CUFUSE_DEVICE T linear_epilogue(float sum, const T* residual, i64 at) {
  sum = activate<kAct>(sum);
  if (residual) sum += to_float(residual[at]);
  return from_float<T>(sum);
}

// By the thread that has one sum of y [rows, n]: what `args` asks for.
template <Act kAct, typename T, template <typename> class Args>
CUFUSE_DEVICE void store_linear(const Args<T>& args, i64 at, int column, float sum) {
  sum = add_bias(sum, args.b, column);
  if (args.pre) args.pre[at] = from_float<T>(sum);
  args.y[at] = linear_epilogue<kAct>(sum, args.residual, at);
}

// gate and up with their biases, then the gate of activation.cuh.
template <Gate kGate, Act kAct, typename T>
CUFUSE_DEVICE T gated_epilogue(
    float gate, float up, const T* b_gate, const T* b_up, int column, float limit, float alpha) {
  if (b_gate) gate += to_float(b_gate[column]);
  if (b_up) up += to_float(b_up[column]);
  return from_float<T>(gated<kGate, kAct>(gate, up, limit, alpha));
}

}  // namespace cufuse
