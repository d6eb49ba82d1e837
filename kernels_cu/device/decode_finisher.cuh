// The role that makes results of a panel's sums and hands them on.
#pragma once

#include "device/decode_role.cuh"
#include "device/epilogue.cuh"

namespace cufuse {

template <typename Shape>
struct Finisher : Role<Shape, kFinisherRole> {
  using T = typename Shape::T;
  using Mlp = typename Shape::Mlp;
  u32 panels_done = 0;
  u64 best_rank = 0;
  u32 choices = 0, choices_left = 0;  // how many were, and of how many nothing is needed any more

  CUFUSE_DEVICE explicit Finisher(const DecodeArgs<T>& args) : Role<Shape, kFinisherRole>(args) {}

  CUFUSE_DEVICE void qkv(int layer) {
    const T* bias = this->args.qkv_bias ? this->args.qkv_bias + layer * Shape::kQkvDim : nullptr;
    u64* words = this->words(Shape::kQkv);
    panels<Shape::kQkvPanels, typename Shape::template Panel<Shape::kDim>, true>([&](int row) {
      const float b = bias && row < Shape::kQkvDim ? to_float(bias[row]) : 0.0f;
      const Outlet outlet(words, row, Shape::kQkvDim, this->tag(layer));
      return [=](float sum) {
        const float value = bias ? sum + b : sum;
        outlet.hand_on(value);
        if constexpr (Shape::kFullNorm) add_squares(row, value, layer);
      };
    });
  }

  CUFUSE_DEVICE void attention(int layer) {
    this->take(Shape::kKvHeads * this->split(layer).count);
  }

  CUFUSE_DEVICE void output(int layer) {
    // The residual of the first layer is the embedding.
    const T* embedded = layer == 0 && this->starts(Shape::kOutPanels)
                            ? this->embedding_row(this->token())
                            : nullptr;
    const T* bias = offset(this->args.out_bias, static_cast<i64>(layer) * Shape::kDim);
    add_residual<Shape::kOutPanels, typename Shape::template Panel<Shape::kQDim>>(
        [=](int row) { return to_float(bias[row]); }, bias != nullptr, embedded,
        this->words(Shape::kX), this->tag(layer - 1), this->words(Shape::kMiddle), layer);
  }

  CUFUSE_DEVICE void gate_up(int layer) {
    if constexpr (Mlp::kRoutes) {
      gates<Shape::kDensePanels, typename Shape::GateUpRows>(
          layer, [&](int panel) { return Slot{panel * 8, nullptr, nullptr, 1.0f}; });
    } else {
      const i64 at = static_cast<i64>(layer) * Shape::kHidden;
      gates<Shape::kGateUpPanels, typename Shape::template Panel<Shape::kDim>>(
          layer, [&](int panel) {
            return Slot{panel * 8, bias_at(this->args.gate_bias, at + panel * 8),
                        bias_at(this->args.up_bias, at + panel * 8), 1.0f};
          });
    }
  }

  CUFUSE_DEVICE void down(int layer) {
    if constexpr (Mlp::kRoutes) {
      from_hidden<typename Shape::DenseDown>(layer, nullptr);
    } else {
      from_hidden<typename Shape::template Panel<Shape::kHidden>>(
          layer, bias_at(this->args.down_bias, static_cast<i64>(layer) * Shape::kDim));
    }
  }

  // A mixture's.
  CUFUSE_DEVICE void router(int layer) {
    if (choices_left != choices) {
      choices_left = choices;
      __syncwarp();
      if (lane_here() == 0) mbarrier_arrive(&choice_here<Shape>().read);
    }
    const T* bias = offset(this->args.router_bias,
                           static_cast<i64>(this->experts_before(layer)) * Mlp::kExperts);
    u64* words = this->words(Shape::kLogits);
    const u32 tag = this->tag(layer);
    panels<Shape::kRouterPanels, typename Shape::GateUpRows, true>([&](int row) {
      const float b = bias && row < Mlp::kExperts ? to_float(bias[row]) : 0.0f;
      return [=](float sum) {
        if (row < Mlp::kLogits && lane_here() < kPanelRows) {
          publish(words + row, __float_as_uint(bias ? sum + b : sum), tag);
        }
      };
    });
  }

