// Blocks and scales of 4-bit weights (device/mxfp4.cuh) that nobody trained: 16 bytes from four
// words of a hash, uniform, and 2^-7, for a quarter of the blocks 2^-8. A thread makes a block.
// Bounded by the write of the blocks.
// instantiate: hash_mxfp4
#include "device/hash.cuh"

namespace cufuse {

struct HashMxfp4Args {
  uint4* blocks;  // [count]
  u8* scales;     // [count]
  i64 count;
  u64 seed;
  u64 block_stream;  // which tensor
  u64 scale_stream;
};

__global__ void __launch_bounds__(256) hash_mxfp4(const HashMxfp4Args args) {
  const i64 i = static_cast<i64>(blockIdx.x) * 256 + threadIdx.x;
  if (i >= args.count) return;
  // The four words of a block never straddle a multiple of 2^32.
  const u64 begin = static_cast<u64>(i) * 4;
  const HashKey key = hash_key(args.seed, args.block_stream, begin >> 32);
  const u32 first = static_cast<u32>(begin);
  args.blocks[i] = make_uint4(hash_word(first, key), hash_word(first + 1, key),
                              hash_word(first + 2, key), hash_word(first + 3, key));
  const HashKey scale_key = hash_key(args.seed, args.scale_stream, static_cast<u64>(i) >> 32);
  args.scales[i] = hash_word(static_cast<u32>(i), scale_key) >> 30 ? 120 : 119;
}

}  // namespace cufuse
