// What follows from the sizes of a decode step, and how it cuts panels and the cache, for a
// comparison with cufuse/plan.py.
// instantiate: decode_plan<DecodeShape<bfloat16, Act::silu, Gate::plain, Rounding::cast_first, Pairing::half_split, QkNorm::none, 2048, 8192, 32, 8, 64, 64, 128256, 16, 78, 10, 16384, 4, 2, Copies::bulk, 2, 4, Probe::last, false, Draw::plain>>
// instantiate: decode_plan<DecodeShape<half, Act::silu, Gate::clamped, Rounding::scale_first, Pairing::half_split, QkNorm::full, 128, 72, 4, 2, 32, 32, 512, 4, 4, 6, 8192, 2, 1, Copies::bulk, 2, 4, Probe::first, false, Draw::plain, Mixture<12, 2, Router::sigmoid_topk, true, 4, 2, true, 48, true, 88, false>>>
// needs: 80
#include "device/decode_roles.cuh"

namespace cufuse {

struct DecodePlanArgs {
  int* sizes;            // [7]
  int* regions;          // [14]; where each begins, and the end
  int* panels;           // [8]; of the phases that multiply, in the order of cufuse/plan.py
  int* cuts;             // [8, 8]; of their panels
  const int* positions;  // [n]
  const int* windows;    // [n]
  int* splits;           // [n, 6]
  int n;
};

template <typename Panel>
CUFUSE_DEVICE void tell(const DecodePlanArgs& args, int phase, int panels) {
  const int found[] = {Panel::kTiles,        Panel::kBlocks, Panel::kBlockTiles, Panel::kLastTiles,
                       Panel::kQuarterTiles, Panel::kChains, Panel::kParts,      Panel::kTileBytes};
  for (int i = 0; i < 8; ++i) args.cuts[phase * 8 + i] = found[i];
  args.panels[phase] = panels;
}

template <typename Shape>
__global__ void decode_plan(const DecodePlanArgs args) {
  if (threadIdx.x > 0) return;
  const int sizes[] = {Shape::kSharedBytes, Shape::kThreads,    Shape::Cache::kKeys,
                       Shape::kMostSplits,  Shape::kReadSplits, kPanelGroups,
                       Shape::kPartials};
  for (int i = 0; i < 7; ++i) args.sizes[i] = sizes[i];
  const int regions[] = {Shape::kX,           Shape::kMiddle, Shape::kQkv,     Shape::kAttention,
                         Shape::kHiddenWords, Shape::kParts,  Shape::kWeights, Shape::kBest,
                         Shape::kAppended,    Shape::kDrawn,  Shape::kHighest, Shape::kLogits,
                         Shape::kSquaresAt,   Shape::kWords};
  for (int i = 0; i < 14; ++i) args.regions[i] = regions[i];
  using OfDim = typename Shape::template Panel<Shape::kDim>;
  tell<OfDim>(args, 0, Shape::kQkvPanels);
  tell<typename Shape::template Panel<Shape::kQDim>>(args, 1, Shape::kOutPanels);
  if constexpr (Shape::Mlp::kRoutes) {
    tell<typename Shape::GateUpRows>(args, 2, Shape::kRouterPanels);
    tell<typename Shape::ExpertsGateUp>(args, 3, Shape::kExpertsPanels);
    tell<typename Shape::ExpertsDown>(args, 4, Shape::kDownPanels);
    tell<typename Shape::GateUpRows>(args, 5, Shape::kDensePanels);
    tell<typename Shape::DenseDown>(args, 6, Shape::kDownPanels);
  } else {
    tell<OfDim>(args, 5, Shape::kGateUpPanels);
    tell<typename Shape::template Panel<Shape::kHidden>>(args, 6, Shape::kDownPanels);
  }
  tell<OfDim>(args, 7, Shape::kHeadPanels);
  for (int i = 0; i < args.n; ++i) {
    const CacheSplit split = split_cache<Shape>(args.positions[i], args.windows[i]);
    const int found[] = {split.span.first, split.span.last, split.first_chunk,
                         split.end_chunk,  split.chunks,    split.count};
    for (int j = 0; j < 6; ++j) args.splits[i * 6 + j] = found[j];
  }
}

}  // namespace cufuse
