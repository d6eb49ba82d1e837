// Copy keys and values of new tokens into the cache at positions start + i. A CTA takes one token
// or a part of it. Bounded by memory: one read and one write of k and v.
// instantiate: append<bfloat16, 8>
// instantiate: append<half, 1>
// instantiate: append<float, 4>
#include "device/vec.cuh"

namespace cufuse {

template <typename T>
struct AppendArgs {
  const T* k;          // [batch, q_len, n_kv_heads, head_dim]
  const T* v;          // [batch, q_len, n_kv_heads, head_dim]
  const int* start;    // [batch]; tokens in the cache
  T* k_cache;          // [batch, n_kv_heads, capacity, head_dim]; at the strides below
  T* v_cache;          // [batch, n_kv_heads, capacity, head_dim]; at the strides below
  i64 k_batch_stride;  // strides count elements
  i64 k_head_stride;
  i64 k_pos_stride;
  i64 v_batch_stride;
  i64 v_head_stride;
  i64 v_pos_stride;
  int q_len;
  int n_kv_heads;
  int head_dim;
  int capacity;
};

template <typename T, int kVec>
__global__ void __launch_bounds__(256) append(const AppendArgs<T> args) {
  constexpr int kThreads = 256;
  const int batch = blockIdx.x / args.q_len;
  const i64 position = static_cast<i64>(args.start[batch]) + (blockIdx.x - batch * args.q_len);
  if (position < 0 || position >= args.capacity) return;
  const int n = args.n_kv_heads * args.head_dim;
  const i64 row = static_cast<i64>(blockIdx.x) * n;
  T* k_cache = args.k_cache + batch * args.k_batch_stride + position * args.k_pos_stride;
  T* v_cache = args.v_cache + batch * args.v_batch_stride + position * args.v_pos_stride;
  for (int i = (blockIdx.y * kThreads + threadIdx.x) * kVec; i < n;
       i += gridDim.y * kThreads * kVec) {
    const int head = i / args.head_dim;
    const int column = i - head * args.head_dim;
    store_vec<kVec>(k_cache + head * args.k_head_stride + column, load_vec<kVec>(args.k + row + i));
    store_vec<kVec>(v_cache + head * args.v_head_stride + column, load_vec<kVec>(args.v + row + i));
  }
}

}  // namespace cufuse
