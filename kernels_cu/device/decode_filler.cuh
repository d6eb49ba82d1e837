// The role that fills the ring with all that its CTA will need: weights and the cache, in order.
#pragma once

#include "device/decode_role.cuh"

namespace cufuse {

template <typename Shape>
struct Filler : Role<Shape, kFillerRole> {
  using T = typename Shape::T;
  using Mlp = typename Shape::Mlp;
  RingFiller<typename Shape::Ring, Shape::kRingAt> filler;
  u32 choices = 0;  // layers whose experts were chosen

  CUFUSE_DEVICE explicit Filler(const DecodeArgs<T>& args) : Role<Shape, kFillerRole>(args) {}

  CUFUSE_DEVICE void qkv(int layer) {
    // From here to the output's product a token waits for one CTA after the other, and what they
    // tell each other waits behind what is on its way; the rings fill all the same.
    filler.window = Shape::Ring::kCalmWindow;
    weights<Shape::kQkvPanels, Shape::kDim>(this->args.qkv, layer);
  }

  CUFUSE_DEVICE void attention(int layer) {
    using Cache = typename Shape::Cache;
    const CacheSplit& split = this->split(layer);
    const int tasks = Shape::kKvHeads * split.count;
    const int first = this->take(tasks);
    if (first >= tasks) return;
    // A long cache is read rather than waited for.
    if (split.chunks > Shape::kSplitChunks) filler.window = Shape::Ring::kWindow;
    for (int task = this->last_of(first, tasks); task >= 0; task -= Shape::kCtas) {
      const int head = task % Shape::kKvHeads, part = task / Shape::kKvHeads;
      const int end = split.end(part);
      if (this->n() > 0 && end * Cache::kKeys > this->launch().start) wait_for_append(layer, head);
      const i64 rows = static_cast<i64>(layer * Shape::kKvHeads + head) * this->args.capacity;
      for (int c = split.begin(part); c < end; ++c) {
        const i64 at = (rows + c * Cache::kKeys) * Cache::kRowBytes;
        // Not the rows from this position on: one of them is being written.
        const int count = min(this->position() - c * Cache::kKeys, Cache::kKeys);
        filler.template fill_sliced<Cache::kValueSlices>(
            reinterpret_cast<const unsigned char*>(this->args.k_cache) + at,
            reinterpret_cast<const unsigned char*>(this->args.v_cache) + at,
            count * Cache::kRowBytes, Cache::kValuesAt, Cache::kSliceBytes, Cache::kSlicePitch,
            this->tracer);
      }
    }
  }

  CUFUSE_DEVICE void output(int layer) {
    filler.window = Shape::Ring::kCalmWindow;
    weights<Shape::kOutPanels, Shape::kQDim>(this->args.out, layer);
  }
  CUFUSE_DEVICE void gate_up(int layer) {
    filler.window = Shape::Ring::kWindow;
    if constexpr (Mlp::kRoutes) {
      const i64 first = rows_before(layer);
      rows<Shape::kDensePanels, typename Shape::GateUpRows>(
          [&](int panel, int) { return gate_up_place(first + panel * 8); });
    } else {
      weights<Shape::kGateUpPanels, Shape::kDim>(this->args.gate_up, layer);
    }
  }
  CUFUSE_DEVICE void down(int layer) {
    if constexpr (Mlp::kRoutes) {
      const i64 first = static_cast<i64>(this->dense_before(layer)) * Shape::kDim;
      rows<Shape::kDownPanels, typename Shape::DenseDown>([&](int panel, int) {
        return Place{&this->args.dense_down_map,
                     nullptr,
                     this->args.dense_down,
                     nullptr,
                     first + panel * kPanelRows,
                     0,
                     0,
                     Mlp::kDense,
                     Shape::kDim - panel * kPanelRows};
      });
    } else {
      weights<Shape::kDownPanels, Shape::kHidden>(this->args.down, layer);
    }
  }

