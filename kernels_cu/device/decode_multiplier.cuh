// The role of the warps that gather x and multiply panels with it, and that attend to the cache.
#pragma once

#include "device/decode_role.cuh"

namespace cufuse {

template <typename Shape>
struct Multiplier : Role<Shape, kMultiplierRole> {
  using T = typename Shape::T;
  using Cache = typename Shape::Cache;
  using Mlp = typename Shape::Mlp;
  static constexpr int kThreads = kPanelWarps * 32;
  static constexpr int kHeadDim = Shape::kHeadDim;
  // Whether a warp has its next weights before it hands on its sums. Before sm_90 the compiler has
  // no registers for both.
#if defined(CUFUSE_HOST) || __CUDA_ARCH__ >= 900
  static constexpr bool kTakesBeforeSums = true;
#else
  static constexpr bool kTakesBeforeSums = false;
#endif
  using Ring = cufuse::Ring<typename Shape::Ring, Shape::kRingAt>;
  typename Ring::Cursor cursor;
  int panels_done = 0;

  CUFUSE_DEVICE explicit Multiplier(const DecodeArgs<T>& args)
      : Role<Shape, kMultiplierRole>(args) {}

  CUFUSE_DEVICE void begin(int token) {
    const i64 row = static_cast<i64>(this->launch().start + token) * (Shape::kRotary / 2);
    float* angles = at<float>(Shape::kAnglesAt);
    for (int i = thread_here(); i < Shape::kRotary / 2; i += kThreads) {
      angles[i] = this->args.cos[row + i];
      angles[Shape::kRotary / 2 + i] = this->args.sin[row + i];
    }
    Role<Shape, kMultiplierRole>::begin(token, sync);
  }

  CUFUSE_DEVICE void qkv(int layer) {
    const int first = this->take(Shape::kQkvPanels);
    if (first >= Shape::kQkvPanels) return;
    if (layer == 0) follow();
    using Panel = typename Shape::template Panel<Shape::kDim>;
    multiply<Panel>(first, Shape::kQkvPanels, [&] {
      const T* row = layer == 0 ? this->embedding_row(this->token()) : nullptr;
      gather_normalized<Panel>(row, this->words(Shape::kX), this->tag(layer - 1),
                               this->args.attn_norm + layer * Shape::kDim);
    });
  }

  CUFUSE_DEVICE void attention(int layer) {
    const CacheSplit& split = this->split(layer);
    const int tasks = Shape::kKvHeads * split.count;
    const int first = this->take(tasks);
    if (first >= tasks) return;
    for (int task = this->last_of(first, tasks); task >= 0; task -= Shape::kCtas) {
      attend(layer, task % Shape::kKvHeads, task / Shape::kKvHeads, split);
    }
  }

  CUFUSE_DEVICE void output(int layer) {
    const int first = this->take(Shape::kOutPanels);
    if (first >= Shape::kOutPanels) return;
    using Panel = typename Shape::template Panel<Shape::kQDim>;
    multiply<Panel>(first, Shape::kOutPanels, [&] {
      const int splits = this->split(layer).count;
      if (splits == 1 || splits > Shape::kReadSplits) {
        gather<Panel>(this->words(Shape::kAttention), this->tag(layer));
      } else {
        gather_splits<Panel>(splits, this->tag(layer));
      }
    });
  }

  CUFUSE_DEVICE void gate_up(int layer) {
    if constexpr (Mlp::kRoutes) {
      mlp(layer, MlpPhase::gate_up);
    } else {
      normed<typename Shape::template Panel<Shape::kDim>>(layer, Shape::kGateUpPanels);
    }
  }

  CUFUSE_DEVICE void down(int layer) {
    if constexpr (Mlp::kRoutes) {
      from_hidden<typename Shape::DenseDown>(layer);
    } else {
      from_hidden<typename Shape::template Panel<Shape::kHidden>>(layer);
    }
  }

  // A mixture's: which experts were chosen is the filler's to know.
  CUFUSE_DEVICE void router(int layer) { mlp(layer, MlpPhase::router); }
  CUFUSE_DEVICE void experts(int layer) { mlp(layer, MlpPhase::experts); }
  template <bool kAlone>
  CUFUSE_DEVICE void combine(int layer) {
    if constexpr (Mlp::kFourBits) {
      mlp(layer, MlpPhase::combine);
    } else {
      from_hidden<typename Shape::ExpertsDown>(layer);
    }
  }
  CUFUSE_DEVICE void mlp(int layer, MlpPhase phase) {
    if constexpr (Mlp::kFourBits) {
      beside_four_bits(layer, phase);
    } else {
      normed<typename Shape::GateUpRows>(layer, panels_of(phase));
    }
  }

  CUFUSE_DEVICE void head() {
    const int first = this->take(Shape::kHeadPanels);
    if (first >= Shape::kHeadPanels) return;
    using Panel = typename Shape::template Panel<Shape::kDim>;
    multiply<Panel>(first, Shape::kHeadPanels, [&] {
      gather_normalized<Panel>(nullptr, this->words(Shape::kX), this->tag(Shape::kLayers - 1),
                               this->args.final_norm);
    });
    if constexpr (Shape::kDraw == Draw::filtered) {
      if (blockIdx.x == 0) draw();
    }
  }

