// A ring of stages in shared memory: one warp fills it with all that its CTA will need, in order,
// and groups of consumer warps empty it, a stage each.
//
// Only `kWindow` fills are on their way at a time, and the rest of the ring fills as they land:
// what queues up in the memory system delays everything else that goes there. `kCalmWindow` are
// where little is read and much is waited for.
#pragma once

#include "device/exchange.cuh"
#include "device/trace.cuh"

namespace cufuse {

// How a stage is filled: bulk copies of one thread (sm_90 and newer) or cp.async of a warp.
enum class Copies { bulk, async };

constexpr int kGroupWarps = 4;  // consumers of a stage

// As in device/exchange.cuh, and traced; what is there at the first look costs the tracer nothing.
template <typename AnyTracer>
CUFUSE_DEVICE void wait_for(u64* barrier, u32 parity, Activity activity, AnyTracer& tracer) {
  if (mbarrier_test_wait(barrier, parity)) return;
  const u32 since = tracer.now();
  while (!mbarrier_try_wait(barrier, parity) && !is_over()) {
  }
  tracer.waited(activity, since, tracer.now());
}

template <int kStages_, int kStageBytes_, int kWindow_, int kCalmWindow_, Copies kCopies_>
struct RingShape {
  static constexpr int kStages = kStages_;
  static constexpr int kStageBytes = kStageBytes_;
  static constexpr int kPitch = kStageBytes + 128;  // values of the cache have gaps between slices
  static constexpr int kWindow = kWindow_;
  static constexpr int kCalmWindow = kCalmWindow_;
  static constexpr Copies kCopies = kCopies_;
  static constexpr int kBytes = kStages * (kPitch + 16);
  static_assert(kWindow >= 1 && kWindow < kStages, "the window is a part of the ring");
  static_assert(kCalmWindow >= 1 && kCalmWindow <= kWindow, "calm is what asks for less");
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
  // By any number.
  CUFUSE_DEVICE void skip(int steps) {
    const int rounds = (stage + steps) / kStages;
    stage += steps - rounds * kStages;
    round ^= rounds & 1;
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
                                  Shape::kStages * Shape::kPitch) +
           stage;
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

  template <typename AnyTracer>
  static CUFUSE_DEVICE const unsigned char* wait(const Cursor& cursor, AnyTracer& tracer) {
    wait_for(full(cursor.stage), cursor.round, kWaitingForWeights, tracer);
    return at(cursor);
  }

  // By each warp of the group, once it has read the stage.
  static CUFUSE_DEVICE void release(const Cursor& cursor) {
    __syncwarp();
    if (lane_here() == 0) mbarrier_arrive(empty(cursor.stage));
  }
};

// The warp that fills the ring; all its lanes call.
template <typename Shape, int kAt>
struct RingFiller {
  using Ring = cufuse::Ring<Shape, kAt>;
  typename Ring::Cursor next, landing;
  int in_flight = 0;
  int window = Shape::kWindow;  // so many may be
  u64 policy = 0;

  CUFUSE_DEVICE RingFiller() {
#if defined(CUFUSE_HOST) || __CUDA_ARCH__ >= 900
    if constexpr (Shape::kCopies == Copies::bulk) policy = evict_first_policy();
#endif
  }

  // size_bytes that are read once in a launch, and so leave L2 first.
  template <typename AnyTracer>
  CUFUSE_DEVICE void fill(const unsigned char* source, int size_bytes, AnyTracer& tracer) {
    if (!begin_stage(tracer)) return;
    if constexpr (Shape::kCopies == Copies::bulk) {
      announce(size_bytes);
      if (lane_here() == 0) copy_one(0, source, size_bytes, true);
    } else {
      copy_by_warp(0, source, size_bytes);
    }
    end_stage();
  }