  // A mixture's.
  CUFUSE_DEVICE void router(int layer) {
    const i64 first = static_cast<i64>(this->experts_before(layer)) * Mlp::kLogits;
    rows<Shape::kRouterPanels, typename Shape::GateUpRows>([&](int panel, int) {
      return Place{&this->args.router_map,
                   &this->args.router_map,
                   this->args.router,
                   this->args.router,
                   first + panel * kPanelRows,
                   8,
                   0,
                   Shape::kDim,
                   Mlp::kLogits - panel * kPanelRows};
    });
  }
  CUFUSE_DEVICE void mlp(int layer, MlpPhase phase) {
    if (phase == MlpPhase::router) router(layer);
    if constexpr (Mlp::kFourBits) {
      const bool down = phase == MlpPhase::combine;
      if (down || phase == MlpPhase::experts) four_bits(layer, down);
    } else {
      if (phase == MlpPhase::experts) experts(layer);
    }
    if (Mlp::kDense > 0 && phase == MlpPhase::gate_up) gate_up(layer);
  }
  CUFUSE_DEVICE void experts(int layer) {
    if constexpr (Mlp::kFourBits) {
      four_bits(layer, false);
    } else {
      experts_in_rows(layer);
    }
  }
  CUFUSE_DEVICE void experts_in_rows(int layer) {
    filler.window = Shape::Ring::kWindow;
    const int first = this->take(Shape::kExpertsPanels);
    const i64 first_row = rows_before(layer);
    auto fill = [&](int from, int to, auto row) {
      int panel = first;
      if (panel < from) panel += (from - panel + Shape::kCtas - 1) / Shape::kCtas * Shape::kCtas;
#pragma unroll 1
      for (; panel < to; panel += Shape::kCtas) {
        const Place at = gate_up_place(first_row + row(panel - from));
#pragma unroll 1
        for (int block = 0; block < Shape::GateUpRows::kBlocks; ++block) {
          fill_rows<typename Shape::GateUpRows>(at, block);
        }
      }
    };
    if constexpr (Mlp::kShared > 0) {
      fill(0, Shape::kSharedPanels,
           [](int panel) { return static_cast<i64>(Mlp::kExperts) * Shape::kHidden + panel * 8; });
    }
    // Who has a part in what follows hands on something that depends on it.
    if (first < Shape::kExpertsPanels || this->starts(Shape::kDownPanels)) choose(layer);
    fill(Shape::kSharedPanels, Shape::kExpertsPanels, [](int panel) {
      const int slot = static_cast<u32>(panel) / Shape::kExpertPanels;
      return static_cast<i64>(choice_here<Shape>().expert[slot]) * Shape::kHidden +
             static_cast<u32>(panel) % Shape::kExpertPanels * 8;
    });
  }
  // kAlone: in a launch of its own.
  template <bool kAlone>
  CUFUSE_DEVICE void combine(int layer) {
    if (kAlone && this->starts(Shape::kDownPanels)) choose(layer);
    if constexpr (Mlp::kFourBits) {
      four_bits(layer, true);
    } else {
      combine_rows(layer);
    }
  }
  CUFUSE_DEVICE void combine_rows(int layer) {
    using Panel = typename Shape::ExpertsDown;
    constexpr int kSharedParts = Mlp::kShared / Shape::kPartColumns;
    constexpr int kExpertParts = Shape::kHidden / Shape::kPartColumns;
    const i64 mixtures = this->experts_before(layer);
    rows<Shape::kDownPanels, Panel>([&](int panel, int part) {
      const int routed = part - kSharedParts;
      const bool shared = routed < 0;
      const int expert =
          shared ? 0 : choice_here<Shape>().expert[static_cast<u32>(routed) / kExpertParts];
      const int column =
          (shared ? part : static_cast<int>(static_cast<u32>(routed) % kExpertParts)) *
          Shape::kPartColumns;
      return Place{shared ? &this->args.shared_down_map : &this->args.down_map,
                   nullptr,
                   shared ? this->args.shared_down : this->args.down,
                   nullptr,
                   (shared ? mixtures : mixtures * Mlp::kExperts + expert) * Shape::kDim +
                       panel * kPanelRows,
                   0,
                   column,
                   shared ? Mlp::kShared : Shape::kHidden,
                   Shape::kDim - panel * kPanelRows};
    });
  }

  // The experts' gates and ups, or their down projections.
  CUFUSE_DEVICE void four_bits(int layer, bool down) {
    filler.window = Shape::Ring::kWindow;
    const int panels = down ? Shape::kDownPanels : Shape::kExpertsPanels;
    const int of_expert = down ? Shape::kDownPanels : Shape::kExpertPanels;
    const unsigned char* weights = down ? this->args.down4 : this->args.gate_up4;
    const typename Shape::FourBitPanel shape{down};
    const int first = this->take(panels);
    if (!down && (first < panels || this->starts(Shape::kDownPanels))) choose(layer);
    for (int panel = first; panel < panels; panel += Shape::kCtas) {
#pragma unroll 1
      for (int part = 0; part < shape.parts(); ++part) {
        const int slot = down ? part : static_cast<u32>(panel) / Shape::kExpertPanels;
        const int its = down ? panel : static_cast<u32>(panel) % Shape::kExpertPanels;
        const i64 expert = static_cast<i64>(this->experts_before(layer)) * Mlp::kExperts +
                           choice_here<Shape>().expert[slot];
        stream(weights + (expert * of_expert + its) * shape.part_bytes(), shape);
      }
    }
  }

