// The three roles of a CTA in a decode step. Each walks over the same phases in the same order:
//
//   Filler      streams what the CTA will need through the ring, far ahead of the others
//   Multiplier  16 warps: gather x, multiply panels; attention
//   Finisher    one warp: adds a panel's sums, bias, activation, residual; hands the result on
//
// A phase's tiles go round robin over the CTAs, and the next phase goes on where the last one ended,
// so that no CTA always has the extra tile.
#pragma once

#include "device/decode_shape.cuh"
#include "device/epilogue.cuh"
#include "device/sampling.cuh"
#include "device/trace.cuh"

namespace cufuse {

// How attention cuts the keys that are in the cache: chunks of a sequence go to splits. It depends
// on the position and the window alone.
struct CacheSplit {
  KeySpan span;     // keys in the cache that the query sees
  int first_chunk;  // of the sequence
  int end_chunk;
  int chunks;       // of a split
  int count;        // splits, at least 1: the first one also takes the new key
};

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

// What a launch finds. The last CTA to go changes it, so all threads read it before their first
// barrier.
struct Beginning {
  u32 sequence;
  int start;
  u64 deadline;

  template <typename T>
  CUFUSE_DEVICE explicit Beginning(const DecodeArgs<T>& args)
      : sequence(args.control[kControlSequence]),
        start(args.start[0]),
        deadline(timer_ns() + args.budget_ns) {}
};

// What all roles know.
template <typename Shape>
struct Role {
  using T = typename Shape::T;
  const DecodeArgs<T>& args;
  Watch watch;
  Tracer<Shape::kTrace> tracer;
  u32 sequence;
  int start;
  int n = 0;  // token of this launch
  int turn = 0;

  CUFUSE_DEVICE Role(const DecodeArgs<T>& args, const Beginning& beginning, int role)
      : args(args),
        watch{args.control + kControlFault, beginning.deadline, false},
        tracer(args.trace, role),
        sequence(beginning.sequence),
        start(beginning.start) {}

  CUFUSE_DEVICE void begin(int token) { n = token; }

  CUFUSE_DEVICE int position() const { return start + n; }
  CUFUSE_DEVICE bool has_logits() const { return args.all_logits || n + 1 == args.n_tokens; }

  // Of what a layer hands on; the layer before the first one is the last one of the token before.
  CUFUSE_DEVICE u32 tag(int layer) const {
    return sequence + static_cast<u32>(n * Shape::kLayers + layer) + 1;
  }

  CUFUSE_DEVICE CacheSplit split(int layer) const {
    const bool windowed = args.window > 0 && layer % args.window_every == 0;
    return split_cache<Shape>(position(), windowed ? args.window : 0);
  }

  // The first of `tiles` tiles that is this CTA's; the next ones are kCtas apart.
  CUFUSE_DEVICE int take(int tiles) {
    int first = static_cast<int>(blockIdx.x) - turn;
    if (first < 0) first += Shape::kCtas;
    turn += tiles % Shape::kCtas;
    if (turn >= Shape::kCtas) turn -= Shape::kCtas;
    return first;
  }

  // The last of this CTA's tiles. Splits other than the first publish and wait for nothing, so a CTA
  // that goes through its splits from the last to the first never waits for one of its own.
  static CUFUSE_DEVICE int last_of(int first, int tiles) {
    return first + (tiles - 1 - first) / Shape::kCtas * Shape::kCtas;
  }

  CUFUSE_DEVICE u64* words(int at) const { return args.words + at; }
  CUFUSE_DEVICE u64* best(int token) const {
    return words(Shape::kBest) + token % 2 * 2 * Shape::kCtas;
  }

  // The token of this step, to every lane of the warp: given, or the one drawn before. -1 if the
  // logits held a NaN.
  CUFUSE_DEVICE int token() {
    return n < args.n_given ? args.tokens[n] : drawn(n - 1, tag(-1));
  }

  // What was drawn behind a token: the best of what every CTA found.
  CUFUSE_DEVICE int drawn(int token, u32 its_tag) {
    const u64* words = best(token);
    u64 rank = 0;
    for (int cta = thread_here() % 32; cta < Shape::kCtas; cta += 32) {
      const u64* its = words + 2 * cta;
      const uint2 pair = settle(look_pair(its), its, its_tag, watch);
      rank = max(rank, static_cast<u64>(pair.x) << 32 | pair.y);
    }
    rank = warp_max(rank);
    return rank == 0 || rank == kRankOfNan ? -1 : id_of(rank);
  }

  CUFUSE_DEVICE const T* embedding_row(int token) const {
    return args.embedding + static_cast<i64>(max(token, 0)) * Shape::kDim;
  }
};

// ---- the ring is filled

template <typename Shape>
struct Filler : Role<Shape> {
  using T = typename Shape::T;
  RingFiller<typename Shape::Ring> filler;

