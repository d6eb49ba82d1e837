// out = softmax(scale q k^T) v for many queries of 16-bit values on sm_90a, with all that
// fused/attention.cu has: wgmma multiplies for one warpgroup while others take their softmax, and
// tensor copies fill rings of keys and values (device/attention_warpgroups.cuh). Bounded by the
// tensor cores and, where heads are small, by exp.
// instantiate: attention_warpgroups<bfloat16, 64, 3, 128, 2, Logits::scaled, Turns::fixed>
// instantiate: attention_warpgroups<half, 64, 2, 128, 2, Logits::any, Turns::fixed>
// instantiate: attention_warpgroups<bfloat16, 64, 2, 128, 2, Logits::scaled, Turns::fixed>
// instantiate: attention_warpgroups<half, 96, 3, 80, 2, Logits::scaled, Turns::fixed>
// instantiate: attention_warpgroups<bfloat16, 128, 3, 80, 2, Logits::scaled, Turns::fixed>
// instantiate: attention_warpgroups<bfloat16, 128, 2, 128, 2, Logits::scaled, Turns::free>
// instantiate: attention_warpgroups<bfloat16, 128, 2, 128, 2, Logits::any, Turns::free>
// instantiate: attention_warpgroups<half, 256, 2, 64, 2, Logits::any, Turns::fixed>
#include "device/attention_warpgroups.cuh"

namespace cufuse {

template <typename T>
struct AttentionWarpgroupsArgs {
  TensorMap q_map;     // [batch, n_heads, q_len, head_dim] in boxes of 64 rows and columns
  TensorMap k_map;     // [batch, n_kv_heads, kv_len, head_dim] in boxes of kKeys rows, 64 columns
  TensorMap v_map;     // [batch, n_kv_heads, kv_len, head_dim] in boxes of kKeys rows, 64 columns
  const T* q;          // [batch, q_len, n_heads, head_dim]
  const T* k;          // [batch, kv_len, n_kv_heads, head_dim]; as k_map has it
  const T* v;          // [batch, kv_len, n_kv_heads, head_dim]; as v_map has it
  const int* start;    // [batch], the position of query 0; null: default_start
  const int* lengths;  // [batch], keys of each sequence; null: causal ? start + q_len : kv_len
  const T* sinks;      // [n_heads]; null: none
  T* out;              // [batch, q_len, n_heads, head_dim]
  int batch;
  int q_len;
  int kv_len;
  int n_heads;
  int n_kv_heads;
  int default_start;
  int window;  // 0: none
  bool causal;
  float scale;
  float softcap;      // 0: none
  float inv_softcap;  // 1 / softcap
};

template <typename T,
          int kHeadDim,
          int kWarpgroups,
          int kKeys,
          int kStages,
          Logits kLogits,
          Turns kTurns>
__global__ void __launch_bounds__((kWarpgroups + 1) * 128, 1)
    attention_warpgroups(const __grid_constant__ AttentionWarpgroupsArgs<T> args) {
#if defined(CUFUSE_HOST) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Shape = AttentionShape<kHeadDim, kWarpgroups, kKeys, kStages>;
  using Memory = AttentionMemory<Shape>;
  const int thread = static_cast<int>(threadIdx.x);
  const int warpgroup = uniform(thread / 128);
  if (thread == 0) {
    prefetch_map(args.q_map);
    prefetch_map(args.k_map);
    prefetch_map(args.v_map);
    Memory::init();
  }
  __syncthreads();

  if (warpgroup == kWarpgroups) {
    give_registers<Shape::kFew>();
    if (thread == kWarpgroups * 128) copy_for_attention<Shape>(args);
  } else {
    take_registers<Shape::kMany>();
    AttentionWarpgroup<Shape, T, kLogits, kTurns, AttentionWarpgroupsArgs<T>> work(args, warpgroup);
    work.run();
  }
#endif
}

}  // namespace cufuse
