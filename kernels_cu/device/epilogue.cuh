// What happens to a sum before it is stored: everything in float32, one rounding at the end.
#pragma once

#include "device/activation.cuh"

namespace cufuse {

// act(sum + bias) + residual; a null pointer leaves its term out. `column` indexes bias [n], `at`
// residual [rows, n].
template <Act kAct, typename T>
CUFUSE_DEVICE T linear_epilogue(float sum, const T* bias, int column, const T* residual, i64 at) {
  if (bias) sum += to_float(bias[column]);
  sum = activate<kAct>(sum);
  if (residual) sum += to_float(residual[at]);
  return from_float<T>(sum);
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