  CUFUSE_DEVICE void mlp(int layer, MlpPhase phase) {
    if (phase == MlpPhase::router) router(layer);
    if (phase == MlpPhase::experts) experts(layer);
    if (Mlp::kFourBits && phase == MlpPhase::combine) combine<false>(layer);
    if (Mlp::kDense > 0 && phase == MlpPhase::gate_up) gate_up(layer);
  }
  CUFUSE_DEVICE void experts(int layer) {
    const i64 before = static_cast<i64>(this->experts_before(layer)) * Mlp::kExperts;
    const bool takes_part = this->starts(Shape::kExpertsPanels);
    // What is shared waits for no choice: the filler makes it when there is room behind that.
    float shared_weight = 1.0f;
    if (Mlp::kSharedGated && this->starts(Shape::kSharedPanels)) {
      const u64* word = this->words(Shape::kLogits) + Mlp::kExperts;
      shared_weight = sigmoid(__uint_as_float(settle(look(word), word, this->tag(layer))));
    }
    bool knows = false;
    gates<Shape::kExpertsPanels, typename Shape::ExpertsGateUp>(layer, [&](int panel) {
      const int routed = panel - Shape::kSharedPanels;
      if (routed < 0) return Slot{panel * 8, nullptr, nullptr, shared_weight};
      if (!knows) await_choice();
      knows = true;
      const auto& choice = choice_here<Shape>();
      const int slot = static_cast<u32>(routed) / Shape::kExpertPanels;
      const i64 at = (before + choice.expert[slot]) * Shape::kHidden +
                     static_cast<u32>(routed) % Shape::kExpertPanels * 8;
      return Slot{panel * 8, bias_at(this->args.gate_bias, at), bias_at(this->args.up_bias, at),
                  choice.weight[slot]};
    });
    if (!knows && (takes_part || this->starts(Shape::kDownPanels))) await_choice();
  }

  template <bool kAlone>
  CUFUSE_DEVICE void combine(int layer) {
    if (kAlone && this->starts(Shape::kDownPanels)) await_choice();
    const T* biases = bias_at(this->args.down_bias, static_cast<i64>(this->experts_before(layer)) *
                                                        Mlp::kExperts * Shape::kDim);
    add_residual<Shape::kDownPanels, typename Shape::ExpertsDown>(
        [&](int row) {
          const auto& choice = choice_here<Shape>();
          float sum = 0.0f;
          for (int slot = 0; biases && slot < Mlp::kTop; ++slot) {
            sum = fmaf(choice.weight[slot],
                       to_float(biases[static_cast<i64>(choice.expert[slot]) * Shape::kDim + row]),
                       sum);
          }
          return sum;
        },
        biases != nullptr, nullptr, this->words(Shape::kMiddle), this->tag(layer),
        this->words(Shape::kX), layer);
  }

  CUFUSE_DEVICE void head() {
    T* logits = this->logits();
    // A row of them is another CTA's with the next token: it stores when it knows what was drawn
    // from this one.
    bool stores = true;
    if constexpr (Shape::kDraw == Draw::filtered) {
      if (this->n() > 0 && this->has_logits_before()) {
        await_all(this->words(Shape::kDrawn), this->tag(-1));
      }
    } else {
      stores = this->args.all_logits || this->n() + 1 == this->args.n_tokens;
    }
    const float inverse = this->args.inverse_temperature;
    const HashKey key = hash_key(this->args.seed, static_cast<u64>(this->position() + 1), 0);
    best_rank = 0;
    // `ids` may lie where a CTA that comes late still reads its first token.
    if (blockIdx.x == 0) wait_for_arrivals();
    __syncwarp();
    panels<Shape::kHeadPanels, typename Shape::template Panel<Shape::kDim>, true>([&](int row) {
      return [=](float sum) {
        if constexpr (Shape::kDraw == Draw::filtered) {
          note(logits, row, sum);
        } else {
          if (row >= Shape::kVocab || lane_here() >= kPanelRows) return;
          const T rounded = from_float<T>(sum);
          if (stores) logits[row] = rounded;
          const float logit = to_float(rounded);
          const u32 order = order_of(logit);
          u64 rank = order == 0 ? kRankOfNan : 0;
          if (order > kOrderOfMinusInfinity) {
            rank = inverse > 0.0f ? draw_rank(logit, row, inverse, key) : rank_of(order, row);
          }
          best_rank = max(best_rank, rank);
        }
      };
    });
    const u64 rank = warp_max(best_rank);
    if constexpr (Shape::kDraw == Draw::filtered) {
      __syncwarp();
      if (lane_here() == 0) {
        publish_all(this->best(this->n()) + 2 * blockIdx.x, static_cast<u32>(rank >> 32),
                    this->tag(Shape::kLayers - 1));
      }
    } else if (lane_here() == 0) {
      publish(this->best(this->n()) + 2 * blockIdx.x, static_cast<u32>(rank >> 32),
              static_cast<u32>(rank), this->tag(Shape::kLayers - 1));
    }
    if (blockIdx.x == 0) {
      const int id = this->drawn(this->n(), this->tag(Shape::kLayers - 1));
      if (lane_here() == 0) this->args.ids[this->n()] = stopped() ? -2 : id;
    }
  }

