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

// float32 values rounded to T; types of 2 bytes two at a time, several times as fast as one by one.
template <typename T, int kVec>
CUFUSE_DEVICE void round_to(float (&values)[kVec]) {
  if constexpr (sizeof(T) == 2 && kVec % 2 == 0) {
#pragma unroll
    for (int j = 0; j < kVec; j += 2) round_pair<T>(values[j], values[j + 1]);
  } else {
#pragma unroll
    for (int j = 0; j < kVec; ++j) values[j] = to_float(from_float<T>(values[j]));
  }
}

// `normalized` of kVec values in place.
template <typename T, Rounding kRounding, int kVec>
CUFUSE_DEVICE void normalize(float (&values)[kVec], float scale, const float (&weights)[kVec]) {
#pragma unroll
  for (int j = 0; j < kVec; ++j) values[j] *= scale;
  if constexpr (kRounding == Rounding::cast_first) round_to<T>(values);
#pragma unroll
  for (int j = 0; j < kVec; ++j) {
    values[j] *= kRounding == Rounding::one_plus ? 1.0f + weights[j] : weights[j];
  }
  round_to<T>(values);
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

// A row of n values that a CTA goes over more than once. Every thread takes each kThreads-th group
// of kVec values, keeps its first kKept groups in registers and reads the rest again.
template <typename T, int kThreads, int kVec, int kKept = 4>
struct KeptRow {
  int n;
  Vec<T, kVec> kept[kKept];

  CUFUSE_DEVICE explicit KeptRow(int n) : n(n) {}

  static CUFUSE_DEVICE int place(int group) {
    return (group * kThreads + static_cast<int>(threadIdx.x)) * kVec;
  }

  // The first pass: visit(i, load(i)) for each group; all loads that are kept are issued first.
  template <typename Load, typename Visit>
  CUFUSE_DEVICE void first(Load load, Visit visit) {
#pragma unroll
    for (int g = 0; g < kKept; ++g) {
      if (place(g) < n) kept[g] = load(place(g));
    }
    again(load, visit);
  }

  // Every later pass: what `load` gives is what the first pass saw.
  template <typename Load, typename Visit>
  CUFUSE_DEVICE void again(Load load, Visit visit) {
#pragma unroll
    for (int g = 0; g < kKept; ++g) {
      if (place(g) < n) visit(place(g), kept[g]);
    }
    for (int i = place(kKept); i < n; i += kThreads * kVec) visit(i, load(i));
  }
};

template <typename T, int kVec>
CUFUSE_DEVICE Vec<T, kVec> add_rounded(const Vec<T, kVec>& a, const Vec<T, kVec>& b) {
  Vec<T, kVec> sum;
#pragma unroll
  for (int j = 0; j < kVec; ++j) sum.v[j] = from_float<T>(to_float(a.v[j]) + to_float(b.v[j]));
  return sum;
}

// y = normalized row, T(x * rsqrt(mean(x^2) + eps)) with its weight. `load` is the first pass's way
// to a group, `reload` that of the second; the sum's order is rms_scale's.
template <typename T, Rounding kRounding, int kThreads, int kVec, typename Load, typename Reload>
CUFUSE_DEVICE void rmsnorm_row(
    T* y, const T* weight, int n, float eps, float* partial, Load load, Reload reload) {
  KeptRow<T, kThreads, kVec> row(n);
  float sum = 0.0f;
  row.first(load, [&](int, const Vec<T, kVec>& group) {
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      const float v = to_float(group.v[j]);
      sum = fmaf(v, v, sum);
    }
  });
  sum = block_sum<kThreads>(sum, partial);
  const float scale = rsqrtf(sum / static_cast<float>(n) + eps);
  const float identity = kRounding == Rounding::one_plus ? 0.0f : 1.0f;
  row.again(reload, [&](int i, const Vec<T, kVec>& group) {
    Vec<T, kVec> weights, result;
    if (weight) weights = load_vec<kVec>(weight + i);
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      const float w = weight ? to_float(weights.v[j]) : identity;
      result.v[j] = normalized<T, kRounding>(to_float(group.v[j]), scale, w);
    }
    store_vec<kVec>(y + i, result);
  });
}

// y = (x - mean) * rsqrt(variance + eps) * weight + bias, rounded once. Mean and variance are those
// of the differences from a first mean, which float rounds, so a large mean does no harm.
template <typename T, int kThreads, int kVec, typename Load, typename Reload>
CUFUSE_DEVICE void layernorm_row(T* y,
                                 const T* weight,
                                 const T* bias,
                                 int n,
                                 float eps,
                                 float* partial,
                                 Load load,
                                 Reload reload) {
  KeptRow<T, kThreads, kVec> row(n);
  float sum = 0.0f;
  row.first(load, [&](int, const Vec<T, kVec>& group) {
#pragma unroll
    for (int j = 0; j < kVec; ++j) sum += to_float(group.v[j]);
  });
  const float mean = block_sum<kThreads>(sum, partial) / static_cast<float>(n);
  float differences = 0.0f, squares = 0.0f;
  row.again(reload, [&](int, const Vec<T, kVec>& group) {
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      const float difference = to_float(group.v[j]) - mean;
      differences += difference;
      squares = fmaf(difference, difference, squares);
    }
  });
  const float drift = block_sum<kThreads>(differences, partial) / static_cast<float>(n);
  const float square = block_sum<kThreads>(squares, partial) / static_cast<float>(n);
  const float variance = fmaxf(fmaf(-drift, drift, square), 0.0f);
  const float scale = rsqrtf(variance + eps);
  row.again(reload, [&](int i, const Vec<T, kVec>& group) {
    Vec<T, kVec> weights, biases, result;
    if (weight) weights = load_vec<kVec>(weight + i);
    if (bias) biases = load_vec<kVec>(bias + i);
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      const float w = weight ? to_float(weights.v[j]) : 1.0f;
      const float b = bias ? to_float(biases.v[j]) : 0.0f;
      result.v[j] = from_float<T>(fmaf((to_float(group.v[j]) - mean - drift) * scale, w, b));
    }
    store_vec<kVec>(y + i, result);
  });
}

}  // namespace cufuse
