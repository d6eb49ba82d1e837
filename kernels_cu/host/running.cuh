// A launch while it runs: its CTAs, their fibers, and what each of them waits for. Seen by the
// runtime's own files alone; all CTAs of a launch share one thread of the system, so that a seed
// decides everything and nothing here needs a lock.
#ifndef CUFUSE_HOST_RUNNING_CUH
#define CUFUSE_HOST_RUNNING_CUH

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "host/fibers.cuh"
#include "host/races.cuh"

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace cufuse::host {

constexpr std::size_t kStackBytes = 128 * 1024;
constexpr std::size_t kGuardBytes = 4096;

struct Context {
#if defined(__x86_64__)
  void* stack_pointer = nullptr;
#else
  ucontext_t ucontext;
#endif
};

// What a CTA runs in. Mapping the stacks anew costs more than a small kernel.
struct Workspace {
  std::vector<std::unique_ptr<char[]>> stacks;
  Shadow dynamic, fixed;
  std::vector<unsigned char> fixed_memory;  // its static shared memory while others run
  unsigned char before[kGuardBytes];
  alignas(1024) unsigned char dynamic_shared[kMaxSharedBytes];
  unsigned char after[kGuardBytes];

  // Dynamic shared memory or what lies close to it.
  bool is_near(const void* p) const {
    const auto offset = static_cast<std::size_t>(static_cast<const unsigned char*>(p) - before);
    return offset < sizeof(Workspace) - offsetof(Workspace, before);
  }
};

// Memory that a copy of this thread may still write or read.
struct Copy {
  const void* memory;
  unsigned size_bytes;
  int group;
  CopyGroups groups;
};

struct RunningFiber : Fiber {
  Context context;
  bool done = false;
  int ready = 0;  // its place among the fibers that can run, or -1
  // What it waits for, where, and together with which lanes.
  const char* waits_for = nullptr;
  unsigned mask = 0;
  Site site, outer;
  bool overtook = false;    // waits for the others to leave its last exchange
  bool in_cluster = false;  // came to its cluster's barrier and has not waited for it
  unsigned cluster_phase = 0;
  std::vector<Copy> copies;
  // Who called the functions that it is in; those that were inlined are not among them.
  std::uint32_t callers[32];
  unsigned depth = 0;
};

// Lanes that deposited a value, and lanes that took the others' away, since the last exchange.
struct Warp {
  unsigned arrived = 0, departed = 0, exited = 0;
  unsigned masks[32];
  const char* names[32];
  Box boxes[32];
};

struct Barrier {
  std::vector<unsigned> members;
  unsigned votes = 0, result = 0;
};

// The CTAs of a cluster and their barrier.
struct Cluster {
  std::vector<struct RunningCta*> ctas;  // null: has ended
  unsigned live = 0, arrived = 0, phase = 0;
  Far arriving, released;
};

// An array of the launch, or several that overlap.
struct Region {
  const unsigned char* begin = nullptr;
  std::size_t size_bytes = 0;
  bool read_only = true;
  std::string names;
  Shadow shadow;
};

// What all CTAs of a launch share.
struct Launch {
  void (*kernel)(const void*);
  const void* args;
  std::size_t args_bytes;
  Dim3 grid, block;
  unsigned cluster_size = 1;
  std::size_t shared_bytes;
  std::uint64_t seed;
  bool checked;
  std::uint64_t steps;
  std::chrono::steady_clock::time_point deadline;
  std::uintptr_t base = 0;  // where the kernel's library lies
  std::size_t library_bytes = 0, tls_module = 0, tls_bytes = 0;
  unsigned char* fixed = nullptr;  // static shared memory of the CTA that runs

  std::vector<Region> regions;  // ascending
  std::unordered_map<const void*, Word> words;

  bool failed = false, hangs = false;
  std::string message;
  std::vector<char> started;

  std::vector<RunningCta*> live;
  RunningCta* actor = nullptr;  // who acts in another CTA's name
  Context main;
  std::uint64_t random = 0;
  unsigned held = 0, hold = 0;  // a CTA that the others leave behind, and for how many turns
  // What went on, and the switches since anything did.
  std::uint64_t progress = 0, seen = 0, idle = 0, switches = 0;
};

struct RunningCta : Cta {
  RunningCta(Launch& l, std::unique_ptr<Workspace> w, unsigned number, unsigned n)
      : launch(&l),
        workspace(std::move(w)),
        linear(number),
        fibers(n),
        warps((n + 31) / 32),
        races(number, n),
        live(n) {}

  Launch* launch;
  std::unique_ptr<Workspace> workspace;
  unsigned linear;
  std::shared_ptr<Cluster> cluster;
  std::vector<RunningFiber> fibers;
  std::vector<Warp> warps;
  std::vector<unsigned> ready;  // fibers that can run
  std::vector<unsigned> scratch;
  Races races;
  unsigned live;
  Barrier barrier;
  std::uint64_t random = 0;
  unsigned style = 0, slow_warp = ~0u;
  unsigned period = 0, countdown = 0, far_countdown = 4096;
  unsigned turn_period = 0, turn = 0;  // yields until another CTA's turn
  std::uint64_t seen = 0, vain = 0;    // progress, and yields since there was any
  Region* last_region = nullptr;
};

inline RunningCta& running() { return *static_cast<RunningCta*>(cta); }
inline RunningFiber& current_fiber() { return *static_cast<RunningFiber*>(cta->current); }
inline Warp& current_warp() { return running().warps[cta->current->index / 32]; }

inline std::uint64_t next_random(std::uint64_t& state) {
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return state >> 11;
}
inline std::uint64_t next_random(RunningCta& c) { return next_random(c.random); }

// A call's place in the kernel.
Site site_of(const void* return_address);
// As a report has it: jit.py puts file and line there.
std::string text_of(Site site);
// End the launch with this report.
[[noreturn]] void fail(const std::string& what);
// Let others run; this fiber can go on at any time.
void preempt(RunningCta& c, Site site);
// Make an empty-handed region of each array and set the clocks to nothing.
void describe_arrays(Launch& launch, const Array* arrays, unsigned n);
// Exchange the static shared memory of the CTA that runs for another's.
void swap_fixed(RunningCta& from, RunningCta& to);

}  // namespace cufuse::host

#endif  // CUFUSE_HOST_RUNNING_CUH