  CUFUSE_DEVICE void end() {
    this->tracer.close();
    if (blockIdx.x != 0 || lane_here() != 0) return;
    wait_for_arrivals();
    store_word<Order::relaxed>(this->args.control + kControlArrived, 0u);
    // After a launch that gave up, the cache counts as if it had not been.
    if (!stopped()) this->args.start[0] = this->launch().start + this->args.n_tokens;
    this->args.control[kControlSequence] =
        this->launch().sequence + static_cast<u32>(this->args.n_tokens * Shape::kLayers);
  }

 private:
  // A logit, for CTA 0 to draw from. Who gave up does not know that those before were read.
  CUFUSE_DEVICE void note(T* logits, int row, float sum) {
    const bool mine = row < Shape::kVocab && lane_here() < kPanelRows;
    const T rounded = from_float<T>(sum);
    if (mine && !is_over()) logits[row] = rounded;
    const u32 order = order_of(to_float(rounded));
    const u32 highest =
        __reduce_max_sync(kFullMask, mine ? (order == 0 ? kHighestOfNan : order) : 0u);
    if (lane_here() == 0 && !is_over()) {
      this->highest()[row / kPanelRows] = highest;
    }
    best_rank = max(best_rank, static_cast<u64>(highest) << 32);
  }

  // Until all CTAs have read what this launch found. All are resident, and arrive before they wait
  // for anything.
  CUFUSE_DEVICE void wait_for_arrivals() const {
    while (load_word<Order::acquire>(this->args.control + kControlArrived) != Shape::kCtas) {
    }
  }

  // Whether a thread of any CTA gave up, in this launch or in one before that the host has not
  // seen.
  CUFUSE_DEVICE bool stopped() const {
    return load_word<Order::acquire>(this->args.control + kControlFault) != 0;
  }

  // For each of this CTA's panels: prepare(row) before its sums are there, and what that returns
  // with the row's sum. Lanes l and l + 16 have the same row.
  template <int kPanels, typename Panel, bool kNormed, typename Prepare>
  CUFUSE_DEVICE void panels(const Prepare& prepare) {
    constexpr bool kScales = kNormed && Shape::kScalesSums;
    const int lane = lane_here();
    int panel = this->take(kPanels);
    if (panel >= kPanels) return;
    u32 since = this->tracer.now();  // what is fetched meanwhile counts as a wait for sums
    const float scale = kScales ? norm_scale() : 1.0f;
#pragma unroll 1
    for (; panel < kPanels; panel += Shape::kCtas) {
      const auto finish = prepare(panel * kPanelRows + lane % kPanelRows);
      const u32 buffer = panels_done++ % Shape::kPartials;
      auto* shared = dynamic_shared<unsigned char>();
      const float* partial = reinterpret_cast<const float*>(shared + Shape::kPartialsAt) +
                             buffer * Shape::kPartialFloats;
      constexpr int kChains = Panel::kChains;
      barrier_sync(kSumsBarrier + buffer, kChains * 32 + 32);
      const u32 there = this->tracer.now();
      const float sum = scale * panel_sum<kChains>(partial);
      if (lane == 0) mbarrier_arrive(reinterpret_cast<u64*>(shared + Shape::kSumsReadAt) + buffer);
      finish(sum);
      const u32 finished = this->tracer.now();
      this->tracer.waited(kWaitingForSums, since, there);
      this->tracer.spent(kFinishing, there, finished);
      since = finished;
    }
  }

  // Of the vector that this phase multiplies: rsqrt(mean(x^2) + eps).
  CUFUSE_DEVICE float norm_scale() const {
    const auto* squares =
        reinterpret_cast<const float*>(dynamic_shared<unsigned char>() + Shape::kNormSumsAt);
    barrier_sync(kNormBarrier, kPanelWarps * 32 + 32);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < Shape::kNormFloats / 128; ++i) {
      const auto four = load_vec<4>(squares + (i * 32 + lane_here()) * 4);
      sum += (four.v[0] + four.v[1]) + (four.v[2] + four.v[3]);
    }
    return rsqrtf(warp_sum(sum) / static_cast<float>(Shape::kDim) + this->args.eps);
  }

  // bias(row), if there is any, and the residual on top of the sums.
  template <int kPanels, typename Panel, typename Bias>
  CUFUSE_DEVICE void add_residual(const Bias& bias,
                                  bool has_bias,
                                  const T* embedded,
                                  const u64* residual,
                                  u32 residual_tag,
                                  u64* words,
                                  int layer) {
    panels<kPanels, Panel, false>([&](int row) {
      const bool there = row < Shape::kDim;
      const float b = has_bias && there ? bias(row) : 0.0f;
      const u64* word = residual + (there ? row : 0) / kPerWord<T>;
      const Outlet outlet(words, row, Shape::kDim, this->tag(layer));
      // It is there: what this phase multiplies depends on all of it.
      const float old = !embedded ? value_in<T>(settle(look(word), word, residual_tag), row)
                        : there   ? to_float(embedded[row])
                                  : 0.0f;
      return [=](float sum) { outlet.hand_on((has_bias ? sum + b : sum) + old); };
    });
  }

