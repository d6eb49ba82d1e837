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

}  // namespace cufuse