  CUFUSE_DEVICE Filler(const DecodeArgs<T>& args, const Beginning& beginning, unsigned char* shared)
      : Role<Shape>(args, beginning, kFillerRole), filler(Ring<typename Shape::Ring>(shared)) {}

  CUFUSE_DEVICE void qkv(int layer) {
    weights<Shape::kQkvPanels, Shape::kDim>(this->args.qkv, layer);
  }

  CUFUSE_DEVICE void attention(int layer) {
    using Cache = typename Shape::Cache;
    const CacheSplit split = this->split(layer);
    const int tasks = Shape::kKvHeads * split.count;
    const int first = this->take(tasks);
    if (first >= tasks) return;
    this->tracer.begin(kAttentionPhase);
    for (int task = this->last_of(first, tasks); task >= first; task -= Shape::kCtas) {
      const int head = task % Shape::kKvHeads, part = task / Shape::kKvHeads;
      const int chunk = split.first_chunk + part * split.chunks;
      const int end = min(chunk + split.chunks, split.end_chunk);
      if (this->n > 0 && end * Cache::kKeys > this->start) wait_for_append(layer, head);
      const i64 rows =
          static_cast<i64>(layer * Shape::kKvHeads + head) * this->args.capacity;
      for (int c = chunk; c < end; ++c) {
        const i64 at = (rows + c * Cache::kKeys) * Cache::kRowBytes;
        for (const T* cache : {this->args.k_cache, this->args.v_cache}) {
          filler.template fill<kSlices, false>(reinterpret_cast<const unsigned char*>(cache) + at,
                                               Cache::kSliceBytes, Cache::kSlicePitch, this->watch);
        }
      }
    }
    this->tracer.end(kAttentionPhase);
  }

  CUFUSE_DEVICE void output(int layer) {
    weights<Shape::kOutPanels, Shape::kQDim>(this->args.out, layer);
  }
  CUFUSE_DEVICE void gate_up(int layer) {
    weights<Shape::kGateUpPanels, Shape::kDim>(this->args.gate_up, layer);
  }
  CUFUSE_DEVICE void down(int layer) {
    weights<Shape::kDownPanels, Shape::kHidden>(this->args.down, layer);
  }
  CUFUSE_DEVICE void head() { weights<Shape::kHeadPanels, Shape::kDim>(this->args.head, 0); }
  CUFUSE_DEVICE void end() { filler.drain(this->watch); }

 private:
  template <int kPanels, int kK>
  CUFUSE_DEVICE void weights(const T* packed, int layer) {
    using Panel = typename Shape::template Panel<kK>;
    const auto* base = reinterpret_cast<const unsigned char*>(packed) +
                       static_cast<i64>(layer) * kPanels * Panel::kBytes;
    const int first = this->take(kPanels);
    for (int panel = first; panel < kPanels; panel += Shape::kCtas) {
      const unsigned char* source = base + panel * Panel::kBytes;
#pragma unroll 1
      for (int block = 0; block < Panel::kBlocks; ++block) {
        filler.template fill<1, true>(source + block * Panel::kBlockTiles * Packing<T>::kTileBytes,
                                      Panel::block_bytes(block), 0, this->watch);
      }
    }
  }

  // Keys and values that this very launch appended: the generic stores of another CTA come before
  // the copies of this one.
  CUFUSE_DEVICE void wait_for_append(int layer, int head) {
    const u64* word = this->words(Shape::kAppended) + layer * Shape::kKvHeads + head;
    const u32 wanted = this->tag(layer) - Shape::kLayers;
    u32 looks = 0;
    while (!has_tag(load_word<Order::acquire>(word), wanted)) {
      if (this->watch.gives_up(looks, kWaitsForWords)) return;
    }
#if defined(CUFUSE_HOST) || __CUDA_ARCH__ >= 900
    fence_proxy_async();
#endif
  }
};

// ---- x is gathered and multiplied, the cache attended to

template <typename Shape>
struct Multiplier : Role<Shape> {
  using T = typename Shape::T;
  using Cache = typename Shape::Cache;
  static constexpr int kThreads = kPanelWarps * 32;
  static constexpr int kHeadDim = Shape::kHeadDim;
  unsigned char* shared;
  Ring<typename Shape::Ring> ring;
  typename Ring<typename Shape::Ring>::Cursor cursor;
  int panels_done = 0;

  CUFUSE_DEVICE Multiplier(const DecodeArgs<T>& args, const Beginning& beginning, unsigned char* shared)
      : Role<Shape>(args, beginning, kMultiplierRole), shared(shared), ring(shared) {}

