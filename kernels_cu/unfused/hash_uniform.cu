// y[i] = center + half_width * u(seed, stream, i) with u uniform in [-1, 1): weights of a model
// that nobody trained. A thread makes one 16-byte group. Bounded by the write of y.
// instantiate: hash_uniform<bfloat16>
// instantiate: hash_uniform<half>
// instantiate: hash_uniform<float>
#include "device/hash.cuh"
#include "device/vec.cuh"

namespace cufuse {

template <typename T>
struct HashUniformArgs {
  T* y;  // [count]; 16-byte aligned
  i64 count;
  u64 seed;
  u64 stream;  // which tensor
  float step;  // half_width / 2^23
  float center;
};

// 24 bits of the hash are a whole number that float32 holds exactly; the product and the sum round
// once each, which is why NumPy makes the same bits.
CUFUSE_DEVICE float uniform_value(u32 word, float step, float center) {
  const int whole = static_cast<int>(word >> 8) - (1 << 23);
  return static_cast<float>(whole) * step + center;
}

template <typename T>
__global__ void __launch_bounds__(256) hash_uniform(const HashUniformArgs<T> args) {
  constexpr int kThreads = 256, kVec = kPer16<T>;
  const i64 begin = (static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x) * kVec;
  if (begin >= args.count) return;
  // A group never straddles a multiple of 2^32, so one key serves it.
  const HashKey key = hash_key(args.seed, args.stream, static_cast<u64>(begin) >> 32);
  Vec<T, kVec> group;
#pragma unroll
  for (int j = 0; j < kVec; ++j) {
    const u32 word = hash_word(static_cast<u32>(begin + j), key);
    group.v[j] = from_float<T>(uniform_value(word, args.step, args.center));
  }
  if (begin + kVec <= args.count) {
    store_vec<kVec>(args.y + begin, group);
    return;
  }
#pragma unroll
  for (int j = 0; j < kVec; ++j) {
    if (begin + j < args.count) args.y[begin + j] = group.v[j];
  }
}

}  // namespace cufuse
