// Split a row of the QKV projection into heads; q = rope(norm(q)) goes out, k = rope(norm(k)) and v
// go into the cache at the row's position start + i. The norms are optional, over one head or over
// the full projection. A warp takes one head, a CTA eight; for the full norm every CTA takes the
// mean anew instead of waiting for another. Bounded by memory, at few rows by the launch.
// instantiate: rope_append<bfloat16, Pairing::half_split, QkNorm::head, Rounding::cast_first, 8>
// instantiate: rope_append<bfloat16, Pairing::half_split, QkNorm::none, Rounding::cast_first, 8>
// instantiate: rope_append<half, Pairing::interleaved, QkNorm::full, Rounding::scale_first, 8>
// instantiate: rope_append<float, Pairing::half_split, QkNorm::full, Rounding::one_plus, 1>
#include "device/rope.cuh"

namespace cufuse {

template <typename T>
struct RopeAppendArgs {
  const T* qkv;        // [batch, q_len, (n_heads + 2 n_kv_heads) head_dim]
  const float* cos;    // [max_pos, n_pairs]; null: nothing is rotated
  const float* sin;    // [max_pos, n_pairs]
  const int* start;    // [batch]; tokens in the cache
  const T* q_weight;   // [head_dim], full: [n_heads head_dim]; null: queries are not normalised
  const T* k_weight;   // [head_dim], full: [n_kv_heads head_dim]; null: keys are not normalised
  T* q;                // [batch, q_len, n_heads, head_dim]
  T* k_cache;          // [batch, n_kv_heads, capacity, head_dim]; at the strides below
  T* v_cache;          // [batch, n_kv_heads, capacity, head_dim]; at the strides below
  i64 k_batch_stride;  // strides count elements
  i64 k_head_stride;
  i64 k_pos_stride;
  i64 v_batch_stride;
  i64 v_head_stride;
  i64 v_pos_stride;
  int q_len;
  int n_heads;
  int n_kv_heads;
  int head_dim;
  int n_pairs;
  int max_pos;
  int capacity;
  float qk_eps;
};

template <typename T, Pairing kPairing, QkNorm kNorm, Rounding kRounding, int kVec>
__global__ void __launch_bounds__(256) rope_append(const RopeAppendArgs<T> args) {
  constexpr int kThreads = 256;
  constexpr int kHeads = kThreads / 32;
  __shared__ float partial[kThreads / 32];
  const int batch = blockIdx.x / args.q_len;
  const i64 position = static_cast<i64>(args.start[batch]) + (blockIdx.x - batch * args.q_len);
  const int all_heads = args.n_heads + 2 * args.n_kv_heads;
  const T* row = args.qkv + static_cast<i64>(blockIdx.x) * all_heads * args.head_dim;
  const int first_head = blockIdx.y * kHeads;
  const int head = first_head + threadIdx.x / 32;

  // The full norm: one scale for all query heads, one for all key heads.
  float q_scale = 0.0f, k_scale = 0.0f;
  if constexpr (kNorm == QkNorm::full) {
    if (args.q_weight && first_head < args.n_heads) {
      q_scale = rms_scale<kThreads, kVec>(row, args.n_heads * args.head_dim, args.qk_eps, partial);
    }
    if (args.k_weight && first_head + kHeads > args.n_heads &&
        first_head < args.n_heads + args.n_kv_heads) {
      k_scale = rms_scale<kThreads, kVec>(row + args.n_heads * args.head_dim,
                                          args.n_kv_heads * args.head_dim, args.qk_eps, partial);
    }
  }
  if (head >= all_heads) return;

  // Where the head goes, and what happens to it on the way.
  const T* x = row + head * args.head_dim;
  const T* weight = nullptr;
  float scale = 0.0f;
  T* y;
  Angles angles = angles_at(args.cos, args.sin, position, args.max_pos, args.n_pairs);
  if (head < args.n_heads) {
    y = args.q + (static_cast<i64>(blockIdx.x) * args.n_heads + head) * args.head_dim;
    scale = q_scale;
    weight = args.q_weight;
    if (weight && kNorm == QkNorm::full) weight += head * args.head_dim;
  } else {
    if (position < 0 || position >= args.capacity) return;
    const int kv_head = (head - args.n_heads) % args.n_kv_heads;
    if (head < args.n_heads + args.n_kv_heads) {
      y = args.k_cache + batch * args.k_batch_stride + kv_head * args.k_head_stride +
          position * args.k_pos_stride;
      scale = k_scale;
      weight = args.k_weight;
      if (weight && kNorm == QkNorm::full) weight += kv_head * args.head_dim;
    } else {
      y = args.v_cache + batch * args.v_batch_stride + kv_head * args.v_head_stride +
          position * args.v_pos_stride;
      angles.n_pairs = 0;
    }
  }
  if constexpr (kNorm == QkNorm::head) {
    if (weight) scale = head_rms_scale<kVec>(x, args.head_dim, args.qk_eps);
  }
  norm_rotate_head<kPairing, kRounding, kVec>(x, y, args.head_dim, angles, weight, scale);
}

}  // namespace cufuse
