// Loops over elements: what the elementary kernels have in common.
#pragma once

#include "device/vec.cuh"

namespace cufuse {

// y[r, i] = f(a[r, i], b[i]) with one b [n] for all rows of a [rows, n]; arrays of one size are one
// row. CTAs stride over columns in x and over rows in y. kVec divides n, or there is one row and
// its last values go one by one.
template <int kVec, typename T, typename F>
CUFUSE_DEVICE void for_each_pair(const T* a, const T* b, T* y, i64 rows, i64 n, F f) {
  const i64 thread = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
  const i64 threads = static_cast<i64>(gridDim.x) * blockDim.x;
  const i64 whole = n / kVec * kVec;
  for (i64 i = thread * kVec; i < whole; i += threads * kVec) {
    const auto right = load_vec<kVec>(b + i);
    for (i64 row = blockIdx.y; row < rows; row += gridDim.y) {
      auto left = load_vec<kVec>(a + row * n + i);
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        left.v[j] = from_float<T>(f(to_float(left.v[j]), to_float(right.v[j])));
      }
      store_vec<kVec>(y + row * n + i, left);
    }
  }
  const i64 rest = whole + thread;
  if (rest < n) y[rest] = from_float<T>(f(to_float(a[rest]), to_float(b[rest])));
}

// y[i] = f(a[i]).
template <int kVec, typename T, typename F>
CUFUSE_DEVICE void for_each(const T* a, T* y, i64 n, F f) {
  const i64 thread = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
  const i64 threads = static_cast<i64>(gridDim.x) * blockDim.x;
  const i64 whole = n / kVec * kVec;
  for (i64 i = thread * kVec; i < whole; i += threads * kVec) {
    auto group = load_vec<kVec>(a + i);
#pragma unroll
    for (int j = 0; j < kVec; ++j) group.v[j] = from_float<T>(f(to_float(group.v[j])));
    store_vec<kVec>(y + i, group);
  }
  const i64 rest = whole + thread;
  if (rest < n) y[rest] = from_float<T>(f(to_float(a[rest])));
}

}  // namespace cufuse
