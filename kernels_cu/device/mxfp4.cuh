// Weights of 4 bits, MXFP4: blocks of 32 along K share a scale 2^(byte - 127), a value is an FP4
// (e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and a sign). OCP Microscaling Formats (MX) v1.0, 2023.
//
// An expert [n, k] is panels of 16 rows, a panel is tiles of 64 columns, a tile is 512 bytes of
// values and 32 of scales. A lane has 16 bytes of values, a word for each 16 columns: its A
// fragment of mma_m16n8k16. The bits of a word lie such that 8 instructions make four registers of
// it; cufuse/reference/mxfp4.py tells the same layout.
#pragma once

#include "device/vec.cuh"

namespace cufuse {

struct Mxfp4 {
  static constexpr int kBlock = 32;  // columns that share a scale
  static constexpr int kTileRows = 16;
  static constexpr int kGatedRows = 8;  // of the gate and of the up in a panel
  static constexpr int kTileK = 64;
  static constexpr int kValueBytes = 512;
  static constexpr int kTileBytes = kValueBytes + 32;

  CUFUSE_DEVICE static constexpr int tiles(int k) { return (k - 1) / kTileK + 1; }
  CUFUSE_DEVICE static constexpr int panels(int n, bool gated = false) {
    return (n - 1) / (gated ? kGatedRows : kTileRows) + 1;
  }
  CUFUSE_DEVICE static constexpr i64 panel_bytes(int k) {
    return static_cast<i64>(tiles(k)) * kTileBytes;
  }

  // In a tile: the 16 bytes of a lane, and the scales of rows lane / 4 and 8 further: those of the
  // first 32 columns in the lower half of the word, row lane / 4 in the lower byte.
  CUFUSE_DEVICE static constexpr int value_place(int lane) { return lane * 16; }
  CUFUSE_DEVICE static constexpr int scale_place(int lane) { return kValueBytes + lane / 4 * 4; }
};

// Where the bits of two FP4 values are in a register of two 16-bit values: the sign on top, the
// other three around the border of bfloat16's exponent and mantissa. So they are the value times
// 2^-126 as it stands, also 0.5, which is no normal number in either format.
constexpr u32 kFp4Bits = 0x81c081c0u;
constexpr u32 kFp4Normal = 0x7e807e80u;  // 2^126 twice, in bfloat16
// Four such pairs are not disjoint however they are turned, but one and three are: the three make
// an inner word, of which these bits keep their places in the outer one and the others are turned.
constexpr u32 kFp4WordBits = 0x1a101a10u;

// Two values, as a checkpoint's byte has them (the first in the low nibble), to their bits.
CUFUSE_DEVICE u32 fp4_spread(u32 byte) {
  return (byte & 0x8u) << 12 | (byte & 0x7u) << 6 | (byte & 0x80u) << 24 | (byte & 0x70u) << 18;
}
CUFUSE_DEVICE u32 fp4_byte(u32 bits) {
  return (bits >> 12 & 0x8u) | (bits >> 6 & 0x7u) | (bits >> 24 & 0x80u) | (bits >> 18 & 0x70u);
}

// Four pairs of values <-> the word of a lane.
CUFUSE_DEVICE u32 fp4_join(const u32 (&pairs)[4]) {
  const u32 inner = pairs[1] | rotate_left(pairs[2], 29) | rotate_left(pairs[3], 3);
  return pairs[0] | (inner & kFp4WordBits) | rotate_left(inner & ~kFp4WordBits, 27);
}
CUFUSE_DEVICE u32 fp4_inner(u32 word) {
  return select_bits(kFp4WordBits, word, rotate_left(word, 5));
}
CUFUSE_DEVICE void fp4_split(u32 word, u32 (&pairs)[4]) {
  const u32 inner = fp4_inner(word);
  pairs[0] = word & kFp4Bits;
  pairs[1] = inner & kFp4Bits;
  pairs[2] = inner << 3 & kFp4Bits;  // these are not turned around
  pairs[3] = rotate_left(inner, 29) & kFp4Bits;
}

// A lane's word as the A fragment of mma_m16n8k16, times what `kFp4Unit` says.
template <typename T>
CUFUSE_DEVICE void fp4_fragment(u32 word, u32 (&a)[4]);

// bfloat16 multiplies by 2^126, which the sums of a float could not hold.
template <>
CUFUSE_DEVICE void fp4_fragment<bfloat16>(u32 word, u32 (&a)[4]) {
  fp4_split(word, a);
#pragma unroll
  for (int i = 0; i < 4; ++i) a[i] = mul_pair<bfloat16>(a[i], kFp4Normal);
}

// half has three bits less of exponent: there the values are times 2^-14, and stay so.
CUFUSE_DEVICE u32 fp4_halves(u32 sign, u32 magnitude) {
  return (sign & 0x80008000u) | (magnitude & 0x0e000e00u);
}
template <>
CUFUSE_DEVICE void fp4_fragment<half>(u32 word, u32 (&a)[4]) {
  const u32 inner = fp4_inner(word), up = inner << 3;
  a[0] = fp4_halves(word, word << 3);
  a[1] = fp4_halves(inner, up);
  a[2] = fp4_halves(up, inner << 6);
  a[3] = fp4_halves(rotate_left(inner, 29), inner);
}

template <typename T>
constexpr float kFp4Unit = 1.0f;
template <>
constexpr float kFp4Unit<half> = 6.103515625e-05f;  // 2^-14

// The scale of byte kIndex of a word, as a float that is normal: 0 for 2^-127, and infinity for the
// byte that stands for NaN.
template <int kIndex>
CUFUSE_DEVICE float mxfp4_scale(u32 scales) {
  constexpr int kUp = 23 - 8 * kIndex;
  return __uint_as_float((kUp >= 0 ? scales << (kUp & 31) : scales >> (-kUp & 31)) & 0x7f800000u);
}

// The sums of a lane over the tiles that its warp multiplies. x is in shared memory as fragments
// (`fragment_place` in panels.cuh), from the tile's first on and this lane's: x + lane % 4; behind
// the last column of the weights it is finite. A block of 32 columns is added up by itself, then
// times its scale; nothing else decides the order.
template <typename T>
struct Mxfp4Sums {
  float first = 0.0f, second = 0.0f;  // of rows lane / 4 and 8 further, times kFp4Unit

