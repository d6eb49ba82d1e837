// y = sum over a token's experts, in ascending id, of weight * (down h + b), h = gated(gate x, up
// x), for few tokens. Two launches, both bounded by reading the experts' weights:
//   moe_gate_up  CTA (c, s) takes every gridDim.x-th group of hidden rows of slot s, that is
//                token * k + j; h stays in float32, where gate times up cannot overflow
//   moe_down     CTA (c, t) takes every gridDim.x-th group of four output rows of token t; warps
//                share the k experts, and an expert's K where there are more warps than experts
// The grid is small enough to be resident at once: slots of one expert walk its rows in step, and
// all but the first find them in L2. A token's bits do not depend on the other tokens.
// instantiate: moe_gate_up<bfloat16, Gate::plain, Act::silu, Rounding::cast_first, 8>
// instantiate: moe_gate_up<half, Gate::clamped, Act::none, Rounding::scale_first, 1>
// instantiate: moe_gate_up<float, Gate::plain, Act::gelu, Rounding::one_plus, 4>
// instantiate: moe_down<bfloat16, 8>
// instantiate: moe_down<half, 1>
// instantiate: moe_down<float, 4>
#include "device/activation.cuh"
#include "device/matvec.cuh"
#include "device/route.cuh"

namespace cufuse {

// Floats from one slot's hidden values to the next: whole groups, filled up with zeros.
constexpr int kHiddenGroup = 8;
CUFUSE_DEVICE int hidden_stride(int hidden_dim) {
  return (hidden_dim + kHiddenGroup - 1) / kHiddenGroup * kHiddenGroup;
}

template <typename T>
struct MoeGateUpArgs {
  const T* x;            // [tokens, dim]
  const T* norm_weight;  // [dim]; null: x as it is
  const int* ids;        // [tokens, k]
  const T* w_gate;       // [n_experts, hidden_dim, dim]
  const T* w_up;         // [n_experts, hidden_dim, dim]
  const T* b_gate;       // [n_experts, hidden_dim]; may be null
  const T* b_up;         // [n_experts, hidden_dim]; may be null
  float* hidden;         // [tokens, k, hidden_stride(hidden_dim)]
  int k;
  int n_experts;
  int dim;
  int hidden_dim;
  float eps;
  float limit;
  float alpha;
};

template <typename T, Gate kGate, Act kAct, Rounding kRounding, int kVec>
__global__ void __launch_bounds__(256, kResidentWarps<1> / 8)
    moe_gate_up(const MoeGateUpArgs<T> args) {
  using Shape = MatvecShape<1, 2, 4, 8, 1, kVec>;
  __shared__ float partial[Shape::kPartials];
  T* staged = dynamic_shared<T>();  // [chunk_count * kChunk]
  const int dim = args.dim, hidden_dim = args.hidden_dim;
  const i64 slot = blockIdx.y;
  const int expert = args.ids[slot];
  if (static_cast<u32>(expert) >= static_cast<u32>(args.n_experts)) return;
  const i64 first = static_cast<i64>(expert) * hidden_dim;  // of the expert's rows
  float* hidden = args.hidden + slot * hidden_stride(hidden_dim);

  auto row = [&](int r, int o) {
    return (o == 0 ? args.w_gate : args.w_up) + (first + r) * static_cast<i64>(dim);
  };
  auto fill = [&] {
    const T* x = args.x + slot / args.k * dim;
    stage_x<Shape::kThreads, 1, kVec, kRounding>(staged, x, 1, dim, args.norm_weight, args.eps,
                                                 partial);
  };
  auto finish = [&](int r, int lane, MatvecSums<Shape> sums) {
    if (lane == 0) {
      float gate = sums(0, 0), up = sums(1, 0);
      if (args.b_gate) gate += to_float(args.b_gate[first + r]);
      if (args.b_up) up += to_float(args.b_up[first + r]);
      hidden[r] = gated<kGate, kAct>(gate, up, args.limit, args.alpha);
    } else if (r == hidden_dim - 1 && r + lane < hidden_stride(hidden_dim)) {
      hidden[r + lane] = 0.0f;
    }
  };
  matvec<Shape>(hidden_dim, dim, staged, partial, row, fill, finish);
}

template <typename T>
struct MoeDownArgs {
  const float* hidden;   // [tokens, k, hidden_stride(hidden_dim)]
  const int* ids;        // [tokens, k]
  const float* weights;  // [tokens, k]
  const T* w;            // [n_experts, dim, hidden_dim]
  const T* b;            // [n_experts, dim]; may be null
  const T* residual;     // [tokens, dim]; may be null
  T* y;                  // [tokens, dim]; may be residual
  int k;
  int n_experts;
  int dim;
  int hidden_dim;
};

constexpr int kDownRows = 4;

template <typename T, int kVec>
__global__ void __launch_bounds__(256, 2) moe_down(const MoeDownArgs<T> args) {
  constexpr int kThreads = 256, kWarps = kThreads / 32, kGroup = kPer16<T>;
  constexpr int kUnroll = kVec == 1 ? 1 : 4;
  static_assert(kHiddenGroup % kGroup == 0, "a group of weights meets a whole group of hidden");
  const int k = args.k, dim = args.dim, hidden_dim = args.hidden_dim;
  const int splits = max(1, kWarps / k);                 // warps that share an expert's K
  int* order = dynamic_shared<int>();                    // [k]
  float* partial = reinterpret_cast<float*>(order + k);  // [k, splits, kDownRows]
  const int lane = threadIdx.x % 32;
  const i64 token = blockIdx.y;
  const int* ids = args.ids + token * k;
  const bool valid = sort_slots<kThreads>(ids, k, args.n_experts, order);
  const int chunks = chunk_count<T>(hidden_dim);
  const int stride = hidden_stride(hidden_dim);

  for (int first = blockIdx.x * kDownRows; first < dim; first += gridDim.x * kDownRows) {
    for (int item = threadIdx.x / 32; valid && item < k * splits; item += kWarps) {
      const int slot = order[item / splits];
      const float* hidden = args.hidden + (token * k + slot) * stride;
      const T* w[kDownRows];
#pragma unroll
      for (int r = 0; r < kDownRows; ++r) {
        const i64 row = static_cast<i64>(ids[slot]) * dim + min(first + r, dim - 1);
        w[r] = args.w + row * hidden_dim;
      }
      float sum[kDownRows] = {};
      for (int chunk = item % splits; chunk < chunks; chunk += kUnroll * splits) {
        uint4 batch[kUnroll][kDownRows];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          const int group = (chunk + u * splits) * 32 + lane;
#pragma unroll
          for (int r = 0; r < kDownRows; ++r) {
            batch[u][r] = load_weight_group<kVec>(w[r], group, hidden_dim);
          }
        }
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          const int group = (chunk + u * splits) * 32 + lane;
          if (group * kGroup >= hidden_dim) break;
          float h[kGroup];
#pragma unroll
          for (int j = 0; j < kGroup; j += 4) {
            const auto four = load_vec<4>(hidden + group * kGroup + j);
#pragma unroll
            for (int i = 0; i < 4; ++i) h[j + i] = four.v[i];
          }
#pragma unroll
          for (int r = 0; r < kDownRows; ++r) {
            float weight[kGroup];
            unpack<T>(weight, batch[u][r]);
#pragma unroll
            for (int j = 0; j < kGroup; ++j) sum[r] = fmaf(weight[j], h[j], sum[r]);
          }
        }
      }
#pragma unroll
      for (int r = 0; r < kDownRows; ++r) {
        sum[r] = warp_sum(sum[r]);
        if (lane == 0) partial[item * kDownRows + r] = sum[r];
      }
    }
    __syncthreads();

    // One thread an output row: the experts in ascending id, one rounding at the end.
    const int row = first + threadIdx.x;
    if (threadIdx.x < kDownRows && row < dim) {
      float total = 0.0f;
      for (int i = 0; i < k && valid; ++i) {
        const int slot = order[i];
        float sum = args.b ? to_float(args.b[static_cast<i64>(ids[slot]) * dim + row]) : 0.0f;
        for (int split = 0; split < splits; ++split) {
          sum += partial[(i * splits + split) * kDownRows + threadIdx.x];
        }
        total = fmaf(args.weights[token * k + slot], sum, total);
      }
      const i64 at = token * dim + row;
      if (args.residual) total += to_float(args.residual[at]);
      args.y[at] = from_float<T>(valid ? total : __uint_as_float(0x7fc00000u));
    }
    __syncthreads();
  }
}

}  // namespace cufuse
