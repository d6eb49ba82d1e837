// The sizes and choices of a decode step, all known when it is compiled, and what follows from
// them: where activations lie between CTAs and what a CTA keeps in shared memory.
#pragma once

#include "device/activation.cuh"
#include "device/cache_attention.cuh"
#include "device/decode_route.cuh"
#include "device/filters.cuh"
#include "device/panels.cuh"
#include "device/rope.cuh"
#include "device/trace.cuh"

namespace cufuse {

// What a step reads and writes. Weights are packed (device/packed.cuh), a layer behind the other.
// Those of a mixture's router and MLPs are row-major, and read through maps: in boxes of 8 rows of
// a gate or an up, of 16 rows of the others. Layers with experts have their place in one array,
// those with one MLP in another, but for gates and ups, which all layers have in one. Experts of
// 4-bit weights (device/mxfp4.cuh) have arrays of their own: one behind the other, a layer's behind
// those of the layer before.
template <typename T>
struct DecodeArgs {
  TensorMap router_map;  // of `router`, and so on
  TensorMap gate_map;
  TensorMap up_map;
  TensorMap down_map;
  TensorMap shared_down_map;
  TensorMap dense_down_map;
  const T* embedding;  // [vocab, dim], row-major
  const T* head;       // packed [vocab, dim]
  const T* qkv;        // [layers] packed [q_dim + 2 kv_dim, dim]
  const T* out;        // [layers] packed [dim, q_dim]
  const T* gate_up;    // [layers] packed, gated, twice [hidden, dim]; none in a mixture
  const T* down;       // [layers] packed [dim, hidden]; of a mixture rows [experts, dim, hidden]
  const T* router;     // [experts, dim], and a row for the gate of what is shared
  const T* gate;       // [experts, hidden, dim] and the shared one; [dense_hidden, dim] where dense
  const T* up;         // likewise
  const T* shared_down;            // [dim, shared_hidden]
  const T* dense_down;             // [dim, dense_hidden]
  const unsigned char* gate_up4;   // [experts] packed, gated, twice [hidden, dim]
  const unsigned char* down4;      // [experts] packed [dim, hidden]
  const T* attn_norm;              // [layers, dim]
  const T* mlp_norm;               // [layers, dim]
  const T* final_norm;             // [dim]
  const T* q_norm;                 // [layers, head_dim]; null without QK-norm
  const T* k_norm;                 // [layers, head_dim]
  const T* qkv_bias;               // [layers, q_dim + 2 kv_dim]; this and the next ones may be null
  const T* out_bias;               // [layers, dim]
  const T* gate_bias;              // [layers, hidden]; of a mixture [experts, hidden]
  const T* up_bias;                // likewise
  const T* down_bias;              // [layers, dim]; of a mixture [experts, dim]
  const T* router_bias;            // [experts]
  const float* router_correction;  // [experts]
  const T* sinks;                  // [layers, heads]
  const float* cos;                // [positions, rotary / 2]
  const float* sin;                // [positions, rotary / 2]
  T* k_cache;                      // [layers, kv_heads, capacity, head_dim]
  T* v_cache;                      // [layers, kv_heads, capacity, head_dim]
  const int* tokens;               // [n_given]; what comes after them is drawn
  int* ids;       // [n_tokens]; what was drawn behind each token that has logits; may be
                  // tokens where one is given
  T* logits;      // [vocab] of the last token, with all_logits [n_tokens, vocab]; with
                  // Draw::filtered of every token in turn
  int* start;     // [1]; tokens in the cache before this step, and after it
  u32* control;   // [kControlWords]
  u64* words;     // DecodeShape::kWords of them
  int* experts;   // [n_tokens, layers, kTop]: what was chosen; may be null
  u64* trace;     // what happened when (device/trace.cuh); null without
  u64 budget_ns;  // a launch that takes longer gives up
  u64 seed;
  u64 dense_low;   // of a mixture: a bit for each of the first 64 layers, whether it has one MLP
  u64 dense_high;  // of the next 64
  u64 share;       // of Filters; this and the next ones for Draw::filtered
  int top_k;
  float min_p;
  float mass_scale;
  int n_tokens;  // that have been through the model when the launch ends, 0 if none yet
  int n_given;
  int layer;  // of a launch that does a part of a step
  int all_logits;
  int capacity;      // of the cache, a multiple of 128
  int window;        // 0: none
  int window_every;  // layer i has the window when i % window_every == 0
  float eps;
  float inverse_temperature;  // 0: the likeliest
  float routed_scale;
  float limit;  // of a clamped gate
  float alpha;
};

// How attention cuts the keys that are in the cache: chunks of a sequence go to splits. It depends
// on the position and the window alone.
struct CacheSplit {
  KeySpan span;     // keys in the cache that the query sees
  int first_chunk;  // of the sequence
  int end_chunk;
  int chunks;  // of a split
  int count;   // splits, at least 1: the first one also takes the new key

