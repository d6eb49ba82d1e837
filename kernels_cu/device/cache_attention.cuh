// Attention of the query heads of one KV head over a part of its cache that comes through a ring:
// chunks of kKeys keys and their values, a stage each, to the groups of four warps in turn. Every
// group keeps a softmax of its own over the keys that it sees.
//
// The keys of a chunk lie in its stage as they do in the cache. Behind them lie the values as
// kValueSlices slices of consecutive rows, each 16 bytes further on than it would be.
#pragma once

#include "device/attention.cuh"
#include "device/ring.cuh"

namespace cufuse {

constexpr int kMostHeads = 8;  // query heads of a KV head: columns of a tensor core's product
constexpr float kLog2E = 1.4426950408889634f;

// ldmatrix reads a row of every slice of the values, or a run of rows where there are less than 8
// slices: the more slices, the fewer bank conflicts, but small copies take longer.
template <typename T, int kHeads_, int kHeadDim_, int kStageBytes, int kValueSlices_>
struct CacheShape {
  static constexpr int kValueSlices = kValueSlices_;
  static constexpr int kHeads = kHeads_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kRowBytes = kHeadDim * static_cast<int>(sizeof(T));
  static constexpr int kFitting = kStageBytes / 2 / kRowBytes;
  static constexpr int kKeys = kFitting >= 64 ? 64 : kFitting >= 32 ? 32 : 16;
  static constexpr int kOctets = kKeys / 8;
  static constexpr int kSliceRows = kKeys / kValueSlices;
  static constexpr int kSliceBytes = kSliceRows * kRowBytes;
  static constexpr int kSlicePitch = kSliceBytes + 16;
  static constexpr int kValuesAt = kKeys * kRowBytes;
  // The logits of a chunk between the warps of a group: [kHeads, kLogitPitch] floats.
  static constexpr int kLogitPitch = kKeys + 8;
  static constexpr int kLogitBytes = kHeads * kLogitPitch * 4;
  static_assert(kHeadDim % 16 == 0 && kHeadDim <= 256, "a row is whole tiles");
  static_assert(kHeads <= kMostHeads, "a group has at most 8 query heads");
  static_assert(8 % kValueSlices == 0, "an octet has as many rows of every slice");
  static_assert(kFitting >= 16, "a chunk fits a stage");

  // A chunk is computed in octets of 8 keys, kRun neighbours of every slice. Key i of the first
  // octet; octet n has the keys n kRun further on.
  static constexpr u32 kRun = 8 / kValueSlices;
  static constexpr int kNextKey = kRun > 1 ? 1 : kSliceRows;  // behind an even one of an octet
  static CUFUSE_DEVICE u32 key_of(u32 i) { return i / kRun * kSliceRows + i % kRun; }
  // Where the values of a key are in the stage.
  static CUFUSE_DEVICE u32 value_at(u32 key) {
    return kValuesAt + key / kSliceRows * kSlicePitch + key % kSliceRows * kRowBytes;
  }
};

// What a warp of a group knows: per head the largest logit (times log2 e), the sum of
// 2^(logit - max), and every fourth pair of tiles of 8 columns of the values weighted with it.
template <typename T, typename Shape>
struct GroupAttention {
  static constexpr int kHeadDim = Shape::kHeadDim;
  static constexpr int kRowBytes = Shape::kRowBytes;
  static constexpr int kTiles = kHeadDim / 8;
  static constexpr int kMine = (kTiles + 7) / 8 * 2;  // in pairs
  static constexpr int kOctets = Shape::kOctets;
  static constexpr int kMyOctets = (kOctets + kGroupWarps - 1) / kGroupWarps;  // of logits

  float max = minus_infinity();  // of head lane / 4
  float total = 0.0f;            // of this lane's keys
  float out[kMine][2] = {};

