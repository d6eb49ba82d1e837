// A CUDA grid on the CPU: a CTA at a time on each worker thread, a CUDA thread on each fiber.
//
// Cooperative grids get one worker thread per CTA, so that all CTAs are resident. A fault (wrong
// mask, hang, out of shared memory) ends the launch and becomes a Python exception.
#include "host/fibers.cuh"

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "host/races.cuh"

#if defined(__x86_64__)
#include <xmmintrin.h>
#else
#include <ucontext.h>
#endif

namespace cufuse::host {

__thread Cta* cta = nullptr;

namespace {

constexpr std::size_t kStackBytes = 128 * 1024;
constexpr std::size_t kGuardBytes = 4096;

#if defined(__x86_64__)
// Save the callee-saved registers and the stack pointer in *from, go on where `to` was saved.
extern "C" void cufuse_switch_fiber(void** from, void* to);
asm(R"(
.text
.type cufuse_switch_fiber, @function
cufuse_switch_fiber:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
)");

struct Context {
  void* stack_pointer = nullptr;
};

void make_context(Context& context, char* stack, void (*entry)()) {
  auto top = reinterpret_cast<std::uintptr_t>(stack + kStackBytes) & ~std::uintptr_t{15};
  void** slot = reinterpret_cast<void**>(top);
  *--slot = nullptr;  // a return address for `entry`, which never returns
  *--slot = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; ++i) *--slot = nullptr;
  context.stack_pointer = slot;
}

void switch_context(Context& from, Context& to) {
  cufuse_switch_fiber(&from.stack_pointer, to.stack_pointer);
}

// Flush denormals to zero, as CuPy compiles for the GPU.
void set_float_mode() { _mm_setcsr(_mm_getcsr() | _MM_FLUSH_ZERO_ON | 0x0040); }
#else
struct Context {
  ucontext_t ucontext;
};

void make_context(Context& context, char* stack, void (*entry)()) {
  getcontext(&context.ucontext);
  context.ucontext.uc_stack.ss_sp = stack;
  context.ucontext.uc_stack.ss_size = kStackBytes;
  context.ucontext.uc_link = nullptr;
  makecontext(&context.ucontext, entry, 0);
}

void switch_context(Context& from, Context& to) { swapcontext(&from.ucontext, &to.ucontext); }

void set_float_mode() {}
#endif

// What a worker thread runs its CTAs in. Mapping the stacks anew costs more than a small kernel.
struct Workspace {
  std::vector<std::unique_ptr<char[]>> stacks;
  Shadow dynamic, fixed;
  unsigned char before[kGuardBytes];
  alignas(1024) unsigned char dynamic_shared[kMaxSharedBytes];
  unsigned char after[kGuardBytes];

  // Dynamic shared memory or what lies close to it.
  bool is_near(const void* p) const {
    const auto offset = static_cast<std::size_t>(static_cast<const unsigned char*>(p) - before);
    return offset < sizeof(Workspace) - offsetof(Workspace, before);
  }
};

// Shared memory that a copy of this thread may still write or read.
struct Copy {
  const void* shared;
  unsigned size_bytes;
  int group;
  bool is_write;
  Site site;
};

struct RunningFiber : Fiber {
  Context context;
  bool done = false;
  int ready = 0;  // its place among the fibers that can run, or -1
  // What it waits for, where, and together with which lanes.
  const char* waits_for = nullptr;
  unsigned mask = 0;
  Site site, outer;
  bool overtook = false;  // waits for the others to leave its last exchange
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

// What all CTAs of a launch share.
struct Launch {
  void (*kernel)(const void*);
  const void* args;
  Dim3 grid, block;
  std::size_t shared_bytes;
  std::uint64_t seed;
  bool checked;
  std::uint64_t steps;
  std::chrono::steady_clock::time_point deadline;
  std::uintptr_t base = 0;  // where the kernel's library lies
  std::size_t library_bytes = 0, tls_module = 0, tls_bytes = 0;
  std::atomic<bool> failed{false};
  std::atomic<bool> hangs{false};
  std::atomic<std::uint64_t> progress{0};
  std::string message;  // written once, by whoever set `failed`
  std::mutex mutex;
  std::map<std::string, std::vector<unsigned>> waiting;  // what each CTA waits for in a hang
  std::vector<char> started;
};

struct RunningCta : Cta {
  RunningCta(Launch& l, Workspace& w, unsigned n)
      : launch(&l), workspace(&w), fibers(n), warps((n + 31) / 32), races(n), live(n) {}