  // size_bytes of each of two sources: of the first as they are, of the second to second_at in
  // kSlices runs of slice_bytes that lie slice_pitch apart.
  template <int kSlices, typename AnyTracer>
  CUFUSE_DEVICE void fill_sliced(const unsigned char* first,
                                 const unsigned char* second,
                                 int size_bytes,
                                 int second_at,
                                 int slice_bytes,
                                 int slice_pitch,
                                 AnyTracer& tracer) {
    if (!begin_stage(tracer)) return;
    if constexpr (Shape::kCopies == Copies::bulk) {
      // A lane for each slice, and one for the first source.
      const int lane = lane_here();
      const int at = lane * slice_bytes, bytes = min(size_bytes - at, slice_bytes);
      announce(2 * size_bytes);
      if (lane == kSlices) {
        copy_one(0, first, size_bytes, false);
      } else if (lane < kSlices && bytes > 0) {
        copy_one(second_at + lane * slice_pitch, second + at, bytes, false);
      }
    } else {
      copy_by_warp(0, first, size_bytes);
      for (int slice = 0; slice < kSlices; ++slice) {
        const int at = slice * slice_bytes;
        copy_by_warp(second_at + slice * slice_pitch, second + at,
                     min(size_bytes - at, slice_bytes));
      }
    }
    end_stage();
  }

  // size_bytes in all, by kCopies tensor copies: copy(i, stage, barrier) by a lane each.
  template <int kCopies, typename Copy, typename AnyTracer>
  CUFUSE_DEVICE void fill_boxes(int size_bytes, const Copy& copy, AnyTracer& tracer) {
    static_assert(kCopies <= 32, "a lane for each");
    if (!begin_stage(tracer)) return;
    announce(size_bytes);
    if (lane_here() < kCopies) copy(lane_here(), Ring::at(next), Ring::full(next.stage));
    end_stage();
  }

  // By cp.async: copy(stage) by all lanes.
  template <typename Copy, typename AnyTracer>
  CUFUSE_DEVICE void fill_by_warp(const Copy& copy, AnyTracer& tracer) {
    if (!begin_stage(tracer)) return;
    copy(Ring::at(next));
    end_stage();
  }

  // Nothing may land in shared memory after the CTA has ended.
  CUFUSE_DEVICE void drain() {
    for (; in_flight > 0; --in_flight) {
      for (int looks = 0; !mbarrier_try_wait(Ring::full(landing.stage), landing.round);) {
        if (++looks == 1 << 20) return;
      }
      landing.template advance<1>();
    }
    if constexpr (Shape::kCopies == Copies::async) copy_async_wait<0>();
  }

 private:
  // Wait until the next stage is free and few enough are on their way; false when that is in vain.
  template <typename AnyTracer>
  CUFUSE_DEVICE bool begin_stage(AnyTracer& tracer) {
    wait_for(Ring::empty(next.stage), next.round ^ 1, kWaitingForRoom, tracer);
    while (true) {
      const bool waits = in_flight >= window;
      if (waits) wait_for(Ring::full(landing.stage), landing.round);
      // All lanes copy or none. What is on its way when all is over is left to `drain`.
      if (__any_sync(kFullMask, is_over())) return false;
      if (!waits) return true;
      landing.template advance<1>();
      --in_flight;
    }
  }

  CUFUSE_DEVICE void end_stage() {
    if constexpr (Shape::kCopies == Copies::async) copy_async_arrive(Ring::full(next.stage));
    next.template advance<1>();
    ++in_flight;
  }

  // By all lanes, before any of them copies.
  CUFUSE_DEVICE void announce(int size_bytes) {
#if defined(CUFUSE_HOST) || __CUDA_ARCH__ >= 900
    if (lane_here() == 0) mbarrier_arrive_expect_tx(Ring::full(next.stage), size_bytes);
    __syncwarp();
#endif
  }
  CUFUSE_DEVICE void copy_one(int at, const unsigned char* source, int size_bytes, bool read_once) {
#if defined(CUFUSE_HOST) || __CUDA_ARCH__ >= 900
    if (read_once) {
      copy_bulk(Ring::at(next) + at, source, size_bytes, Ring::full(next.stage), policy);
    } else {
      copy_bulk(Ring::at(next) + at, source, size_bytes, Ring::full(next.stage));
    }
#endif
  }
  CUFUSE_DEVICE void copy_by_warp(int at, const unsigned char* source, int size_bytes) {
    for (int i = lane_here() * 16; i < size_bytes; i += 32 * 16) {
      copy_async(Ring::at(next) + at + i, source + i, 16);
    }
  }
};

}  // namespace cufuse