  CUFUSE_DEVICE void begin(int token) {
    Role<Shape>::begin(token);
    const i64 row = static_cast<i64>(this->position()) * (Shape::kRotary / 2);
    float* angles = at<float>(Shape::kAnglesAt);
    for (int i = thread_here(); i < Shape::kRotary / 2; i += kThreads) {
      angles[i] = this->args.cos[row + i];
      angles[Shape::kRotary / 2 + i] = this->args.sin[row + i];
    }
    sync();
  }

  CUFUSE_DEVICE void qkv(int layer) {
    const int first = this->take(Shape::kQkvPanels);
    if (first >= Shape::kQkvPanels) return;
    const T* row = layer == 0 ? this->embedding_row(this->token()) : nullptr;
    gather_normalized(row, this->words(Shape::kX), this->tag(layer - 1),
                      this->args.attn_norm + layer * Shape::kDim);
    multiply<Shape::kQkvPanels, Shape::kDim>(first);
  }

  CUFUSE_DEVICE void attention(int layer) {
    const CacheSplit split = this->split(layer);
    const int tasks = Shape::kKvHeads * split.count;
    const int first = this->take(tasks);
    if (first >= tasks) return;
    for (int task = this->last_of(first, tasks); task >= first; task -= Shape::kCtas) {
      attend(layer, task % Shape::kKvHeads, task / Shape::kKvHeads, split);
    }
  }

  CUFUSE_DEVICE void output(int layer) {
    const int first = this->take(Shape::kOutPanels);
    if (first >= Shape::kOutPanels) return;
    gather<Shape::kQDim>(this->words(Shape::kAttention), this->tag(layer));
    multiply<Shape::kOutPanels, Shape::kQDim>(first);
  }

  CUFUSE_DEVICE void gate_up(int layer) {
    const int first = this->take(Shape::kGateUpPanels);
    if (first >= Shape::kGateUpPanels) return;
    gather_normalized(nullptr, this->words(Shape::kMiddle), this->tag(layer),
                      this->args.mlp_norm + layer * Shape::kDim);
    multiply<Shape::kGateUpPanels, Shape::kDim>(first);
  }

  CUFUSE_DEVICE void down(int layer) {
    const int first = this->take(Shape::kDownPanels);
    if (first >= Shape::kDownPanels) return;
    gather<Shape::kHidden>(this->words(Shape::kHiddenWords), this->tag(layer));
    multiply<Shape::kDownPanels, Shape::kHidden>(first);
  }

  CUFUSE_DEVICE void head() {
    const int first = this->take(Shape::kHeadPanels);
    if (first >= Shape::kHeadPanels) return;
    gather_normalized(nullptr, this->words(Shape::kX), this->tag(Shape::kLayers - 1),
                      this->args.final_norm);
    multiply<Shape::kHeadPanels, Shape::kDim>(first);
  }

  CUFUSE_DEVICE void end() {}

 private:
  template <typename U>
  CUFUSE_DEVICE U* at(int offset) const {
    return reinterpret_cast<U*>(shared + offset);
  }
  static CUFUSE_DEVICE void sync() { barrier_sync(1, kThreads); }

  // One thread looks at the word that is expected last until it is there; then all look at once.
  // Looks in vain crowd L2 and delay the very words that are waited for.
  CUFUSE_DEVICE void probe(const u64* word, u32 tag) {
    this->tracer.begin(kGatherPhase);
    if (thread_here() == 0) settle(look(word), word, tag, this->watch);
    sync();
  }

  // Words [0, kWords) to shared memory as fragments, zeros behind them.
  template <int kN>
  CUFUSE_DEVICE void gather(const u64* words, u32 tag) {
    constexpr int kPairs = kN / kPerWord<T> / 2;
    constexpr int kAhead = 4;
    u32* x = at<u32>(Shape::kXAt);
    probe(words + 2 * kPairs - 1, tag);
#pragma unroll 1
    for (int first = thread_here(); first < kPairs; first += kThreads * kAhead) {
      ulonglong2 seen[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int pair = first + i * kThreads;
        if (pair < kPairs) seen[i] = look_pair(words + 2 * pair);
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int pair = first + i * kThreads;
        if (pair >= kPairs) break;
        put(x, pair, settle(seen[i], words + 2 * pair, tag, this->watch));
      }
    }
    clear_behind<kN>(x);
    sync();
    this->tracer.end(kGatherPhase);
  }