  CUFUSE_DEVICE void end() { this->tracer.close(); }

 private:
  // A product with what attention leaves behind, normalised.
  template <typename Panel>
  CUFUSE_DEVICE void normed(int layer, int panels) {
    const int first = this->take(panels);
    if (first >= panels) return;
    multiply<Panel>(first, panels, [&] { gather_middle<Panel>(layer); });
  }
  template <typename Panel>
  CUFUSE_DEVICE void gather_middle(int layer) {
    gather_normalized<Panel>(nullptr, this->words(Shape::kMiddle), this->tag(layer),
                             this->args.mlp_norm + layer * Shape::kDim);
  }
  // A product with what gates and ups make.
  template <typename Panel>
  CUFUSE_DEVICE void from_hidden(int layer) {
    const int first = this->take(Shape::kDownPanels);
    if (first >= Shape::kDownPanels) return;
    multiply<Panel>(first, Shape::kDownPanels,
                    [&] { gather<Panel>(this->words(Shape::kHiddenWords), this->tag(layer)); });
  }

  // Panels of a mixture's product, known here: what depends on them would be kept for each phase,
  // and spilled before sm_90.
  static CUFUSE_DEVICE int panels_of(MlpPhase phase) {
    const u32 panels = phase == MlpPhase::router    ? Shape::kRouterPanels
                       : phase == MlpPhase::experts ? Shape::kExpertsPanels
                       : phase == MlpPhase::combine ? Shape::kDownPanels
                                                    : Shape::kDensePanels;
    return static_cast<int>(by_now(panels));
  }

  // Of a mixture of 4-bit experts: any product but that of DenseDown.
  CUFUSE_DEVICE void beside_four_bits(int layer, MlpPhase phase) {
    static_assert(Shape::ExpertsGateUp::kPartXTiles >= Shape::GateUpRows::kPartXTiles,
                  "x is cleared as far as rows read it too");
    const bool down = phase == MlpPhase::combine;
    const int panels = panels_of(phase), first = this->take(panels);
    if (first >= panels) return;
    multiply<typename Shape::RowsOrFourBitPanel>(
        first, panels,
        [&] {
          if (down) {
            gather<typename Shape::ExpertsDown>(this->words(Shape::kHiddenWords), this->tag(layer));
          } else {
            gather_middle<typename Shape::ExpertsGateUp>(layer);
          }
        },
        {down || phase == MlpPhase::experts, {}, {down}});
  }

  // The threads that draw together.
  struct Team {
    static constexpr int kThreads = Multiplier::kThreads;
    static CUFUSE_DEVICE int index() { return thread_here(); }
    static CUFUSE_DEVICE void sync() { Multiplier::sync(); }
  };

  // The logits of all CTAs: of most panels a look at the largest is enough.
  struct Logits {
    using T = Multiplier::T;
    static constexpr int n = Shape::kVocab;
    // Logits of an access: the row of a token begins where the one before ends.
    static constexpr int kVec = n % kPer16<T> == 0 ? kPer16<T> : 1;
    const T* logits;
    const u32* highest;

    CUFUSE_DEVICE float at(int i) const { return to_float(logits[i]); }
    template <typename AnyTeam, typename Visit>
    CUFUSE_DEVICE void visit(u32 floor, Visit visit) const {
      constexpr int kAhead = 16;
      constexpr int kPanels = Shape::kHeadPanels;
#pragma unroll 1
      for (int first = AnyTeam::index(); first < kPanels; first += kAhead * kThreads) {
        u32 wanted = 0;  // of the next kAhead panels of this thread; their looks share a latency
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          const int panel = first + i * kThreads;
          if (panel < kPanels && highest[min(panel, kPanels - 1)] >= floor) wanted |= 1u << i;
        }
#pragma unroll 1
        for (; wanted; wanted &= wanted - 1) {
          const int begin = (first + (__ffs(static_cast<int>(wanted)) - 1) * kThreads) * kPanelRows;
          const int end = min(begin + kPanelRows, n);
          auto next = load_vec<kVec>(logits + begin);
#pragma unroll 1
          for (int i = begin; i < end; i += kVec) {
            const auto group = next;
            next = load_vec<kVec>(logits + min(i + kVec, end - kVec));
#pragma unroll
            for (int j = 0; j < kVec; ++j) visit(i + j, to_float(group.v[j]));
          }
        }
      }
    }
  };