  // One chunk, whose first key is `first`; keys outside [span.first, span.last) are left out.
  //   queries: [kHeads, kHeadDim] in shared memory
  //   stage: the chunk
  //   logits: kLogitBytes of the group, others than for the last chunk; sync is its barrier
  template <typename Sync>
  CUFUSE_DEVICE void add_chunk(const T* queries,
                               const unsigned char* stage,
                               float* logits,
                               int quarter,
                               int first,
                               KeySpan span,
                               float scale,
                               const Sync& sync) {
    const u32 lane = lane_here(), t = lane % 4;
    float* mine = logits + min(lane / 4, Shape::kHeads - 1u) * Shape::kLogitPitch + 2 * t;
    float found[kMyOctets][2] = {};
    find_logits(found, queries, stage, quarter, scale);

    // Values do not wait for logits.
    u32 values[kOctets][kMine];
    const unsigned char* source =
        stage + Shape::value_at(Shape::key_of(lane % 8)) + lane / 8 % 2 * Shape::kRun * kRowBytes;
#pragma unroll
    for (int n = 0; n < kMine; n += 2) {
      // Tiles 2 quarter and the next, then 8 further on: two in one access.
      const int tile = min(2 * quarter + n * kGroupWarps, kTiles - 2);
#pragma unroll
      for (int octet = 0; octet < kOctets; octet += 2) {
        u32 b[4];
        load_matrix_transposed(b, source + octet * Shape::kRun * kRowBytes +
                                      (tile + static_cast<int>(lane / 16)) * 16);
        values[octet][n] = b[0];
        values[octet + 1][n] = b[1];
        values[octet][n + 1] = b[2];
        values[octet + 1][n + 1] = b[3];
      }
    }

    if (first < span.first || first + Shape::kKeys > span.last) {
      // From the first key that is seen to this lane's first one.
      const int behind = first + static_cast<int>(Shape::key_of(2 * t)) - span.first;
      const u32 count = span.last - span.first;
      auto hidden = [&](int octet, int i) {
        const int key = behind + octet * static_cast<int>(Shape::kRun) + i * Shape::kNextKey;
        return static_cast<u32>(key) >= count;
      };
#pragma unroll
      for (int n = 0; n < kMyOctets; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (hidden(quarter + n * kGroupWarps, i)) found[n][i] = minus_infinity();
        }
      }
      // Rows that nobody wrote may hold anything; 0 times that is not 0.
#pragma unroll
      for (int octet = 0; octet < kOctets; ++octet) {
        const u32 keep = (hidden(octet, 0) ? 0u : 0xffffu) | (hidden(octet, 1) ? 0u : 0xffff0000u);
#pragma unroll
        for (int n = 0; n < kMine; ++n) values[octet][n] &= keep;
      }
    }
    if (lane / 4 < Shape::kHeads) {
#pragma unroll
      for (int n = 0; n < kMyOctets; ++n) {
        const int octet = quarter + n * kGroupWarps;
        if (kOctets % kGroupWarps != 0 && octet >= kOctets) break;
        store_vec<2>(mine + octet * 8, Vec<float, 2>{{found[n][0], found[n][1]}});
      }
    }
    sync();

