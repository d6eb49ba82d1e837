// Experts of 4-bit weights to their packed layout (device/mxfp4.cuh), bits unchanged, and out of it
// to row-major matrices of another type. A warp takes a tile; a thread takes the 16 bytes that one
// lane has of it, packing, and 16 columns of two rows, unpacking, for which four lanes swap words.
// Bounded by memory: one read and one write of the weights.
// instantiate: pack_mxfp4
// instantiate: unpack_mxfp4<bfloat16, 8>
// instantiate: unpack_mxfp4<half, 1>
// instantiate: unpack_mxfp4<float, 4>
#include "device/mxfp4.cuh"

namespace cufuse {

struct PackMxfp4Args {
  const u8* blocks;     // [n_experts, n, blocks of k, 16]; the even column in the low nibble
  const u8* scales;     // [n_experts, n, blocks of k]
  const u8* up_blocks;  // as blocks; null for experts that are not gated
  const u8* up_scales;  // as scales
  u8* packed;           // [n_experts, panels of n, tiles of k, kTileBytes]; 16-byte aligned
  i64 expert_stride;    // of blocks and up_blocks, in bytes
  i64 row_stride;
  i64 scale_expert_stride;
  i64 scale_row_stride;
  int n_experts;
  int n;
  int k;
};

template <typename T>
struct UnpackMxfp4Args {
  const u8* packed;  // [n_experts, panels of n, tiles of k, kTileBytes]; 16-byte aligned
  T* w;              // [n_experts, n, k]
  T* up;             // [n_experts, n, k]; null for experts that are not gated
  const int* ids;    // [n_ids]; only these experts are written; null for all
  int n_ids;
  int n_experts;
  int n;
  int k;
};

constexpr int kMxfp4Threads = 256;

// The tile of this warp, which may lie beyond the panel's last.
CUFUSE_DEVICE int mxfp4_tile() {
  return static_cast<int>(blockIdx.x) * (kMxfp4Threads / 32) + static_cast<int>(threadIdx.x / 32);
}

// Which row of which matrix a panel's row is.
struct Mxfp4Row {
  int row;
  bool up;
};
CUFUSE_DEVICE Mxfp4Row mxfp4_row(int panel, int row, bool gated) {
  if (!gated) return {panel * Mxfp4::kTileRows + row, false};
  return {panel * Mxfp4::kGatedRows + row % Mxfp4::kGatedRows, row >= Mxfp4::kGatedRows};
}

__global__ void __launch_bounds__(kMxfp4Threads) pack_mxfp4(const PackMxfp4Args args) {
  const int lane = threadIdx.x % 32, tile = mxfp4_tile();
  if (tile >= Mxfp4::tiles(args.k)) return;
  const bool gated = args.up_blocks != nullptr;
  const int panels = Mxfp4::panels(args.n, gated);
  const i64 all = static_cast<i64>(panels) * args.n_experts;
  const int first = tile * (Mxfp4::kTileK / Mxfp4::kBlock), blocks = args.k / Mxfp4::kBlock;
  for (i64 at = blockIdx.y; at < all; at += gridDim.y) {
    const i64 expert = at / panels;
    u32 words[4] = {}, scales = 0x7f7f7f7fu;
#pragma unroll
    for (int half_panel = 0; half_panel < 2; ++half_panel) {
      const Mxfp4Row from =
          mxfp4_row(static_cast<int>(at % panels), lane / 4 + half_panel * 8, gated);
      if (from.row >= args.n) continue;
      const u8* row = (from.up ? args.up_blocks : args.blocks) + expert * args.expert_stride +
                      from.row * args.row_stride;
      const u8* row_scales = (from.up ? args.up_scales : args.scales) +
                             expert * args.scale_expert_stride + from.row * args.scale_row_stride;
#pragma unroll
      for (int block = 0; block < 2; ++block) {
        if (first + block >= blocks) continue;
        const u32 scale = row_scales[first + block];
        const int shift = block * 16 + half_panel * 8;
        scales = (scales & ~(0xffu << shift)) | scale << shift;
        // Columns 2 t and 2 t + 1 of 16 are byte t of 8.
        const u8* values = row + (first + block) * 16 + lane % 4;
#pragma unroll
        for (int word = 0; word < 2; ++word) {
          u32 pairs[4] = {};
          pairs[half_panel] = fp4_spread(values[word * 8]);
          pairs[half_panel + 2] = fp4_spread(values[word * 8 + 4]);
          words[block * 2 + word] |= fp4_join(pairs);
        }
      }
    }
    u8* target = args.packed + (at * Mxfp4::tiles(args.k) + tile) * Mxfp4::kTileBytes;
    *reinterpret_cast<uint4*>(target + Mxfp4::value_place(lane)) =
        make_uint4(words[0], words[1], words[2], words[3]);
    if (lane % 4 == 0) *reinterpret_cast<u32*>(target + Mxfp4::scale_place(lane)) = scales;
  }
}

// The float that a value times 2^(scale - 127) is, made of whole numbers: products would flush what
// is below the normal ones. Infinity beyond the largest float, NaN for 255.
CUFUSE_DEVICE float mxfp4_value(u32 nibble, u32 scale) {
  const u32 sign = nibble << 28 & 0x80000000u, exponent = nibble >> 1 & 3u;
  if (scale == 255) return __uint_as_float(0x7fc00000u);
  if ((nibble & 7u) == 0) return __uint_as_float(sign);
  const u32 fraction = exponent ? (nibble & 1u) << 22 : 0u;
  const int field = static_cast<int>(scale + exponent) - 1;
  if (field >= 255) return __uint_as_float(sign | 0x7f800000u);
  if (field >= 1) return __uint_as_float(sign | static_cast<u32>(field) << 23 | fraction);
  return __uint_as_float(sign | (0x800000u | fraction) >> (1 - field));
}

// Two values at their places (`fp4_spread`) times a scale, as floats: products, where all of them
// are zero or normal numbers.
CUFUSE_DEVICE float2 mxfp4_values(u32 bits, u32 scale) {
  if (scale < 2 || scale > 252) {
    const u32 byte = fp4_byte(bits);
    return make_float2(mxfp4_value(byte & 15u, scale), mxfp4_value(byte >> 4, scale));
  }
  float2 values;
  unpack_pair(values.x, values.y, mul_pair<bfloat16>(bits, kFp4Normal), bfloat16{});
  const float factor = __uint_as_float(scale << 23);
  return make_float2(values.x * factor, values.y * factor);
}

// Whether an expert is among the ids; all lanes of a warp ask together.
CUFUSE_DEVICE bool mxfp4_wanted(const int* ids, int n_ids, int expert, int lane) {
  if (ids == nullptr) return true;
  bool found = false;
  for (int i = lane; i < n_ids; i += 32) found |= ids[i] == expert;
  return __any_sync(kFullMask, found) != 0;
}

CUFUSE_DEVICE u32 pick(const u32 (&words)[4], int i) {
  return i & 2 ? (i & 1 ? words[3] : words[2]) : (i & 1 ? words[1] : words[0]);
}

// kVec values are stored at once: what a row's length and address allow.
template <typename T, int kVec>
__global__ void __launch_bounds__(kMxfp4Threads) unpack_mxfp4(const UnpackMxfp4Args<T> args) {
  constexpr int kColumns = 16;
  const int lane = threadIdx.x % 32, t = lane % 4, tile = mxfp4_tile();
  if (tile >= Mxfp4::tiles(args.k)) return;
  const bool gated = args.up != nullptr;
  const int panels = Mxfp4::panels(args.n, gated);
  const i64 all = static_cast<i64>(panels) * args.n_experts;
  const int column = tile * Mxfp4::kTileK + t * kColumns;
  for (i64 at = blockIdx.y; at < all; at += gridDim.y) {
    const int expert = static_cast<int>(at / panels);
    if (!mxfp4_wanted(args.ids, args.n_ids, expert, lane)) continue;
    const u8* source = args.packed + (at * Mxfp4::tiles(args.k) + tile) * Mxfp4::kTileBytes;
    const uint4 loaded = load_stream(source + Mxfp4::value_place(lane));
    const u32 scales =
        *reinterpret_cast<const u32*>(source + Mxfp4::scale_place(lane)) >> t / 2 * 16;

    // Word s of four neighbours goes to the one of them that is number s.
    const u32 words[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
    u32 swapped[4];
#pragma unroll
    for (int apart = 0; apart < 4; ++apart) {
      swapped[apart] = __shfl_xor_sync(kFullMask, pick(words, t ^ apart), apart);
    }
    u32 rows[2][kColumns / 2];  // the bits of each two columns
#pragma unroll
    for (int from = 0; from < 4; ++from) {
      u32 pairs[4];
      fp4_split(pick(swapped, from ^ t), pairs);
#pragma unroll
      for (int i = 0; i < 4; ++i) rows[i % 2][i / 2 * 4 + from] = pairs[i];
    }
#pragma unroll
    for (int half_panel = 0; half_panel < 2; ++half_panel) {
      const Mxfp4Row to =
          mxfp4_row(static_cast<int>(at % panels), lane / 4 + half_panel * 8, gated);
      if (to.row >= args.n || column >= args.k) continue;
      const u32 scale = scales >> half_panel * 8 & 0xffu;
      const i64 place = (static_cast<i64>(expert) * args.n + to.row) * args.k + column;
      T* target = (to.up ? args.up : args.w) + place;
      T values[kColumns];
#pragma unroll
      for (int i = 0; i < kColumns; i += 2) {
        const float2 two = mxfp4_values(rows[half_panel][i / 2], scale);
        values[i] = from_float<T>(two.x);
        values[i + 1] = from_float<T>(two.y);
      }
#pragma unroll
      for (int begin = 0; begin < kColumns; begin += kVec) {
        Vec<T, kVec> group;
#pragma unroll
        for (int i = 0; i < kVec; ++i) group.v[i] = values[begin + i];
        store_vec<kVec>(target + begin, group);
      }
    }
  }
}

}  // namespace cufuse