  // The chunks of a split.
  CUFUSE_DEVICE int begin(int split) const { return first_chunk + split * chunks; }
  CUFUSE_DEVICE int end(int split) const { return min(begin(split) + chunks, end_chunk); }
  CUFUSE_DEVICE int size(int split) const { return end(split) - begin(split); }
};

template <typename T>
constexpr bool kIsHalf = false;
template <>
constexpr bool kIsHalf<half> = true;

// What the threads of a role share, for one token.
struct RoleBlock {
  CacheSplit splits[2];  // of layers without a window, and with one
  int token;             // of this launch
};

// control: a count that makes tags unique, whether a launch was over (Deadline), CTAs that have
// read the count.
constexpr int kControlSequence = 0;
constexpr int kControlFault = 1;
constexpr int kControlArrived = 2;
constexpr int kControlWords = 32;

// What is drawn from: all logits, as they come, or what top-k, top-p and min-p leave, for which one
// CTA looks at all of them.
enum class Draw { plain, filtered };

// Which word of a vector a CTA waits for before all its threads look at theirs: later the last one
// keeps more of them from looking in vain, the first one gives them a start.
enum class Probe { first, last };

template <typename T_,
          Act kAct_,
          Gate kGate_,
          Rounding kRounding_,
          Pairing kPairing_,
          QkNorm kQkNorm_,
          int kDim_,
          int kHidden_,
          int kHeads_,
          int kKvHeads_,
          int kHeadDim_,
          int kRotary_,
          int kVocab_,
          int kLayers_,
          int kCtas_,
          int kStages_,
          int kStageBytes_,
          int kWindow_,
          int kCalmWindow_,
          Copies kCopies_,
          int kSplitChunks_,
          int kValueSlices_,
          Probe kProbe_,
          bool kTrace_,
          Draw kDraw_,
          typename Mlp_ = OneMlp>
struct DecodeShape {
  using T = T_;
  using Ring = RingShape<kStages_, kStageBytes_, kWindow_, kCalmWindow_, kCopies_>;
  template <int kK>
  using Panel = PanelShape<T, kK, kStageBytes_>;
  template <int kK, bool kGated = false, int kParts = 1>
  using RowsPanel = PanelShape<T, kK, kStageBytes_, Layout::rows, kGated, kParts>;
  using Mlp = Mlp_;
  static constexpr Act kAct = kAct_;
  static constexpr Gate kGate = kGate_;
  static constexpr Rounding kRounding = kRounding_;
  static constexpr Pairing kPairing = kPairing_;
  static constexpr QkNorm kQkNorm = kQkNorm_;
  static constexpr Probe kProbe = kProbe_;
  static constexpr bool kTrace = kTrace_;
  static constexpr Draw kDraw = kDraw_;
  static constexpr int kDim = kDim_;
  static constexpr int kHidden = kHidden_;
  static constexpr int kHeads = kHeads_;
  static constexpr int kKvHeads = kKvHeads_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kRotary = kRotary_;
  static constexpr int kVocab = kVocab_;
  static constexpr int kLayers = kLayers_;
  static constexpr int kCtas = kCtas_;

  static constexpr int most(int a, int b) { return a > b ? a : b; }
  static constexpr int common_divisor(int a, int b) { return b ? common_divisor(b, a % b) : a; }

  static constexpr int kGroup = kHeads / kKvHeads;  // query heads of a KV head
  static constexpr int kQDim = kHeads * kHeadDim;
  static constexpr int kKvDim = kKvHeads * kHeadDim;
  static constexpr int kQkvDim = kQDim + 2 * kKvDim;
  using Cache = CacheShape<T, kGroup, kHeadDim, kStageBytes_, kValueSlices_>;

