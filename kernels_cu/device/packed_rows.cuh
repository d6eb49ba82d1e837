// y = x w^T for a few rows x, w packed in panels of 16 rows (device/packed.cuh): every weight is
// read once, straight from memory into the registers of the lane that multiplies it. The warps of a
// CTA share the K of a panel; x lies in shared memory in the order in which they multiply, and the
// rows of x are the columns of an mma.
//
// The order in which a sum is taken belongs to k: warp s adds up pairs of tiles s, s + kWarps, ...,
// the even and the odd tiles apart, and the warps come in ascending order.
#pragma once

#include "device/panels.cuh"
#include "device/staging.cuh"

namespace cufuse {

// A CTA's cut: kM rows of x, kWarps warps with kUnroll pairs of tiles each on their way.
template <int kM_, int kWarps_, int kUnroll_>
struct PackedRowsShape {
  static constexpr int kM = kM_, kWarps = kWarps_, kUnroll = kUnroll_;
  static constexpr int kThreads = kWarps * 32;
  // Of one row's sums of a panel; eight lanes that store two rows of x meet no bank twice.
  static constexpr int kPitch = kPanelRows + 4;
  static constexpr int kPartials = 2 * kWarps * kM * kPitch;  // floats of shared memory
  static_assert(kM == 1 || kM == 2 || kM == 4 || kM == 8, "an mma has eight columns");
};

// The sums of a lane over the tiles that its warp multiplies.
template <typename T, int kM>
struct PackedRowSums {
  float even[4] = {}, odd[4] = {};

  // x [kM, 4] of a pair of tiles; columns past kM repeat the others.
  CUFUSE_DEVICE void add(const uint4& a0, const uint4& a1, const uint4* x) {
    const int lane = threadIdx.x % 32;
    const u32 first[4] = {a0.x, a0.y, a0.z, a0.w};
    const u32 second[4] = {a1.x, a1.y, a1.z, a1.w};
    const uint4 v = x[lane / 4 % kM * 4 + lane % 4];
    mma_m16n8k16<T>(even, first, v.x, v.y);
    mma_m16n8k16<T>(odd, second, v.z, v.w);
  }

  CUFUSE_DEVICE void store(float* to, int pitch) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int m = lane % 4 * 2 + e;
      if (m < kM) {
        to[m * pitch + lane / 4] = even[e] + odd[e];
        to[m * pitch + lane / 4 + 8] = even[e + 2] + odd[e + 2];
      }
    }
  }
};

template <int kM>
struct PackedRowSums<float, kM> {
  PanelSums<float> sums[kM];

  CUFUSE_DEVICE void add(const uint4& a0, const uint4& a1, const uint4* x) {
#pragma unroll
    for (int m = 0; m < kM; ++m) sums[m].add(a0, a1, x[m * 4 + threadIdx.x % 4]);
  }

  CUFUSE_DEVICE void store(float* to, int pitch) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      const float2 rows = sums[m].rows();
      if (lane % 4 == m % 4) {
        to[m * pitch + lane / 4] = rows.x;
        to[m * pitch + lane / 4 + 8] = rows.y;
      }
    }
  }
};

// What a panel sums to, for the `finish` of `packed_rows`.
template <typename Shape>
struct PackedRowsSums {
  const float* partial;  // [kWarps, kM, kPitch]

  CUFUSE_DEVICE float operator()(int row, int m) const {
    float sum = partial[m * Shape::kPitch + row];
#pragma unroll
    for (int warp = 1; warp < Shape::kWarps; ++warp) {
      sum += partial[(warp * Shape::kM + m) * Shape::kPitch + row];
    }
    return sum;
  }
};

