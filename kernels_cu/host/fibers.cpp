// A CUDA grid on the CPU: a CUDA thread on each fiber, a few CTAs at a time that take turns.
//
// All CTAs of a cooperative grid are there at once. A fault (wrong mask, hang, out of shared
// memory) ends the launch and becomes a Python exception.
#include "host/fibers.cuh"

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "host/races.cuh"
#include "host/running.cuh"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace cufuse::host {

__thread Cta* cta = nullptr;

namespace {

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

// Flush denormals to zero, as CuPy compiles for the GPU, as long as the launch runs.
class FloatMode {
 public:
  FloatMode() : before_(_mm_getcsr()) { _mm_setcsr(before_ | _MM_FLUSH_ZERO_ON | 0x0040); }
  ~FloatMode() { _mm_setcsr(before_); }

 private:
  unsigned before_;
};
#else
void make_context(Context& context, char* stack, void (*entry)()) {
  getcontext(&context.ucontext);
  context.ucontext.uc_stack.ss_sp = stack;
  context.ucontext.uc_stack.ss_size = kStackBytes;
  context.ucontext.uc_link = nullptr;
  makecontext(&context.ucontext, entry, 0);
}

void switch_context(Context& from, Context& to) { swapcontext(&from.ucontext, &to.ucontext); }

struct FloatMode {};
#endif

std::uint64_t scramble(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

}  // namespace

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

namespace {

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

// Leave the launch for good: its fibers are abandoned.
[[noreturn]] void leave_launch() {
  Context scrap;
  switch_context(scrap, running().launch->main);
  std::abort();
}

[[noreturn]] void hang(const char* why) {
  Launch& launch = *running().launch;
  launch.message = std::string("the kernel hangs: ") + why;
  launch.failed = launch.hangs = true;
  std::map<std::string, std::vector<unsigned>> waiting;
  for (const RunningCta* c : launch.live) waiting[who_waits(*c)].push_back(c->linear);
  for (auto& [what, which] : waiting) {
    std::sort(which.begin(), which.end());
    launch.message += "\n  block " + ranges(which) + what;
  }
  std::vector<unsigned> absent;
  for (unsigned i = 0; i < launch.started.size(); ++i) {
    if (!launch.started[i]) absent.push_back(i);
  }
  if (!absent.empty()) launch.message += "\n  block " + ranges(absent) + " never started";
  leave_launch();
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

// Now and then the others leave one CTA behind.
RunningCta& choose_cta(Launch& launch) {
  const std::vector<RunningCta*>& live = launch.live;
  const std::uint64_t random = next_random(launch.random);
  if (launch.hold) {
    --launch.hold;
  } else if (random % 32 == 0) {
    launch.held = live[(random >> 8) % live.size()]->linear;
    launch.hold = 1u << (random >> 32) % 14;
  }
  std::size_t place = (random >> 16) % live.size();
  if (launch.hold && live[place]->linear == launch.held) place = (place + 1) % live.size();
  return *live[place];
}

void enter(RunningCta& c) {
  cta = &c;
  c.turn = 1 + next_random(c) % (2 * c.turn_period);
  if (c.launch->tls_bytes)
    std::memcpy(c.launch->fixed, c.workspace->fixed_memory.data(), c.launch->tls_bytes);
}

void leave(RunningCta& c) {
  if (c.launch->tls_bytes)
    std::memcpy(c.workspace->fixed_memory.data(), c.launch->fixed, c.launch->tls_bytes);
}

// Let another fiber of the CTA run or, when the CTA's turn is over, another CTA.
void hand_over(RunningCta& c, RunningFiber& self, RunningFiber& next) {
  // Where everybody polls, only another CTA can help.
  if (c.launch->progress != c.seen) {
    c.seen = c.launch->progress;
    c.vain = 0;
  } else if (++c.vain > c.ready.size()) {
    c.vain = 0;
    c.turn = 0;
  }
  if (c.turn && --c.turn) return switch_to(c, self, next);
  RunningCta& other = choose_cta(*c.launch);
  if (&other == &c) {
    c.turn = 1 + next_random(c) % (2 * c.turn_period);
    return switch_to(c, self, next);
  }
  c.current = &next;
  leave(c);
  enter(other);
  switch_context(self.context, static_cast<RunningFiber*>(other.current)->context);
}

// Every now and then: does anything still go on?
void look_around(RunningCta& c) {
  constexpr unsigned kEvery = 256;
  Launch& launch = *c.launch;
  if (++launch.switches % kEvery) return;
  if (launch.progress != launch.seen) {
    launch.seen = launch.progress;
    launch.idle = 0;
  } else {
    launch.idle += kEvery;
    if (launch.idle > 8 * kEvery) launch.hold = 0;  // the others wait for it
    if (launch.idle > launch.steps) hang("nothing went on for its budget of steps");
  }
  if (std::chrono::steady_clock::now() > launch.deadline) hang("its time is over");
}

}  // namespace

void fail(const std::string& what) {
  Launch& launch = *running().launch;
  if (launch.actor) cta = launch.actor;
  const RunningFiber& fiber = current_fiber();
  launch.failed = true;
  launch.message = what + " (block " + std::to_string(cta->block_index.x) + "," +
                   std::to_string(cta->block_index.y) + "," + std::to_string(cta->block_index.z) +
                   " warp " + std::to_string(fiber.index / 32) + " lane " +
                   std::to_string(fiber.index % 32);
  if (fiber.site.at) launch.message += " " + text_of(fiber.site);
  launch.message += ")";
  leave_launch();
}

void preempt(RunningCta& c, Site site) {
  RunningFiber& self = current_fiber();
  self.site = site;
  if (c.async.in_flight) land_some();
  look_around(c);
  hand_over(c, self, choose(c));
  self.site = {};
}

namespace {

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
  ++c.launch->progress;
  std::sort(barrier.members.begin(), barrier.members.end());
  if (c.launch->checked) c.races.meet(barrier.members);
  for (unsigned m : barrier.members) {
    if (c.fibers[m].ready < 0) make_ready(c, m);
  }
  barrier.members.clear();
}

// The cluster's barrier counts the threads that still run.
void complete_cluster(Cluster& cluster) {
  if (cluster.arrived < cluster.live) return;
  cluster.arrived = 0;
  ++cluster.phase;
  cluster.released = cluster.arriving;
}

void run_fiber() {
  RunningCta& c = running();
  Launch& launch = *c.launch;
  launch.kernel(launch.args);
  RunningFiber& self = current_fiber();
  Warp& warp = c.warps[self.index / 32];
  self.site = {};
  self.done = true;
  ++launch.progress;
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
  --c.cluster->live;
  if (self.in_cluster && self.cluster_phase == c.cluster->phase) --c.cluster->arrived;
  complete_cluster(*c.cluster);
  // A barrier counts the threads that still run: this exit may complete it.
  if (c.live && c.barrier.members.size() == c.live) complete_barrier(c);
  if (c.live && c.ready.empty()) hang("every thread waits for another");
  if (c.live) switch_to(c, self, choose(c));
  leave_launch();
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

std::unique_ptr<RunningCta> start_cta(Launch& launch, unsigned linear) {
  const unsigned n = launch.block.count();
  auto started = std::make_unique<RunningCta>(launch, workspaces.take(), linear, n);
  RunningCta& c = *started;
  Workspace& workspace = *c.workspace;
  c.grid = launch.grid;
  c.block = launch.block;
  c.block_index = {linear % launch.grid.x, linear / launch.grid.x % launch.grid.y,
                   linear / launch.grid.x / launch.grid.y};
  c.random = scramble((launch.seed + 1) * 0x9E3779B97F4A7C15ull + linear) | 1;
  c.style = next_random(c) % 3;
  c.slow_warp = next_random(c) % c.warps.size();
  c.period = 8u << (next_random(c) % 3 * 2);
  c.countdown = 1 + next_random(c) % c.period;
  c.turn_period = 32u << (next_random(c) % 3 * 3);
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
  workspace.fixed_memory.assign(launch.tls_bytes, 0xFF);
  if (launch.checked) {
    workspace.dynamic.reset(c.dynamic_shared, launch.shared_bytes, 4);
    workspace.fixed.reset(launch.fixed, launch.tls_bytes, 4);
  }
  launch.started[linear] = 1;
  ++launch.progress;
  c.current = &c.fibers[next_random(c) % n];
  return started;
}

std::string run_grid(Launch& launch, bool cooperative) {
  if (launch.shared_bytes > kMaxSharedBytes) return "more shared memory asked than a CTA can have";
  if (launch.block.count() > 1024) return "more than 1024 threads in a CTA";
  Dl_info library;
  if (dladdr(reinterpret_cast<void*>(launch.kernel), &library)) {
    launch.base = reinterpret_cast<std::uintptr_t>(library.dli_fbase);
    dl_iterate_phdr(find_library, &launch);
  }
  if (launch.tls_bytes) {
    ThreadLocalIndex index{launch.tls_module, 0};
    launch.fixed = static_cast<unsigned char*>(__tls_get_addr(&index));
  }
  const FloatMode mode;
  const unsigned n_ctas = launch.grid.count();
  launch.started.resize(n_ctas);
  launch.random = scramble(launch.seed + 0x51ED270B0A1F2D3Cull) | 1;
  // The clusters come in any order, a few CTAs at a time.
  std::vector<unsigned> order(n_ctas / launch.cluster_size);
  for (unsigned i = 0; i < order.size(); ++i) {
    order[i] = i;
    std::swap(order[i], order[next_random(launch.random) % (i + 1)]);
  }
  const unsigned together = cooperative ? n_ctas : 2 + next_random(launch.random) % 3;
  std::vector<std::unique_ptr<RunningCta>> ctas;
  std::size_t next = 0;
  for (;;) {
    for (auto at = ctas.begin(); at != ctas.end();) {
      if ((*at)->live) {
        ++at;
        continue;
      }
      RunningCta& ended = **at;
      for (RunningCta*& mate : ended.cluster->ctas) {
        if (mate == &ended) mate = nullptr;
      }
      launch.live.erase(std::find(launch.live.begin(), launch.live.end(), &ended));
      workspaces.give_back(std::move(ended.workspace));
      at = ctas.erase(at);
    }
    while (next < order.size() && (ctas.empty() || ctas.size() + launch.cluster_size <= together)) {
      auto cluster = std::make_shared<Cluster>();
      cluster->live = launch.cluster_size * launch.block.count();
      for (unsigned rank = 0; rank < launch.cluster_size; ++rank) {
        ctas.push_back(start_cta(launch, order[next] * launch.cluster_size + rank));
        ctas.back()->cluster = cluster;
        cluster->ctas.push_back(ctas.back().get());
        launch.live.push_back(ctas.back().get());
      }
      ++next;
    }
    if (launch.live.empty()) break;
    RunningCta& first = choose_cta(launch);
    enter(first);
    switch_context(launch.main, static_cast<RunningFiber*>(first.current)->context);
    if (launch.failed) break;
    leave(running());
  }
  cta = nullptr;
  for (auto& c : ctas) workspaces.give_back(std::move(c->workspace));
  return launch.message;
}

}  // namespace

void swap_fixed(RunningCta& from, RunningCta& to) {
  leave(from);
  if (to.launch->tls_bytes)
    std::memcpy(to.launch->fixed, to.workspace->fixed_memory.data(), to.launch->tls_bytes);
}

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
  ++c.launch->progress;
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
    // Without the check's calls the compiler may make two places of one.
    if (c.launch->checked && m - first < 32 && c.fibers[m].site.at != site.at) {
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

void cluster_arrive() {
  RunningCta& c = running();
  RunningFiber& self = current_fiber();
  Cluster& cluster = *c.cluster;
  called_from(__builtin_return_address(0));
  if (self.in_cluster) fail("cluster_arrive", "the thread came before and did not wait");
  self.in_cluster = true;
  self.cluster_phase = cluster.phase;
  ++c.launch->progress;
  if (c.launch->checked) cluster.arriving.join(c.races.publish(self.index));
  ++cluster.arrived;
  complete_cluster(cluster);
  if (next_random(c) % 2) preempt(c, self.outer);
}

void cluster_wait() {
  RunningCta& c = running();
  RunningFiber& self = current_fiber();
  const std::shared_ptr<Cluster> cluster = c.cluster;
  called_from(__builtin_return_address(0));
  if (!self.in_cluster) fail("cluster_wait", "the thread did not arrive before");
  char reason[100];
  for (unsigned spin = 0; cluster->phase == self.cluster_phase; ++spin) {
    if (spin % 64 == 0) {
      std::snprintf(reason, sizeof reason, "cluster_wait (%u of %u threads came)", cluster->arrived,
                    cluster->live);
    }
    self.waits_for = reason;
    preempt(c, self.outer);
    self.waits_for = nullptr;
  }
  self.in_cluster = false;
  ++c.launch->progress;
  if (c.launch->checked) c.races.learn(self.index, cluster->released);
}

}  // namespace cufuse::host

// Run the grid; returns 0, or 1 with what went wrong in `message`.
extern "C" int cufuse_run(void (*kernel)(const void*),
                          const void* args,
                          unsigned long long args_bytes,
                          const unsigned* grid,
                          unsigned block,
                          unsigned cluster,
                          unsigned long long shared_bytes,
                          int cooperative,
                          const cufuse::host::Array* arrays,
                          unsigned n_arrays,
                          unsigned long long seed,
                          double seconds,
                          unsigned long long steps,
                          int checked,
                          char* message,
                          unsigned long long capacity) {
  cufuse::host::Launch launch;
  launch.kernel = kernel;
  launch.args = args;
  launch.args_bytes = args_bytes;
  launch.grid = {grid[0], grid[1], grid[2]};
  launch.block = {block, 1, 1};
  launch.cluster_size = cluster;
  launch.shared_bytes = shared_bytes;
  launch.seed = seed;
  launch.steps = steps;
  launch.checked = checked;
  launch.deadline = std::chrono::steady_clock::now() +
                    std::chrono::milliseconds(static_cast<std::int64_t>(seconds * 1000));
  cufuse::host::describe_arrays(launch, arrays, n_arrays);
  const std::string fault = cufuse::host::run_grid(launch, cooperative);
  std::snprintf(message, capacity, "%s", fault.c_str());
  return !fault.empty();
}
