// How matrices of 16-bit values lie in shared memory for the tensor cores, and the descriptors that
// tell wgmma. Only hw.cuh and its twin include this.
#pragma once

namespace cufuse {

// The index whose neighbours lie side by side: k of [rows, k], or the row of [k, rows].
enum class Major { k, mn };

// Where a byte goes that would be at `offset` in lines of kBytes: 16-byte chunks of a line change
// places by the number of the line's 128 bytes, so that no eight lines of a column meet in one
// bank. kBytes is 128, 64, 32, or 16: nothing changes. The offset counts from an address that is a
// multiple of 8 kBytes.
template <int kBytes>
CUFUSE_DEVICE constexpr u32 swizzle(u32 offset) {
  static_assert(kBytes == 16 || kBytes == 32 || kBytes == 64 || kBytes == 128,
                "wgmma knows swizzles of 32, 64 and 128 bytes, and 16: none");
  return offset ^ (offset >> 3 & (kBytes - 16));
}

// A matrix in shared memory for wgmma, in blocks of 8 lines of kSwizzle bytes, each from `swizzle`.
// Major::k: a line is kSwizzle / 2 of a row's k, a block 8 rows; the next 8 rows are stride_bytes
// on. Without a swizzle a line holds 8 of the 16 k, and the other 8 are leading_bytes on; with one,
// leading_bytes has no meaning.
// Major::mn: a line is kSwizzle / 2 rows at one k, a block 8 k. The next 8 k are stride_bytes on,
// the next rows leading_bytes; without a swizzle it is the other way round.
// PTX ISA, "Matrix Descriptor Format".
template <int kSwizzle>
CUFUSE_DEVICE u64 wgmma_descriptor(const void* shared, u32 leading_bytes, u32 stride_bytes) {
  constexpr u64 kMode = kSwizzle == 128 ? 1 : kSwizzle == 64 ? 2 : kSwizzle == 32 ? 3 : 0;
  static_assert(kMode != 0 || kSwizzle == 16, "swizzles have 32, 64 or 128 bytes; 16 is none");
  return static_cast<u64>((shared_address(shared) & 0x3ffff) >> 4) |
         static_cast<u64>(leading_bytes >> 4) << 16 | static_cast<u64>(stride_bytes >> 4) << 32 |
         kMode << 62;
}

// The descriptor of the same matrix size_bytes on: the next 16 k, say.
CUFUSE_DEVICE u64 wgmma_advance(u64 descriptor, u32 size_bytes) {
  return descriptor + (size_bytes >> 4);
}

}  // namespace cufuse