  // The same of a residual vector, through an RMSNorm; from `row` in memory if that is not null.
  CUFUSE_DEVICE void gather_normalized(const T* row, const u64* words, u32 tag, const T* weight) {
    constexpr int kPairs = Shape::kDim / kPerWord<T> / 2;
    constexpr int kMine = (kPairs + kThreads - 1) / kThreads;
    constexpr int kValues = 2 * kPerWord<T>;
    u32* x = at<u32>(Shape::kXAt);
    float* sums = at<float>(Shape::kNormSumsAt);
    const auto* weights = reinterpret_cast<const uint2*>(weight);
    uint2 bits[kMine], weight_bits[kMine];
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      const int pair = thread_here() + i * kThreads;
      weight_bits[i] = pair < kPairs ? weights[pair] : make_uint2(0, 0);
    }
    if (row) {
      this->tracer.begin(kGatherPhase);
      sync();
#pragma unroll
      for (int i = 0; i < kMine; ++i) {
        const int pair = thread_here() + i * kThreads;
        bits[i] = pair < kPairs ? reinterpret_cast<const uint2*>(row)[pair] : make_uint2(0, 0);
      }
    } else {
      probe(words + 2 * kPairs - 1, tag);
      ulonglong2 seen[kMine];
#pragma unroll
      for (int i = 0; i < kMine; ++i) {
        const int pair = thread_here() + i * kThreads;
        if (pair < kPairs) seen[i] = look_pair(words + 2 * pair);
      }
#pragma unroll
      for (int i = 0; i < kMine; ++i) {
        const int pair = thread_here() + i * kThreads;
        bits[i] = pair < kPairs ? settle(seen[i], words + 2 * pair, tag, this->watch)
                                : make_uint2(0, 0);
      }
    }
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      T v[kValues];
      memcpy(v, &bits[i], sizeof v);
#pragma unroll
      for (int j = 0; j < kValues; ++j) sum = fmaf(to_float(v[j]), to_float(v[j]), sum);
    }
    sum = warp_sum(sum);
    if (thread_here() % 32 == 0) sums[thread_here() / 32] = sum;
    sync();
    sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kPanelWarps; i += 4) {
      const auto four = load_vec<4>(sums + i);
#pragma unroll
      for (int j = 0; j < 4; ++j) sum += four.v[j];
    }
    const float scale = rsqrtf(sum / static_cast<float>(Shape::kDim) + this->args.eps);
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      const int pair = thread_here() + i * kThreads;
      T v[kValues], w[kValues];
      memcpy(v, &bits[i], sizeof v);
      memcpy(w, &weight_bits[i], sizeof w);