  Launch* launch;
  Workspace* workspace;
  unsigned linear = 0;
  std::vector<RunningFiber> fibers;
  std::vector<Warp> warps;
  std::vector<unsigned> ready;  // fibers that can run
  std::vector<unsigned> scratch;
  Races races;
  unsigned live;
  Barrier barrier;
  Context main;
  std::uint64_t random = 0, switches = 0;
  // What went on, and the steps since anything did, here or in another CTA.
  std::uint64_t progress = 0, told = 0, seen = 0, idle = 0;
  unsigned style = 0, slow_warp = ~0u;
  unsigned period = 0, countdown = 0, far_countdown = 4096;
};

RunningCta& running() { return *static_cast<RunningCta*>(cta); }
RunningFiber& current_fiber() { return *static_cast<RunningFiber*>(cta->current); }
Warp& current_warp() { return running().warps[cta->current->index / 32]; }

std::uint64_t next_random(std::uint64_t& state) {
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return state >> 11;
}
std::uint64_t next_random(RunningCta& c) { return next_random(c.random); }

std::uint64_t scramble(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

Site site_of(const void* return_address) {
  const RunningFiber& self = current_fiber();
  const std::uintptr_t at =
      reinterpret_cast<std::uintptr_t>(return_address) - 1 - running().launch->base;
  if (at >= running().launch->library_bytes) return self.outer;  // one of ours called
  return {static_cast<std::uint32_t>(at), self.depth ? self.callers[(self.depth - 1) % 32] : 0};
}

// ---- what went wrong

// jit.py puts file and line in its place.
std::string text_of(Site site) {
  char text[48];
  std::snprintf(text, sizeof text, "<at %x %x>", site.at, site.caller);
  return text;
}

// 0,2-5
std::string ranges(const std::vector<unsigned>& numbers) {
  std::string text;
  for (std::size_t i = 0; i < numbers.size();) {
    std::size_t j = i;
    while (j + 1 < numbers.size() && numbers[j + 1] == numbers[j] + 1) ++j;
    if (!text.empty()) text += ",";
    text += std::to_string(numbers[i]);
    if (j > i) text += "-" + std::to_string(numbers[j]);
    i = j + 1;
  }
  return text;
}

// Where every thread of this CTA is, equal lanes and equal warps together.
std::string who_waits(const RunningCta& c) {
  std::map<std::string, std::vector<unsigned>> warps;
  for (unsigned w = 0; w < c.warps.size(); ++w) {
    std::map<std::string, std::vector<unsigned>> lanes;
    for (unsigned i = w * 32; i < c.fibers.size() && i < w * 32 + 32; ++i) {
      const RunningFiber& fiber = c.fibers[i];
      std::string text = "ended";
      if (!fiber.done) {
        text = fiber.waits_for ? std::string("waits at ") + fiber.waits_for : "runs";
        char mask[24];
        std::snprintf(mask, sizeof mask, " of mask %08x", fiber.mask);
        if (fiber.mask) text += mask;
        if (fiber.site.at) text += " " + text_of(fiber.site);
      }
      lanes[text].push_back(i % 32);
    }
    std::string text;
    for (const auto& [what, which] : lanes)
      text += (text.empty() ? "lanes " : "; lanes ") + ranges(which) + " " + what;
    warps[text].push_back(w);
  }
  std::string text;
  for (const auto& [what, which] : warps) text += "\n    warp " + ranges(which) + ": " + what;
  return text;
}

// Leave the CTA for good: its fibers are abandoned.
[[noreturn]] void leave_cta() {
  RunningCta& c = running();
  if (c.launch->hangs) {
    const std::lock_guard lock(c.launch->mutex);
    c.launch->waiting[who_waits(c)].push_back(c.linear);
  }
  Context scrap;
  switch_context(scrap, c.main);
  std::abort();
}

[[noreturn]] void fail(const std::string& what) {
  Launch& launch = *running().launch;
  if (!launch.failed.exchange(true)) {
    const RunningFiber& fiber = current_fiber();
    launch.message = what + " (block " + std::to_string(cta->block_index.x) + "," +
                     std::to_string(cta->block_index.y) + "," + std::to_string(cta->block_index.z) +
                     " warp " + std::to_string(fiber.index / 32) + " lane " +
                     std::to_string(fiber.index % 32);
    if (fiber.site.at) launch.message += " " + text_of(fiber.site);
    launch.message += ")";
  }
  leave_cta();
}

[[noreturn]] void hang(const char* why) {
  Launch& launch = *running().launch;
  if (!launch.failed.exchange(true)) {
    launch.message = std::string("the kernel hangs: ") + why;
    launch.hangs = true;
  }
  leave_cta();
}

std::string hang_text(Launch& launch) {
  std::string text = launch.message;
  for (auto& [what, which] : launch.waiting) {
    std::sort(which.begin(), which.end());
    text += "\n  block " + ranges(which) + what;
  }
  std::vector<unsigned> absent;
  for (unsigned i = 0; i < launch.started.size(); ++i) {
    if (!launch.started[i]) absent.push_back(i);
  }
  if (!absent.empty()) text += "\n  block " + ranges(absent) + " never started";
  return text;
}

// ---- who runs next

void make_ready(RunningCta& c, unsigned index) {
  c.fibers[index].ready = static_cast<int>(c.ready.size());
  c.ready.push_back(index);
}

void make_unready(RunningCta& c, RunningFiber& fiber) {
  c.ready[fiber.ready] = c.ready.back();
  c.fibers[c.ready.back()].ready = fiber.ready;
  c.ready.pop_back();
  fiber.ready = -1;
}

// Some CTAs let a warp run as far as it comes, some hold one warp back, some choose blindly.
RunningFiber& choose(RunningCta& c) {
  const std::uint64_t random = next_random(c);
  const std::size_t n = c.ready.size();
  if (c.style == 0 && random % 4) return c.fibers[c.ready.back()];
  std::size_t place = (random >> 8) % n;
  if (c.style == 1 && random % 16) {
    for (int i = 0; i < 3 && c.ready[place] / 32 == c.slow_warp; ++i) place = next_random(c) % n;
  }
  return c.fibers[c.ready[place]];
}

void switch_to(RunningCta& c, RunningFiber& self, RunningFiber& next) {
  if (&next == &self) return;
  c.current = &next;
  switch_context(self.context, next.context);
}

// Every now and then: has another CTA failed, does anything still go on?
void look_around(RunningCta& c) {
  constexpr unsigned kEvery = 256;
  if (++c.switches % kEvery) return;
  Launch& launch = *c.launch;
  if (launch.failed) leave_cta();
  launch.progress += c.progress - c.told;
  c.told = c.progress;
  const std::uint64_t progress = launch.progress;
  if (progress != c.seen) {
    c.seen = progress;
    c.idle = 0;
  } else {
    c.idle += kEvery;
    std::this_thread::yield();
    if (c.idle > launch.steps) hang("nothing went on for its budget of steps");
  }
  if (std::chrono::steady_clock::now() > launch.deadline) hang("its time is over");
}

// Let others run; this fiber can go on at any time.
void preempt(RunningCta& c, Site site) {
  RunningFiber& self = current_fiber();
  self.site = site;
  if (c.async.in_flight) land_some();
  look_around(c);
  switch_to(c, self, choose(c));
  self.site = {};
}

// Wait until another fiber makes this one ready.
void sleep(const char* name, unsigned mask, Site site) {
  RunningCta& c = running();
  RunningFiber& self = current_fiber();
  if (c.async.in_flight) land_some();
  self.waits_for = name;
  self.mask = mask;
  self.site = site;
  make_unready(c, self);
  if (c.ready.empty()) hang("every thread waits for another");
  look_around(c);
  switch_to(c, self, choose(c));
  self.waits_for = nullptr;
  self.mask = 0;
  self.site = {};
}

void complete_barrier(RunningCta& c) {
  Barrier& barrier = c.barrier;
  barrier.result = barrier.votes;
  barrier.votes = 0;
  ++c.progress;
  std::sort(barrier.members.begin(), barrier.members.end());
  if (c.launch->checked) c.races.meet(barrier.members);
  for (unsigned m : barrier.members) {
    if (c.fibers[m].ready < 0) make_ready(c, m);
  }
  barrier.members.clear();
}

void run_fiber() {
  RunningCta& c = running();
  c.launch->kernel(c.launch->args);
  RunningFiber& self = current_fiber();
  Warp& warp = c.warps[self.index / 32];
  self.site = {};
  self.done = true;
  ++c.progress;
  warp.exited |= 1u << (self.index % 32);
  for (unsigned lane = 0; lane < 32; ++lane) {
    if (warp.arrived >> lane & 1 && (warp.masks[lane] & warp.exited) &&
        (warp.arrived & warp.masks[lane]) != warp.masks[lane]) {
      self.site = c.fibers[self.index / 32 * 32 + lane].site;
      fail(std::string(warp.names[lane]) + ": a lane named in the mask has exited");
    }
  }
  make_unready(c, self);
  --c.live;
  // A barrier counts the threads that still run: this exit may complete it.
  if (c.live && c.barrier.members.size() == c.live) complete_barrier(c);
  if (c.live && c.ready.empty()) hang("every thread waits for another");
  if (c.live) switch_to(c, self, choose(c));
  c.launch->progress += c.progress - c.told;
  leave_cta();
}

class Workspaces {
 public:
  std::unique_ptr<Workspace> take() {
    const std::lock_guard lock(mutex_);
    if (free_.empty()) return std::make_unique<Workspace>();
    auto workspace = std::move(free_.back());
    free_.pop_back();
    return workspace;
  }
  void give_back(std::unique_ptr<Workspace> workspace) {
    const std::lock_guard lock(mutex_);
    if (free_.size() < 16) free_.push_back(std::move(workspace));
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Workspace>> free_;
} workspaces;

// `__shared__` variables are thread-local ones of the kernel's library.
struct ThreadLocalIndex {
  unsigned long module, offset;
};
extern "C" void* __tls_get_addr(ThreadLocalIndex*);

int find_library(dl_phdr_info* info, std::size_t, void* data) {
  Launch& launch = *static_cast<Launch*>(data);
  if (info->dlpi_addr != launch.base) return 0;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& part = info->dlpi_phdr[i];
    launch.library_bytes = std::max<std::size_t>(launch.library_bytes, part.p_vaddr + part.p_memsz);
    if (part.p_type != PT_TLS) continue;
    launch.tls_module = info->dlpi_tls_modid;
    launch.tls_bytes = part.p_memsz;
  }
  return 1;
}

void run_cta(Launch& launch, unsigned linear, Workspace& workspace) {
  const unsigned n = launch.block.count();
  RunningCta c(launch, workspace, n);
  c.linear = linear;
  c.grid = launch.grid;
  c.block = launch.block;
  c.block_index = {linear % launch.grid.x, linear / launch.grid.x % launch.grid.y,
                   linear / launch.grid.x / launch.grid.y};
  c.random = scramble((launch.seed + 1) * 0x9E3779B97F4A7C15ull + linear) | 1;
  c.style = next_random(c) % 3;
  c.slow_warp = next_random(c) % c.warps.size();
  c.period = 8u << (next_random(c) % 3 * 2);
  c.countdown = 1 + next_random(c) % c.period;
  auto& stacks = workspace.stacks;
  while (stacks.size() < n) stacks.emplace_back(new char[kStackBytes]);
  for (unsigned i = 0; i < n; ++i) {
    RunningFiber& fiber = c.fibers[i];
    fiber.index = i;
    fiber.thread = {i % launch.block.x, i / launch.block.x % launch.block.y,
                    i / launch.block.x / launch.block.y};
    // All stacks begin at the same offset in a page: spread them over the cache's sets.
    char* stack = stacks[i].get() - i % 61 * 128;
    make_context(fiber.context, stack, run_fiber);
    fiber.stack_end = reinterpret_cast<unsigned char*>(stack + kStackBytes);
    make_ready(c, i);
  }
  if (n % 32) c.warps.back().exited = ~0u << (n % 32);
  c.dynamic_shared = workspace.dynamic_shared;
  c.dynamic_shared_bytes = launch.shared_bytes;
  c.seed = launch.seed;
  std::memset(c.dynamic_shared, 0xFF, launch.shared_bytes);
  unsigned char* fixed = nullptr;
  if (launch.tls_bytes) {
    ThreadLocalIndex index{launch.tls_module, 0};
    fixed = static_cast<unsigned char*>(__tls_get_addr(&index));
    std::memset(fixed, 0xFF, launch.tls_bytes);
  }
  if (launch.checked) {
    workspace.dynamic.reset(c.dynamic_shared, launch.shared_bytes);
    workspace.fixed.reset(fixed, launch.tls_bytes);
  }
  launch.started[linear] = 1;
  ++c.progress;
  cta = &c;
  RunningFiber& first = c.fibers[next_random(c) % n];
  c.current = &first;
  switch_context(c.main, first.context);
  cta = nullptr;
}

std::string run_grid(Launch& launch, bool cooperative) {
  if (launch.shared_bytes > kMaxSharedBytes) return "more shared memory asked than a CTA can have";
  if (launch.block.count() > 1024) return "more than 1024 threads in a CTA";
  Dl_info library;
  if (dladdr(reinterpret_cast<void*>(launch.kernel), &library)) {
    launch.base = reinterpret_cast<std::uintptr_t>(library.dli_fbase);
    dl_iterate_phdr(find_library, &launch);
  }
  std::atomic<unsigned> next{0};
  const unsigned n_ctas = launch.grid.count();
  const unsigned cores = std::max(1u, std::thread::hardware_concurrency());
  const unsigned n_workers = cooperative ? n_ctas : std::min(n_ctas, cores);
  launch.started.resize(n_ctas);
  std::uint64_t random = scramble(launch.seed + 0x51ED270B0A1F2D3Cull) | 1;
  std::vector<unsigned> order(n_ctas);
  for (unsigned i = 0; i < n_ctas; ++i) {
    order[i] = i;
    std::swap(order[i], order[next_random(random) % (i + 1)]);
  }
  std::vector<std::thread> workers;
  for (unsigned w = 0; w < n_workers; ++w) {
    unsigned delay_us = 0;
    if (n_workers > 1 && next_random(random) % 4 == 0) delay_us = next_random(random) % 300;
    workers.emplace_back([&, delay_us] {
      set_float_mode();
      auto workspace = workspaces.take();
      if (delay_us) std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
      for (unsigned i = next++; i < n_ctas && !launch.failed; i = next++)
        run_cta(launch, order[i], *workspace);
      workspaces.give_back(std::move(workspace));
    });
  }
  for (auto& worker : workers) worker.join();
  if (!launch.failed) return std::string();
  return launch.hangs ? hang_text(launch) : launch.message;
}

// ---- every access of a kernel, as g++ -fsanitize=thread reports it

[[noreturn]] void report_race(RunningCta& c,
                              const Shadow& shadow,
                              const void* p,
                              unsigned size,
                              unsigned kind,
                              Site site,
                              const Cell& other) {
  RunningFiber& self = current_fiber();
  auto access = [&](unsigned k, unsigned thread, Site where) {
    std::string text = k & kWrite ? "write" : "read";
    if (k & kAtomic) text = "atomic " + text;
    if (k & kInFlight) text = (k & kProxy ? "copy's or product's " : "copy's ") + text;
    return text + " by warp " + std::to_string(thread / 32) + " lane " +
           std::to_string(thread % 32) + " " + text_of(where);
  };
  std::string text = other.kind & kInFlight ? "a copy in flight was not waited for: "
                     : kind & kProxy        ? "a store without fence_proxy_async, or a race: "
                                            : "a race in shared memory: ";
  text += access(kind, self.index, site) + " and " +
          (other.thread == c.fibers.size() ? "a copy that landed " + text_of(other.site)
                                           : access(other.kind, other.thread, other.site)) +
          ", " + std::to_string(size) + " bytes at " +
          (&shadow == &c.workspace->dynamic ? "dynamic" : "static") + " offset " +
          std::to_string(static_cast<const unsigned char*>(p) - shadow.begin);
  self.site = {};
  fail(text);
}

Shadow* shadow_of(Workspace& w, const void* p) {
  return w.dynamic.holds(p) ? &w.dynamic : w.fixed.holds(p) ? &w.fixed : nullptr;
}

// Note an access; returns whether it was one of shared memory.
bool note(RunningCta& c, const void* p, unsigned size, unsigned kind, Site site) {
  Workspace& w = *c.workspace;
  Shadow* shadow = shadow_of(w, p);
  const auto* byte = static_cast<const unsigned char*>(p);
  if (w.is_near(p) && (!shadow || byte + size > w.dynamic.begin + w.dynamic.size_bytes)) {
    current_fiber().site = site;
    fail("an access of " + std::to_string(size) + " bytes at offset " +
         std::to_string(byte - w.dynamic_shared) + " of dynamic shared memory, which has " +
         std::to_string(w.dynamic.size_bytes) + " bytes");
  }
  if (!shadow) return false;
  const Cell* other =
      c.races.access(c.current->index, *shadow, byte - shadow->begin, size, kind, site, c.random);
  if (other) report_race(c, *shadow, p, size, kind, site, *other);
  return true;
}

inline void touched(const void* p, unsigned size, unsigned kind, const void* return_address) {
  RunningCta& c = running();
  if (kind & kWrite) ++c.progress;
  if (!c.workspace->fixed.holds(p) && !c.workspace->is_near(p)) {
    if (c.wgmma.used()) {
      current_fiber().site = site_of(return_address);
      registers_touched(p, size, kind & kWrite);
      current_fiber().site = {};
    }
    // A thread that polls a plain word must let the others run.
    if (--c.far_countdown) return;
    c.far_countdown = 4096;
    preempt(c, site_of(return_address));
    return;
  }
  const Site site = site_of(return_address);
  if (--c.countdown == 0) {
    c.countdown = 1 + next_random(c) % (2 * c.period);
    preempt(c, site);
  }
  note(c, p, size, kind, site);
}

bool acquires(int order) {
  return order == __ATOMIC_ACQUIRE || order == __ATOMIC_CONSUME || order >= __ATOMIC_ACQ_REL;
}
bool releases(int order) { return order == __ATOMIC_RELEASE || order >= __ATOMIC_ACQ_REL; }

// Around an atomic access. A relaxed one of a global word stands with a fence more often than not
// and is taken for both.
void before_atomic(const volatile void* v, unsigned size, unsigned kind, int order, void* from) {
  const void* p = const_cast<const void*>(v);
  RunningCta& c = running();
  const Site site = site_of(from);
  if (next_random(c) % 4 == 0) preempt(c, site);
  const bool shared = note(c, p, size, kind | kAtomic, site);
  if (!(kind & kWrite)) return;
  ++c.progress;
  if (releases(order) || !shared) c.races.release(c.current->index, p);
}
void after_atomic(const volatile void* v, int order) {
  const void* p = const_cast<const void*>(v);
  RunningCta& c = running();
  if (acquires(order) || !shadow_of(*c.workspace, p)) c.races.acquire(c.current->index, p);
}

}  // namespace

void fail(const char* name, const char* what) {
  RunningFiber& self = current_fiber();
  if (!self.site.at) self.site = site_of(__builtin_return_address(0));
  fail(std::string(name) + ": " + what);
}

void yield(const char* reason) {
  RunningFiber& self = current_fiber();
  self.waits_for = reason;
  preempt(running(), site_of(__builtin_return_address(0)));
  self.waits_for = nullptr;
}

void called_from(const void* return_address) {
  const Site site = site_of(return_address);
  current_fiber().outer = site;
}

void release(const void* object) {
  RunningCta& c = running();
  ++c.progress;
  if (c.launch->checked) c.races.release(c.current->index, object);
}
void acquire(const void* object) {
  RunningCta& c = running();
  if (c.launch->checked) c.races.acquire(c.current->index, object);
}
void accessed(const void* shared, unsigned size_bytes, bool is_write) {
  RunningCta& c = running();
  if (c.launch->checked) note(c, shared, size_bytes, is_write ? kWrite : kRead, {});
}

void copy_begins(const void* shared, unsigned size_bytes, int group, bool is_write) {
  RunningCta& c = running();
  RunningFiber& fiber = current_fiber();
  if (!c.launch->checked) return;
  const unsigned kind = is_write ? kWrite : group >= 0 ? kRead | kProxy : kRead;
  note(c, shared, size_bytes, kInFlight | kind, fiber.outer);
  if (group >= 0) fiber.copies.push_back({shared, size_bytes, group, is_write, fiber.outer});
}

void copies_end(int newest, bool is_write) {
  RunningCta& c = running();
  std::vector<Copy>& copies = current_fiber().copies;
  auto later = copies.begin();
  for (const Copy& copy : copies) {
    if (copy.is_write != is_write || copy.group >= newest) {
      *later++ = copy;
    } else if (Shadow* shadow = shadow_of(*c.workspace, copy.shared)) {
      c.races.land(c.current->index, *shadow, copy.shared, copy.size_bytes);
    }
  }
  copies.erase(later, copies.end());
}

void copy_landed(const void* shared, unsigned size_bytes, const void* object) {
  RunningCta& c = running();
  ++c.progress;
  if (!c.launch->checked) return;
  const unsigned engine = c.fibers.size();
  if (Shadow* shadow = shadow_of(*c.workspace, shared))
    c.races.land(engine, *shadow, shared, size_bytes);
  c.races.release_only(engine, object);
}

void operand_begins(const void* shared, unsigned size_bytes) {
  RunningCta& c = running();
  if (c.launch->checked)
    note(c, shared, size_bytes, kInFlight | kProxy | kRead, current_fiber().outer);
}

void operand_ends(const void* shared, unsigned size_bytes) {
  RunningCta& c = running();
  Shadow* shadow = shadow_of(*c.workspace, shared);
  if (c.launch->checked && shadow) c.races.land(c.current->index, *shadow, shared, size_bytes);
}

void fence_proxy_async() {
  RunningCta& c = running();
  if (c.launch->checked) c.races.fence_proxy(c.current->index);
}

const Box* arrive(unsigned mask, const void* value, unsigned size_bytes, const char* name) {
  RunningCta& c = running();
  Warp& warp = current_warp();
  RunningFiber& fiber = current_fiber();
  const unsigned lane = current_lane(), self = 1u << lane;
  const unsigned first = fiber.index - lane;
  const Site site = site_of(__builtin_return_address(0));
  fiber.site = site;
  if (!(mask & self)) fail(name, "the calling lane is not named in the mask");
  // A lane that overtook the others waits until all have left the exchange before.
  if (warp.arrived & self) {
    fiber.overtook = true;
    sleep(name, mask, site);
    fiber.site = site;
  }
  if (mask & warp.exited) fail(name, "a lane named in the mask has exited");
  for (unsigned waiting = warp.arrived & mask; waiting; waiting &= waiting - 1) {
    const unsigned other = __builtin_ctz(waiting);
    const RunningFiber& there = c.fibers[first + other];
    if (there.ready >= 0 || there.overtook) continue;  // it is in the exchange before
    if (warp.masks[other] != mask) fail(name, "lanes named in the mask came with another mask");
    if (std::strcmp(warp.names[other], name) != 0) {
      fail(std::string(name) + ": a lane named in the mask waits at " + warp.names[other] + " " +
           text_of(there.site));
    }
  }
  std::memcpy(&warp.boxes[lane], value, size_bytes);
  warp.arrived |= self;
  warp.masks[lane] = mask;
  warp.names[lane] = name;
  if ((warp.arrived & mask) != mask) {
    sleep(name, mask, site);
    return warp.boxes;
  }
  ++c.progress;
  std::vector<unsigned>& members = c.scratch;
  members.clear();
  for (unsigned rest = mask; rest; rest &= rest - 1) members.push_back(first + __builtin_ctz(rest));
  if (c.launch->checked) c.races.meet(members);
  for (unsigned m : members) {
    if (c.fibers[m].ready < 0) make_ready(c, m);
  }
  fiber.site = {};
  // Whoever came last need not be the first to go on.
  if (next_random(c) % 2) preempt(c, {});
  return warp.boxes;
}

void depart(unsigned mask, const char*) {
  RunningCta& c = running();
  Warp& warp = current_warp();
  const unsigned first = cta->current->index - current_lane();
  warp.departed |= 1u << current_lane();
  if ((warp.departed & mask) != mask) return;
  warp.arrived &= ~mask;
  warp.departed &= ~mask;
  for (unsigned rest = mask; rest; rest &= rest - 1) {
    RunningFiber& fiber = c.fibers[first + __builtin_ctz(rest)];
    if (fiber.overtook) make_ready(c, fiber.index);
    fiber.overtook = false;
  }
}

unsigned block_barrier(bool predicate, const char* name) {
  RunningCta& c = running();
  RunningFiber& self = current_fiber();
  Barrier& barrier = c.barrier;
  const Site site = site_of(__builtin_return_address(0));
  const unsigned first = self.index - self.index % 32;
  for (unsigned m : barrier.members) {
    // Warps may meet at two places that count the same threads; the lanes of one warp may not.
    if (m - first < 32 && c.fibers[m].site.at != site.at) {
      self.site = site;
      fail(std::string(name) + ": another lane of the warp waits at a different barrier " +
           text_of(c.fibers[m].site));
    }
  }
  barrier.votes += predicate;
  barrier.members.push_back(self.index);
  if (barrier.members.size() < c.live) {
    sleep(name, 0, site);
  } else {
    complete_barrier(c);
    if (next_random(c) % 2) preempt(c, {});
  }
  return barrier.result;
}

}  // namespace cufuse::host

// ---- what g++ -fsanitize=thread calls; libtsan is never linked

#define FROM __builtin_return_address(0)
#define ACCESS(size)                                                                               \
  void __tsan_read##size(void* p) { cufuse::host::touched(p, size, cufuse::host::kRead, FROM); }   \
  void __tsan_write##size(void* p) { cufuse::host::touched(p, size, cufuse::host::kWrite, FROM); } \
  void __tsan_unaligned_read##size(void* p) {                                                      \
    cufuse::host::touched(p, size, cufuse::host::kRead, FROM);                                     \
  }                                                                                                \
  void __tsan_unaligned_write##size(void* p) {                                                     \
    cufuse::host::touched(p, size, cufuse::host::kWrite, FROM);                                    \
  }
