// What a role of a CTA does when, written to global memory as the kernel runs. Compiled in only for
// tracing; without it a Tracer is nothing.
#pragma once

#include "device/hw.cuh"

namespace cufuse {

enum RoleId : int { kFillerRole, kMultiplierRole, kFinisherRole, kRoles };
enum Activity : int {
  kWaiting,    // for activations of other CTAs
  kGathering,  // them to shared memory, with a norm
  kMultiplying,
  kAttending,
  kMerging,  // attention's groups of warps, and its splits
  kFinishing,
};

constexpr int kTraceWords = 1 << 13;  // of a role of a CTA
constexpr int kTraceHead = 8;         // of them before the events

template <bool kTrace>
struct Tracer {
  CUFUSE_DEVICE Tracer(u64*, int) {}
  CUFUSE_DEVICE void begin(Activity) {}
  CUFUSE_DEVICE void end(Activity) {}
  CUFUSE_DEVICE void close() {}
};

// trace: [ctas, kRoles, kTraceWords]. A row's head is how many events follow it, then timer_ns and
// clock_cycles when the role began and when it ended; an event is
// cycles << 8 | activity << 1 | (0 begins, 1 ends). The role's first thread writes.
template <>
struct Tracer<true> {
  u64* row;
  int count;

  CUFUSE_DEVICE Tracer(u64* trace, int role)
      : row(trace + (static_cast<i64>(blockIdx.x) * kRoles + role) * kTraceWords),
        count(thread_here() % 32 != 0 || (role == kMultiplierRole && thread_here() != 0)
                  ? kTraceWords
                  : kTraceHead) {
    if (count == kTraceWords) return;
    row[1] = timer_ns();
    row[2] = clock_cycles();
  }

  CUFUSE_DEVICE void begin(Activity activity) { write(activity << 1); }
  CUFUSE_DEVICE void end(Activity activity) { write(activity << 1 | 1); }
  CUFUSE_DEVICE void close() {
    if (count == kTraceWords) return;
    row[0] = static_cast<u64>(count - kTraceHead);
    row[3] = timer_ns();
    row[4] = clock_cycles();
  }

 private:
  CUFUSE_DEVICE void write(int code) {
    if (count + 1 < kTraceWords) row[count++] = clock_cycles() << 8 | static_cast<u64>(code);
  }
};

}  // namespace cufuse