// Rows of x [rows, k] to shared memory as [tiles / 2, kM, 4] times 16 bytes, what `fragment_place`
// says of each row; rows that are not there and columns past k are zeros. With a norm_weight [k]
// (null: x as it is) each goes through an RMSNorm first. All kThreads threads take part, with
// `partial` for their kThreads / 32 sums, and end together.
template <int kThreads, int kM, int kVec, Rounding kRounding, typename T>
CUFUSE_DEVICE void stage_fragments(
    u32* shared, const T* x, int rows, int k, const T* norm_weight, float eps, float* partial) {
  constexpr int kGroup = kPer16<T>;
  constexpr int kAhead = 4;  // loads in flight
  const int groups = Packing<T>::tiles(k) * 2;
  auto place = [&](int group, int m, int half) {
    const u32 word = fragment_place<T>(2 * group + half);
    return shared + (word / 16 * kM + m) * 16 + word % 16;
  };
#pragma unroll 1
  for (int m = 0; m < kM; ++m, x += k) {
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
        if (first + i * kThreads < groups) {
          u32* low = place(first + i * kThreads, m, 0);
          u32* high = place(first + i * kThreads, m, 1);
          low[0] = bits[i].x;
          low[kNextFragment<T>] = bits[i].y;
          high[0] = bits[i].z;
          high[kNextFragment<T>] = bits[i].w;
        }
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
        u32* low = place(group, m, 0);
        u32* high = place(group, m, 1);
        float v[kGroup], weight[kGroup];
        unpack<T>(v, make_uint4(low[0], low[kNextFragment<T>], high[0], high[kNextFragment<T>]));
        unpack<T>(weight, weight_bits[i]);
        union {
          Vec<T, kGroup> values;
          uint4 bits;
        } u{};
#pragma unroll
        for (int j = 0; j < kGroup; ++j) {
          u.values.v[j] = normalized<T, kRounding>(v[j], scale, weight[j]);
        }
        low[0] = u.bits.x;
        low[kNextFragment<T>] = u.bits.y;
        high[0] = u.bits.z;
        high[kNextFragment<T>] = u.bits.w;
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        weight_bits[i] = load_group<kVec>(norm_weight, first + (i + kAhead) * kThreads, k);
      }
    }
  }
  __syncthreads();
}

// Multiply `count` panels by the rows of x.
//   panel_at(i)          the i-th panel of this CTA
//   fill()               puts x into shared memory (`stage_fragments`); the first weights are on
//                        their way meanwhile
//   finish(panel, sums)  called by all threads for each panel; sums(row, m), row [0, 16)
// `partial` holds Shape::kPartials floats of shared memory.
template <typename Shape, typename T, typename PanelAt, typename Fill, typename Finish>
CUFUSE_DEVICE void packed_rows(const T* w,
                               int count,
                               int k,
                               const uint4* x,
                               float* partial,
                               PanelAt panel_at,
                               Fill fill,
                               Finish finish) {
  constexpr int kM = Shape::kM, kWarps = Shape::kWarps, kUnroll = Shape::kUnroll;
  constexpr int kBatch = kUnroll * kWarps;  // pairs from one batch of a warp to its next
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int pairs = Packing<T>::tiles(k) / 2;
  const uint4* weights = reinterpret_cast<const uint4*>(w) + lane;
  uint4 batch[kUnroll][2];
  auto load = [&](uint4(&to)[2], int panel, int pair) {
    const uint4* from = weights + (static_cast<i64>(panel) * pairs + pair) * 64;
    to[0] = load_stream(from);
    to[1] = load_stream(from + 32);
  };

  // The first loads go out before anything is waited for.
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    if (warp + u * kWarps < pairs) load(batch[u], panel_at(0), warp + u * kWarps);
  }
  fill();

  int panel = panel_at(0);
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    const bool is_last = i + 1 == count;
    const int next_panel = is_last ? panel : panel_at(i + 1);
    PackedRowSums<T, kM> sums;
#pragma unroll 1
    for (int first = warp; first < pairs; first += kBatch) {
      // A slot of the batch is loaded again when it was used: from this panel or the next one.
      int next = first + kBatch, from = panel;
      if (next >= pairs) {
        next = is_last ? pairs : warp;
        from = next_panel;
      }
      const uint4* here = x + first * kM * 4;
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (first + u * kWarps < pairs) {
          sums.add(batch[u][0], batch[u][1], here + u * kWarps * kM * 4);
        }
        if (next + u * kWarps < pairs) load(batch[u], from, next + u * kWarps);
      }
    }
    // Two buffers in turn need one barrier a panel.
    float* all = partial + i % 2 * kWarps * kM * Shape::kPitch;
    sums.store(all + warp * kM * Shape::kPitch, Shape::kPitch);
    __syncthreads();
    finish(panel, PackedRowsSums<Shape>{all});
    panel = next_panel;
  }
}

// The same where CTA b takes panel b and goes on by the grid, which is no larger than `panels`.
template <typename Shape, typename T, typename Fill, typename Finish>
CUFUSE_DEVICE void packed_rows(
    const T* w, int panels, int k, const uint4* x, float* partial, Fill fill, Finish finish) {
  const int first = blockIdx.x, step = gridDim.x;
  packed_rows<Shape>(
      w, (panels - first - 1) / step + 1, k, x, partial, [=](int i) { return first + i * step; },
      fill, finish);
}

}  // namespace cufuse
