// A ring of stages in shared memory: one warp fills it with all that its CTA will need, in order,
// and groups of consumer warps empty it, a stage each.
//
// Only `kWindow` fills are on their way at a time, and the rest of the ring fills as they land: what
// queues up in the memory system delays everything else that goes there.
#pragma once

#include "device/exchange.cuh"

namespace cufuse {

// How a stage is filled: bulk copies of one thread (sm_90 and newer) or cp.async of a warp.
enum class Copies { bulk, async };

constexpr int kGroupWarps = 4;           // consumers of a stage

template <int kStages_, int kStageBytes_, int kWindow_, Copies kCopies_>
struct RingShape {
  static constexpr int kStages = kStages_;
  static constexpr int kStageBytes = kStageBytes_;
  static constexpr int kPitch = kStageBytes + 128;  // a part of the cache has gaps between slices
  static constexpr int kWindow = kWindow_;
  static constexpr Copies kCopies = kCopies_;
  static constexpr int kBytes = kStages * (kPitch + 16);
  static_assert(kWindow >= 1 && kWindow < kStages, "the window is a part of the ring");
};

// A stage and how often the ring went round, its lowest bit.
template <int kStages>
struct RingCursor {
  int stage = 0;
  u32 round = 0;

  template <int kSteps>
  CUFUSE_DEVICE void advance() {
    stage += kSteps % kStages;
    round ^= kSteps / kStages & 1;
    wrap();
  }
  // By fewer steps than the ring has stages.
  CUFUSE_DEVICE void advance(int steps) {
    stage += steps;
    wrap();
  }

 private:
  CUFUSE_DEVICE void wrap() {
    if (stage >= kStages) {
      stage -= kStages;
      round ^= 1;
    }
  }
};

// The ring lies at byte kAt of the dynamic shared memory: addresses are constants, not registers.
template <typename Shape, int kAt>
struct Ring {
  using Cursor = RingCursor<Shape::kStages>;

  static CUFUSE_DEVICE unsigned char* at(const Cursor& cursor) {
    return dynamic_shared<unsigned char>() + kAt + cursor.stage * Shape::kPitch;
  }
  static CUFUSE_DEVICE u64* full(int stage) {
    return reinterpret_cast<u64*>(dynamic_shared<unsigned char>() + kAt +
                                  Shape::kStages * Shape::kPitch) + stage;
  }
  static CUFUSE_DEVICE u64* empty(int stage) { return full(Shape::kStages + stage); }

  // By one thread, before a barrier.
  static CUFUSE_DEVICE void init() {
    for (int stage = 0; stage < Shape::kStages; ++stage) {
      mbarrier_init(full(stage), Shape::kCopies == Copies::bulk ? 1 : 32);
      mbarrier_init(empty(stage), kGroupWarps);
    }
    fence_mbarrier_init();
  }

  static CUFUSE_DEVICE const unsigned char* wait(const Cursor& cursor, Watch& watch) {
    wait_for(full(cursor.stage), cursor.round, watch, kWaitsForWeights);
    return at(cursor);
  }

  // By each warp of the group, once it has read the stage.
  static CUFUSE_DEVICE void release(const Cursor& cursor) {
    __syncwarp();
    if (thread_here() % 32 == 0) mbarrier_arrive(empty(cursor.stage));
  }
};

// The warp that fills the ring; all its lanes call.
template <typename Shape, int kAt>
struct RingFiller {
  using Ring = cufuse::Ring<Shape, kAt>;
  typename Ring::Cursor next, landing;
  int in_flight = 0;
  u64 policy = 0;

  CUFUSE_DEVICE RingFiller() {
#if defined(CUFUSE_HOST) || __CUDA_ARCH__ >= 900
    if constexpr (Shape::kCopies == Copies::bulk) policy = evict_first_policy();
#endif
  }

  // size_bytes from `source` on in up to kSlices runs of slice_bytes, placed slice_pitch apart. What
  // is read once in a launch leaves L2 first.
  template <int kSlices, bool kReadOnce>
  CUFUSE_DEVICE void fill(const unsigned char* source,
                          int size_bytes,
                          int slice_bytes,
                          int slice_pitch,
                          Watch& watch) {
    const int lane = thread_here() % 32;
    wait_for(Ring::empty(next.stage), next.round ^ 1, watch, kWaitsForRoom);
    if (in_flight == Shape::kWindow) {
      wait_for(Ring::full(landing.stage), landing.round, watch, kWaitsForWeights);
      landing.template advance<1>();
      --in_flight;
    }
    if (watch.expired) return;  // nobody reads it any more
    unsigned char* stage = Ring::at(next);
    u64* full = Ring::full(next.stage);
#if defined(CUFUSE_HOST) || __CUDA_ARCH__ >= 900
    if constexpr (Shape::kCopies == Copies::bulk) {
      if (lane == 0) mbarrier_arrive_expect_tx(full, size_bytes);
      __syncwarp();
      // A lane for each slice.
      const int bytes = min(size_bytes - lane * slice_bytes, slice_bytes);
      if (lane < kSlices && bytes > 0) {
        if constexpr (kReadOnce) {
          copy_bulk(stage, source, bytes, full, policy);
        } else {
          copy_bulk(stage + lane * slice_pitch, source + lane * slice_bytes, bytes, full);
        }
      }
      __syncwarp();
    }
#endif
    if constexpr (Shape::kCopies == Copies::async) {
      for (int i = 0; i < kSlices; ++i) {
        const int bytes = min(size_bytes - i * slice_bytes, slice_bytes);
        for (int at = lane * 16; at < bytes; at += 32 * 16) {
          copy_async(stage + i * slice_pitch + at, source + i * slice_bytes + at, 16);
        }
      }
      copy_async_arrive(full);
    }
    next.template advance<1>();
    ++in_flight;
  }

  // Nothing may land in shared memory after the CTA has ended.
  CUFUSE_DEVICE void drain(Watch& watch) {
    for (; in_flight > 0; --in_flight) {
      for (int looks = 0; !mbarrier_try_wait(Ring::full(landing.stage), landing.round);) {
        if (++looks == 1 << 20) return;
      }
      landing.template advance<1>();
    }
    if constexpr (Shape::kCopies == Copies::async) copy_async_wait<0>();
  }
};

}  // namespace cufuse