#pragma unroll
      for (int j = 0; j < kValues; ++j) {
        v[j] = normalized<T, Shape::kRounding>(to_float(v[j]), scale, to_float(w[j]));
      }
      if (pair < kPairs) put(x, pair, make_uint2(word_of(v), word_of(v + kPerWord<T>)));
    }
    clear_behind<Shape::kDim>(x);
    sync();
    this->tracer.end(kGatherPhase);
  }

  static CUFUSE_DEVICE void put(u32* x, int pair, uint2 words) {
    x[fragment_word<T>(2 * pair)] = words.x;
    x[fragment_word<T>(2 * pair + 1)] = words.y;
  }

  template <int kN>
  static CUFUSE_DEVICE void clear_behind(u32* x) {
    constexpr int kFirst = kN / kPerWord<T>;
    constexpr int kEnd = Packing<T>::tiles(kN) * 8;
    for (int i = kFirst + thread_here(); i < kEnd; i += kThreads) x[fragment_word<T>(i)] = 0;
  }

  // This CTA's panels, from `first` on.
  template <int kPanels, int kK>
  CUFUSE_DEVICE void multiply(int first) {
    using Panel = typename Shape::template Panel<kK>;
    const int warp = thread_here() / 32;
    const int group = warp / kGroupWarps, quarter = warp % kGroupWarps;
    const uint4* x = at<const uint4>(Shape::kXAt);
    this->tracer.begin(kMultiplyPhase);
    int base = 0;
#pragma unroll 1
    for (int panel = first; panel < kPanels; panel += Shape::kCtas) {
      const int mine = (group - base) & (kPanelGroups - 1);
      PanelSums<T> sums;
      auto stage = cursor;
      stage.advance(mine);
#pragma unroll 1
      for (int block = mine; block < Panel::kBlocks; block += kPanelGroups) {
        multiply_block<Panel>(sums, ring.wait(stage, this->watch), x, block, quarter);
        ring.release(stage);
        stage.advance(kPanelGroups);
      }
      cursor.template advance<Panel::kBlocks>();
      base += Panel::kBlocks % kPanelGroups;

      const int buffer = panels_done % Shape::kPartials;
      wait_for(at<u64>(Shape::kPartialsEmptyAt) + buffer,
               (panels_done / Shape::kPartials & 1) ^ 1, this->watch, kWaitsForSums);
      if (mine < Panel::kBlocks) {
        float* partial = at<float>(Shape::kPartialsAt) + buffer * Shape::kPartialFloats;
        store_chain(partial, mine * kGroupWarps + quarter, sums);
      }
      barrier_arrive(2 + buffer, kThreads + 32);
      ++panels_done;
    }
    this->tracer.end(kMultiplyPhase);
  }

  // One KV head's queries over one split of its cache. The first split also takes the new key, and
  // waits for what the others publish.
  CUFUSE_DEVICE void attend(int layer, int kv_head, int part, const CacheSplit& split) {
    constexpr int kGroup = Shape::kGroup;
    const bool merges = part == 0;
    const u32 tag = this->tag(layer);
    const int warp = thread_here() / 32, lane = thread_here() % 32;
    T* rows = at<T>(Shape::kRowsAt);  // queries, then the new key and value
    float* maxima = at<float>(Shape::kStatsAt);
    float* totals = maxima + kPanelWarps * kMostHeads;
    float* new_logits = totals + kPanelWarps * kMostHeads;
    const float scale = rsqrtf(static_cast<float>(kHeadDim)) * kLog2E;

    this->tracer.begin(kGatherPhase);
    if (warp < kGroup + (merges ? 2 : 0)) fetch_row(layer, kv_head, warp, tag, rows);
    sync();
    this->tracer.end(kGatherPhase);

    this->tracer.begin(kAttentionPhase);
    const T* new_key = rows + kGroup * kHeadDim;
    const T* new_value = new_key + kHeadDim;
    if (merges) {
      if (warp < kGroup) {
        float dot = 0.0f;
        for (int i = lane; i < kHeadDim; i += 32) {
          dot = fmaf(to_float(rows[warp * kHeadDim + i]), to_float(new_key[i]), dot);
        }
        dot = warp_sum(dot);
        if (lane == 0) new_logits[warp] = dot * scale;
      }
      if (warp >= kPanelWarps - 2) append(layer, kv_head, warp == kPanelWarps - 1, new_key);
    }

    const int chunk = split.first_chunk + part * split.chunks;
    const int count = max(min(split.chunks, split.end_chunk - chunk), 0);
    const int group = warp / kGroupWarps;
    WarpAttention<T, Cache> attention(rows);
    auto keys = cursor;
    for (int i = 0; i < group; ++i) keys.advance(2);
#pragma unroll 1
    for (int i = group; i < count; i += kPanelGroups) {
      auto values = keys;
      values.advance(1);
      attention.add_chunk(ring.wait(keys, this->watch), warp % kGroupWarps,
                          (chunk + i) * Cache::kKeys, split.span, scale,
                          [&] { return ring.wait(values, this->watch); });
      ring.release(keys);
      ring.release(values);
      keys.advance(kPanelGroups);
      keys.advance(kPanelGroups);
    }
    cursor.round ^= 2 * count / Shape::Ring::kStages & 1;
    cursor.advance(2 * count % Shape::Ring::kStages);

    const int warps = min(count, kPanelGroups) * kGroupWarps;  // that saw a chunk
    if (warp < warps) {
      attention.store_stats(maxima + warp * kMostHeads, totals + warp * kMostHeads);
    }
    constexpr int kMerged = Shape::kMergedHeads;
    float* outs = at<float>(Shape::kXAt);  // [warps, kMerged, kMergePitch]
#pragma unroll 1
    for (int head = 0; head < kGroup; head += kMerged) {
      if (warp < warps) {
        attention.store_out(outs + warp * kMerged * Shape::kMergePitch, Shape::kMergePitch, head,
                            min(kMerged, kGroup - head));
      }
      sync();
      if (head == 0 && merges && thread_here() == 0 && this->args.n_tokens > 1) {
        store_word<Order::release>(
            this->words(Shape::kAppended) + layer * Shape::kKvHeads + kv_head, tagged(0, tag));
      }
      for (int i = thread_here(); i < kMerged * kHeadDim / 2; i += kThreads) {
        const int mine = head + i / (kHeadDim / 2), column = i % (kHeadDim / 2) * 2;
        if (mine >= kGroup) break;
        PartialHead part_of_head;
        for (int w = 0; w < warps; ++w) {
          part_of_head.max = fmaxf(part_of_head.max, maxima[w * kMostHeads + mine]);
        }
        const float shift = softmax_shift(part_of_head.max);
#pragma unroll 4
        for (int w = 0; w < warps; ++w) {
          const float weight = exp2f(maxima[w * kMostHeads + mine] - shift);
          const float2 values = *reinterpret_cast<const float2*>(
              outs + (w * kMerged + mine - head) * Shape::kMergePitch + column);
          part_of_head.total = fmaf(totals[w * kMostHeads + mine], weight, part_of_head.total);
          part_of_head.out.x = fmaf(values.x, weight, part_of_head.out.x);
          part_of_head.out.y = fmaf(values.y, weight, part_of_head.out.y);
        }
        if (merges) {
          part_of_head.add(new_logits[mine], 1.0f,
                           make_float2(to_float(new_value[column]), to_float(new_value[column + 1])));
          finish_head(layer, kv_head, mine, column, split.count, tag, part_of_head);
        } else {
          u64* its = part_words(kv_head, part, mine);
          publish(its + column, __float_as_uint(part_of_head.out.x),
                  __float_as_uint(part_of_head.out.y), tag);
          if (column == 0) {
            publish(its + kHeadDim, __float_as_uint(part_of_head.max),
                    __float_as_uint(part_of_head.total), tag);
          }
        }
      }
      sync();
    }
    this->tracer.end(kAttentionPhase);
  }

  // A query head, the new key or the new value (row kGroup, kGroup + 1) by one warp: fetch, norm,
  // rotate.
  CUFUSE_DEVICE void fetch_row(int layer, int kv_head, int row, u32 tag, T* rows) {
    constexpr int kGroup = Shape::kGroup;
    constexpr int kPairs = kHeadDim / kPerWord<T> / 2;
    const int lane = thread_here() % 32;
    const int first = row < kGroup    ? (kv_head * kGroup + row) * kHeadDim
                      : row == kGroup ? Shape::kQDim + kv_head * kHeadDim
                                      : Shape::kQDim + Shape::kKvDim + kv_head * kHeadDim;
    const u64* words = this->words(Shape::kQkv) + first / kPerWord<T>;
    auto* target = reinterpret_cast<uint2*>(rows + row * kHeadDim);
    const T* weight = nullptr;
    uint2 weight_bits[(kPairs + 31) / 32];
    if (Shape::kQkNorm && row <= kGroup) {
      weight = (row < kGroup ? this->args.q_norm : this->args.k_norm) + layer * kHeadDim;
#pragma unroll
      for (int i = 0; i < (kPairs + 31) / 32; ++i) {
        if (lane + i * 32 < kPairs) {
          weight_bits[i] = reinterpret_cast<const uint2*>(weight)[lane + i * 32];
        }
      }
    }
#pragma unroll
    for (int i = 0; i < (kPairs + 31) / 32; ++i) {
      const u64* pair = words + 2 * (lane + i * 32);
      if (lane + i * 32 < kPairs) {
        target[lane + i * 32] = settle(look_pair(pair), pair, tag, this->watch);
      }
    }
    if (row > kGroup) return;
    float norm = 0.0f;
    if (weight) {
      T* shared_weight = at<T>(Shape::kNormWeightsAt) + row * kHeadDim;
#pragma unroll
      for (int i = 0; i < (kPairs + 31) / 32; ++i) {
        if (lane + i * 32 < kPairs) {
          reinterpret_cast<uint2*>(shared_weight)[lane + i * 32] = weight_bits[i];
        }
      }
      weight = shared_weight;
      __syncwarp();
      norm = head_rms_scale<2>(rows + row * kHeadDim, kHeadDim, this->args.eps);
    }
    __syncwarp();
    const float* angles = at<const float>(Shape::kAnglesAt);
    norm_rotate_head<Shape::kPairing, Shape::kRounding, 2>(
        rows + row * kHeadDim, rows + row * kHeadDim, kHeadDim,
        Angles{angles, angles + Shape::kRotary / 2, Shape::kRotary / 2}, weight, norm);
  }

  CUFUSE_DEVICE void append(int layer, int kv_head, bool value, const T* new_key) {
    constexpr int kPer8 = 8 / static_cast<int>(sizeof(T));
    const i64 row = static_cast<i64>(layer * Shape::kKvHeads + kv_head) * this->args.capacity +
                    this->position();
    T* cache = (value ? this->args.v_cache : this->args.k_cache) + row * kHeadDim;
    const T* source = new_key + (value ? kHeadDim : 0);
    for (int i = thread_here() % 32 * kPer8; i < kHeadDim; i += 32 * kPer8) {
      store_vec<kPer8>(cache + i, load_vec<kPer8>(source + i));
    }
#if defined(CUFUSE_HOST) || __CUDA_ARCH__ >= 900
    if (this->args.n_tokens > 1) fence_proxy_async();
#endif
  }

  CUFUSE_DEVICE u64* part_words(int kv_head, int part, int head) const {
    return this->words(Shape::kParts) +
           ((kv_head * Shape::kMostSplits + part) * Shape::kGroup + head) * Shape::kPart;
  }

  // The other splits in ascending order, a sink, the division; then it goes out.
  CUFUSE_DEVICE void finish_head(int layer, int kv_head, int head, int column, int splits, u32 tag,
                                 PartialHead part) {
    constexpr int kAhead = 2;
#pragma unroll 1
    for (int first = 1; first < splits; first += kAhead) {
      ulonglong2 values[kAhead], stats[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (first + i >= splits) break;
        const u64* its = part_words(kv_head, first + i, head);
        stats[i] = look_pair(its + kHeadDim);
        values[i] = look_pair(its + column);
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (first + i >= splits) break;
        const u64* its = part_words(kv_head, first + i, head);
        const uint2 s = settle(stats[i], its + kHeadDim, tag, this->watch);
        const uint2 v = settle(values[i], its + column, tag, this->watch);
        part.add(__uint_as_float(s.x), __uint_as_float(s.y),
                 make_float2(__uint_as_float(v.x), __uint_as_float(v.y)));
      }
    }
    const int query = kv_head * Shape::kGroup + head;
    if (this->args.sinks) {
      part.add_sink(to_float(this->args.sinks[layer * Shape::kHeads + query]));
    }
    const float2 result = part.result();
    const T rounded[2] = {from_float<T>(result.x), from_float<T>(result.y)};
    u64* word = this->words(Shape::kAttention) + (query * kHeadDim + column) / kPerWord<T>;
    if constexpr (kPerWord<T> == 2) {
      publish(word, word_of(rounded), tag);
    } else {
      publish(word, word_of(rounded), word_of(rounded + 1), tag);
    }
  }
};

