// Which experts one warp chooses from logits, and how it weighs them (device/decode_route.cuh).
// instantiate: route<Mixture<8, 2, Router::softmax_topk, true, 1, 1, false, 0, false, 0, false>>
// instantiate: route<Mixture<256, 8, Router::sigmoid_topk, true, 8, 4, true, 0, false, 0, false>>
// needs: 80
#include "device/decode_route.cuh"

namespace cufuse {

struct RouteArgs {
  const float* logits;      // [n, experts]
  const float* correction;  // [experts]; may be null
  int* ids;                 // [n, k]
  float* weights;           // [n, k]
  int n;
  float scale;
};

template <typename Mlp>
__global__ void route(const RouteArgs args) {
  using Choose = Chooser<Mlp>;
  auto& choice = *dynamic_shared<Choice<Mlp>>();
  for (int row = blockIdx.x; row < args.n; row += gridDim.x) {
    Choose chooser;
    for (int i = 0; i < Choose::kMine; ++i) {
      const float* from = args.logits + row * Mlp::kExperts + Choose::expert(i);
      chooser.logits[i] = Choose::has(i) ? *from : 0.0f;
    }
    chooser.choose(args.correction, args.scale, choice);
    __syncwarp();
    for (int i = lane_here(); i < Mlp::kTop; i += 32) {
      args.ids[row * Mlp::kTop + i] = choice.expert[i];
      args.weights[row * Mlp::kTop + i] = choice.weight[i];
    }
    __syncwarp();
  }
}

}  // namespace cufuse
