// A whole decode step, or several one behind the other, in one launch: embedding, every layer, head
// and the draw of the next token. One CTA an SM; the roles of its warps walk through the model side
// by side and meet in shared memory, the CTAs meet in words that carry their own flag. Bounded by
// reading every weight once, and by what one phase has to wait for the one before.
// instantiate: decode<DecodeShape<bfloat16, Act::silu, Gate::plain, Rounding::cast_first, Pairing::half_split, QkNorm::none, 2048, 8192, 32, 8, 64, 64, 128256, 16, 78, 12, 16384, 4, 2, Copies::bulk, 2, 4, Probe::last, false, Draw::plain>>
// instantiate: decode<DecodeShape<half, Act::silu, Gate::plain, Rounding::cast_first, Pairing::half_split, QkNorm::head, 128, 256, 4, 2, 32, 32, 512, 2, 4, 6, 8192, 2, 1, Copies::bulk, 2, 4, Probe::first, false, Draw::plain>>
// instantiate: decode<DecodeShape<float, Act::silu, Gate::plain, Rounding::cast_first, Pairing::half_split, QkNorm::head, 128, 256, 4, 2, 32, 32, 512, 2, 4, 6, 8192, 2, 1, Copies::async, 2, 4, Probe::last, false, Draw::plain>>
// instantiate: decode<DecodeShape<bfloat16, Act::silu, Gate::plain, Rounding::cast_first, Pairing::half_split, QkNorm::none, 2048, 8192, 32, 8, 64, 64, 128256, 16, 78, 12, 16384, 4, 2, Copies::bulk, 2, 4, Probe::last, false, Draw::filtered>>
// instantiate: decode<DecodeShape<float, Act::silu, Gate::plain, Rounding::cast_first, Pairing::half_split, QkNorm::head, 128, 256, 4, 2, 32, 32, 512, 2, 4, 6, 8192, 2, 1, Copies::async, 2, 4, Probe::last, false, Draw::filtered>>
// instantiate: decode<DecodeShape<bfloat16, Act::silu, Gate::plain, Rounding::cast_first, Pairing::half_split, QkNorm::full, 2048, 1024, 16, 16, 128, 128, 50304, 16, 78, 11, 16384, 3, 3, Copies::bulk, 4, 2, Probe::last, false, Draw::plain, Mixture<64, 8, Router::softmax_topk, false, 1, 1, false, 0, false, 0, false>>>
// instantiate: decode<DecodeShape<half, Act::silu, Gate::clamped, Rounding::scale_first, Pairing::half_split, QkNorm::none, 128, 72, 4, 2, 32, 32, 512, 4, 4, 6, 8192, 2, 1, Copies::bulk, 2, 4, Probe::first, false, Draw::plain, Mixture<12, 2, Router::sigmoid_topk, true, 4, 2, true, 48, true, 88, false>>>
// instantiate: decode<DecodeShape<float, Act::silu, Gate::plain, Rounding::cast_first, Pairing::half_split, QkNorm::head, 128, 64, 4, 2, 32, 32, 512, 2, 4, 6, 8192, 2, 1, Copies::async, 2, 4, Probe::last, false, Draw::plain, Mixture<8, 2, Router::topk_softmax, true, 1, 1, false, 0, false, 0, true>>>
// instantiate: decode<DecodeShape<bfloat16, Act::silu, Gate::clamped, Rounding::scale_first, Pairing::half_split, QkNorm::none, 2880, 2880, 64, 8, 64, 64, 201088, 24, 78, 11, 16384, 6, 5, Copies::bulk, 4, 4, Probe::last, false, Draw::plain, Mixture<32, 4, Router::topk_softmax, true, 1, 1, false, 0, false, 0, true, true>>>
// instantiate: decode<DecodeShape<float, Act::silu, Gate::clamped, Rounding::cast_first, Pairing::half_split, QkNorm::head, 96, 160, 4, 2, 32, 32, 512, 2, 4, 6, 8192, 2, 1, Copies::async, 2, 4, Probe::last, false, Draw::plain, Mixture<8, 2, Router::topk_softmax, true, 1, 1, false, 0, false, 0, true, true>>>
#include "device/decode_roles.cuh"

namespace cufuse {

// What a role does, from token to token.
template <typename AnyRole>
CUFUSE_DEVICE void walk(AnyRole role, int n_layers) {
#pragma unroll 1
  for (int token = 0; token < role.args.n_tokens; token = role.n() + 1) {
    role.begin(token);
#pragma unroll 1
    for (int layer = 0; layer < n_layers; ++layer) {
      role.qkv(layer);        // norm, product, bias
      role.attention(layer);  // QK-norm, RoPE, append, attention
      role.output(layer);     // product, bias, residual
      if constexpr (AnyRole::kRoutes) {
        // Norm and product: the router's; choice, each expert's with activation and weight; the sum
        // of 4-bit experts'. Or the one MLP's. In a loop, for one code to do them all.
        const bool dense = role.is_dense(layer);
        const int first = dense ? static_cast<int>(MlpPhase::gate_up) : 0;
        const int count = dense ? 1 : AnyRole::kLoopCombines ? 3 : 2;
#pragma unroll 1
        for (int i = first; i < first + count; ++i) role.mlp(layer, static_cast<MlpPhase>(i));
        if (dense) {
          role.down(layer);  // product, residual
        } else if (!AnyRole::kLoopCombines) {
          role.template combine<false>(layer);  // the sum of the experts' products, residual
        }
      } else {
        role.gate_up(layer);  // norm, two products, activation
        role.down(layer);     // product, residual
      }
    }
    if (role.has_logits()) role.head();  // norm, product, draw
  }
  role.end();
}

template <typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    decode(const __grid_constant__ DecodeArgs<typename Shape::T> args) {
  run_roles<Shape>(args, [&](auto role) { walk(role, Shape::kLayers); });
}

}  // namespace cufuse
