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
constexpr int kTraceHead = 8;         // of them before the events
constexpr u32 kTraceShort = 200;      // cycles; a shorter wait is one that found all there

template <bool kTrace>
struct Tracer {
  CUFUSE_DEVICE Tracer(u64*, int) {}
  CUFUSE_DEVICE void begin(Activity) {}
  CUFUSE_DEVICE void end(Activity) {}
  CUFUSE_DEVICE void phase() {}
  CUFUSE_DEVICE u32 now() const { return 0; }
  CUFUSE_DEVICE void then(Activity, Activity, u32) {}
  CUFUSE_DEVICE void spent(Activity, u32, u32) {}
  CUFUSE_DEVICE void waited(Activity, u32, u32) {}
  CUFUSE_DEVICE void waited(Activity, u32) {}
  CUFUSE_DEVICE void close() {}
};

// trace: [ctas, kRoles, kTraceWords]. A row's head is how many events there were, then timer_ns and
// clock_cycles when the role began and when it ended. An event is
// cycles << 8 | activity << 1 | (0 begins, 1 ends); those that find no room in the row are lost. It
// is written when a token does not wait for its writer, so not always in the order of its cycles.
// The role's first thread writes.
template <>
struct Tracer<true> {
  u64* const& trace;
  const int role;
  int count = 0;

  CUFUSE_DEVICE Tracer(u64* const& trace, int role) : trace(trace), role(role) {
    if (!writes()) return;
    row()[1] = timer_ns();
    row()[2] = clock_cycles();
  }

  CUFUSE_DEVICE void begin(Activity activity) { write(activity << 1, clock_cycles()); }
  CUFUSE_DEVICE void end(Activity activity) { write(activity << 1 | 1, clock_cycles()); }
  CUFUSE_DEVICE void phase() { begin(kNextPhase); }

  // What was before, by what `now` said then: one activity and the next, a span, a wait.
  CUFUSE_DEVICE u32 now() const { return static_cast<u32>(clock_cycles()); }
  CUFUSE_DEVICE void then(Activity last, Activity next, u32 at) {
    const u64 cycles = cycles_at(at);
    write(last << 1 | 1, cycles);
    write(next << 1, cycles);
  }
  CUFUSE_DEVICE void spent(Activity activity, u32 since, u32 until) {
    const u64 end = cycles_at(until);
    write(activity << 1, end - (until - since));
    write(activity << 1 | 1, end);
  }
  CUFUSE_DEVICE void waited(Activity activity, u32 since, u32 until) {
    if (until - since >= kTraceShort) spent(activity, since, until);
  }
  CUFUSE_DEVICE void waited(Activity activity, u32 since) { waited(activity, since, now()); }

  CUFUSE_DEVICE void close() {
    if (!writes()) return;
    row()[0] = static_cast<u64>(count);
    row()[3] = timer_ns();
    row()[4] = clock_cycles();
  }

 private:
  static CUFUSE_DEVICE u64 cycles_at(u32 at) {
    const u64 cycles = clock_cycles();
    return cycles - (static_cast<u32>(cycles) - at);
  }
  CUFUSE_DEVICE bool writes() const {
    return role == kMultiplierRole ? thread_here() == 0 : lane_here() == 0;
  }
  CUFUSE_DEVICE u64* row() const {
    return trace + (static_cast<i64>(blockIdx.x) * kRoles + role) * kTraceWords;
  }
  CUFUSE_DEVICE void write(int code, u64 cycles) {
    if (!writes()) return;
    const int at = kTraceHead + count++;
    if (at < kTraceWords) row()[at] = cycles << 8 | static_cast<u64>(code);
  }
};

}  // namespace cufuse
