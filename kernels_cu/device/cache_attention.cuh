// Attention of the query heads of one KV head over a part of its cache that comes through a ring:
// chunks of kKeys keys and their values, a stage each, to the groups of four warps in turn. Every
// group keeps a softmax of its own over the keys that it sees.
//
// The keys of a chunk lie in its stage as 8 slices of consecutive rows, each 16 bytes further on
// than it would be: row i of all slices, 8 keys, is then read without bank conflicts whatever the
// head's size is. Behind them the values lie likewise.
#pragma once

#include "device/attention.cuh"
#include "device/ring.cuh"

namespace cufuse {

constexpr int kSlices = 8;
constexpr int kMostHeads = 8;  // query heads of a KV head: columns of a tensor core's product
constexpr float kLog2E = 1.4426950408889634f;

template <typename T, int kHeads_, int kHeadDim_, int kStageBytes>
struct CacheShape {
  static constexpr int kHeads = kHeads_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kRowBytes = kHeadDim * static_cast<int>(sizeof(T));
  static constexpr int kFitting = kStageBytes / 2 / kRowBytes;
  static constexpr int kKeys = kFitting >= 64 ? 64 : kFitting >= 32 ? 32 : 16;
  static constexpr int kSliceRows = kKeys / kSlices;
  static constexpr int kSliceBytes = kSliceRows * kRowBytes;
  static constexpr int kSlicePitch = kSliceBytes + 16;
  // The logits of a chunk between the warps of a group: [kHeads, kLogitPitch] floats.
  static constexpr int kLogitPitch = kKeys + 8;
  static constexpr int kLogitBytes = kHeads * kLogitPitch * 4;
  static_assert(kHeadDim % 16 == 0 && kHeadDim <= 256, "a row is whole tiles");
  static_assert(kHeads <= kMostHeads, "a group has at most 8 query heads");
  static constexpr int kValuesAt = kSlices * kSlicePitch;
  static_assert(kFitting >= 16, "a chunk fits a stage");
};

// What a warp of a group knows: per head the largest logit (times log2 e), the sum of
// 2^(logit - max), and every fourth tile of 8 columns of the values weighted with it.
template <typename T, typename Shape>
struct GroupAttention {
  static constexpr int kHeadDim = Shape::kHeadDim;
  static constexpr int kTiles = kHeadDim / 8;
  static constexpr int kMine = (kTiles + 7) / 8 * 2;  // in pairs
  float max = minus_infinity();                       // of head lane / 4
  float total = 0.0f;                                 // of this lane's keys
  float out[kMine][2] = {};

