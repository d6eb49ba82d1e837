// Attention of one query per head over a part of the KV cache that comes through a ring: chunks of
// kKeys keys and then their values, to the groups of warps in turn. Every warp keeps a softmax of
// its own over the keys that it sees; `merge_heads` puts the warps' together.
//
// A chunk lies in its stage as 8 slices of consecutive rows, each 16 bytes further on than it would
// be: row i of all slices, 8 keys, is then read without bank conflicts whatever the head's size is.
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
  static constexpr int kFitting = kStageBytes / kRowBytes;
  static constexpr int kKeys = kFitting >= 128 ? 128 : kFitting >= 64 ? 64 : kFitting >= 32 ? 32 : 16;
  static constexpr int kSliceRows = kKeys / kSlices;
  static constexpr int kSliceBytes = kSliceRows * kRowBytes;
  static constexpr int kSlicePitch = kSliceBytes + 16;
  static constexpr int kPairs = kSliceRows / 2;  // of row indices: 16 keys
  static constexpr int kPairsPerWarp = (kPairs + kGroupWarps - 1) / kGroupWarps;
  static_assert(kHeadDim % 16 == 0 && kHeadDim <= 256, "a row is whole tiles");
  static_assert(kHeads <= kMostHeads, "a group has at most 8 query heads");
  static_assert(kSlices * kSlicePitch <= kStageBytes + 128, "a chunk fits a stage");
};

// What one warp knows: per head the largest logit (times log2 e), the sum of 2^(logit - max) and
// the values weighted with it.
template <typename T, typename Shape>
struct WarpAttention {
  static constexpr int kHeadDim = Shape::kHeadDim;
  const u32* q;  // of head lane / 4 in shared memory, from word lane % 4 on; null for no head
  float max = minus_infinity();
  float total = 0.0f;  // of this lane's keys
  float out[kHeadDim / 8][2];

  // shared_q: [kHeads, kHeadDim]
  CUFUSE_DEVICE explicit WarpAttention(const T* shared_q) {
    const int lane = thread_here() % 32, head = lane / 4;
    q = head < Shape::kHeads ? reinterpret_cast<const u32*>(shared_q + head * kHeadDim) + lane % 4
                             : nullptr;
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n) out[n][0] = out[n][1] = 0.0f;
  }

  // One chunk, whose first key is `first`; keys outside [span.first, span.last) are left out. The
  // warp is `quarter` of its group; `values` waits for the values' stage.
  template <typename Values>
  CUFUSE_DEVICE void add_chunk(const unsigned char* keys,
                               int quarter,
                               int first,
                               KeySpan span,
                               float scale,
                               const Values& values) {
    const bool whole = first >= span.first && first + Shape::kKeys <= span.last;
    const unsigned char* stage = nullptr;
#pragma unroll 1
    for (int row = 2 * quarter; row < Shape::kSliceRows; row += 2 * kGroupWarps) {
      const int lane = thread_here() % 32;
      // This lane's keys: rows `row` and `row` + 1 of slices 2 (lane % 4) and the next.
      u32 visible = 0xf;
      if (!whole) {
        visible = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int key = first + (lane % 4 * 2 + i % 2) * Shape::kSliceRows + row + i / 2;
          if (key >= span.first && key < span.last) visible |= 1u << i;
        }
      }
      float p[4];
      logits(p, keys, row, lane);
      float top = max;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        p[i] = visible >> i & 1 ? p[i] * scale : minus_infinity();
        top = fmaxf(top, p[i]);
      }
#pragma unroll
      for (int offset = 1; offset < 4; offset *= 2) {
        top = fmaxf(top, __shfl_xor_sync(kFullMask, top, offset));
      }
      const float shift = softmax_shift(top);
      const float rescale = exp2f(max - shift);
      max = top;
      total *= rescale;
      T rounded[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        p[i] = exp2f(p[i] - shift);
        total += p[i];
        rounded[i] = from_float<T>(p[i]);
      }
      if (!stage) stage = values();
      const u32 a[4] = {word_of(rounded), 0, word_of(rounded + 2), 0};
      // Rows that nobody wrote may hold anything; 0 times that is not 0.
      const u32 keep[2] = {(visible & 1 ? 0xffffu : 0u) | (visible & 2 ? 0xffff0000u : 0u),
                           (visible & 4 ? 0xffffu : 0u) | (visible & 8 ? 0xffff0000u : 0u)};
      const unsigned char* source = stage + lane % 8 * Shape::kSlicePitch +
                                    (row + lane / 8 % 2) * Shape::kRowBytes + lane / 16 * 16;
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; n += 2) {
        u32 b[4];
        load_matrix_transposed(b, source + n * 16);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float c[4] = {out[n + i][0] * rescale, out[n + i][1] * rescale, 0.0f, 0.0f};
          mma_m16n8k16<T>(c, a, b[2 * i] & keep[0], b[2 * i + 1] & keep[1]);
          out[n + i][0] = c[0];
          out[n + i][1] = c[1];
        }
      }
    }
    if (!stage) values();
  }

  // max and total of all heads to maxima, totals [kMostHeads].
  CUFUSE_DEVICE void store_stats(float* maxima, float* totals) const {
    float sum = total;
#pragma unroll
    for (int offset = 1; offset < 4; offset *= 2) sum += __shfl_xor_sync(kFullMask, sum, offset);
    const int lane = thread_here() % 32;
    if (lane % 4 == 0) {
      maxima[lane / 4] = max;
      totals[lane / 4] = sum;
    }
  }

  // The weighted values of heads [head, head + count) to rows [count, pitch].
  CUFUSE_DEVICE void store_out(float* rows, int pitch, int head, int count) const {
    const int lane = thread_here() % 32, mine = lane / 4 - head, t = lane % 4;
    if (mine < 0 || mine >= count) return;
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n) {
      *reinterpret_cast<float2*>(rows + mine * pitch + n * 8 + 2 * t) =
          make_float2(out[n][0], out[n][1]);
    }
  }

 private:
  // Of 16 keys, rows `row` and `row` + 1 of all slices.
  CUFUSE_DEVICE void logits(float (&s)[4], const unsigned char* keys, int row, int lane) const {
    const unsigned char* source = keys + lane % 8 * Shape::kSlicePitch +
                                  (row + lane / 16) * Shape::kRowBytes + lane / 8 % 2 * 16;
    float even[4] = {}, odd[4] = {};
#pragma unroll
    for (int k = 0; k < kHeadDim / 16; ++k) {
      u32 b[4];
      load_matrix(b, source + k * 32);
      const u32 a[4] = {q ? q[k * 8] : 0, 0, q ? q[k * 8 + 4] : 0, 0};
      mma_m16n8k16<T>(even, a, b[0], b[1]);
      mma_m16n8k16<T>(odd, a, b[2], b[3]);
    }
    s[0] = even[0];
    s[1] = even[1];
    s[2] = odd[0];
    s[3] = odd[1];
  }
};