  template <typename Panel>
  CUFUSE_DEVICE void from_hidden(int layer, const T* bias) {
    add_residual<Shape::kDownPanels, Panel>([=](int row) { return to_float(bias[row]); },
                                            bias != nullptr, nullptr, this->words(Shape::kMiddle),
                                            this->tag(layer), this->words(Shape::kX), layer);
  }

  // What becomes of a panel of a gate and its up: its first column among all that come before the
  // last product, the biases of its columns, what it is multiplied by.
  struct Slot {
    int column;
    const T *gate_bias, *up_bias;
    float weight;
  };

  template <int kPanels, typename Panel, typename Place>
  CUFUSE_DEVICE void gates(int layer, const Place& place) {
    constexpr int kColumns = 8 * kPanels;
    constexpr int kEnd = Mlp::kRoutes ? kColumns : Shape::kHidden;
    u64* words = this->words(Shape::kHiddenWords);
    panels<kPanels, Panel, true>([&](int row) {
      // Rows 0..7 of a panel are the gate's, 8..15 the up's.
      const Slot slot = place(row / kPanelRows);
      const int column = row % 8;
      const bool there = row % kPanelRows < 8 && slot.column + column < kEnd;
      const float gate_b = slot.gate_bias && there ? to_float(slot.gate_bias[column]) : 0.0f;
      const float up_b = slot.up_bias && there ? to_float(slot.up_bias[column]) : 0.0f;
      const bool has_gate_bias = slot.gate_bias != nullptr, has_up_bias = slot.up_bias != nullptr;
      const float weight = slot.weight;
      const Outlet outlet(words, there ? slot.column + column : kEnd, kEnd, this->tag(layer));
      const float limit = this->args.limit, alpha = this->args.alpha;
      return [=](float sum) {
        float gate = sum, up = __shfl_down_sync(kFullMask, sum, 8);
        if (has_gate_bias) gate += gate_b;
        if (has_up_bias) up += up_b;
        const float value = gated<Shape::kGate, Shape::kAct>(gate, up, limit, alpha);
        outlet.hand_on(Mlp::kRoutes ? weight * value : value);
      };
    });
  }

  static CUFUSE_DEVICE const T* offset(const T* array, i64 at) {
    return array ? array + at : nullptr;
  }
  // Of an MLP's biases: known not to be there where that is known.
  static CUFUSE_DEVICE const T* bias_at(const T* array, i64 at) {
    return Mlp::kBiased ? offset(array, at) : nullptr;
  }

  // Until the filler has chosen a layer's experts.
  CUFUSE_DEVICE void await_choice() {
    wait_for(&choice_here<Shape>().made, choices++ & 1);
    __syncwarp();
  }

  // For the norm over all queries, or keys: of values as they were handed on. Lanes l and l + 16
  // have the same row.
  CUFUSE_DEVICE void add_squares(int row, float value, int layer) {
    const float rounded = to_float(from_float<T>(value));
    float sum = rounded * rounded;
#pragma unroll
    for (int apart = 8; apart > 0; apart /= 2) sum += __shfl_xor_sync(kFullMask, sum, apart);
    const int panel = row / kPanelRows;
    if (lane_here() == 0 && panel < (Shape::kQDim + Shape::kKvDim) / kPanelRows) {
      publish(this->words(Shape::kSquaresAt) + panel, __float_as_uint(sum), this->tag(layer));
    }
  }

  // Where row `row` of a vector of n goes. Lanes l and l + 16 have the same one; the first ones of
  // each two rows that share a word write it.
  struct Outlet {
    u64* word;
    u32 tag;
    bool writes;

    CUFUSE_DEVICE Outlet(u64* words, int row, int n, u32 tag)
        : word(words + row / kPerWord<T>),
          tag(tag),
          writes(row < n && row % kPerWord<T> == 0 && lane_here() < kPanelRows) {}

    // By all lanes, a row's value each.
    CUFUSE_DEVICE void hand_on(float value) const {
      if constexpr (kPerWord<T> == 1) {
        if (writes) publish(word, bits_of(value), tag);
      } else {
        const u32 pair = pair_from_floats<T>(value, __shfl_down_sync(kFullMask, value, 1));
        if (writes) publish(word, pair, tag);
      }
    }
  };
};

}  // namespace cufuse