  // Attention: a split takes kSplitChunks chunks, more when there would be too many splits.
  static constexpr int kSplitChunks = kSplitChunks_;
  static constexpr int kMostSplits = kKvHeads >= 128 ? 1 : 128 / kKvHeads;
  // So many splits are merged by everybody who reads them; of more the first split makes one.
  static constexpr int kReadSplits = 2;

  // An RMSNorm's scale is the finisher's: what is multiplied is x times the norm's weight, and the
  // sums are scaled. A residual stream's outliers would be too large for that in half.
  static constexpr bool kScalesSums = !kIsHalf<T>;

  // A mixture's MLPs: what is shared comes before the chosen experts, and the last product's K is
  // made of all of them, in parts of one width.
  static constexpr int kExpertColumns = Mlp::kShared + Mlp::kTop * kHidden;
  static constexpr int kPartColumns =
      Mlp::kShared ? common_divisor(Mlp::kShared, kHidden) : kHidden;
  static constexpr Layout kExpertsLayout = Mlp::kFourBits ? Layout::mxfp4 : Layout::rows;
  using GateUpRows = RowsPanel<kDim, true>;
  using ExpertsGateUp = PanelShape<T, kDim, kStageBytes_, kExpertsLayout, true>;
  using ExpertsDown = PanelShape<T,
                                 kPartColumns,
                                 kStageBytes_,
                                 kExpertsLayout,
                                 false,
                                 kExpertColumns / kPartColumns>;
  using FourBitPanel = EitherPanel<ExpertsGateUp, ExpertsDown>;
  using RowsOrFourBitPanel = EitherPanel<GateUpRows, FourBitPanel>;
  using DenseDown = RowsPanel<(Mlp::kDense > 0 ? Mlp::kDense : 8)>;
  static constexpr int kRouterPanels = Mlp::kRoutes ? (Mlp::kLogits + 15) / 16 : 0;
  static constexpr int kSharedPanels = Mlp::kShared / 8;
  static constexpr int kExpertPanels = kHidden / 8;  // of one expert
  static constexpr int kExpertsPanels = kSharedPanels + Mlp::kTop * kExpertPanels;
  static constexpr int kDensePanels = Mlp::kDense / 8;

  // Phases: panels of each product.
  static constexpr int kQkvPanels = (kQkvDim + 15) / 16;
  static constexpr int kOutPanels = (kDim + 15) / 16;
  static constexpr int kGateUpPanels = (kHidden + 7) / 8;
  static constexpr int kDownPanels = (kDim + 15) / 16;
  static constexpr int kHeadPanels = (kVocab + 15) / 16;

  // Words between CTAs. Vectors of the model's dtype, then float32 of attention's splits.
  static constexpr int words(int n) { return round_up((n + kPerWord<T> - 1) / kPerWord<T>, 16); }
  static constexpr int kX = 0;                                    // [dim], between layers
  static constexpr int kMiddle = kX + words(kDim);                // [dim], behind attention
  static constexpr int kQkv = kMiddle + words(kDim);              // [q_dim + 2 kv_dim]
  static constexpr int kAttention = kQkv + words(kQkvDim);        // [q_dim]
  static constexpr int kHiddenWords = kAttention + words(kQDim);  // [hidden] of all experts
  static constexpr int kWidest = Mlp::kRoutes ? most(kExpertColumns, Mlp::kDense) : kHidden;
  static constexpr int kParts = kHiddenWords + words(kWidest);  // [splits][q_dim], with weights
  static constexpr int kWeights = kParts + 2 * kMostSplits * words(kQDim);  // [splits, heads] float
  static constexpr int kBest = kWeights + round_up(kMostSplits * kHeads, 16);  // [2, ctas, 2]
  static constexpr int kAppended = kBest + round_up(2 * kCtas * 2, 16);  // [2, layers, kv_heads]
  static constexpr int kDrawn = kAppended + round_up(2 * kLayers * kKvHeads, 16);  // [1]
  static constexpr int kHighest = kDrawn + 16;  // [panels of the head] u32
  static constexpr int kLogits = kHighest + round_up((kHeadPanels + 1) / 2, 16);  // float, router's
  static constexpr int kRouterWords = Mlp::kRoutes ? round_up(Mlp::kExperts + 1, 16) : 0;
  // Sums of squares of the panels of queries, then keys.
  static constexpr int kSquaresAt = kLogits + kRouterWords;
  static constexpr bool kFullNorm = kQkNorm == QkNorm::full;
  static constexpr int kSquareWords = kFullNorm ? round_up((kQDim + kKvDim) / 16, 16) : 0;
  static constexpr int kWords = kSquaresAt + kSquareWords;

