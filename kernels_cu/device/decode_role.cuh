// What the roles of a decode step have in common (device/decode_roles.cuh): what a launch finds,
// which token and which tags, whose tile it is, what was drawn.
#pragma once

#include "device/decode_shape.cuh"
#include "device/sampling.cuh"

namespace cufuse {

// Named barriers.
constexpr u32 kMultiplierBarrier = 1;  // the warps that multiply
constexpr u32 kSumsBarrier = 2;        // and 3..5: the sums of a panel are there
constexpr u32 kGroupBarrier = 6;       // and 7..9: the warps of a group
constexpr u32 kNormBarrier = 10;       // the squares of a vector are there

template <typename Shape>
CUFUSE_DEVICE CacheSplit split_cache(int position, int window) {
  constexpr int kKeys = Shape::Cache::kKeys;
  CacheSplit split;
  split.span = {window > 0 ? max(position + 1 - window, 0) : 0, position};
  split.first_chunk = split.span.first / kKeys;
  split.end_chunk = (position + kKeys - 1) / kKeys;
  const int chunks = max(split.end_chunk - split.first_chunk, 1);
  const int wanted = (chunks + Shape::kSplitChunks - 1) / Shape::kSplitChunks;
  split.count = min(wanted, Shape::kMostSplits);
  split.chunks = (chunks + split.count - 1) / split.count;
  split.count = (chunks + split.chunks - 1) / split.chunks;
  return split;
}

// The first bytes of shared memory: what a launch finds and leaves otherwise. One thread reads it
// before the barrier behind which its CTA counts as arrived, and it changes when all CTAs have.
struct LaunchBlock {
  Deadline deadline;
  u32 sequence;
  int start;
  int first_token;  // `ids` may take its place
};
static_assert(sizeof(LaunchBlock) <= Deadline::kBytes, "the ring comes behind it");

// The experts of the layer that this CTA is in. The filler chooses them, and the finisher reads
// them before anybody can know the logits of the next layer.
template <typename Shape>
CUFUSE_DEVICE Choice<typename Shape::Mlp>& choice_here() {
  return *reinterpret_cast<Choice<typename Shape::Mlp>*>(dynamic_shared<unsigned char>() +
                                                         Shape::kChoiceAt);
}

// By one thread, before the first barrier.
template <typename Shape>
CUFUSE_DEVICE void begin_launch(const DecodeArgs<typename Shape::T>& args) {
  LaunchBlock& launch = *dynamic_shared<LaunchBlock>();
  launch = {{args.control + kControlFault, timer_ns() + args.budget_ns},
            args.control[kControlSequence],
            args.start[0],
            args.tokens[0]};
  mbarrier_init(&launch.deadline.finished, Shape::kWatchdog);
  for (int i = 0; i < Shape::kPartials; ++i) {
    mbarrier_init(reinterpret_cast<u64*>(dynamic_shared<unsigned char>() + Shape::kSumsReadAt) + i,
                  1);
  }
  if constexpr (Shape::Mlp::kRoutes) {
    auto& choice = choice_here<Shape>();
    mbarrier_init(&choice.made, 1);
    mbarrier_init(&choice.read, 1);
    // Who gives up waiting reads what is there: it has to be an expert.
    for (int slot = 0; slot < Shape::Mlp::kTop; ++slot) choice.expert[slot] = 0;
  }
  Ring<typename Shape::Ring, Shape::kRingAt>::init();
}

// What a mixture does behind attention in a loop, for one code to do several: what a layer with
// experts does, and the first product of one with one MLP.
enum class MlpPhase { router, experts, combine, gate_up };

// What all roles know. What does not change within a token lies in shared memory: the warps that
// multiply have no registers to spare.
template <typename Shape, RoleId kRole>
struct Role {
  using T = typename Shape::T;
  static constexpr bool kRoutes = Shape::Mlp::kRoutes;
  // Whether the loop has `combine`. Of rows it is another code than the rest, and spilled there
  // before sm_90.
  static constexpr bool kLoopCombines = Shape::Mlp::kFourBits;
  const DecodeArgs<T>& args;
  Tracer<Shape::kTrace> tracer;
  int turn = 0;

  CUFUSE_DEVICE explicit Role(const DecodeArgs<T>& args) : args(args), tracer(args.trace, kRole) {}

  // By all threads of the role; `sync` is a barrier of theirs.
  template <typename Sync>
  CUFUSE_DEVICE void begin(int token, const Sync& sync) {
    sync();
    if (lane_here() == 0 && (kRole != kMultiplierRole || thread_here() == 0)) {
      block().token = token;
#pragma unroll 1
      for (int i = 0; i < 2; ++i) {
        block().splits[i] = split_cache<Shape>(launch().start + token, i == 0 ? 0 : args.window);
      }
    }
    sync();
  }
  CUFUSE_DEVICE void begin(int token) {
    begin(token, [] { __syncwarp(); });
  }

  static CUFUSE_DEVICE const LaunchBlock& launch() { return *dynamic_shared<LaunchBlock>(); }
  static CUFUSE_DEVICE RoleBlock& block() {
    return reinterpret_cast<RoleBlock*>(dynamic_shared<unsigned char>() + Shape::kRolesAt)[kRole];
  }

