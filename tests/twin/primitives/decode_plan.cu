// What follows from the sizes of a decode step, and how it cuts panels and the cache, for a
// comparison with cufuse/plan.py.
// instantiate: decode_plan<DecodeShape<bfloat16, Act::silu, Rounding::cast_first, Pairing::half_split, false, 2048, 8192, 32, 8, 64, 64, 128256, 16, 78, 10, 16384, 4, 2, Copies::bulk, 2, 4, Probe::last, false, Draw::plain>>
// needs: 80
#include "device/decode_roles.cuh"

namespace cufuse {

struct DecodePlanArgs {
  int* sizes;            // [7]
  int* regions;          // [12]; where each begins, and the end
  int* cuts;             // [3, 6]; of K = dim, q_dim and hidden
  const int* positions;  // [n]
  const int* windows;    // [n]
  int* splits;           // [n, 6]
  int n;
};

template <typename Panel>
CUFUSE_DEVICE void tell(int* cut) {
  const int found[] = {Panel::kTiles,     Panel::kBlocks,       Panel::kBlockTiles,
                       Panel::kLastTiles, Panel::kQuarterTiles, Panel::kChains};
  for (int i = 0; i < 6; ++i) cut[i] = found[i];
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
                         Shape::kAppended,    Shape::kDrawn,  Shape::kHighest, Shape::kWords};
  for (int i = 0; i < 12; ++i) args.regions[i] = regions[i];
  tell<typename Shape::template Panel<Shape::kDim>>(args.cuts);
  tell<typename Shape::template Panel<Shape::kQDim>>(args.cuts + 6);
  tell<typename Shape::template Panel<Shape::kHidden>>(args.cuts + 12);
  for (int i = 0; i < args.n; ++i) {
    const CacheSplit split = split_cache<Shape>(args.positions[i], args.windows[i]);
    const int found[] = {split.span.first, split.span.last, split.first_chunk,
                         split.end_chunk,  split.chunks,    split.count};
    for (int j = 0; j < 6; ++j) args.splits[i * 6 + j] = found[j];
  }
}

}  // namespace cufuse