  // One chunk, whose first key is `first`; keys outside [span.first, span.last) are left out.
  //   queries: [kHeads, kHeadDim] in shared memory
  //   logits: kLogitBytes of the group; sync is its barrier
  template <typename Sync>
  CUFUSE_DEVICE void add_chunk(const T* queries,
                               const unsigned char* keys,
                               float* logits,
                               int quarter,
                               int first,
                               KeySpan span,
                               float scale,
                               const Sync& sync) {
    const bool whole = first >= span.first && first + Shape::kKeys <= span.last;
    find_logits(queries, keys, logits, quarter, scale);
    sync();
    const int lane = thread_here() % 32;
    const int head = min(lane / 4, Shape::kHeads - 1);
    // A lane's keys: all rows of slices 2 (lane % 4) and the next.
    const float* mine = logits + head * Shape::kLogitPitch + lane % 4 * 2;
    const int first_key = first + lane % 4 * 2 * Shape::kSliceRows;
    auto visible = [&](int slice, int row) {
      const int key = first_key + slice * Shape::kSliceRows + row;
      return key >= span.first && key < span.last;
    };

    float top = max;
#pragma unroll 8
    for (int row = 0; row < Shape::kSliceRows; ++row) {
      const auto s = load_vec<2>(mine + row * kSlices);
      if (whole || visible(0, row)) top = fmaxf(top, s.v[0]);
      if (whole || visible(1, row)) top = fmaxf(top, s.v[1]);
    }
#pragma unroll
    for (int offset = 1; offset < 4; offset *= 2) {
      top = fmaxf(top, __shfl_xor_sync(kFullMask, top, offset));
    }
    const float shift = softmax_shift(top);
    const float rescale = exp2f(max - shift);
    max = top;
    total *= rescale;
#pragma unroll
    for (int n = 0; n < kMine; ++n) {
      out[n][0] *= rescale;
      out[n][1] *= rescale;
    }

    const unsigned char* source = keys + Shape::kValuesAt + lane % 8 * Shape::kSlicePitch +
                                  lane / 8 % 2 * Shape::kRowBytes + lane / 16 * 16 + quarter * 32;
#pragma unroll 2
    for (int row = 0; row < Shape::kSliceRows; row += 2) {
      u32 a[4] = {}, keep[2] = {~0u, ~0u};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const auto s = load_vec<2>(mine + (row + i) * kSlices);
        float low = exp2f(s.v[0] - shift), high = exp2f(s.v[1] - shift);
        // Rows that nobody wrote may hold anything; 0 times that is not 0.
        if (!whole) {
          const bool first_is = visible(0, row + i), second_is = visible(1, row + i);
          low = first_is ? low : 0.0f;
          high = second_is ? high : 0.0f;
          keep[i] = (first_is ? 0xffffu : 0u) | (second_is ? 0xffff0000u : 0u);
        }
        total += low + high;
        a[2 * i] = word_of(from_float<T>(low), from_float<T>(high));
      }
#pragma unroll
      for (int n = 0; n < kMine; n += 2) {
        // Tiles 2 quarter and the next, then 8 further on: two in one access.
        if (kTiles % 8 != 0 && quarter * 2 + n * 4 >= kTiles) break;
        u32 b[4];
        load_matrix_transposed(b, source + row * Shape::kRowBytes + n * 64);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float c[4] = {out[n + i][0], out[n + i][1], 0.0f, 0.0f};
          mma_m16n8k16<T>(c, a, b[2 * i] & keep[0], b[2 * i + 1] & keep[1]);
          out[n + i][0] = c[0];
          out[n + i][1] = c[1];
        }
      }
    }
  }

  // max and total of all heads, the same in all warps of the group, to maxima, totals [kMostHeads];
  // this warp's columns of the weighted values to rows [kHeads, pitch].
  CUFUSE_DEVICE void store(
      float* maxima, float* totals, float* rows, int pitch, int quarter) const {
    const int lane = thread_here() % 32, head = lane / 4;
    float sum = total;
#pragma unroll
    for (int offset = 1; offset < 4; offset *= 2) sum += __shfl_xor_sync(kFullMask, sum, offset);
    if (quarter == 0 && lane % 4 == 0) {
      maxima[head] = max;
      totals[head] = sum;
    }
    if (head >= Shape::kHeads) return;
#pragma unroll
    for (int n = 0; n < kMine; ++n) {
      const int tile = quarter * 2 + n / 2 * 2 * kGroupWarps + n % 2;
      if (kTiles % (2 * kGroupWarps) != 0 && tile >= kTiles) break;
      store_vec<2>(rows + head * pitch + tile * 8 + lane % 4 * 2,
                   Vec<float, 2>{{out[n][0], out[n][1]}});
    }
  }

 private:
  // Every fourth 16 keys of the chunk: rows `row` and `row` + 1 of all slices.
  static CUFUSE_DEVICE void find_logits(
      const T* queries, const unsigned char* keys, float* logits, int quarter, float scale) {
    const int lane = thread_here() % 32, head = lane / 4, t = lane % 4;
    const u32* q = reinterpret_cast<const u32*>(queries + head * kHeadDim) + t;
    const bool there = head < Shape::kHeads;
#pragma unroll 1
    for (int row = 2 * quarter; row < Shape::kSliceRows; row += 2 * kGroupWarps) {
      const unsigned char* source = keys + lane % 8 * Shape::kSlicePitch +
                                    (row + lane / 16) * Shape::kRowBytes + lane / 8 % 2 * 16;
      float even[4] = {}, odd[4] = {};
#pragma unroll 4
      for (int k = 0; k < kHeadDim / 16; ++k) {
        u32 b[4];
        load_matrix(b, source + k * 32);
        const u32 a[4] = {there ? q[k * 8] : 0, 0, there ? q[k * 8 + 4] : 0, 0};
        mma_m16n8k16<T>(even, a, b[0], b[1]);
        mma_m16n8k16<T>(odd, a, b[2], b[3]);
      }
      if (there) {
        float* to = logits + head * Shape::kLogitPitch + row * kSlices + 2 * t;
        store_vec<2>(to, Vec<float, 2>{{even[0] * scale, even[1] * scale}});
        store_vec<2>(to + kSlices, Vec<float, 2>{{odd[0] * scale, odd[1] * scale}});
      }
    }
  }
};

// The same in float32: a warp takes every fourth head, a lane a key of 32 and then every 32nd
// column.
template <typename Shape>
struct GroupAttention<float, Shape> {
  static constexpr int kHeadDim = Shape::kHeadDim;
  static constexpr int kMine = (Shape::kHeads + kGroupWarps - 1) / kGroupWarps;
  static constexpr int kColumns = (kHeadDim + 31) / 32;
  float max[kMine], total[kMine] = {}, out[kMine][kColumns] = {};