  // Which token of this launch it is, and where in the sequence.
  static CUFUSE_DEVICE int n() { return block().token; }
  static CUFUSE_DEVICE int position() { return launch().start + n(); }
  CUFUSE_DEVICE bool has_logits() const { return args.all_logits || n() + 1 >= args.n_given; }
  CUFUSE_DEVICE bool has_logits_before() const { return args.all_logits || n() >= args.n_given; }

  // Of what a layer hands on; the layer before the first one is the last one of the token before.
  static CUFUSE_DEVICE u32 tag(int layer) {
    return launch().sequence + static_cast<u32>(n() * Shape::kLayers + layer) + 1;
  }

  CUFUSE_DEVICE const CacheSplit& split(int layer) const {
    const bool windowed = args.window > 0 && layer % args.window_every == 0;
    return block().splits[windowed ? 1 : 0];
  }

  // Of a mixture: whether a layer has one MLP, how many before it have, and how many have experts.
  CUFUSE_DEVICE bool is_dense(int layer) const {
    if constexpr (Shape::Mlp::kDense == 0) return false;
    return (layer < 64 ? args.dense_low >> layer : args.dense_high >> (layer - 64)) & 1;
  }
  CUFUSE_DEVICE int dense_before(int layer) const {
    if constexpr (Shape::Mlp::kDense == 0) return 0;
    const u64 low = layer < 64 ? args.dense_low & ((1ull << layer) - 1) : args.dense_low;
    const u64 high = layer <= 64 ? 0 : args.dense_high & ((1ull << (layer - 64)) - 1);
    return __popcll(low) + __popcll(high);
  }
  CUFUSE_DEVICE int experts_before(int layer) const { return layer - dense_before(layer); }

  // Of this token.
  CUFUSE_DEVICE T* logits() const {
    return args.logits + (args.all_logits ? static_cast<i64>(n()) * Shape::kVocab : 0);
  }
  // The largest order in each panel of them.
  CUFUSE_DEVICE u32* highest() const { return reinterpret_cast<u32*>(words(Shape::kHighest)); }

  // The first of `tiles` tiles that is this CTA's; the next ones are kCtas apart.
  CUFUSE_DEVICE int take(int tiles) {
    tracer.phase();  // every role takes once a phase
    int first = static_cast<int>(blockIdx.x) - turn;
    if (first < 0) first += Shape::kCtas;
    turn += tiles % Shape::kCtas;
    if (turn >= Shape::kCtas) turn -= Shape::kCtas;
    return first;
  }

  // Whether this CTA has any of the next phase's tiles.
  CUFUSE_DEVICE bool starts(int tiles) const {
    int first = static_cast<int>(blockIdx.x) - turn;
    if (first < 0) first += Shape::kCtas;
    return first < tiles;
  }

  // The last of this CTA's tiles. Splits other than the first publish and wait for nothing, so a
  // CTA that goes through its splits from the last to the first never waits for one of its own.
  static CUFUSE_DEVICE int last_of(int first, int tiles) {
    return first + (tiles - 1 - first) / Shape::kCtas * Shape::kCtas;
  }

  CUFUSE_DEVICE u64* words(int at) const { return args.words + at; }
  CUFUSE_DEVICE u64* best(int token) const {
    return words(Shape::kBest) + token % 2 * 2 * Shape::kCtas;
  }
  // Tokens take turns: the next one's row may be there before a slow CTA has looked for this one's.
  CUFUSE_DEVICE u64* appended(int token, int layer, int head) const {
    return words(Shape::kAppended) + (token % 2 * Shape::kLayers + layer) * Shape::kKvHeads + head;
  }

  // The token of this step, to every lane of the warp: given, or the one drawn before. -1 if the
  // logits held a NaN. Where the one before has logits, behind everybody's head: else a given token
  // could overwrite what a slow CTA has yet to read there.
  CUFUSE_DEVICE int token() {
    if (n() == 0) return launch().first_token;
    const bool given = n() < args.n_given;
    const int before = args.all_logits || !given ? drawn(n() - 1, tag(-1)) : 0;
    return given ? args.tokens[n()] : before;
  }

  // What was drawn behind a token: the best of what every CTA found, or what CTA 0 says. One word
  // is enough for that: it is written when everybody's best of a token is there, and everybody
  // looked for the id of the token before on the way to that.
  CUFUSE_DEVICE int drawn(int token, u32 its_tag) {
    if constexpr (Shape::kDraw == Draw::filtered) {
      const u64* word = words(Shape::kDrawn);
      return static_cast<int>(settle(look(word), word, its_tag));
    }
    const u64* words = best(token);
    u64 rank = 0;
    for (int cta = lane_here(); cta < Shape::kCtas; cta += 32) {
      const u64* its = words + 2 * cta;
      const uint2 pair = settle(look_pair(its), its, its_tag);
      rank = max(rank, static_cast<u64>(pair.x) << 32 | pair.y);
    }
    rank = warp_max(rank);
    return rank == 0 || rank == kRankOfNan ? -1 : id_of(rank);
  }

  CUFUSE_DEVICE const T* embedding_row(int token) const {
    return args.embedding + static_cast<i64>(max(token, 0)) * Shape::kDim;
  }
};

}  // namespace cufuse