    Vec<float, 2> weights[kOctets];
    float tops[kOctets];
#pragma unroll
    for (int octet = 0; octet < kOctets; ++octet) {
      weights[octet] = load_vec<2>(mine + octet * 8);
      tops[octet] = fmaxf(weights[octet].v[0], weights[octet].v[1]);
    }
#pragma unroll
    for (int step = kOctets / 2; step > 0; step /= 2) {
#pragma unroll
      for (int octet = 0; octet < step; ++octet) {
        tops[octet] = fmaxf(tops[octet], tops[octet + step]);
      }
    }
    float top = fmaxf(max, tops[0]);
#pragma unroll
    for (int offset = 1; offset < 4; offset *= 2) {
      top = fmaxf(top, __shfl_xor_sync(kFullMask, top, offset));
    }
    const float shift = softmax_shift(top);
    const float rescale = exp2f(max - shift);
    max = top;
    total *= rescale;
    float sums[kMine][4];
#pragma unroll
    for (int n = 0; n < kMine; ++n) {
      sums[n][0] = out[n][0] * rescale;
      sums[n][1] = out[n][1] * rescale;
      sums[n][2] = sums[n][3] = 0.0f;
    }
#pragma unroll
    for (int octet = 0; octet < kOctets; octet += 2) {
      u32 a[4] = {};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float low = exp2f(weights[octet + i].v[0] - shift);
        const float high = exp2f(weights[octet + i].v[1] - shift);
        total += low + high;
        a[2 * i] = word_of(from_float<T>(low), from_float<T>(high));
      }
#pragma unroll
      for (int n = 0; n < kMine; ++n) {
        mma_m16n8k16<T>(sums[n], a, values[octet][n], values[octet + 1][n]);
      }
    }
#pragma unroll
    for (int n = 0; n < kMine; ++n) {
      out[n][0] = sums[n][0];
      out[n][1] = sums[n][1];
    }
  }

  // max and total of all heads, the same in all warps of the group, to maxima, totals [kMostHeads];
  // this warp's columns of the weighted values to rows [kHeads, pitch].
  CUFUSE_DEVICE void store(
      float* maxima, float* totals, float* rows, int pitch, int quarter) const {
    const int lane = static_cast<int>(lane_here()), head = lane / 4;
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
  // Octets quarter, quarter + 4, ...: the logits of keys 2 t and the next one, t = lane % 4, with
  // head lane / 4.
  //
  // A lane loads 16-byte pieces of key lane / 4 of an octet, and mma may take the columns in any
  // order that q has too. Of 8 pieces the lanes of even keys load piece t first and 4 + t next,
  // those of odd keys the other way round: else the rows of two keys were in the same banks. So q
  // is there twice, rows 0 to 7 of mma in the order of even keys and rows 8 to 15 in that of odd
  // ones.
  static CUFUSE_DEVICE void find_logits(float (&found)[kMyOctets][2],
                                        const T* queries,
                                        const unsigned char* stage,
                                        int quarter,
                                        float scale) {
    constexpr int kPairs = kHeadDim / 64;      // of a lane's pieces
    constexpr int kRest = kHeadDim % 64 / 16;  // products of what is left, in its plain order
    const u32 lane = lane_here(), g = lane / 4, t = lane % 4;
    const T* row = queries + min(g, Shape::kHeads - 1u) * kHeadDim;
#pragma unroll
    for (int n = 0; n < kMyOctets; ++n) {
      const int octet = quarter + n * kGroupWarps;
      if (kOctets % kGroupWarps != 0 && octet >= kOctets) break;
      const unsigned char* key = stage + (Shape::key_of(g) + octet * Shape::kRun) * kRowBytes;
      const u32 first = (g % 2 * 4 + t) * 16, next = first ^ 64;
      // Of the second piece, rows of even keys are with the columns of odd ones.
      float sums[2][4] = {};
#pragma unroll 2
      for (int j = 0; j < kPairs; ++j) {
        const uint4 pieces[] = {*reinterpret_cast<const uint4*>(key + j * 128 + first),
                                *reinterpret_cast<const uint4*>(key + j * 128 + next)};
        const auto even = *reinterpret_cast<const uint4*>(row + (8 * j + t) * 8);
        const auto odd = *reinterpret_cast<const uint4*>(row + (8 * j + 4 + t) * 8);
        const u32 a[4] = {even.x, odd.x, even.y, odd.y}, b[4] = {even.z, odd.z, even.w, odd.w};
        mma_m16n8k16<T>(sums[0], a, pieces[0].x, pieces[0].y);
        mma_m16n8k16<T>(sums[1], a, pieces[1].x, pieces[1].y);
        mma_m16n8k16<T>(sums[0], b, pieces[0].z, pieces[0].w);
        mma_m16n8k16<T>(sums[1], b, pieces[1].z, pieces[1].w);
      }
#pragma unroll
      for (int i = 0; i < kRest; ++i) {
        const auto* words = reinterpret_cast<const u32*>(key + kPairs * 128 + i * 32) + t;
        const auto* q = reinterpret_cast<const u32*>(row + kPairs * 64 + i * 16) + t;
        const u32 a[4] = {q[0], q[0], q[4], q[4]};
        mma_m16n8k16<T>(sums[0], a, words[0], words[4]);
      }
      found[n][0] = (sums[0][0] + sums[1][2]) * scale;
      found[n][1] = (sums[0][3] + sums[1][1]) * scale;
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
                               const unsigned char* stage,
                               float*,
                               int quarter,
                               int first,
                               KeySpan span,
                               float scale,
                               const Sync&) {
    const int lane = lane_here();
#pragma unroll
    for (int h = 0; h < kMine; ++h) {
      const int head = quarter + h * kGroupWarps;
      if (head >= Shape::kHeads) break;
      const float* q = queries + head * kHeadDim;
#pragma unroll 1
      for (int begin = 0; begin < Shape::kKeys; begin += 32) {
        const int count = min(32, Shape::kKeys - begin);
        const int mine = begin + min(lane, count - 1);
        const int key = first + mine;
        const auto* k = reinterpret_cast<const float*>(stage + mine * Shape::kRowBytes);
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
          const int at = begin + i;
          if (first + at < span.first || first + at >= span.last) continue;
          const auto* v = reinterpret_cast<const float*>(stage + Shape::value_at(at));
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
    const int lane = lane_here();
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

  // Many at once: none waits for the one before.
  template <int kCount>
  static CUFUSE_DEVICE PartialHead of(const PartialHead (&parts)[kCount]) {
    PartialHead all;
#pragma unroll
    for (int i = 0; i < kCount; ++i) all.max = fmaxf(all.max, parts[i].max);
    const float shift = softmax_shift(all.max);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float weight = exp2f(parts[i].max - shift);
      all.total = fmaf(parts[i].total, weight, all.total);
      all.out.x = fmaf(parts[i].out.x, weight, all.out.x);
      all.out.y = fmaf(parts[i].out.y, weight, all.out.y);
    }
    return all;
  }

  // A sink takes its share of the sum and brings no value.
  CUFUSE_DEVICE void add_sink(float logit) { add(logit * kLog2E, 1.0f, make_float2(0.0f, 0.0f)); }

  CUFUSE_DEVICE float2 result() const {
    const float scale = total == 0.0f ? 0.0f : __fdividef(1.0f, total);
    return make_float2(out.x * scale, out.y * scale);
  }

  // What weighs the result against those of other keys: 2 to this power.
  CUFUSE_DEVICE float weight() const { return total == 0.0f ? max : max + __log2f(total); }
};

}  // namespace cufuse
