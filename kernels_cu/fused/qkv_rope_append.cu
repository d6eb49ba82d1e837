// Queries, keys and values of a few rows in one launch: norm(x) w^T + b, RoPE on queries and keys,
// q to its place and k, v into the cache at the row's position start + i. A warp sums the two
// weight rows of a rotated pair together, so that the product never leaves the registers and is
// rounded once. Bounded by reading w once. (QK-norm needs a whole head: linear, then rope_append.)
// instantiate: qkv_rows<bfloat16, Pairing::half_split, Rounding::cast_first, 1, 2, 4, 4, 4, 8>
// instantiate: qkv_rows<half, Pairing::interleaved, Rounding::scale_first, 8, 2, 4, 4, 4, 8>
// instantiate: qkv_rows<float, Pairing::half_split, Rounding::one_plus, 4, 2, 4, 4, 2, 1>
#include "device/matvec.cuh"
#include "device/qkv.cuh"

namespace cufuse {

template <typename T>
struct QkvRowsArgs {
  const T* x;            // [batch, q_len, dim]
  const T* w;            // [(n_heads + 2 n_kv_heads) head_dim, dim]; rows of q, then k, then v
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
  int head_dim;  // even
  int dim;
  int n_pairs;
  int max_pos;
  int capacity;
  float eps;
};

// Two values of a head: a pair to rotate, or two neighbours.
struct HeadPair {
  int head, unit, first, second;
  bool is_rotated;
};

template <Pairing kPairing, typename T>
CUFUSE_DEVICE HeadPair head_pair(const QkvRowsArgs<T>& args, int slot) {
  HeadPair pair;
  const int per_head = args.head_dim / 2;
  pair.head = slot / per_head;
  pair.unit = slot - pair.head * per_head;
  pair.is_rotated = pair.head < args.n_heads + args.n_kv_heads && pair.unit < args.n_pairs;
  pair.first = pair.is_rotated ? pair_first<kPairing>(pair.unit, args.n_pairs) : 2 * pair.unit;
  pair.second =
      pair.is_rotated ? pair_second<kPairing>(pair.unit, args.n_pairs) : 2 * pair.unit + 1;
  return pair;
}

// blockIdx.y takes kM rows of x, blockIdx.x strides over the pairs of weight rows.
template <typename T,
          Pairing kPairing,
          Rounding kRounding,
          int kM,
          int kOut,
          int kUnroll,
          int kWarps,
          int kSplit,
          int kVec>
__global__ void __launch_bounds__(kWarps * 32, kResidentWarps<kM> / kWarps)
    qkv_rows(const QkvRowsArgs<T> args) {
  static_assert(kOut == 2, "a warp takes one pair");
  using Shape = MatvecShape<kM, kOut, kUnroll, kWarps, kSplit, kVec>;
  __shared__ float partial[Shape::kPartials];
  T* x = dynamic_shared<T>();
  const int k = args.dim;
  const int first_row = blockIdx.y * kM;
  const int rows = min(args.rows - first_row, kM);
  const int pairs = (args.n_heads + 2 * args.n_kv_heads) * (args.head_dim / 2);

  auto row = [&](int slot, int o) {
    const HeadPair pair = head_pair<kPairing>(args, slot);
    return args.w +
           static_cast<i64>(pair.head * args.head_dim + (o ? pair.second : pair.first)) * k;
  };
  auto fill = [&] {
    stage_x<Shape::kThreads, kM, kVec, kRounding>(x, args.x + static_cast<i64>(first_row) * k, rows,
                                                  k, args.norm_weight, args.eps, partial);
  };
  auto finish = [&](int slot, int lane, MatvecSums<Shape> sums) {
    if (lane >= rows) return;
    const int at = first_row + lane;
    const int batch = at / args.q_len;
    const i64 position = static_cast<i64>(args.start[batch]) + (at - batch * args.q_len);
    const HeadPair pair = head_pair<kPairing>(args, slot);
    T* y = head_target(args, at, pair.head, position);
    if (!y) return;
    float2 values = make_float2(sums(0, lane), sums(1, lane));
    if (args.b) {
      values.x += to_float(args.b[pair.head * args.head_dim + pair.first]);
      values.y += to_float(args.b[pair.head * args.head_dim + pair.second]);
    }
    if (pair.is_rotated) {
      const Angles angles = angles_at(args.cos, args.sin, position, args.max_pos, args.n_pairs);
      values = rotated(values.x, values.y, angles, pair.unit);
    }
    y[pair.first] = from_float<T>(values.x);
    y[pair.second] = from_float<T>(values.y);
  };
  static_assert(kM <= 32, "a lane finishes a row");
  matvec<Shape>(pairs, k, x, partial, row, fill, finish);
}

}  // namespace cufuse