// ---- sums are finished and handed on

template <typename Shape>
struct Finisher : Role<Shape> {
  using T = typename Shape::T;
  unsigned char* shared;
  int panels_done = 0;
  u64 best_rank = 0;

  CUFUSE_DEVICE Finisher(const DecodeArgs<T>& args, const Beginning& beginning, unsigned char* shared)
      : Role<Shape>(args, beginning, kFinisherRole), shared(shared) {}

  CUFUSE_DEVICE void qkv(int layer) {
    const T* bias = this->args.qkv_bias ? this->args.qkv_bias + layer * Shape::kQkvDim : nullptr;
    u64* words = this->words(Shape::kQkv);
    panels<Shape::kQkvPanels, Shape::kDim>([&](int row) {
      const float b = bias && row < Shape::kQkvDim ? to_float(bias[row]) : 0.0f;
      return [=](float sum) {
        hand_on<Shape::kQkvDim>(words, row, from_float<T>(bias ? sum + b : sum), this->tag(layer));
      };
    });
  }

  CUFUSE_DEVICE void attention(int layer) { this->take(Shape::kKvHeads * this->split(layer).count); }

  CUFUSE_DEVICE void output(int layer) {
    // The residual of the first layer is the embedding.
    const T* embedded = layer == 0 && starts(Shape::kOutPanels)
                            ? this->embedding_row(this->token())
                            : nullptr;
    add_residual<Shape::kOutPanels, Shape::kQDim>(
        this->args.out_bias ? this->args.out_bias + layer * Shape::kDim : nullptr, embedded,
        this->words(Shape::kX), this->tag(layer - 1), this->words(Shape::kMiddle), layer);
  }

