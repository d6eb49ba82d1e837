// What a role of a CTA does when: pairs of times, written to global memory as the kernel runs.
// Compiled in only for tracing; without it a Tracer is nothing.
#pragma once

#include "device/hw.cuh"

namespace cufuse {

enum RoleId : int { kFillerRole, kMultiplierRole, kFinisherRole, kRoles };
enum TracePhase : int {
  kWaitPhase,    // for activations of other CTAs
  kGatherPhase,  // them to shared memory, with a norm
  kMultiplyPhase,
  kAttentionPhase,
  kMergePhase,  // attention's warps, and its splits
  kFinishPhase,
};

constexpr int kTraceEvents = 1 << 14;  // of a role of a CTA

template <bool kTrace>
struct Tracer {
  CUFUSE_DEVICE Tracer(u64*, int) {}
  CUFUSE_DEVICE void begin(TracePhase) {}
  CUFUSE_DEVICE void end(TracePhase) {}
};

// trace: [ctas, kRoles, kTraceEvents]; an event is time << 8 | phase << 1 | (0 begins, 1 ends), and
// the first one of each row counts the others. The first thread of the role writes.
template <>
struct Tracer<true> {
  u64* row;
  int count;

  // The role's first thread writes.
  CUFUSE_DEVICE Tracer(u64* trace, int role)
      : row(trace + (static_cast<i64>(blockIdx.x) * kRoles + role) * kTraceEvents),
        count(thread_here() % 32 != 0 || (role == kMultiplierRole && thread_here() != 0)
                  ? kTraceEvents
                  : 0) {}

  CUFUSE_DEVICE void begin(TracePhase phase) { write(phase << 1); }
  CUFUSE_DEVICE void end(TracePhase phase) { write(phase << 1 | 1); }

 private:
  CUFUSE_DEVICE void write(int code) {
    if (count + 1 >= kTraceEvents) return;
    row[++count] = timer_ns() << 8 | static_cast<u64>(code);
    row[0] = static_cast<u64>(count);
  }
};

}  // namespace cufuse
