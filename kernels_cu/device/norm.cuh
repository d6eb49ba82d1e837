// RMSNorm and LayerNorm of one row by one CTA, with the rounding of each model family.
#pragma once

#include "device/reduce.cuh"
#include "device/vec.cuh"

namespace cufuse {

// How the weight enters an RMSNorm, T being the model's dtype:
//   cast_first   T(x * r) * w, the product rounded to T again (Llama, Qwen, Mistral, OLMoE)
//   scale_first  T(x * r * w) (OLMo 2, gpt-oss)
//   one_plus     T(x * r * (1 + w)) (Gemma)
enum class Rounding { cast_first, scale_first, one_plus };

// One normalised value; `scale` is rsqrt(mean(x^2) + eps).
template <typename T, Rounding kRounding>
CUFUSE_DEVICE T normalized(float x, float scale, float weight) {
  if constexpr (kRounding == Rounding::cast_first) {
    return from_float<T>(to_float(from_float<T>(x * scale)) * weight);
  } else if constexpr (kRounding == Rounding::scale_first) {
    return from_float<T>(x * scale * weight);
  } else {
    return from_float<T>(x * scale * (1.0f + weight));
  }
}

// rsqrt(mean(x^2) + eps) of a row of n values, to every thread. Each thread sums every kThreads-th
// group of kVec values; `partial` is block_sum's.
template <int kThreads, int kVec, typename T>
CUFUSE_DEVICE float rms_scale(const T* x, int n, float eps, float* partial) {
  float sum = 0.0f;
  for (int i = threadIdx.x * kVec; i < n; i += kThreads * kVec) {
    const auto group = load_vec<kVec>(x + i);
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      const float v = to_float(group.v[j]);
      sum = fmaf(v, v, sum);
    }
  }
  sum = block_sum<kThreads>(sum, partial);
  return rsqrtf(sum / static_cast<float>(n) + eps);
}

}  // namespace cufuse
