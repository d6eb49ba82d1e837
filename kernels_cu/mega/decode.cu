// A whole decode step, or several one behind the other, in one launch: embedding, every layer, head
// and the draw of the next token. One CTA an SM; the roles of its warps walk through the model side
// by side and meet in shared memory, the CTAs meet in words that carry their own flag. Bounded by
// reading every weight once, and by what one phase has to wait for the one before.
// instantiate: decode<DecodeShape<bfloat16, Act::silu, Rounding::cast_first, Pairing::half_split, false, 2048, 8192, 32, 8, 64, 64, 128256, 16, 78, 12, 16384, 4, 2, Copies::bulk, 2, 4, Probe::last, false, Draw::plain>>
// instantiate: decode<DecodeShape<half, Act::silu, Rounding::cast_first, Pairing::half_split, true, 128, 256, 4, 2, 32, 32, 512, 2, 4, 5, 8192, 2, 1, Copies::bulk, 2, 4, Probe::first, false, Draw::plain>>
// instantiate: decode<DecodeShape<float, Act::silu, Rounding::cast_first, Pairing::half_split, true, 128, 256, 4, 2, 32, 32, 512, 2, 4, 5, 8192, 2, 1, Copies::async, 2, 4, Probe::last, true, Draw::plain>>
// instantiate: decode<DecodeShape<bfloat16, Act::silu, Rounding::cast_first, Pairing::half_split, false, 2048, 8192, 32, 8, 64, 64, 128256, 16, 78, 12, 16384, 4, 2, Copies::bulk, 2, 4, Probe::last, false, Draw::filtered>>
// instantiate: decode<DecodeShape<float, Act::silu, Rounding::cast_first, Pairing::half_split, true, 128, 256, 4, 2, 32, 32, 512, 2, 4, 5, 8192, 2, 1, Copies::async, 2, 4, Probe::last, true, Draw::filtered>>
#include "device/decode_roles.cuh"

namespace cufuse {

// What a role does, from token to token.
template <typename AnyRole>
CUFUSE_DEVICE void walk(AnyRole role, int n_tokens, int n_layers) {
#pragma unroll 1
  for (int token = 0; token < n_tokens; ++token) {
    role.begin(token);
#pragma unroll 1
    for (int layer = 0; layer < n_layers; ++layer) {
      role.qkv(layer);        // norm, product, bias
      role.attention(layer);  // QK-norm, RoPE, append, attention
      role.output(layer);     // product, bias, residual
      role.gate_up(layer);    // norm, two products, activation
      role.down(layer);       // product, residual
    }
    if (role.has_logits()) role.head();  // norm, product, draw
  }
  role.end();
}

template <typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    decode(const __grid_constant__ DecodeArgs<typename Shape::T> args) {
  run_roles<Shape>(args, [&](auto role) { walk(role, args.n_tokens, Shape::kLayers); });
}

}  // namespace cufuse
