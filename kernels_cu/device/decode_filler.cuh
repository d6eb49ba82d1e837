// The role that fills the ring with all that its CTA will need: weights and the cache, in order.
#pragma once

#include "device/decode_role.cuh"

namespace cufuse {

template <typename Shape>
struct Filler : Role<Shape, kFillerRole> {
  using T = typename Shape::T;
  RingFiller<typename Shape::Ring, Shape::kRingAt> filler;

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
    for (int task = this->last_of(first, tasks); task >= first; task -= Shape::kCtas) {
      const int head = task % Shape::kKvHeads, part = task / Shape::kKvHeads;
      const int chunk = split.first_chunk + part * split.chunks;
      const int end = min(chunk + split.chunks, split.end_chunk);
      if (this->n() > 0 && end * Cache::kKeys > this->launch().start) wait_for_append(layer, head);
      const i64 rows = static_cast<i64>(layer * Shape::kKvHeads + head) * this->args.capacity;
      for (int c = chunk; c < end; ++c) {
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
    weights<Shape::kGateUpPanels, Shape::kDim>(this->args.gate_up, layer);
  }
  CUFUSE_DEVICE void down(int layer) {
    weights<Shape::kDownPanels, Shape::kHidden>(this->args.down, layer);
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
      const unsigned char* source = base + panel * Panel::kBytes;
#pragma unroll 1
      for (int block = 0; block < Panel::kBlocks; ++block) {
        filler.fill(source + block * Panel::kBlockTiles * Packing<T>::kTileBytes,
                    Panel::block_bytes(block), this->tracer);
      }
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