  // By CTA 0: the id, when everybody's logits are there.
  CUFUSE_DEVICE void draw() {
    const u32 tag = this->tag(Shape::kLayers - 1);
    const u32 since = this->tracer.now();
    u32 highest = 0;
    for (int cta = thread_here(); cta < Shape::kCtas; cta += kThreads) {
      highest = max(highest, await_all(this->best(this->n()) + 2 * cta, tag));
    }
    sync();
    const u32 there = this->tracer.now();
    const Filters filters{this->args.share, this->args.top_k, this->args.inverse_temperature,
                          this->args.min_p, this->args.mass_scale};
    const HashKey key = hash_key(this->args.seed, static_cast<u64>(this->position() + 1), 0);
    // Who gave up has not seen all logits and draws none.
    const int id = draw_filtered<Team>(Logits{this->logits(), this->highest()},
                                       is_over() ? kHighestOfNan : highest, filters, key,
                                       *at<typename Shape::Bins>(Shape::kXAt));
    if (thread_here() == 0) {
      publish_all(this->words(Shape::kDrawn), static_cast<u32>(id), tag);
    }
    this->tracer.waited(kWaitingForActivations, since, there);
    this->tracer.spent(kDrawing, there, this->tracer.now());
  }

  template <typename U>
  static CUFUSE_DEVICE U* at(int offset) {
    return reinterpret_cast<U*>(dynamic_shared<unsigned char>() + offset);
  }
  static CUFUSE_DEVICE void sync() { barrier_sync(kMultiplierBarrier, kThreads); }

  // A stage's bytes, once they are there.
  CUFUSE_DEVICE const unsigned char* landed(const typename Ring::Cursor& stage) {
    return Ring::wait(stage, this->tracer);
  }

  // A given token needs nothing of the one before. It waits for its end all the same: else who has
  // no part in its first phases could find overwritten what it has yet to read of the last ones.
  CUFUSE_DEVICE void follow() {
    if constexpr (Shape::kDraw == Draw::filtered) {
      // The id takes CTA 0 its time: one thread looks for it, as in `probe`.
      if (this->n() > 0 && this->has_logits_before()) {
        const u32 since = this->tracer.now();
        if (thread_here() == 0) this->drawn(this->n() - 1, this->tag(-1));
        sync();
        this->tracer.waited(kWaitingForActivations, since, this->tracer.now());
      }
    }
    if (this->n() == 0 || this->has_logits_before()) return;
    const u64* words = this->words(Shape::kX);
    const u32 tag = this->tag(-1);
#pragma unroll 1
    for (int pair = thread_here(); pair < Shape::kDim / kPerWord<T> / 2; pair += kThreads) {
      settle(look_pair(words + 2 * pair), words + 2 * pair, tag);
    }
  }

  // One thread looks at one of n words until it is there; then all look at once. Looks in vain
  // crowd L2 and delay the very words that are waited for.
  CUFUSE_DEVICE void probe(const u64* word, int n, u32 tag) {
    if (Shape::kProbe == Probe::last) word += n - 1;
    this->tracer.waits();
    if (thread_here() == 0) settle(look(word), word, tag);
    sync();
  }

  // The pairs of words that a thread gathers: every kThreads-th of kPairs.
  template <int kPairs>
  struct Pairs {
    static constexpr int kMine = (kPairs + kThreads - 1) / kThreads;
    const u64* first;

    CUFUSE_DEVICE explicit Pairs(const u64* words) : first(by_now(words + 2 * thread_here())) {}
    static CUFUSE_DEVICE bool has(int i) {
      return (i + 1) * kThreads <= kPairs || thread_here() + i * kThreads < kPairs;
    }
    CUFUSE_DEVICE const u64* at(int i) const { return first + 2 * i * kThreads; }
  };

