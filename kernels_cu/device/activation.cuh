// Activations and gates of one value, in float32 with the accurate library functions.
#pragma once

#include "device/hw.cuh"

namespace cufuse {

// gelu is the exact one (erf); gelu_tanh its usual approximation, "gelu_new" in some models.
enum class Act { none, relu, relu2, gelu, gelu_tanh, silu, quick_gelu, sigmoid };

// plain: activate(gate) * up. clamped: gpt-oss's (up + 1) * gate * sigmoid(alpha * gate), with gate
// cut off above `limit` and up on both sides.
enum class Gate { plain, clamped };

CUFUSE_DEVICE float sigmoid(float v) { return 1.0f / (1.0f + expf(-v)); }

template <Act kAct>
CUFUSE_DEVICE float activate(float v) {
  if constexpr (kAct == Act::relu) {
    return v < 0.0f ? 0.0f : v;  // NaN stays NaN
  } else if constexpr (kAct == Act::relu2) {
    return v < 0.0f ? 0.0f : v * v;
  } else if constexpr (kAct == Act::gelu) {
    return 0.5f * v * (1.0f + erff(v * 0.70710678118654752f));
  } else if constexpr (kAct == Act::gelu_tanh) {
    const float cubed = v * v * v;
    return 0.5f * v * (1.0f + tanhf(0.79788456080286536f * fmaf(0.044715f, cubed, v)));
  } else if constexpr (kAct == Act::silu) {
    return v / (1.0f + expf(-v));
  } else if constexpr (kAct == Act::quick_gelu) {
    return v / (1.0f + expf(-1.702f * v));
  } else if constexpr (kAct == Act::sigmoid) {
    return sigmoid(v);
  } else {
    return v;
  }
}

// log2 of the normal distribution's tail at a, 0 <= a <= 16. Up to 5 the tail is right to 5e-6 of
// its value, where bfloat16 is wanted, which rounds by up to 2e-3, to 2e-4.
CUFUSE_DEVICE float log_normal_tail(float a, half) {
  float log = -1.8199610849478631e-06f;
  log = fmaf(log, a, 6.134672730695456e-05f);
  log = fmaf(log, a, -0.0009288817527703941f);
  log = fmaf(log, a, 0.008502686396241188f);
  log = fmaf(log, a, -0.05395183339715004f);
  log = fmaf(log, a, -0.4584704041481018f);
  log = fmaf(log, a, -1.1512495279312134f);
  return fmaf(log, a, -0.9999953508377075f);
}
CUFUSE_DEVICE float log_normal_tail(float a, bfloat16) {
  float log = -0.0002547121622579553f;
  log = fmaf(log, a, 0.0051248454804333704f);
  log = fmaf(log, a, -0.04564442578929671f);
  log = fmaf(log, a, -0.46796512395550055f);
  log = fmaf(log, a, -1.1472228655592995f);
  return fmaf(log, a, -1.000275188912806f);
}

// The same as `activate` for results that are rounded to T, 16 bits, in a third of the
// instructions: where tensor cores make the sums, activations take a time that counts. gelu is
// v - v times the normal distribution's tail at |v|.
template <Act kAct, typename T>
CUFUSE_DEVICE float activate_for_16_bits(float v) {
  constexpr float kLog2E = 1.4426950408889634f;
  if constexpr (kAct == Act::gelu) {
    const float a = fminf(fabsf(v), 16.0f);
    return fmaf(-a, exp2f(log_normal_tail(a, T{})), max_or_nan(v, 0.0f));
  } else if constexpr (kAct == Act::gelu_tanh) {
    const float twice = v * fmaf(-2.0f * 0.044715f * 0.79788456080286536f * kLog2E, v * v,
                                 -2.0f * 0.79788456080286536f * kLog2E);
    return __fdividef(v, 1.0f + exp2f(twice));
  } else if constexpr (kAct == Act::silu) {
    return __fdividef(v, 1.0f + exp2f(-kLog2E * v));
  } else if constexpr (kAct == Act::quick_gelu) {
    return __fdividef(v, 1.0f + exp2f(-1.702f * kLog2E * v));
  } else {
    return activate<kAct>(v);
  }
}

// `limit` and `alpha` are read by the clamped gate alone.
template <Gate kGate, Act kAct>
CUFUSE_DEVICE float gated(float gate, float up, float limit, float alpha) {
  if constexpr (kGate == Gate::clamped) {
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : up < -limit ? -limit : up;
    return (up + 1.0f) * gate * sigmoid(alpha * gate);
  } else {
    return activate<kAct>(gate) * up;
  }
}
// The same for results that are rounded to T.
template <Gate kGate, Act kAct, typename T>
CUFUSE_DEVICE float gated_for_16_bits(float gate, float up, float limit, float alpha) {
  if constexpr (kGate == Gate::clamped) return gated<kGate, kAct>(gate, up, limit, alpha);
  return activate_for_16_bits<kAct, T>(gate) * up;
}

}  // namespace cufuse