  CUFUSE_DEVICE void gate_up(int layer) {
    const i64 at = static_cast<i64>(layer) * Shape::kHidden;
    const T* gate_bias = this->args.gate_bias ? this->args.gate_bias + at : nullptr;
    const T* up_bias = this->args.up_bias ? this->args.up_bias + at : nullptr;
    u64* words = this->words(Shape::kHiddenWords);
    panels<Shape::kGateUpPanels, Shape::kDim>([&](int row) {
      // Rows 0..7 of a panel are the gate's, 8..15 the up's.
      const int column = row / kPanelRows * 8 + row % 8;
      return [=](float sum) {
        const float up = __shfl_down_sync(kFullMask, sum, 8);
        const T value = gated_epilogue<Gate::plain, Shape::kAct>(
            sum, up, gate_bias, up_bias, min(column, Shape::kHidden - 1), 0.0f, 0.0f);
        hand_on<Shape::kHidden>(words, row % kPanelRows < 8 ? column : Shape::kHidden, value,
                                this->tag(layer));
      };
    });
  }

  CUFUSE_DEVICE void down(int layer) {
    add_residual<Shape::kDownPanels, Shape::kHidden>(
        this->args.down_bias ? this->args.down_bias + layer * Shape::kDim : nullptr, nullptr,
        this->words(Shape::kMiddle), this->tag(layer), this->words(Shape::kX), layer);
  }

