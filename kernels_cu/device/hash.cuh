// Random numbers that depend on a counter alone: no state, any order, the same bits in NumPy
// (cufuse/reference/random.py). The constants of the two mixers are those of splitmix64 (Steele,
// Lea and Flood 2014) and of a 32-bit integer hash found by search (triple32, Wellons 2018).
#pragma once

#include "device/hw.cuh"

namespace cufuse {

// What tells one stream of numbers from another.
struct HashKey {
  u32 first, second;
};

CUFUSE_DEVICE u64 mix64(u64 x) {
  x += 0x9E3779B97F4A7C15ull;
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ x >> 27) * 0x94D049BB133111EBull;
  return x ^ x >> 31;
}

CUFUSE_DEVICE HashKey hash_key(u64 seed, u64 stream, u64 block) {
  const u64 key = mix64(mix64(mix64(seed) ^ stream) ^ block);
  return {static_cast<u32>(key), static_cast<u32>(key >> 32)};
}

// 32 random bits. The second half of the key enters between the multiplications: without it two
// streams would be the same numbers in another order. With two multiplications instead of three
// the words of neighbours of one key depend on each other.
CUFUSE_DEVICE u32 hash_word(u32 i, HashKey key) {
  u32 x = i ^ key.first;
  x = (x ^ x >> 17) * 0xED5AD4BBu;
  x = ((x ^ x >> 11) + key.second) * 0xAC4C1B51u;
  x = (x ^ x >> 15) * 0x31848BABu;
  return x ^ x >> 14;
}

}  // namespace cufuse