  CUFUSE_DEVICE void head() { weights<Shape::kHeadPanels, Shape::kDim>(this->args.head, 0); }
  CUFUSE_DEVICE void end() {
    filler.drain();
    this->tracer.close();
  }

 private:
  template <int kPanels, int kK>
  CUFUSE_DEVICE void weights(const T* packed, int layer) {
    using Panel = typename Shape::template Panel<kK>;
    const auto* base = reinterpret_cast<const unsigned char*>(packed) +
                       static_cast<i64>(layer) * kPanels * Panel::kBytes;
    const int first = this->take(kPanels);
    for (int panel = first; panel < kPanels; panel += Shape::kCtas) {
      stream(base + panel * Panel::kBytes, Panel{});
    }
  }

  // A part of a panel, which is contiguous.
  template <typename Panel>
  CUFUSE_DEVICE void stream(const unsigned char* source, Panel shape) {
#pragma unroll 1
    for (int block = 0; block < shape.part_blocks(); ++block) {
      filler.fill(source, shape.block_bytes(block), this->tracer);
      source += shape.block_bytes(block);
    }
  }

  // Where a panel's rows are: of one matrix, or 8 of a second one behind 8 of the first.
  struct Place {
    const TensorMap* map;
    const TensorMap* second_map;
    const T* data;
    const T* second;
    i64 row;
    int second_row;  // from `row` on
    int column;
    int pitch;  // columns of a row
    int rows;   // that are the panel's
  };

  CUFUSE_DEVICE Place gate_up_place(i64 row) const {
    return {&this->args.gate_map, &this->args.up_map, this->args.gate, this->args.up, row, 0, 0,
            Shape::kDim,          kPanelRows};
  }
  // Rows of the gates (and of the ups) of the layers before.
  CUFUSE_DEVICE i64 rows_before(int layer) const {
    constexpr i64 kRows =
        Mlp::kFourBits ? 0 : static_cast<i64>(Mlp::kExperts) * Shape::kHidden + Mlp::kShared;
    return this->experts_before(layer) * kRows +
           static_cast<i64>(this->dense_before(layer)) * Mlp::kDense;
  }

  // This CTA's panels of row-major weights; place(panel, part).
  template <int kPanels, typename Panel, typename AnyPlace>
  CUFUSE_DEVICE void rows(const AnyPlace& place) {
    const int first = this->take(kPanels);
    for (int panel = first; panel < kPanels; panel += Shape::kCtas) {
#pragma unroll 1
      for (int part = 0; part < Panel::kParts; ++part) {
        const Place at = place(panel, part);
#pragma unroll 1
        for (int block = 0; block < Panel::kPartBlocks; ++block) fill_rows<Panel>(at, block);
      }
    }
  }

