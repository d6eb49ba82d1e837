// Random draws from logits, the same bits as cufuse/reference/sampling.py: all of it is float32
// additions, multiplications and divisions in a fixed order.
#pragma once

#include "device/hash.cuh"
#include "device/order.cuh"

namespace cufuse {

constexpr float kLargestFloat = 3.402823466e38f;

// exp(z) for z <= 0 (Cody and Waite's reduction, Cephes' polynomial); 0 below -87.
CUFUSE_DEVICE float exponential(float z) {
  if (!(z >= -87.0f)) return 0.0f;
  const float k = rintf(z * 1.44269504f);
  const float r = (z - k * 0.693359375f) - k * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  const float y = (p * (r * r) + r) + 1.0f;
  return y * __int_as_float((static_cast<int>(k) + 127) << 23);
}

// The probability of a logit relative to the largest, which has exactly 1.
CUFUSE_DEVICE float relative_probability(float logit, float top, float inverse_temperature) {
  return exponential(logit == top ? 0.0f : (logit - top) * inverse_temperature);
}

// 2 (s + s^3 / 3 + ... + s^kLast / kLast).
template <int kLast>
CUFUSE_DEVICE float twice_atanh(float s) {
  const float square = s * s;
  float p = static_cast<float>(1.0 / kLast);
#pragma unroll
  for (int odd = kLast - 2; odd > 0; odd -= 2) p = p * square + static_cast<float>(1.0 / odd);
  return 2.0f * (s * p);
}

// -log(-log(u)), u = 1 - (word | 1) / 2^32. Small -log(u), which decide the draw, keep their
// relative precision.
CUFUSE_DEVICE float gumbel(u32 word) {
  const u32 survivor = 0u - (word | 1u);  // u in units of 2^-32
  const int zeros = __clz(static_cast<int>(survivor));
  const u32 missing = 0u - (survivor << zeros);  // u = 2^-zeros * (1 - missing / 2^32)
  const float g = static_cast<float>(missing) * 0x1p-32f;
  const float e = static_cast<float>(zeros) * 0.69314718f + twice_atanh<15>(g / (2.0f - g));
  // log(e) from e = 2^k f, f in [2/3, 4/3)
  const u32 bits = __float_as_uint(e);
  const int k = static_cast<int>(bits - 0x3F2AAAABu) >> 23;
  const float f = __uint_as_float(bits - (static_cast<u32>(k) << 23));
  return -(static_cast<float>(k) * 0.69314718f + twice_atanh<9>((f - 1.0f) / (f + 1.0f)));
}

// The rank of an id in a Gumbel-max draw: the largest of a row is drawn with its probability.
CUFUSE_DEVICE u64 draw_rank(float logit, int id, float inverse_temperature, HashKey key) {
  float s = logit * inverse_temperature;
  if (fabsf(logit) <= kLargestFloat) s = fminf(fmaxf(s, -kLargestFloat), kLargestFloat);
  return rank_of(s + gumbel(hash_word(static_cast<u32>(id), key)), id);
}

}  // namespace cufuse