  CUFUSE_DEVICE void head() {
    T* logits = this->args.logits +
                (this->args.all_logits ? static_cast<i64>(this->n) * Shape::kVocab : 0);
    const float inverse = this->args.inverse_temperature;
    const HashKey key =
        hash_key(this->args.seed, static_cast<u64>(this->position() + 1), 0);
    best_rank = 0;
    panels<Shape::kHeadPanels, Shape::kDim>([&](int row) {
      return [=](float sum) {
        if (row >= Shape::kVocab || thread_here() % 32 >= kPanelRows) return;
        const T rounded = from_float<T>(sum);
        logits[row] = rounded;
        const float logit = to_float(rounded);
        const u32 order = order_of(logit);
        u64 rank = order == 0 ? kRankOfNan : 0;
        if (order > kOrderOfMinusInfinity) {
          rank = inverse > 0.0f ? draw_rank(logit, row, inverse, key) : rank_of(order, row);
        }
        best_rank = max(best_rank, rank);
      };
    });
    const u64 rank = warp_max(best_rank);
    if (thread_here() % 32 == 0) {
      publish(this->best(this->n) + 2 * blockIdx.x, static_cast<u32>(rank >> 32),
              static_cast<u32>(rank), this->tag(Shape::kLayers - 1));
    }
    if (blockIdx.x == 0) {
      const int id = this->drawn(this->n, this->tag(Shape::kLayers - 1));
      if (thread_here() % 32 == 0) this->args.ids[this->n] = this->watch.expired ? -2 : id;
    }
  }

  // Every CTA has published its best of the last token, so all have read what changes here.
  CUFUSE_DEVICE void end() {
    if (blockIdx.x != 0 || thread_here() % 32 != 0) return;
    this->args.start[0] = this->start + this->args.n_tokens;
    this->args.control[kControlSequence] =
        this->sequence + static_cast<u32>(this->args.n_tokens * Shape::kLayers);
  }

 private:
  CUFUSE_DEVICE bool starts(int panels) const {
    int first = static_cast<int>(blockIdx.x) - this->turn;
    if (first < 0) first += Shape::kCtas;
    return first < panels;
  }

  // For each of this CTA's panels: prepare(row) before its sums are there, and what that returns
  // with the row's sum. Lanes l and l + 16 have the same row.
  template <int kPanels, int kK, typename Prepare>
  CUFUSE_DEVICE void panels(const Prepare& prepare) {
    const int lane = thread_here() % 32;
#pragma unroll 1
    for (int panel = this->take(kPanels); panel < kPanels; panel += Shape::kCtas) {
      const auto finish = prepare(panel * kPanelRows + lane % kPanelRows);
      const int buffer = panels_done++ % Shape::kPartials;
      const float* partial = reinterpret_cast<const float*>(shared + Shape::kPartialsAt) +
                             buffer * Shape::kPartialFloats;
      barrier_sync(2 + buffer, kPanelWarps * 32 + 32);
      this->tracer.begin(kFinishPhase);
      const float sum = panel_sum<Shape::template Panel<kK>::kChains>(partial);
      if (lane == 0) {
        mbarrier_arrive(reinterpret_cast<u64*>(shared + Shape::kPartialsEmptyAt) + buffer);
      }
      finish(sum);
      this->tracer.end(kFinishPhase);
    }
  }

  template <int kPanels, int kK>
  CUFUSE_DEVICE void add_residual(const T* bias, const T* embedded, const u64* residual,
                                  u32 residual_tag, u64* words, int layer) {
    panels<kPanels, kK>([&](int row) {
      const bool there = row < Shape::kDim;
      const float b = bias && there ? to_float(bias[row]) : 0.0f;
      const u64* word = residual + (there ? row : 0) / kPerWord<T>;
      const u64 seen = embedded ? 0 : look(word);
      const float plain = embedded && there ? to_float(embedded[row]) : 0.0f;
      return [=](float sum) {
        float old = plain;
        if (!embedded) {
          T values[kPerWord<T>];
          values_of<T>(values, settle(seen, word, residual_tag, this->watch));
          old = to_float(values[row % kPerWord<T>]);
        }
        if (bias) sum += b;
        hand_on<Shape::kDim>(words, row, from_float<T>(sum + old), this->tag(layer));
      };
    });
  }

  // Row `row` of a vector of kN; lanes of even rows take their neighbour's value along.
  template <int kN>
  CUFUSE_DEVICE void hand_on(u64* words, int row, T value, u32 tag) {
    const bool mine = row < kN && thread_here() % 32 < kPanelRows;
    if constexpr (kPerWord<T> == 1) {
      if (mine) publish(words + row, word_of(&value), tag);
    } else {
      u16 bits;
      memcpy(&bits, &value, sizeof bits);
      const u32 next = __shfl_down_sync(kFullMask, static_cast<u32>(bits), 1);
      if (mine && row % 2 == 0) publish(words + row / 2, bits | next << 16, tag);
    }
  }
};

}  // namespace cufuse