  // A vector of words to shared memory as fragments, zeros behind it (behind each part).
  template <typename Panel>
  CUFUSE_DEVICE void gather(const u64* words, u32 tag) {
    constexpr int kPairs = Panel::kParts * Panel::kK / kPerWord<T> / 2;
    constexpr int kMine = Pairs<kPairs>::kMine;
    constexpr int kAhead = kMine < 4 ? kMine : 4;
    const Pairs<kPairs> pairs(words);
    const u32 first_place = by_now(fragment_place<T>(thread_here()));
    auto put_pair = [&](int i, uint2 found) {
      if constexpr (Panel::kParts == 1 || kPartPairs<Panel> == Panel::kPartXTiles * 4) {
        put(first_place, i, found);
      } else {
        const u32 pair = thread_here() + i * kThreads;
        const u32 part = pair / kPartPairs<Panel>;
        put(part * Panel::kPartXTiles * 8 + fragment_place<T>(pair % kPartPairs<Panel>), 0, found);
      }
    };
    probe(words, 2 * kPairs, tag);
#pragma unroll
    for (int round = 0; round < kMine; round += kAhead) {
      ulonglong2 seen[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (round + i < kMine && pairs.has(round + i)) seen[i] = look_pair(pairs.at(round + i));
      }
      if (round == 0) this->tracer.gathers();
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (round + i >= kMine || !pairs.has(round + i)) break;
        put_pair(round + i, settle(seen[i], pairs.at(round + i), tag));
      }
    }
    clear_behind<Panel>();
    sync();
  }

  // The same of a residual vector, through an RMSNorm; from `row` in memory if that is not null.
  template <typename Panel>
  CUFUSE_DEVICE void gather_normalized(const T* row, const u64* words, u32 tag, const T* weight) {
    constexpr int kPairs = Shape::kDim / kPerWord<T> / 2;
    constexpr int kMine = Pairs<kPairs>::kMine;
    constexpr int kValues = 2 * kPerWord<T>;
    float* sums = at<float>(Shape::kNormSumsAt);
    const auto* weights = reinterpret_cast<const uint2*>(weight);
    const int thread = thread_here();
    const Pairs<kPairs> pairs(words);
    const u32 place = by_now(fragment_place<T>(thread));
    uint2 bits[kMine] = {}, weight_bits[kMine] = {};
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      if (pairs.has(i)) weight_bits[i] = weights[thread + i * kThreads];
    }
    if (row) {
      sync();
      this->tracer.waits();
      this->tracer.gathers();
#pragma unroll
      for (int i = 0; i < kMine; ++i) {
        if (pairs.has(i)) bits[i] = reinterpret_cast<const uint2*>(row)[thread + i * kThreads];
      }
    } else {
      probe(words, 2 * kPairs, tag);
      ulonglong2 seen[kMine] = {};
#pragma unroll
      for (int i = 0; i < kMine; ++i) {
        if (pairs.has(i)) seen[i] = look_pair(pairs.at(i));
      }
      this->tracer.gathers();
#pragma unroll
      for (int i = 0; i < kMine; ++i) {
        if (pairs.has(i)) bits[i] = settle(seen[i], pairs.at(i), tag);
      }
    }
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
#pragma unroll
      for (int j = 0; j < kValues; ++j) {
        const float v = value_in<T>(j < kPerWord<T> ? bits[i].x : bits[i].y, j);
        sum = fmaf(v, v, sum);
      }
    }
    float scale = 1.0f;
    if constexpr (Shape::kScalesSums) {
      if (thread < Shape::kNormFloats) sums[thread] = sum;
    } else {
      sum = warp_sum(sum);
      if (thread % 32 == 0) sums[thread / 32] = sum;
      sync();
      sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kPanelWarps; i += 4) {
        const auto four = load_vec<4>(sums + i);
        sum += (four.v[0] + four.v[1]) + (four.v[2] + four.v[3]);
      }
      scale = rsqrtf(sum / static_cast<float>(Shape::kDim) + this->args.eps);
    }
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      if (!pairs.has(i)) break;
      const uint2 normal = make_uint2(normalized_word(bits[i].x, scale, weight_bits[i].x),
                                      normalized_word(bits[i].y, scale, weight_bits[i].y));
      put(place, i, normal);
    }
    clear_behind<Panel>();
    if constexpr (Shape::kScalesSums) barrier_arrive(kNormBarrier, kThreads + 32);
    sync();
  }

  static CUFUSE_DEVICE u32 normalized_word(u32 word, float scale, u32 weight) {
    constexpr Rounding kRounding = Shape::kScalesSums && Shape::kRounding == Rounding::cast_first
                                       ? Rounding::scale_first
                                       : Shape::kRounding;
    auto value = [&](int i) {
      return normalized<T, kRounding>(value_in<T>(word, i), scale, value_in<T>(weight, i));
    };
    if constexpr (kPerWord<T> == 2) {
      return word_of(value(0), value(1));
    } else {
      return bits_of(value(0));
    }
  }

  // Words 2 i and 2 i + 1, i = `round` kThreads + this thread, whose fragment_place is `place`.
  static CUFUSE_DEVICE void put(u32 place, int round, uint2 words) {
    u32* x = at<u32>(Shape::kXAt) + place + round * 2 * kThreads;
    x[0] = words.x;
    x[kNextFragment<T>] = words.y;
  }

  // Pairs of words of a part of x; a tile has four.
  template <typename Panel>
  static constexpr int kPartPairs = Panel::kK / kPerWord<T> / 2;

  template <typename Panel>
  static CUFUSE_DEVICE void clear_behind() {
    constexpr int kFirst = kPartPairs<Panel>, kEnd = Panel::kPartXTiles * 4;
    if constexpr (kEnd > kFirst) {
      for (int i = thread_here(); i < Panel::kParts * (kEnd - kFirst); i += kThreads) {
        const int part = i / (kEnd - kFirst), pair = kFirst + i % (kEnd - kFirst);
        put(part * Panel::kPartXTiles * 8 + fragment_place<T>(pair), 0, make_uint2(0, 0));
      }
    }
  }

  // This CTA's panels of `panels`, from `panel` on. A warp has its first weights in registers
  // before it gathers x, and the next ones before it hands on its sums: their stages are free so
  // much earlier.
  template <typename Panel, typename Gather>
  CUFUSE_DEVICE void multiply(int panel, int panels, const Gather& gather, Panel shape = {}) {
    const int warp = warp_here();
    const int group = warp / kGroupWarps % kPanelGroups, quarter = warp % kGroupWarps;
    const uint4* x = at<const uint4>(Shape::kXAt);
    using Quarter = PanelQuarter<T, Panel>;
    Quarter next;
    auto stage = cursor;
    int mine = 0;  // this group's first block of the panel
    auto take = [&](int block) {
      next.load(landed(stage), shape, block, quarter);
      if constexpr (!Quarter::kInStage) Ring::release(stage);
    };
    // Sums that lie in the same place come from the same groups.
    auto begin_panel = [&] {
      mine = (group - panels_done * shape.blocks()) & (kPanelGroups - 1);
      stage = cursor;
      stage.advance(mine);
    };
    auto pass_panel = [&] {
      shape.pass(cursor);
      panel += Shape::kCtas;
      ++panels_done;
      begin_panel();
    };
    // Panels of less than four blocks are not every group's.
    auto take_first = [&] {
      while (panel < panels && mine >= shape.blocks()) pass_panel();
      if (panel < panels) take(mine);
    };
    if (panels_done > 0) await_finisher(panels_done - 1);
    const int unread = panels_done;
    begin_panel();
    take_first();
    gather();
    const u32 gathered = this->tracer.now();
#pragma unroll 1
    while (panel < panels) {
      typename Quarter::Sums sums;
#pragma unroll 1
      for (int block = mine; block < shape.blocks(); block += kPanelGroups) {
        if (block != mine) take(block);
        next.multiply(sums, x, shape, block, quarter);
        if constexpr (Quarter::kInStage) Ring::release(stage);
        stage.advance(kPanelGroups);
      }
      const int chain = mine * kGroupWarps + quarter, done = panels_done;
      pass_panel();
      if (kTakesBeforeSums) take_first();
      if (done - unread >= Shape::kPartials) await_finisher(done - Shape::kPartials);
      const int buffer = done % Shape::kPartials;
      store_chain(at<float>(Shape::kPartialsAt) + buffer * Shape::kPartialFloats, chain, sums);
      barrier_arrive(kSumsBarrier + buffer, shape.chains() * 32 + 32);
      if (!kTakesBeforeSums) take_first();
    }
    const u32 multiplied = this->tracer.now();
    this->tracer.gathered(gathered);
    this->tracer.spent(kMultiplying, gathered, multiplied);
  }

  // Until the finisher has read the sums of a panel. It never waits for ever, so this needs no way
  // out of its own, and none may run ahead of it: its barriers count.
  CUFUSE_DEVICE void await_finisher(int panel) {
    const u32 since = this->tracer.now();
    const u32 times = static_cast<u32>(panel) / Shape::kPartials;
    u64* barrier = at<u64>(Shape::kSumsReadAt) + static_cast<u32>(panel) % Shape::kPartials;
    while (!mbarrier_try_wait(barrier, times & 1)) {
    }
    this->tracer.waited(kWaitingForSums, since, this->tracer.now());
  }

  // One KV head's queries over one split of its cache. The first split also takes the new key, and
  // waits for what the others publish.
  CUFUSE_DEVICE void attend(int layer, int kv_head, int part, const CacheSplit& split) {
    constexpr int kGroup = Shape::kGroup;
    const bool merges = part == 0;
    const u32 tag = this->tag(layer);
    const int warp = warp_here(), lane = lane_here();
    T* rows = at<T>(Shape::kRowsAt);  // queries, then the new key and value
    float* maxima = at<float>(Shape::kStatsAt);
    float* totals = maxima + kPanelGroups * kMostHeads;
    float* new_logits = totals + kPanelGroups * kMostHeads;
    const float scale = rsqrtf(static_cast<float>(kHeadDim)) * kLog2E;

    const u32 since = this->tracer.now();
    if (warp < kGroup + (merges ? 2 : 0)) fetch_row(layer, kv_head, warp, tag, rows);
    sync();
    const u32 found = this->tracer.now();
    this->tracer.waited(kWaitingForActivations, since, found);

    const T* new_key = rows + kGroup * kHeadDim;
    const T* new_value = new_key + kHeadDim;
    if (merges) {
      // By the last warps: the first ones always have a chunk to do.
      const int head = kPanelWarps - 3 - warp;
      if (head >= 0 && head < kGroup) {
        float dot = 0.0f;
        for (int i = lane; i < kHeadDim; i += 32) {
          dot = fmaf(to_float(rows[head * kHeadDim + i]), to_float(new_key[i]), dot);
        }
        dot = warp_sum(dot);
        if (lane == 0) new_logits[head] = dot * scale;
      }
      if (warp >= kPanelWarps - 2) append(layer, kv_head, warp == kPanelWarps - 1, new_key);
    }

    const int begin = split.begin(part), end = split.end(part);
    const int group = static_cast<int>(static_cast<u32>(warp) / kGroupWarps);
    const int quarter = static_cast<int>(static_cast<u32>(warp) % kGroupWarps);
    float* outs = at<float>(Shape::kXAt);  // [groups, kGroup, kMergePitch]
    {
      // Two buffers in turn: nobody writes logits while another warp still reads those before.
      constexpr int kLogits = Cache::kLogitBytes / 4;
      float* logits = outs + kPanelGroups * Shape::kGroupOuts + group * 2 * kLogits;
      GroupAttention<T, Cache> attention;
      auto stage = cursor;
      stage.advance(group);
#pragma unroll 1
      for (int chunk = begin + group; chunk < end; chunk += kPanelGroups) {
        attention.add_chunk(rows, landed(stage),
                            logits + static_cast<u32>(chunk) / kPanelGroups % 2 * kLogits, quarter,
                            chunk * Cache::kKeys, split.span, scale,
                            [&] { barrier_sync(kGroupBarrier + group, kGroupWarps * 32); });
        Ring::release(stage);
        stage.advance(kPanelGroups);
      }
      if (begin + group < end) {
        attention.store(maxima + group * kMostHeads, totals + group * kMostHeads,
                        outs + group * Shape::kGroupOuts, Shape::kMergePitch, quarter);
      }
    }
    cursor.round ^= split.size(part) / Shape::Ring::kStages & 1;
    cursor.advance(split.size(part) % Shape::Ring::kStages);
    const u32 attended = this->tracer.now();
    sync();
    if (merges && thread_here() == 0 && this->args.n_tokens > 1) {
      store_word<Order::release>(this->appended(this->n(), layer, kv_head), tagged(0, tag));
    }
    const int groups = min(split.size(part), kPanelGroups);  // that saw a chunk
#pragma unroll 1
    for (int i = thread_here(); i < kGroup * kHeadDim / 2; i += kThreads) {
      const int head = i / (kHeadDim / 2), column = i % (kHeadDim / 2) * 2;
      PartialHead parts[kPanelGroups + 1];
#pragma unroll
      for (int g = 0; g < kPanelGroups; ++g) {
        if (g < groups) {
          const auto values =
              load_vec<2>(outs + g * Shape::kGroupOuts + head * Shape::kMergePitch + column);
          parts[g] = {maxima[g * kMostHeads + head], totals[g * kMostHeads + head],
                      make_float2(values.v[0], values.v[1])};
        }
      }
      if (merges) {
        const auto values = load_vec<2>(new_value + column);
        parts[kPanelGroups] = {new_logits[head], 1.0f,
                               make_float2(to_float(values.v[0]), to_float(values.v[1]))};
      }
      PartialHead partial = PartialHead::of(parts);
      if (merges) {
        const int query = kv_head * kGroup + head;
        if (this->args.sinks) {
          partial.add_sink(to_float(this->args.sinks[layer * Shape::kHeads + query]));
        }
      }
      hand_on(kv_head * kGroup + head, column, part, split.count, tag, partial);
    }
    sync();
    const u32 merged = this->tracer.now();
    this->tracer.spent(kAttending, found, attended);
    this->tracer.spent(kMerging, attended, merged);
  }

  // A query head, the new key or the new value (row kGroup, kGroup + 1) by one warp: fetch, norm,
  // rotate.
  CUFUSE_DEVICE void fetch_row(int layer, int kv_head, int row, u32 tag, T* rows) {
    constexpr int kGroup = Shape::kGroup;
    constexpr int kVec = 2 * kPerWord<T>;  // values of a lane
    const int lane = lane_here();
    const int first = row < kGroup    ? (kv_head * kGroup + row) * kHeadDim
                      : row == kGroup ? Shape::kQDim + kv_head * kHeadDim
                                      : Shape::kQDim + Shape::kKvDim + kv_head * kHeadDim;
    const u64* words = this->words(Shape::kQkv) + first / kPerWord<T> + 2 * lane;
    rows += row * kHeadDim + lane * kVec;
    const T* norm = nullptr;
    if (Shape::kQkNorm == QkNorm::head && row <= kGroup) {
      norm =
          (row < kGroup ? this->args.q_norm : this->args.k_norm) + layer * kHeadDim + lane * kVec;
    }
    if (Shape::kQkNorm == QkNorm::full && row <= kGroup) {
      norm = (row < kGroup ? this->args.q_norm + layer * Shape::kQDim + first
                           : this->args.k_norm + layer * Shape::kKvDim + kv_head * kHeadDim) +
             lane * kVec;
    }
    const float* cos = at<const float>(Shape::kAnglesAt);
    const float* sin = cos + Shape::kRotary / 2;

    if constexpr (kRotatesHeld<Shape::kPairing, kHeadDim, Shape::kRotary, kVec>) {
      const HeldAngles<Shape::kPairing, Shape::kRotary, kVec> angles(cos, sin);
      const bool has = kHeadDim == 32 * kVec || lane < kHeadDim / kVec;
      uint2 bits = {}, weight = {};
      if (has && norm) weight = *reinterpret_cast<const uint2*>(norm);
      if (has) bits = settle(look_pair(words), words, tag);
      if (row <= kGroup) {
        float values[kVec];
#pragma unroll
        for (int j = 0; j < kVec; ++j) values[j] = value_in<T>(j < kVec / 2 ? bits.x : bits.y, j);
        if (norm) {
          float sum = 0.0f;
#pragma unroll
          for (int j = 0; j < kVec; ++j) sum = fmaf(values[j], values[j], sum);
          const float scale =
              Shape::kFullNorm
                  ? full_norm_scale(row < kGroup, tag)
                  : rsqrtf(warp_sum(sum) / static_cast<float>(kHeadDim) + this->args.eps);
#pragma unroll
          for (int j = 0; j < kVec; ++j) {
            values[j] = to_float(normalized<T, Shape::kRounding>(
                values[j], scale, value_in<T>(j < kVec / 2 ? weight.x : weight.y, j)));
          }
        }
        angles.rotate(values);
        Vec<T, kVec> rounded;
#pragma unroll
        for (int j = 0; j < kVec; ++j) rounded.v[j] = from_float<T>(values[j]);
        if (has) store_vec<kVec>(rows, rounded);
      } else if (has) {
        *reinterpret_cast<uint2*>(rows) = bits;
      }
    } else {
      T* shared_norm = at<T>(Shape::kNormWeightsAt) + row * kHeadDim;
#pragma unroll 1
      for (int i = lane; i < kHeadDim / kVec; i += 32, words += 64, rows += 32 * kVec) {
        if (norm) {
          reinterpret_cast<uint2*>(shared_norm)[i] = *reinterpret_cast<const uint2*>(norm);
          norm += 32 * kVec;
        }
        *reinterpret_cast<uint2*>(rows) = settle(look_pair(words), words, tag);
      }
      if (row > kGroup) return;
      __syncwarp();
      rows = at<T>(Shape::kRowsAt) + row * kHeadDim;
      const float scale = !norm              ? 0.0f
                          : Shape::kFullNorm ? full_norm_scale(row < kGroup, tag)
                                             : head_rms_scale<2>(rows, kHeadDim, this->args.eps);
      __syncwarp();
      norm_rotate_head<Shape::kPairing, Shape::kRounding, 2>(rows, rows, kHeadDim,
                                                             Angles{cos, sin, Shape::kRotary / 2},
                                                             norm ? shared_norm : nullptr, scale);
    }
  }

  // By a warp, when it has its row: the scale of the norm over all queries, or over all keys, from
  // the sums of squares of the panels that made them.
  CUFUSE_DEVICE float full_norm_scale(bool of_queries, u32 tag) const {
    constexpr int kMost = (Shape::most(Shape::kQDim, Shape::kKvDim) / kPanelRows + 31) / 32;
    const int n = of_queries ? Shape::kQDim : Shape::kKvDim;
    const u64* words =
        this->words(Shape::kSquaresAt) + lane_here() + (of_queries ? 0 : Shape::kQDim / kPanelRows);
    u64 seen[kMost];
    auto has = [&](int i) { return lane_here() + i * 32 < n / kPanelRows; };
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      if (has(i)) seen[i] = look(words + i * 32);
    }
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      if (has(i)) sum += __uint_as_float(settle(seen[i], words + i * 32, tag));
    }
    return rsqrtf(warp_sum(sum) / static_cast<float>(n) + this->args.eps);
  }

  CUFUSE_DEVICE void append(int layer, int kv_head, bool value, const T* new_key) {
    constexpr int kPer8 = 8 / static_cast<int>(sizeof(T));
    const i64 row = static_cast<i64>(layer * Shape::kKvHeads + kv_head) * this->args.capacity +
                    this->position();
    T* cache = (value ? this->args.v_cache : this->args.k_cache) + row * kHeadDim;
    const T* source = new_key + (value ? kHeadDim : 0);
    for (int i = lane_here() * kPer8; i < kHeadDim; i += 32 * kPer8) {
      store_vec<kPer8>(cache + i, load_vec<kPer8>(source + i));
    }
#if defined(CUFUSE_HOST) || __CUDA_ARCH__ >= 900
    if (this->args.n_tokens > 1) fence_proxy_async();
#endif
  }

  // Two values of one query head over the keys of one split. A single split is the result; of a few
  // everybody reads all, and of many the first one makes the result when the others are there.
  CUFUSE_DEVICE void hand_on(
      int query, int column, int part, int splits, u32 tag, PartialHead partial) {
    u64* word = this->words(Shape::kAttention);
    if (splits > Shape::kReadSplits) {
      if (part > 0) {
        publish_part(part_of(part, query, column), partial, tag);
        return;
      }
#pragma unroll 1
      for (int first = 1; first < splits; first += kPartsAhead) {
        add_parts(partial, first, splits, query, column, tag);
      }
    } else if (splits > 1) {
      word = values_of(part);
      if (column == 0) publish(weight_of(part, query), __float_as_uint(partial.weight()), tag);
    }
    publish_values(word + (query * kHeadDim + column) / kPerWord<T>, partial.result(), tag);
  }

  CUFUSE_DEVICE static void publish_values(u64* word, float2 values, u32 tag) {
    const T x = from_float<T>(values.x), y = from_float<T>(values.y);
    if constexpr (kPerWord<T> == 2) {
      publish(word, word_of(x, y), tag);
    } else {
      publish(word, bits_of(x), bits_of(y), tag);
    }
  }

  // Of a few splits: the values of each, and a weight of each head.
  CUFUSE_DEVICE u64* values_of(int split) const {
    return this->words(Shape::kParts) + split * Shape::words(Shape::kQDim);
  }
  CUFUSE_DEVICE u64* weight_of(int split, int query) const {
    return this->words(Shape::kWeights) + split * Shape::kHeads + query;
  }

  // Of many: two values beside their weight, so that one look finds all.
  static constexpr int kPartsAhead = 4;
  CUFUSE_DEVICE u64* part_of(int split, int query, int column) const {
    const int pair = (split * Shape::kQDim + query * kHeadDim + column) / 2;
    return this->words(Shape::kParts) + pair * (4 / kPerWord<T>);
  }
  CUFUSE_DEVICE static void publish_part(u64* words, const PartialHead& part, u32 tag) {
    const u32 weight = __float_as_uint(part.weight());
    const float2 values = part.result();
    if constexpr (kPerWord<T> == 2) {
      publish(words, word_of(from_float<T>(values.x), from_float<T>(values.y)), weight, tag);
    } else {
      publish(words, bits_of(values.x), bits_of(values.y), tag);
      publish(words + 2, weight, tag);
    }
  }
  CUFUSE_DEVICE void add_parts(
      PartialHead& partial, int first, int splits, int query, int column, u32 tag) {
    const u64* words = part_of(first, query, column);
    constexpr int kNext = Shape::kQDim * 2 / kPerWord<T>;
    const int count = min(splits - first, kPartsAhead);
    ulonglong2 seen[kPartsAhead] = {};
    u64 seen_weights[kPartsAhead] = {};
#pragma unroll
    for (int i = 0; i < kPartsAhead; ++i) {
      if (i >= count) break;
      seen[i] = look_pair(words + i * kNext);
      if constexpr (kPerWord<T> == 1) seen_weights[i] = look(words + i * kNext + 2);
    }
    PartialHead parts[kPartsAhead + 1];
    parts[kPartsAhead] = partial;
#pragma unroll
    for (int i = 0; i < kPartsAhead; ++i) {
      if (i >= count) break;
      const uint2 found = settle(seen[i], words + i * kNext, tag);
      parts[i].total = 1.0f;
      if constexpr (kPerWord<T> == 2) {
        parts[i].max = __uint_as_float(found.y);
        parts[i].out = make_float2(value_in<T>(found.x, 0), value_in<T>(found.x, 1));
      } else {
        parts[i].max = __uint_as_float(settle(seen_weights[i], words + i * kNext + 2, tag));
        parts[i].out = make_float2(value_in<T>(found.x, 0), value_in<T>(found.y, 0));
      }
    }
    partial = PartialHead::of(parts);
  }

  // What attention hands on, of a few splits, to shared memory as fragments.
  template <typename Panel>
  CUFUSE_DEVICE void gather_splits(int splits, u32 tag) {
    constexpr int kPairs = Shape::kQDim / kPerWord<T> / 2;
    constexpr int kMost = Shape::kReadSplits;
    const int thread = thread_here();
    u32 place = fragment_place<T>(thread);
    probe(values_of(0), 2 * kPairs, tag);
    this->tracer.gathers();
#pragma unroll 1
    for (int pair = thread; pair < kPairs; pair += kThreads, place += 2 * kThreads) {
      const int query = pair * 2 * kPerWord<T> / kHeadDim;
      ulonglong2 seen[kMost];
      u64 seen_weights[kMost];
#pragma unroll
      for (int i = 0; i < kMost; ++i) {
        const int split = min(i, splits - 1);
        seen_weights[i] = look(weight_of(split, query));
        seen[i] = look_pair(values_of(split) + 2 * pair);
      }
      float weights[kMost], top = minus_infinity();
#pragma unroll
      for (int i = 0; i < kMost; ++i) {
        const int split = min(i, splits - 1);
        weights[i] = __uint_as_float(settle(seen_weights[i], weight_of(split, query), tag));
        top = fmaxf(top, weights[i]);
      }
      float sum = 0.0f, values[2 * kPerWord<T>] = {};
#pragma unroll
      for (int i = 0; i < kMost; ++i) {
        if (i >= splits) break;
        const uint2 words = settle(seen[i], values_of(i) + 2 * pair, tag);
        const float weight = exp2f(weights[i] - softmax_shift(top));
        sum += weight;
#pragma unroll
        for (int j = 0; j < kPerWord<T>; ++j) {
          values[j] = fmaf(weight, value_in<T>(words.x, j), values[j]);
          values[kPerWord<T> + j] = fmaf(weight, value_in<T>(words.y, j), values[kPerWord<T> + j]);
        }
      }
      const float scale = sum == 0.0f ? 0.0f : 1.0f / sum;
      auto rounded = [&](int j) { return from_float<T>(values[j] * scale); };
      if constexpr (kPerWord<T> == 2) {
        put(place, 0, make_uint2(word_of(rounded(0), rounded(1)), word_of(rounded(2), rounded(3))));
      } else {
        put(place, 0, make_uint2(bits_of(rounded(0)), bits_of(rounded(1))));
      }
    }
    clear_behind<Panel>();
    sync();
  }
};

}  // namespace cufuse
