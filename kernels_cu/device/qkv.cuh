// Where the heads of a QKV projection go: queries to q, keys and values into the cache.
#pragma once

#include "device/rope.cuh"

namespace cufuse {

// Where a head of a row goes; null for a token beyond the cache.
template <typename T, template <typename> class Args>
CUFUSE_DEVICE T* head_target(const Args<T>& args, int row, int head, i64 position) {
  if (head < args.n_heads) {
    return args.q + (static_cast<i64>(row) * args.n_heads + head) * args.head_dim;
  }
  if (position < 0 || position >= args.capacity) return nullptr;
  const int batch = row / args.q_len;
  const int kv_head = head - args.n_heads;
  if (kv_head < args.n_kv_heads) {
    return args.k_cache + batch * args.k_batch_stride + kv_head * args.k_head_stride +
           position * args.k_pos_stride;
  }
  return args.v_cache + batch * args.v_batch_stride +
         (kv_head - args.n_kv_heads) * args.v_head_stride + position * args.v_pos_stride;
}

}  // namespace cufuse
