// One phase of a decode step in a launch: the roles of mega/decode.cu do for one layer what they do
// there in a row, so the bits are the same, and what a phase hands on stays in the words between
// CTAs. Five launches a layer, and the head's, which counts the token. Bounded by reading the
// phase's weights once, behind a ring that starts empty.
// instantiate: decode_phase<DecodeShape<bfloat16, Act::silu, Gate::plain, Rounding::cast_first, Pairing::half_split, QkNorm::none, 2048, 8192, 32, 8, 64, 64, 128256, 16, 78, 12, 16384, 4, 2, Copies::bulk, 2, 4, Probe::last, false, Draw::plain>, Phase::attention>
// instantiate: decode_phase<DecodeShape<half, Act::silu, Gate::plain, Rounding::cast_first, Pairing::half_split, QkNorm::head, 128, 256, 4, 2, 32, 32, 512, 2, 4, 6, 8192, 2, 1, Copies::bulk, 2, 4, Probe::last, false, Draw::plain>, Phase::head>
// instantiate: decode_phase<DecodeShape<float, Act::silu, Gate::plain, Rounding::cast_first, Pairing::half_split, QkNorm::head, 128, 256, 4, 2, 32, 32, 512, 2, 4, 6, 8192, 2, 1, Copies::async, 2, 4, Probe::last, false, Draw::plain>, Phase::qkv>
// instantiate: decode_phase<DecodeShape<bfloat16, Act::silu, Gate::plain, Rounding::cast_first, Pairing::half_split, QkNorm::none, 2048, 8192, 32, 8, 64, 64, 128256, 16, 78, 12, 16384, 4, 2, Copies::bulk, 2, 4, Probe::last, false, Draw::filtered>, Phase::head>
// instantiate: decode_phase<DecodeShape<bfloat16, Act::silu, Gate::plain, Rounding::cast_first, Pairing::half_split, QkNorm::full, 2048, 1024, 16, 16, 128, 128, 50304, 16, 78, 11, 16384, 3, 3, Copies::bulk, 4, 2, Probe::last, false, Draw::plain, Mixture<64, 8, Router::softmax_topk, false, 1, 1, false, 0, false, 0, false>>, Phase::experts>
// instantiate: decode_phase<DecodeShape<bfloat16, Act::silu, Gate::clamped, Rounding::scale_first, Pairing::half_split, QkNorm::none, 2880, 2880, 64, 8, 64, 64, 201088, 24, 78, 11, 16384, 6, 5, Copies::bulk, 4, 4, Probe::last, false, Draw::plain, Mixture<32, 4, Router::topk_softmax, true, 1, 1, false, 0, false, 0, true, true>>, Phase::combine>
// instantiate: decode_phase<DecodeShape<half, Act::silu, Gate::clamped, Rounding::scale_first, Pairing::half_split, QkNorm::none, 2880, 2880, 64, 8, 64, 64, 201088, 24, 78, 11, 16384, 6, 5, Copies::bulk, 4, 4, Probe::last, false, Draw::plain, Mixture<32, 4, Router::topk_softmax, true, 1, 1, false, 0, false, 0, true, true>>, Phase::experts>
#include "device/decode_roles.cuh"

namespace cufuse {

enum class Phase { qkv, attention, output, gate_up, down, router, experts, combine, head };

// What a role does.
template <Phase kPhase, typename AnyRole>
CUFUSE_DEVICE void walk(AnyRole role, int layer) {
  role.begin(0);
  if constexpr (kPhase == Phase::qkv) role.qkv(layer);
  if constexpr (kPhase == Phase::attention) role.attention(layer);
  if constexpr (kPhase == Phase::output) role.output(layer);
  if constexpr (kPhase == Phase::gate_up) role.gate_up(layer);
  if constexpr (kPhase == Phase::down) role.down(layer);
  if constexpr (kPhase == Phase::router) role.router(layer);
  if constexpr (kPhase == Phase::experts) role.experts(layer);
  if constexpr (kPhase == Phase::combine) role.template combine<true>(layer);
  if constexpr (kPhase == Phase::head) role.head();
  role.end();
}

template <typename Shape, Phase kPhase>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    decode_phase(const __grid_constant__ DecodeArgs<typename Shape::T> args) {
  run_roles<Shape>(args, [&](auto role) { walk<kPhase>(role, args.layer); });
}

}  // namespace cufuse
