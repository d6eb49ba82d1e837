// The two 8-bit floating-point types and their conversions in plain C++, for the GPU and its twin.
// hw.cuh includes this where the compiler's words are known and offers it as to_float, from_float.
#pragma once

namespace cufuse {

struct e4m3 {  // 4 bits of exponent, 3 of mantissa; up to 448, no infinity
  unsigned char bits;
};
struct e5m2 {  // 5 bits of exponent, 2 of mantissa; up to 57344
  unsigned char bits;
};

// What 7 bits without the sign mean, if finite. A float's own subnormals would be flushed to zero.
template <int kMantissaBits, int kBias>
CUFUSE_DEVICE float fp8_magnitude(unsigned magnitude) {
  if (magnitude >> kMantissaBits == 0) {
    const float unit = __uint_as_float(static_cast<unsigned>(128 - kBias - kMantissaBits) << 23);
    return static_cast<float>(magnitude) * unit;
  }
  return __uint_as_float((magnitude << (23 - kMantissaBits)) +
                         (static_cast<unsigned>(127 - kBias) << 23));
}

CUFUSE_DEVICE float fp8_to_float(e4m3 v) {
  const unsigned magnitude = v.bits & 0x7fu;
  const float f = magnitude == 0x7f ? __uint_as_float(0x7fc00000u) : fp8_magnitude<3, 7>(magnitude);
  return v.bits & 0x80u ? -f : f;
}

CUFUSE_DEVICE float fp8_to_float(e5m2 v) {
  const unsigned magnitude = v.bits & 0x7fu;
  const float f = magnitude >= 0x7c ? __uint_as_float(0x7f800000u | (magnitude & 3u) << 21)
                                    : fp8_magnitude<2, 15>(magnitude);
  return v.bits & 0x80u ? -f : f;
}

// Round to nearest even; what is too large, infinity too, becomes the largest finite value.
template <int kMantissaBits, int kBias, unsigned kLargest>
CUFUSE_DEVICE unsigned char fp8_from_float(float v) {
  const unsigned bits = __float_as_uint(v);
  const unsigned sign = bits >> 24 & 0x80u;
  const unsigned u = bits & 0x7fffffffu;
  if (u > 0x7f800000u) return 0x7f;
  const float magnitude = __uint_as_float(u);
  if (magnitude >= fp8_magnitude<kMantissaBits, kBias>(kLargest)) {
    return static_cast<unsigned char>(sign | kLargest);
  }
  if (u >> 23 <= 127 - kBias) {  // a multiple of the smallest value
    const float units = __uint_as_float(static_cast<unsigned>(126 + kBias + kMantissaBits) << 23);
    const int rounded = __float2int_rn(magnitude * units);
    return static_cast<unsigned char>(sign | static_cast<unsigned>(rounded));
  }
  constexpr int kDropped = 23 - kMantissaBits;
  const unsigned rounded = u + ((1u << (kDropped - 1)) - 1) + (u >> kDropped & 1);
  return static_cast<unsigned char>(
      sign | ((rounded >> kDropped) - (static_cast<unsigned>(127 - kBias) << kMantissaBits)));
}

CUFUSE_DEVICE e4m3 to_e4m3(float v) { return {fp8_from_float<3, 7, 0x7e>(v)}; }
CUFUSE_DEVICE e5m2 to_e5m2(float v) { return {fp8_from_float<2, 15, 0x7b>(v)}; }

}  // namespace cufuse