#define UPDATE(bits, name, operation)                                                     \
  Int##bits __tsan_atomic##bits##_##name(volatile Int##bits* p, Int##bits v, int order) { \
    cufuse::host::before_atomic(p, bits / 8, cufuse::host::kWrite, order, FROM);          \
    const Int##bits old = operation(p, v, __ATOMIC_SEQ_CST);                              \
    cufuse::host::after_atomic(p, order);                                                 \
    return old;                                                                           \
  }
#define EXCHANGE(bits, name)                                                               \
  int __tsan_atomic##bits##_compare_exchange_##name(volatile Int##bits* p, Int##bits* old, \
                                                    Int##bits v, int order, int) {         \
    cufuse::host::before_atomic(p, bits / 8, cufuse::host::kWrite, order, FROM);           \
    const bool done = __atomic_compare_exchange_n(p, old, v, false, 5, 5);                 \
    cufuse::host::after_atomic(p, order);                                                  \
    return done;                                                                           \
  }
#define ATOMIC(bits)                                                                \
  using Int##bits = std::int##bits##_t;                                             \
  Int##bits __tsan_atomic##bits##_load(const volatile Int##bits* p, int order) {    \
    cufuse::host::before_atomic(p, bits / 8, cufuse::host::kRead, order, FROM);     \
    const Int##bits v = __atomic_load_n(p, __ATOMIC_SEQ_CST);                       \
    cufuse::host::after_atomic(p, order);                                           \
    return v;                                                                       \
  }                                                                                 \
  void __tsan_atomic##bits##_store(volatile Int##bits* p, Int##bits v, int order) { \
    cufuse::host::before_atomic(p, bits / 8, cufuse::host::kWrite, order, FROM);    \
    __atomic_store_n(p, v, __ATOMIC_SEQ_CST);                                       \
  }                                                                                 \
  UPDATE(bits, exchange, __atomic_exchange_n)                                       \
  UPDATE(bits, fetch_add, __atomic_fetch_add)                                       \
  UPDATE(bits, fetch_sub, __atomic_fetch_sub)                                       \
  UPDATE(bits, fetch_and, __atomic_fetch_and)                                       \
  UPDATE(bits, fetch_or, __atomic_fetch_or)                                         \
  UPDATE(bits, fetch_xor, __atomic_fetch_xor)                                       \
  EXCHANGE(bits, strong)                                                            \
  EXCHANGE(bits, weak)

