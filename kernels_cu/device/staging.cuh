// A few rows of x in shared memory, normalised on the way in if asked: what `matvec` multiplies.
#pragma once

#include "device/norm.cuh"

namespace cufuse {

// A row is cut into groups of 16 bytes, and a warp takes 32 groups, a chunk, at a time. The last
// chunk is filled up with zeros, so that a lane past the end of the row multiplies 0 by 0.
template <typename T>
constexpr int kChunk = 32 * kPer16<T>;

template <typename T>
CUFUSE_DEVICE int chunk_count(int k) {
  return (k + kChunk<T> - 1) / kChunk<T>;
}

// The values of 16 bytes. Loads that are in flight have to be kept as words: single 16-bit values
// would each take a register, and packing them waits for the load.
template <typename T>
CUFUSE_DEVICE void unpack(float (&to)[kPer16<T>], const uint4& bits) {
  const u32 words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4) {
      to[i] = __uint_as_float(words[i]);
    } else {
      unpack_pair(to[2 * i], to[2 * i + 1], words[i], T{});
    }
  }
}

// Group `group` of a row of k values, zeros past its end. kVec is kPer16<T>, or 1 when k or the
// address forbids an access of 16 bytes: the values are the same, so sums over them are, too.
template <int kVec, typename T>
CUFUSE_DEVICE uint4 load_group(const T* row, int group, int k) {
  constexpr int kGroup = kPer16<T>;
  static_assert(kVec == kGroup || kVec == 1, "a group is read whole or value by value");
  if constexpr (kVec == kGroup) {
    if (group * kGroup < k) return *reinterpret_cast<const uint4*>(row + group * kGroup);
    return make_uint4(0, 0, 0, 0);
  } else {
    union {
      Vec<T, kGroup> values;
      uint4 bits;
    } u{};
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
      if (group * kGroup + j < k) u.values.v[j] = row[group * kGroup + j];
    }
    return u.bits;
  }
}

// The same of a weight row, which is read once.
template <int kVec, typename T>
CUFUSE_DEVICE uint4 load_weight_group(const T* row, int group, int k) {
  if constexpr (kVec == kPer16<T>) {
    return group * kVec < k ? load_stream(row + group * kVec) : make_uint4(0, 0, 0, 0);
  } else {
    return load_group<kVec>(row, group, k);
  }
}

// Copy rows of x [rows, k] to shared memory [kM, chunk_count * kChunk]; rows that are not there
// become zeros. With a norm_weight [k] (null: x as it is) each goes through an RMSNorm first. All
// kThreads threads take part, with `partial` for their kThreads / 32 sums, and end together.
template <int kThreads, int kM, int kVec, Rounding kRounding, typename T>
CUFUSE_DEVICE void stage_x(
    T* shared, const T* x, int rows, int k, const T* norm_weight, float eps, float* partial) {
  constexpr int kGroup = kPer16<T>;
  constexpr int kAhead = 4;  // loads in flight
  const int groups = chunk_count<T>(k) * 32;
  uint4* to = reinterpret_cast<uint4*>(shared);
#pragma unroll 1
  for (int m = 0; m < kM; ++m, x += k, to += groups) {
    float sum = 0.0f;
#pragma unroll 1
    for (int first = threadIdx.x; first < groups; first += kThreads * kAhead) {
      uint4 bits[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        bits[i] = load_group<kVec>(x, first + i * kThreads, m < rows ? k : 0);
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (first + i * kThreads < groups) to[first + i * kThreads] = bits[i];
        float v[kGroup];
        unpack<T>(v, bits[i]);
#pragma unroll
        for (int j = 0; j < kGroup; ++j) sum = fmaf(v[j], v[j], sum);
      }
    }
    if (norm_weight == nullptr || m >= rows) continue;
    // A thread normalises the groups that it wrote itself: no barrier but that of the sum, which
    // the first weights do not wait for.
    uint4 weight_bits[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      weight_bits[i] = load_group<kVec>(norm_weight, threadIdx.x + i * kThreads, k);
    }
    sum = block_sum<kThreads>(sum, partial);
    const float scale = rsqrtf(sum / static_cast<float>(k) + eps);
#pragma unroll 1
    for (int first = threadIdx.x; first < groups; first += kThreads * kAhead) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int group = first + i * kThreads;
        if (group >= groups) break;
        float v[kGroup], weight[kGroup];
        unpack<T>(v, to[group]);
        unpack<T>(weight, weight_bits[i]);
        Vec<T, kGroup> result;
#pragma unroll
        for (int j = 0; j < kGroup; ++j) {
          result.v[j] = normalized<T, kRounding>(v[j], scale, weight[j]);
        }
        store_vec<kGroup>(reinterpret_cast<T*>(to + group), result);
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        weight_bits[i] = load_group<kVec>(norm_weight, first + (i + kAhead) * kThreads, k);
      }
    }
  }
  __syncthreads();
}

}  // namespace cufuse
