// Vectors of 16 bytes: how every stage reads and writes global memory when addresses allow it.
#pragma once

#include "device/hw.cuh"

namespace cufuse {

// The number of T in one 16-byte access.
template <typename T>
constexpr int kPer16 = 16 / static_cast<int>(sizeof(T));

// kCount values of T that move in one access where kCount * sizeof(T) is 4, 8 or 16.
template <typename T, int kCount>
struct alignas(sizeof(T) * kCount) Vec {
  T v[kCount];
};

template <int kCount, typename T>
CUFUSE_DEVICE Vec<T, kCount> load_vec(const T* p) {
  return *reinterpret_cast<const Vec<T, kCount>*>(p);
}

template <int kCount, typename T>
CUFUSE_DEVICE void store_vec(T* p, const Vec<T, kCount>& v) {
  *reinterpret_cast<Vec<T, kCount>*>(p) = v;
}

// The two values of a word.
CUFUSE_DEVICE void unpack_pair(float& low, float& high, u32 word, bfloat16) {
  low = __uint_as_float(word << 16);
  high = __uint_as_float(word & 0xffff0000u);
}

CUFUSE_DEVICE void unpack_pair(float& low, float& high, u32 word, half) {
  union {
    u32 word;
    Vec<half, 2> pair;
  } u{word};
  low = to_float(u.pair.v[0]);
  high = to_float(u.pair.v[1]);
}

}  // namespace cufuse
