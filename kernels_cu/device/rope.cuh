// Rotary position embedding of one head: rotate pairs in float32, round once.
#pragma once

#include "device/norm.cuh"

namespace cufuse {

// Which two values of a head make pair t of n_pairs:
//   half_split   t and t + n_pairs (Llama, Qwen, Mistral: "NeoX")
//   interleaved  2t and 2t + 1 (Cohere, DeepSeek: "GPT-J")
enum class Pairing { half_split, interleaved };

template <Pairing kPairing>
CUFUSE_DEVICE int pair_first(int t, int n_pairs) {
  return kPairing == Pairing::half_split ? t : 2 * t;
}

template <Pairing kPairing>
CUFUSE_DEVICE int pair_second(int t, int n_pairs) {
  return kPairing == Pairing::half_split ? t + n_pairs : 2 * t + 1;
}

// The pair (x, y) turned by the angle whose cosine and sine are given.
CUFUSE_DEVICE float2 rotated(float x, float y, float cos, float sin) {
  return make_float2(fmaf(x, cos, -(y * sin)), fmaf(y, cos, x * sin));
}

// cos and sin of one position; what lies outside the table turns a pair into NaN.
struct Angles {
  const float* cos;  // [n_pairs]; null outside the table
  const float* sin;  // [n_pairs]
  int n_pairs;
};

// The angles of a position in cos, sin [max_pos, n_pairs].
CUFUSE_DEVICE Angles
angles_at(const float* cos, const float* sin, i64 position, int max_pos, int n_pairs) {
  if (position < 0 || position >= max_pos) return {nullptr, nullptr, n_pairs};
  return {cos + position * n_pairs, sin + position * n_pairs, n_pairs};
}

CUFUSE_DEVICE float2 rotated(float x, float y, const Angles& angles, int t) {
  if (!angles.cos) return make_float2(__int_as_float(0x7fffffff), __int_as_float(0x7fffffff));
  return rotated(x, y, angles.cos[t], angles.sin[t]);
}

// How many units of work `rotate_head_unit` cuts a head into: first the pairs, then the tail. Every
// access takes kVec values, so kVec divides head_dim and the number of rotated (half_split: paired)
// values.
template <Pairing kPairing, int kVec>
CUFUSE_DEVICE int rotate_head_units(int n_pairs, int head_dim) {
  constexpr int kPairs = kPairing == Pairing::half_split || kVec == 1 ? kVec : kVec / 2;
  return n_pairs / kPairs + (head_dim - 2 * n_pairs) / kVec;
}

// Unit `unit` of a head: load, prepare(value, index) in float32, rotate, store. y may be x.
template <Pairing kPairing, int kVec, typename T, typename Prepare>
CUFUSE_DEVICE void rotate_head_unit(
    const T* x, T* y, int unit, const Angles& angles, const Prepare& prepare) {
  constexpr bool kTwoLoads = kPairing == Pairing::half_split || kVec == 1;
  constexpr int kPairs = kTwoLoads ? kVec : kVec / 2;
  const int n_units = angles.n_pairs / kPairs;
  if (unit >= n_units) {  // the tail passes through
    const int i = 2 * angles.n_pairs + (unit - n_units) * kVec;
    auto group = load_vec<kVec>(x + i);
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      group.v[j] = from_float<T>(prepare(to_float(group.v[j]), i + j));
    }
    store_vec<kVec>(y + i, group);
    return;
  }
  const int t = unit * kPairs;
  const int first = pair_first<kPairing>(t, angles.n_pairs);
  const int second = pair_second<kPairing>(t, angles.n_pairs);
  if constexpr (kTwoLoads) {
    auto a = load_vec<kVec>(x + first);
    auto b = load_vec<kVec>(x + second);
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      const float2 pair = rotated(prepare(to_float(a.v[j]), first + j),
                                  prepare(to_float(b.v[j]), second + j), angles, t + j);
      a.v[j] = from_float<T>(pair.x);
      b.v[j] = from_float<T>(pair.y);
    }
    store_vec<kVec>(y + first, a);
    store_vec<kVec>(y + second, b);
  } else {
    auto group = load_vec<kVec>(x + first);
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const int i = first + 2 * j;
      const float2 pair = rotated(prepare(to_float(group.v[2 * j]), i),
                                  prepare(to_float(group.v[2 * j + 1]), i + 1), angles, t + j);
      group.v[2 * j] = from_float<T>(pair.x);
      group.v[2 * j + 1] = from_float<T>(pair.y);
    }
    store_vec<kVec>(y + first, group);
  }
}

