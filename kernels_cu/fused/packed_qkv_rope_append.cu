// What fused/qkv_rope_append.cu does, with packed weights (device/packed.cuh): queries, keys and
// values of a few rows, RoPE and the append in one launch. A CTA takes panels in twos, the two
// halves of 16 rotated pairs one after the other, and a thread that has a sum of the first keeps it
// for the second. Bounded by reading w once.
// instantiate: packed_qkv_rows<bfloat16, Pairing::half_split, Rounding::cast_first, 1, 8, 4, 8>
// instantiate: packed_qkv_rows<half, Pairing::interleaved, Rounding::scale_first, 8, 8, 4, 8>
// instantiate: packed_qkv_rows<float, Pairing::half_split, Rounding::one_plus, 4, 8, 4, 1>
#include "device/packed_rows.cuh"
#include "device/qkv.cuh"

namespace cufuse {

template <typename T>
struct PackedQkvRowsArgs {
  const T* x;            // [batch, q_len, dim]
  const T* w;            // [(n_heads + 2 n_kv_heads) head_dim, dim]; packed
  const T* b;            // [(n_heads + 2 n_kv_heads) head_dim]; may be null
  const T* norm_weight;  // [dim]; null: x as it is
  const float* cos;      // [max_pos, n_pairs]; null: nothing is rotated
  const float* sin;      // [max_pos, n_pairs]
  const int* start;      // [batch]; tokens in the cache
  T* q;                  // [batch, q_len, n_heads, head_dim]
  T* k_cache;            // [batch, n_kv_heads, capacity, head_dim]; at the strides below
  T* v_cache;            // [batch, n_kv_heads, capacity, head_dim]; at the strides below
  i64 k_batch_stride;    // strides count elements
  i64 k_head_stride;
  i64 k_pos_stride;
  i64 v_batch_stride;
  i64 v_head_stride;
  i64 v_pos_stride;
  int rows;  // batch * q_len
  int q_len;
  int n_heads;
  int n_kv_heads;
  int head_dim;  // a multiple of 32
  int dim;
  int n_pairs;
  int max_pos;
  int capacity;
  float eps;
};

// blockIdx.y takes kM rows of x, blockIdx.x strides over the twos of panels.
template <typename T,
          Pairing kPairing,
          Rounding kRounding,
          int kM,
          int kWarps,
          int kUnroll,
          int kVec>
__global__ void __launch_bounds__(kWarps * 32, 16 / kWarps)
    packed_qkv_rows(const PackedQkvRowsArgs<T> args) {
  using Shape = PackedRowsShape<kM, kWarps, kUnroll>;
  static_assert(kM * kPanelRows <= Shape::kThreads, "a thread has one sum of a panel");
  __shared__ float partial[Shape::kPartials];
  u32* x = dynamic_shared<u32>();
  const int k = args.dim;
  const int first_row = blockIdx.y * kM;
  const int rows = min(args.rows - first_row, kM);
  const int rotated_heads = args.n_heads + args.n_kv_heads;
  const int per_head = args.head_dim / kPanelRows;
  // Half-split pairs: so many panels of a head hold their first values, the next ones the second.
  const int firsts = kPairing == Pairing::half_split ? args.n_pairs / kPanelRows : 0;

  auto panel_at = [&](int i) {
    const int two = blockIdx.x + i / 2 * gridDim.x, second = i % 2;
    const int head = two / (per_head / 2), at = two - head * (per_head / 2);
    const bool apart = head < rotated_heads && at < firsts;
    return head * per_head + (apart ? at + second * firsts : 2 * at + second);
  };
  auto fill = [&] {
    stage_fragments<Shape::kThreads, kM, kVec, kRounding>(
        x, args.x + static_cast<i64>(first_row) * k, rows, k, args.norm_weight, args.eps, partial);
  };
  float kept = 0.0f;
  auto finish = [&](int panel, PackedRowsSums<Shape> sums) {
    const int m = threadIdx.x / kPanelRows, row = threadIdx.x % kPanelRows;
    if (m >= rows) return;
    const int head = panel / per_head, column = (panel - head * per_head) * kPanelRows + row;
    auto value = [&](int i) {
      const float sum = sums(row + i, m);
      return args.b ? sum + to_float(args.b[head * args.head_dim + column + i]) : sum;
    };
    const bool is_rotated = head < rotated_heads && column < 2 * args.n_pairs;
    if (kPairing == Pairing::half_split && is_rotated && column < args.n_pairs) {
      kept = value(0);
      return;
    }
    if (kPairing == Pairing::interleaved && is_rotated && row % 2 != 0) return;

    const int at = first_row + m;
    const int batch = at / args.q_len;
    const i64 position = static_cast<i64>(args.start[batch]) + (at - batch * args.q_len);
    T* y = head_target(args, at, head, position);
    if (!y) return;
    if (!is_rotated) {
      y[column] = from_float<T>(value(0));
      return;
    }
    constexpr bool kApart = kPairing == Pairing::half_split;
    const int pair = kApart ? column - args.n_pairs : column / 2;
    const Angles angles = angles_at(args.cos, args.sin, position, args.max_pos, args.n_pairs);
    const float2 values =
        rotated(kApart ? kept : value(0), kApart ? value(0) : value(1), angles, pair);
    y[pair_first<kPairing>(pair, args.n_pairs)] = from_float<T>(values.x);
    y[pair_second<kPairing>(pair, args.n_pairs)] = from_float<T>(values.y);
  };
  const int twos = (args.n_heads + 2 * args.n_kv_heads) * (per_head / 2);
  const int mine = (twos - static_cast<int>(blockIdx.x) - 1) / static_cast<int>(gridDim.x) + 1;
  packed_rows<Shape>(args.w, 2 * mine, k, reinterpret_cast<const uint4*>(x), partial, panel_at,
                     fill, finish);
}

}  // namespace cufuse