extern "C" {

void __tsan_init() {}
void __tsan_func_entry(void* caller) {
  auto& fiber = cufuse::host::current_fiber();
  fiber.callers[fiber.depth++ % 32] = static_cast<std::uint32_t>(
      reinterpret_cast<std::uintptr_t>(caller) - 1 - cufuse::host::running().launch->base);
}
void __tsan_func_exit() { --cufuse::host::current_fiber().depth; }
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)
void __tsan_read_range(void* p, unsigned long size) {
  cufuse::host::touched(p, static_cast<unsigned>(size), cufuse::host::kRead, FROM);
}
void __tsan_write_range(void* p, unsigned long size) {
  cufuse::host::touched(p, static_cast<unsigned>(size), cufuse::host::kWrite, FROM);
}
ATOMIC(8)
ATOMIC(16)
ATOMIC(32)
ATOMIC(64)
void __tsan_atomic_thread_fence(int) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
void __tsan_atomic_signal_fence(int) {}

}  // extern "C"

#undef FROM
#undef ACCESS
#undef UPDATE
#undef EXCHANGE
#undef ATOMIC

// Run the grid; returns 0, or 1 with what went wrong in `message`.
extern "C" int cufuse_run(void (*kernel)(const void*),
                          const void* args,
                          const unsigned* grid,
                          unsigned block,
                          unsigned long long shared_bytes,
                          int cooperative,
                          unsigned long long seed,
                          double seconds,
                          unsigned long long steps,
                          int checked,
                          char* message,
                          unsigned long long capacity) {
  cufuse::host::Launch launch;
  launch.kernel = kernel;
  launch.args = args;
  launch.grid = {grid[0], grid[1], grid[2]};
  launch.block = {block, 1, 1};
  launch.shared_bytes = shared_bytes;
  launch.seed = seed;
  launch.steps = steps;
  launch.checked = checked;
  launch.deadline = std::chrono::steady_clock::now() +
                    std::chrono::milliseconds(static_cast<std::int64_t>(seconds * 1000));
  const std::string fault = cufuse::host::run_grid(launch, cooperative);
  std::snprintf(message, capacity, "%s", fault.c_str());
  return !fault.empty();
}