// Whether a warp can rotate a head that its lanes hold, kVec neighbours each.
template <Pairing kPairing, int kHeadDim, int kRotary, int kVec>
constexpr bool kRotatesHeld = kHeadDim <= 32 * kVec && kRotary % kVec == 0 &&
                              (kPairing == Pairing::interleaved || kRotary / 2 % kVec == 0);

// Its angles: lane l has values [l kVec, (l + 1) kVec). Made of cos and sin of kRotary / 2 pairs
// before the values are there; all lanes rotate.
template <Pairing kPairing, int kRotary, int kVec>
struct HeldAngles {
  static constexpr bool kHalves = kPairing == Pairing::half_split;
  static constexpr int kAngles = kHalves ? kVec : kVec / 2;
  Vec<float, kAngles> cos, sin;

  CUFUSE_DEVICE HeldAngles(const float* cosines, const float* sines) {
    const int pair = !rotates() ? 0 : kHalves ? first() - upper() * (kRotary / 2) : first() / 2;
    cos = load_vec<kAngles>(cosines + pair);
    sin = load_vec<kAngles>(sines + pair);
  }

  CUFUSE_DEVICE void rotate(float (&values)[kVec]) const {
    if constexpr (kHalves) {
      constexpr int kApart = kRotary / 2 / kVec;  // lanes
      const int other = lane_here() + (upper() ? -kApart : kApart);
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        const float partner = __shfl_sync(kFullMask, values[j], other) * sin.v[j];
        if (rotates()) values[j] = fmaf(values[j], cos.v[j], upper() ? partner : -partner);
      }
    } else {
#pragma unroll
      for (int j = 0; j < kAngles; ++j) {
        const float2 turned = rotated(values[2 * j], values[2 * j + 1], cos.v[j], sin.v[j]);
        if (rotates()) values[2 * j] = turned.x;
        if (rotates()) values[2 * j + 1] = turned.y;
      }
    }
  }

 private:
  static CUFUSE_DEVICE int first() { return lane_here() * kVec; }
  static CUFUSE_DEVICE bool rotates() { return kRotary >= 32 * kVec || first() < kRotary; }
  static CUFUSE_DEVICE bool upper() { return first() >= kRotary / 2; }
};

// What an RMSNorm of queries and keys takes its mean over: nothing, one head (Qwen3) or the full
// projection (OLMo 2, OLMoE).
enum class QkNorm { none, head, full };

// rsqrt(mean(x^2) + eps) of one head by one warp, to every lane; the order of the sum depends on
// head_dim and kVec alone.
template <int kVec, typename T>
CUFUSE_DEVICE float head_rms_scale(const T* x, int head_dim, float eps) {
  float sum = 0.0f;
  for (int i = threadIdx.x % 32 * kVec; i < head_dim; i += 32 * kVec) {
    const auto group = load_vec<kVec>(x + i);
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      const float v = to_float(group.v[j]);
      sum = fmaf(v, v, sum);
    }
  }
  return rsqrtf(warp_sum(sum) / static_cast<float>(head_dim) + eps);
}

// One head by one warp: y = rotated(normalized(x)); without a weight nothing is normalised, without
// pairs nothing is rotated.
template <Pairing kPairing, Rounding kRounding, int kVec, typename T>
CUFUSE_DEVICE void norm_rotate_head(
    const T* x, T* y, int head_dim, const Angles& angles, const T* weight, float scale) {
  const int units = rotate_head_units<kPairing, kVec>(angles.n_pairs, head_dim);
  for (int unit = threadIdx.x % 32; unit < units; unit += 32) {
    if (weight) {
      rotate_head_unit<kPairing, kVec>(x, y, unit, angles, [=](float v, int i) {
        return to_float(normalized<T, kRounding>(v, scale, to_float(weight[i])));
      });
    } else {
      rotate_head_unit<kPairing, kVec>(x, y, unit, angles, [](float v, int) { return v; });
    }
  }
}

}  // namespace cufuse