  CUFUSE_DEVICE void add(const uint4& values, u32 scales, const uint4* x) {
    const uint4 low = x[0], high = x[4];
    float block[4] = {}, next[4] = {};
    multiply(block, values.x, low.x, low.y);
    multiply(block, values.y, low.z, low.w);
    multiply(next, values.z, high.x, high.y);
    multiply(next, values.w, high.z, high.w);
    first = fmaf(block[0], mxfp4_scale<0>(scales), first);
    second = fmaf(block[2], mxfp4_scale<1>(scales), second);
    first = fmaf(next[0], mxfp4_scale<2>(scales), first);
    second = fmaf(next[2], mxfp4_scale<3>(scales), second);
  }
  // Sums of other products, as they are.
  CUFUSE_DEVICE void add(float2 others) {
    first = fmaf(others.x, kFp4Unit<T>, first);
    second = fmaf(others.y, kFp4Unit<T>, second);
  }

  // In all lanes: every column of the products is x.
  CUFUSE_DEVICE float2 rows() const {
    return make_float2(first * (1.0f / kFp4Unit<T>), second * (1.0f / kFp4Unit<T>));
  }

 private:
  static CUFUSE_DEVICE void multiply(float (&sums)[4], u32 word, u32 x0, u32 x1) {
    u32 a[4];
    fp4_fragment<T>(word, a);
    mma_m16n8k16<T>(sums, a, x0, x1);
  }
};

template <>
struct Mxfp4Sums<float> {
  float first = 0.0f, second = 0.0f;

  CUFUSE_DEVICE void add(const uint4& values, u32 scales, const uint4* x) {
    float block[2] = {}, next[2] = {};
    multiply(block, values.x, x[0]);
    multiply(block, values.y, x[4]);
    multiply(next, values.z, x[8]);
    multiply(next, values.w, x[12]);
    first = fmaf(block[0], mxfp4_scale<0>(scales), first);
    second = fmaf(block[1], mxfp4_scale<1>(scales), second);
    first = fmaf(next[0], mxfp4_scale<2>(scales), first);
    second = fmaf(next[1], mxfp4_scale<3>(scales), second);
  }
  CUFUSE_DEVICE void add(float2 others) {
    first += others.x;
    second += others.y;
  }

  // In all lanes: each has its own columns, which are added here.
  CUFUSE_DEVICE float2 rows() const {
    float2 sum = make_float2(first, second);
#pragma unroll
    for (int offset = 1; offset < 4; offset *= 2) {
      sum.x += __shfl_xor_sync(kFullMask, sum.x, offset);
      sum.y += __shfl_xor_sync(kFullMask, sum.y, offset);
    }
    return sum;
  }

 private:
  static CUFUSE_DEVICE void multiply(float (&sums)[2], u32 word, const uint4& x) {
    u32 a[4];
    fp4_fragment<bfloat16>(word, a);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float low, high;
      unpack_pair(low, high, a[i], bfloat16{});
      sums[i % 2] = fmaf(low, __uint_as_float(i < 2 ? x.x : x.z), sums[i % 2]);
      sums[i % 2] = fmaf(high, __uint_as_float(i < 2 ? x.y : x.w), sums[i % 2]);
    }
  }
};

}  // namespace cufuse