  template <typename Panel>
  CUFUSE_DEVICE void fill_rows(const Place& at, int block) {
    using Rows = BlockRows<Panel>;
    constexpr int kMatrices = Panel::kGated ? 2 : 1;
    constexpr int kRows = Rows::kRowsTogether;
    const int line = block * Rows::kLines;
#if defined(CUFUSE_HOST) || __CUDA_ARCH__ >= 900
    if constexpr (Shape::Ring::kCopies == Copies::bulk) {
      auto row = [&](int i) { return static_cast<int>(at.row) + (i == 0 ? 0 : at.second_row); };
      constexpr int kBytes = Rows::kLines * kRows * Rows::kLineBytes;  // of one matrix
      auto map = [&](int i) -> const TensorMap& { return i == 0 ? *at.map : *at.second_map; };
      if constexpr (kInLines<T, Panel::kK>) {
        // A box is a block: lines of the rows' next 128 bytes behind each other.
        const int first = at.column / Panel::kLineColumns + line;
        filler.template fill_boxes<kMatrices>(
            kMatrices * kBytes,
            [&](int i, unsigned char* stage, u64* barrier) {
              copy_tensor_hinted(stage + i * kBytes, map(i), barrier, filler.policy, 0, row(i),
                                 first);
            },
            this->tracer);
      } else {
        filler.template fill_boxes<kMatrices * Rows::kLines>(
            kMatrices * kBytes,
            [&](int i, unsigned char* stage, u64* barrier) {
              const int column = at.column + (line + i / kMatrices) * Panel::kLineColumns;
              copy_tensor_hinted(
                  stage + i % kMatrices * kBytes + i / kMatrices * kRows * Rows::kLineBytes,
                  map(i % kMatrices), barrier, filler.policy, column, row(i % kMatrices));
            },
            this->tracer);
      }
    }
#endif
    if constexpr (Shape::Ring::kCopies == Copies::async) {
      filler.fill_by_warp(
          [&](unsigned char* stage) {
            constexpr int kPer16Bytes = 16 / static_cast<int>(sizeof(T));
            for (int i = lane_here(); i < Rows::kLines * 16 * 8; i += 32) {
              const int chunk = i % 8, row = i / 8 % 16;
              const int column = (line + i / 128) * Panel::kLineColumns + chunk * kPer16Bytes;
              const unsigned char* to =
                  Rows::line(stage, row % 8, row >= 8) + i / 128 * Rows::kColumnBytes;
              const bool second = Panel::kGated && row >= 8;
              const i64 at_row =
                  at.row + (second ? at.second_row : 0) + (Panel::kGated ? row % 8 : row);
              const T* from =
                  (second ? at.second : at.data) + at_row * at.pitch + at.column + column;
              const bool there = column < Panel::kK && row < at.rows;
              copy_async(const_cast<unsigned char*>(to) + (chunk ^ Rows::swap(to)) * 16,
                         there ? from : at.data, there ? 16 : 0);
            }
          },
          this->tracer);
    }
  }

  CUFUSE_DEVICE const float* correction(int layer) const {
    if constexpr (!Mlp::kCorrects) return nullptr;
    return this->args.router_correction +
           static_cast<i64>(this->experts_before(layer)) * Mlp::kExperts;
  }

  // The experts of a layer, when the router's logits are there.
  CUFUSE_DEVICE void choose(int layer) {
    using Choose = Chooser<Mlp>;
    const u32 tag = this->tag(layer);
    const u32 since = this->tracer.now();
    const u64* words = this->words(Shape::kLogits) + Choose::expert(0);
    Choose chooser;
    // One word is looked at until it is there, then all: looks in vain delay what is waited for.
    const u64* last = this->words(Shape::kLogits) + Mlp::kExperts - 1;
    while (!has_tag(look(last), tag) && !is_over()) {
    }
    __syncwarp();
    for (bool there = false, over = false; !there && !over;) {
      over = is_over();
      u64 seen[Choose::kMine];
#pragma unroll
      for (int i = 0; i < Choose::kMine; ++i) {
        if (Choose::has(i)) seen[i] = look(words + i);
      }
      there = true;
#pragma unroll
      for (int i = 0; i < Choose::kMine; ++i) {
        there = there && (!Choose::has(i) || has_tag(seen[i], tag));
        chooser.logits[i] = Choose::has(i) ? __uint_as_float(static_cast<u32>(seen[i])) : 0.0f;
      }
    }
    __syncwarp();
    this->tracer.waited(kWaitingForActivations, since, this->tracer.now());
    auto& choice = choice_here<Shape>();
    if (choices > 0) wait_for(&choice.read, (choices - 1) & 1);
    ++choices;
    chooser.choose(correction(layer), this->args.routed_scale, choice);
    __syncwarp();
    if (lane_here() == 0) mbarrier_arrive(&choice.made);
    // By who has the first tile of the last product, which somebody always has.
    if (this->args.experts && static_cast<int>(blockIdx.x) == this->turn) {
      int* experts =
          this->args.experts + (static_cast<i64>(this->n()) * Shape::kLayers + layer) * Mlp::kTop;
      for (int i = lane_here(); i < Mlp::kTop; i += 32) experts[i] = choice.expert[i];
    }
  }

  // Keys and values that this very launch appended: the generic stores of another CTA come before
  // the copies of this one.
  CUFUSE_DEVICE void wait_for_append(int layer, int head) {
    const u64* word = this->appended(this->n() - 1, layer, head);
    await_all(word, this->tag(layer) - Shape::kLayers);
#if defined(CUFUSE_HOST) || __CUDA_ARCH__ >= 900
    fence_proxy_async();
#endif
  }
};

}  // namespace cufuse