  // Warps: those that multiply, one that finishes their sums, one that fills the ring, one that
  // looks at the clock.
  static constexpr int kFinisher = kPanelWarps;
  static constexpr int kFiller = kPanelWarps + 1;
  static constexpr int kWatchdog = kPanelWarps + 2;
  static constexpr int kThreads = (kPanelWarps + 3) * 32;

  // Shared memory.
  static constexpr int kPartials = 4;  // panels whose sums are on their way
  static constexpr int kPartialFloats = kPanelWarps * kPanelRows;
  static constexpr int kMergePitch = kHeadDim + 8;
  static constexpr int kMlpTiles = Mlp::kRoutes
                                       ? most(most(GateUpRows::kXTiles, ExpertsGateUp::kXTiles),
                                              most(ExpertsDown::kXTiles, DenseDown::kXTiles))
                                       : Packing<T>::tiles(kHidden);
  static constexpr int kFragmentBytes =
      32 * most(kMlpTiles, most(Packing<T>::tiles(kDim), Packing<T>::tiles(kQDim)));
  static constexpr int kGroupOuts = kGroup * kMergePitch;  // floats
  static constexpr int kMergeBytes = kPanelGroups * (kGroupOuts * 4 + 2 * Cache::kLogitBytes);
  // What filters keep count with: where x and partial sums are when there are any.
  using Bins = cufuse::Bins<kPanelWarps * 32>;
  static constexpr int kBinBytes =
      round_up(static_cast<int>(sizeof(Bins)), 16) - kPartials * kPartialFloats * 4;
  static constexpr int kRingAt = Deadline::kBytes;
  static constexpr int kXAt = round_up(kRingAt + Ring::kBytes, 128);
  static constexpr int kPartialsAt =
      kXAt + round_up(most(kBinBytes, most(kFragmentBytes, kMergeBytes)), 16);
  static constexpr int kSumsReadAt = kPartialsAt + kPartials * kPartialFloats * 4;  // mbarriers
  static constexpr int kNormSumsAt = kSumsReadAt + kPartials * 8;
  // Sums of squares: of warps, or of the threads that have any.
  static constexpr int kSquares = kDim / kPerWord<T> / 2;
  static constexpr int kNormFloats =
      !kScalesSums ? kPanelWarps
                   : round_up(kSquares < kPanelWarps * 32 ? kSquares : kPanelWarps * 32, 128);
  static constexpr int kRowsAt = kNormSumsAt + kNormFloats * 4;  // q of the group, k, v
  static constexpr int kNormWeightsAt = kRowsAt + round_up((kGroup + 2) * Cache::kRowBytes, 16);
  static constexpr int kAnglesAt =
      kNormWeightsAt +
      (kQkNorm != QkNorm::none ? round_up((kGroup + 1) * Cache::kRowBytes, 16) : 0);
  static constexpr int kStatsAt = kAnglesAt + round_up(kRotary * 4, 16);
  static constexpr int kRolesAt = kStatsAt + (2 * kPanelGroups + 1) * kMostHeads * 4;
  static constexpr int kChoiceAt =
      round_up(kRolesAt + kRoles * static_cast<int>(sizeof(RoleBlock)), 8);
  static constexpr int kSharedBytes =
      kChoiceAt + (Mlp::kRoutes ? static_cast<int>(sizeof(Choice<Mlp>)) : 0);

  static_assert(kDim % 8 == 0 && kHidden % 8 == 0, "vectors travel in whole words");
  // Copies land in any order. A group that has its block of stage s waits for the one that comes
  // kPanelGroups later; what was in that stage before has landed only if it was issued more than a
  // window before s.
  static_assert(Ring::kWindow + kPanelGroups <= Ring::kStages,
                "a stage's bytes before have landed when a group waits for its next ones");
  static_assert(!Mlp::kRoutes || (Mlp::kShared % 8 == 0 && Mlp::kDense % 8 == 0),
                "panels of gates and ups are whole");
  static_assert(!kFullNorm || kHeadDim % 16 == 0, "panels belong to queries or to keys");
  static_assert(kCtas <= kHeadPanels, "a CTA without a part in the head would run ahead");
};

}  // namespace cufuse
