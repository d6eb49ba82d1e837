// What a role of a CTA does when, written to global memory as the kernel runs. Compiled in only for
// tracing; without it a Tracer is nothing.
#pragma once

#include "device/hw.cuh"

namespace cufuse {

enum RoleId : int { kFillerRole, kMultiplierRole, kFinisherRole, kRoles };
enum Activity : int {
  kWaitingForActivations,  // of other CTAs
  kWaitingForWeights,      // and for the cache: a stage of the ring is to land
  kWaitingForRoom,         // in the ring
  kWaitingForSums,         // to be there, or to be read
  kGathering,              // activations to shared memory, with a norm
  kMultiplying,
  kAttending,
  kMerging,    // attention's groups of warps, and its splits, and storing the result
  kFinishing,  // a panel: its sums added, and what became of them stored for other CTAs
  kDrawing,    // from what filters leave
  kNextPhase,  // no span: a role goes on to its next phase
};

constexpr int kTraceWords = 1 << 13;  // of a role of a CTA
constexpr int kTraceHead = 8;         // of them before the spans
constexpr int kActivityBits = 5;      // of a span's word
constexpr u32 kTraceShort = 200;      // cycles; a shorter wait is one that found all there
static_assert(kNextPhase < 1 << kActivityBits, "an activity fits its bits");

template <bool kTrace>
struct Tracer {
  CUFUSE_DEVICE Tracer(u64*, int) {}
  CUFUSE_DEVICE u32 now() const { return 0; }
  CUFUSE_DEVICE void spent(Activity, u32, u32) {}
  CUFUSE_DEVICE void waited(Activity, u32, u32) {}
  CUFUSE_DEVICE void phase() {}
  CUFUSE_DEVICE void waits() {}
  CUFUSE_DEVICE void gathers() {}
  CUFUSE_DEVICE void gathered(u32) {}
  CUFUSE_DEVICE void close() {}
};

// trace: [ctas, kRoles, kTraceWords]. A row's head is how many spans there were, then timer_ns and
// clock_cycles when the role began and when it ended. A span's upper half is the cycles it took,
// its lower half the clock at its end << kActivityBits | activity; the head tells the bits of the
// clock that are shifted out. Spans that find no room in the row are lost. They are written when a
// token does not wait for their writer, the role's first thread: in the phase that they belong to,
// but not always in the order of their cycles.
template <>
struct Tracer<true> {
  // A span is few instructions: when it was 40 the kernel outgrew the instruction cache and a step
  // took 9 % longer (H200, Qwen3-0.6B). And it is few registers: where the row ends is the same for
  // all of a warp, and who does not write has no room.
  u64* const trace;
  const int role;
  const int end;  // word
  int next;       // word, counted from the end
  u32 since = 0;  // when a gather began to wait, then when it began to gather

  CUFUSE_DEVICE Tracer(u64* trace, int role)
      : trace(trace),
        role(role),
        end((static_cast<int>(blockIdx.x) * kRoles + role + 1) * kTraceWords),
        next(writes() ? kTraceHead - kTraceWords : 0) {
    if (!writes()) return;
    row()[1] = timer_ns();
    row()[2] = clock_cycles();
  }

  CUFUSE_DEVICE u32 now() const { return clock_low(); }

  // What was before, by what `now` said then.
  CUFUSE_DEVICE void spent(Activity activity, u32 since, u32 until) {
    if (next < 0) {
      store_word<Order::relaxed>(trace + (end + next),
                                 static_cast<u64>(until - since) << 32 |
                                     (until << kActivityBits | static_cast<u32>(activity)));
    }
    ++next;
  }
  CUFUSE_DEVICE void waited(Activity activity, u32 since, u32 until) {
    if (until - since >= kTraceShort) spent(activity, since, until);
  }
  CUFUSE_DEVICE void phase() {
    const u32 at = now();
    spent(kNextPhase, at, at);
  }

  // A gather waits for activations, then gathers. The wait is written while the looks at what is
  // gathered are under way, the gathering when a token no longer waits.
  CUFUSE_DEVICE void waits() { since = now(); }
  CUFUSE_DEVICE void gathers() {
    const u32 at = now();
    waited(kWaitingForActivations, since, at);
    since = at;
  }
  CUFUSE_DEVICE void gathered(u32 until) { spent(kGathering, since, until); }

  CUFUSE_DEVICE void close() {
    if (!writes()) return;
    row()[0] = static_cast<u64>(next + kTraceWords - kTraceHead);
    row()[3] = timer_ns();
    row()[4] = clock_cycles();
  }

 private:
  CUFUSE_DEVICE bool writes() const {
    return role == kMultiplierRole ? thread_here() == 0 : lane_here() == 0;
  }
  CUFUSE_DEVICE u64* row() const { return trace + (end - kTraceWords); }
};

}  // namespace cufuse