  CUFUSE_DEVICE GroupAttention() {
#pragma unroll
    for (int h = 0; h < kMine; ++h) max[h] = minus_infinity();
  }

  template <typename Sync>
  CUFUSE_DEVICE void add_chunk(const float* queries,
                               const unsigned char* keys,
                               float*,
                               int quarter,
                               int first,
                               KeySpan span,
                               float scale,
                               const Sync&) {
    const unsigned char* stage = keys + Shape::kValuesAt;
    const int lane = thread_here() % 32;
#pragma unroll
    for (int h = 0; h < kMine; ++h) {
      const int head = quarter + h * kGroupWarps;
      if (head >= Shape::kHeads) break;
      const float* q = queries + head * kHeadDim;
#pragma unroll 1
      for (int begin = 0; begin < Shape::kKeys; begin += 32) {
        const int count = min(32, Shape::kKeys - begin);
        const int mine = begin + min(lane, count - 1);
        const int key = first + place(mine);
        const auto* k = reinterpret_cast<const float*>(keys + offset(mine));
        float dot[4] = {};
#pragma unroll 4
        for (int c = 0; c < kHeadDim; c += 4) {
          const auto a = load_vec<4>(k + c), b = load_vec<4>(q + c);
#pragma unroll
          for (int j = 0; j < 4; ++j) dot[j] = fmaf(a.v[j], b.v[j], dot[j]);
        }
        const bool visible = lane < count && key >= span.first && key < span.last;
        const float s =
            visible ? ((dot[0] + dot[1]) + (dot[2] + dot[3])) * scale : minus_infinity();
        const float top = fmaxf(max[h], warp_max(s));
        const float shift = softmax_shift(top);
        const float rescale = exp2f(max[h] - shift);
        const float p = exp2f(s - shift);
        max[h] = top;
        total[h] = fmaf(total[h], rescale, warp_sum(p));
#pragma unroll
        for (int c = 0; c < kColumns; ++c) out[h][c] *= rescale;
#pragma unroll 1
        for (int i = 0; i < count; ++i) {
          const float weight = __shfl_sync(kFullMask, p, i);
          const int at = first + place(begin + i);
          if (at < span.first || at >= span.last) continue;
          const auto* v = reinterpret_cast<const float*>(stage + offset(begin + i));
#pragma unroll
          for (int c = 0; c < kColumns; ++c) {
            const int column = lane + c * 32;
            if (column < kHeadDim) out[h][c] = fmaf(weight, v[column], out[h][c]);
          }
        }
      }
    }
  }

  CUFUSE_DEVICE void store(
      float* maxima, float* totals, float* rows, int pitch, int quarter) const {
    const int lane = thread_here() % 32;
#pragma unroll
    for (int h = 0; h < kMine; ++h) {
      const int head = quarter + h * kGroupWarps;
      if (head >= Shape::kHeads) break;
      if (lane == 0) {
        maxima[head] = max[h];
        totals[head] = total[h];
      }
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const int column = lane + c * 32;
        if (column < kHeadDim) rows[head * pitch + column] = out[h][c];
      }
    }
  }

 private:
  // Key i of a chunk, where rows of all slices follow each other: its place in the sequence, and
  // its byte in the stage.
  static CUFUSE_DEVICE int place(int i) { return i % kSlices * Shape::kSliceRows + i / kSlices; }
  static CUFUSE_DEVICE int offset(int i) {
    return i % kSlices * Shape::kSlicePitch + i / kSlices * Shape::kRowBytes;
  }
};

// A softmax over some keys of one head, and two of its values.
struct PartialHead {
  float max = minus_infinity();
  float total = 0.0f;
  float2 out = make_float2(0.0f, 0.0f);

  CUFUSE_DEVICE void add(float other_max, float other_total, float2 other) {
    const float top = fmaxf(max, other_max);
    const float shift = softmax_shift(top);
    const float mine = exp2f(max - shift), its = exp2f(other_max - shift);
    total = total * mine + other_total * its;
    out.x = out.x * mine + other.x * its;
    out.y = out.y * mine + other.y * its;
    max = top;
  }

  // A sink takes its share of the sum and brings no value.
  CUFUSE_DEVICE void add_sink(float logit) { add(logit * kLog2E, 1.0f, make_float2(0.0f, 0.0f)); }

  CUFUSE_DEVICE float2 result() const {
    const float scale = total == 0.0f ? 0.0f : 1.0f / total;
    return make_float2(out.x * scale, out.y * scale);
  }

  // What weighs the result against those of other keys: 2 to this power.
  CUFUSE_DEVICE float weight() const { return total == 0.0f ? max : max + log2f(total); }
};

}  // namespace cufuse