// The same in float32: a lane takes a key of 16 and half of its row, then every 32nd value.
template <typename Shape>
struct WarpAttention<float, Shape> {
  static constexpr int kHeadDim = Shape::kHeadDim;
  static constexpr int kHeads = Shape::kHeads;
  static constexpr int kColumns = (kHeadDim + 31) / 32;
  const float* q;  // [kHeads, kHeadDim] in shared memory
  float max[kHeads], total[kHeads], out[kHeads][kColumns];

  CUFUSE_DEVICE explicit WarpAttention(const float* shared_q) : q(shared_q) {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      max[h] = minus_infinity();
      total[h] = 0.0f;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) out[h][c] = 0.0f;
    }
  }

  template <typename Values>
  CUFUSE_DEVICE void add_chunk(const unsigned char* keys, int quarter, int first, KeySpan span,
                               float scale, const Values& values) {
    const int lane = thread_here() % 32, half = lane / 16;
    const unsigned char* stage = nullptr;
    for (int row = 2 * quarter; row < Shape::kSliceRows; row += 2 * kGroupWarps) {
      const int offset = lane % 8 * Shape::kSlicePitch + (row + lane / 8 % 2) * Shape::kRowBytes;
      const int key = first + lane % 8 * Shape::kSliceRows + row + lane / 8 % 2;
      const bool visible = key >= span.first && key < span.last;
      const float* k = reinterpret_cast<const float*>(keys + offset) + half * (kHeadDim / 2);
      float p[kHeads], rescale[kHeads];
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        const float* query = q + h * kHeadDim + half * (kHeadDim / 2);
        float dot[4] = {};
#pragma unroll 4
        for (int c = 0; c < kHeadDim / 2; c += 4) {
          const auto a = load_vec<4>(k + c), b = load_vec<4>(query + c);
#pragma unroll
          for (int j = 0; j < 4; ++j) dot[j] = fmaf(a.v[j], b.v[j], dot[j]);
        }
        float s = (dot[0] + dot[1]) + (dot[2] + dot[3]);
        s += __shfl_xor_sync(kFullMask, s, 16);
        s = visible ? s * scale : minus_infinity();
        const float top = fmaxf(max[h], warp_max(s));
        const float shift = softmax_shift(top);
        rescale[h] = exp2f(max[h] - shift);
        max[h] = top;
        p[h] = exp2f(s - shift);
        total[h] = fmaf(total[h], rescale[h], warp_sum(half == 0 ? p[h] : 0.0f));
#pragma unroll
        for (int c = 0; c < kColumns; ++c) out[h][c] *= rescale[h];
      }
      if (!stage) stage = values();
#pragma unroll 1
      for (int i = 0; i < 16; ++i) {
        const int at = first + i % 8 * Shape::kSliceRows + row + i / 8;
        const bool there = at >= span.first && at < span.last;
        const float* v = reinterpret_cast<const float*>(stage + i % 8 * Shape::kSlicePitch +
                                                        (row + i / 8) * Shape::kRowBytes);
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
          const float weight = __shfl_sync(kFullMask, p[h], i);
#pragma unroll
          for (int c = 0; c < kColumns; ++c) {
            const int column = lane + c * 32;
            if (there && column < kHeadDim) out[h][c] = fmaf(weight, v[column], out[h][c]);
          }
        }
      }
    }
    if (!stage) values();
  }

  CUFUSE_DEVICE void store_stats(float* maxima, float* totals) const {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      if (thread_here() % 32 == h) {
        maxima[h] = max[h];
        totals[h] = total[h];
      }
    }
  }

  CUFUSE_DEVICE void store_out(float* rows, int pitch, int head, int count) const {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      if (h < head || h >= head + count) continue;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const int column = thread_here() % 32 + c * 32;
        if (column < kHeadDim) rows[(h - head) * pitch + column] = out[h][c];
      }
    }
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
};

}  // namespace cufuse
