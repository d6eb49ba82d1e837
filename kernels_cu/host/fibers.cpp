// A CUDA grid on the CPU: a CTA at a time on each worker thread, a CUDA thread on each fiber.
//
// Cooperative grids get one worker thread per CTA, so that all CTAs are resident. A fault (wrong
// mask, hang, out of shared memory) ends the launch and becomes a Python exception.
#include "host/fibers.cuh"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <xmmintrin.h>
#else
#include <ucontext.h>
#endif

namespace cufuse::host {

__thread Cta* cta = nullptr;

namespace {

constexpr std::size_t kStackBytes = 128 * 1024;

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

struct RunningFiber : Fiber {
  Context context;
  bool done = false;
  const char* waits_for = nullptr;
};

// Lanes that deposited a value, and lanes that took the others' away, since the last exchange.
struct Warp {
  unsigned arrived = 0, departed = 0, exited = 0;
  Box boxes[32];
};

struct Barrier {
  unsigned arrived = 0, generation = 0, votes = 0, result = 0;
};

// What all CTAs of a launch share.
struct Launch {
  void (*kernel)(const void*);
  const void* args;
  Dim3 grid, block;
  std::size_t shared_bytes;
  std::uint64_t seed;
  std::chrono::steady_clock::time_point deadline;
  std::atomic<bool> failed{false};
  std::string message;  // written once, by whoever set `failed`
};

struct RunningCta : Cta {
  Launch* launch = nullptr;
  std::vector<RunningFiber> fibers;
  std::vector<Warp> warps;
  unsigned live = 0;
  Barrier barrier;
  Context main;
  std::uint64_t random = 0, switches = 0;
};

RunningCta& running() { return *static_cast<RunningCta*>(cta); }
RunningFiber& current_fiber() { return *static_cast<RunningFiber*>(cta->current); }
Warp& current_warp() { return running().warps[cta->current->index / 32]; }

std::uint64_t next_random(RunningCta& c) {
  c.random ^= c.random << 13;
  c.random ^= c.random >> 7;
  c.random ^= c.random << 17;
  return c.random;
}

// Leave the CTA for good: its fibers are abandoned.
[[noreturn]] void leave_cta() {
  Context scrap;
  switch_context(scrap, running().main);
  std::abort();
}

std::string who_waits() {
  std::string text;
  const RunningCta& c = running();
  for (std::size_t w = 0; w < c.warps.size(); ++w) {
    const RunningFiber* waiting = nullptr;
    for (std::size_t i = w * 32; i < c.fibers.size() && i < w * 32 + 32; ++i) {
      if (!c.fibers[i].done && c.fibers[i].waits_for) waiting = &c.fibers[i];
    }
    if (waiting) text += "; warp " + std::to_string(w) + " waits at " + waiting->waits_for;
  }
  return text;
}

[[noreturn]] void fail(const std::string& what) {
  Launch& launch = *running().launch;
  if (!launch.failed.exchange(true)) {
    const Fiber& fiber = *cta->current;
    launch.message = what + " (block " + std::to_string(cta->block_index.x) + "," +
                     std::to_string(cta->block_index.y) + "," + std::to_string(cta->block_index.z) +
                     " warp " + std::to_string(fiber.index / 32) + " lane " +
                     std::to_string(fiber.index % 32) + ")";
  }
  leave_cta();
}

void run_fiber() {
  RunningCta& c = running();
  c.launch->kernel(c.launch->args);
  RunningFiber& self = current_fiber();
  self.done = true;
  c.warps[self.index / 32].exited |= 1u << (self.index % 32);
  if (--c.live == 0) leave_cta();
  // A barrier counts the threads that still run: this exit may complete it.
  yield("its end");
  std::abort();
}

// What a worker thread runs its CTAs in. Mapping the stacks anew costs more than a small kernel.
struct Workspace {
  std::vector<std::unique_ptr<char[]>> stacks;
  alignas(1024) unsigned char dynamic_shared[kMaxSharedBytes];
};

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

void run_cta(Launch& launch, unsigned linear, Workspace& workspace) {
  RunningCta c;
  c.launch = &launch;
  c.grid = launch.grid;
  c.block = launch.block;
  c.block_index = {linear % launch.grid.x, linear / launch.grid.x % launch.grid.y,
                   linear / launch.grid.x / launch.grid.y};
  c.random = (launch.seed + 1) * 0x9E3779B97F4A7C15ull + linear * 0xD1B54A32D192ED03ull + 1;
  const unsigned n = launch.block.count();
  c.fibers.resize(n);
  c.warps.resize((n + 31) / 32);
  c.live = n;
  auto& stacks = workspace.stacks;
  while (stacks.size() < n) stacks.emplace_back(new char[kStackBytes]);
  for (unsigned i = 0; i < n; ++i) {
    RunningFiber& fiber = c.fibers[i];
    fiber.index = i;
    fiber.thread = {i % launch.block.x, i / launch.block.x % launch.block.y,
                    i / launch.block.x / launch.block.y};
    make_context(fiber.context, stacks[i].get(), run_fiber);
  }
  if (n % 32) c.warps.back().exited = ~0u << (n % 32);
  c.dynamic_shared = workspace.dynamic_shared;
  c.dynamic_shared_bytes = launch.shared_bytes;
  c.seed = launch.seed;
  std::memset(c.dynamic_shared, 0xFF, launch.shared_bytes);
  cta = &c;
  RunningFiber& first = c.fibers[next_random(c) % n];
  c.current = &first;
  switch_context(c.main, first.context);
  cta = nullptr;
}

std::string run_grid(Launch& launch, bool cooperative) {
  if (launch.shared_bytes > kMaxSharedBytes) return "more shared memory asked than a CTA can have";
  if (launch.block.count() > 1024) return "more than 1024 threads in a CTA";
  std::atomic<unsigned> next{0};
  const unsigned n_ctas = launch.grid.count();
  const unsigned cores = std::max(1u, std::thread::hardware_concurrency());
  const unsigned n_workers = cooperative ? n_ctas : std::min(n_ctas, cores);
  std::vector<std::thread> workers;
  for (unsigned w = 0; w < n_workers; ++w) {
    workers.emplace_back([&] {
      set_float_mode();
      auto workspace = workspaces.take();
      for (unsigned i = next++; i < n_ctas && !launch.failed; i = next++)
        run_cta(launch, i, *workspace);
      workspaces.give_back(std::move(workspace));
    });
  }
  for (auto& worker : workers) worker.join();
  return launch.failed ? launch.message : std::string();
}

}  // namespace

void fail(const char* name, const char* what) { fail(std::string(name) + ": " + what); }

void yield(const char* reason) {
  RunningCta& c = running();
  RunningFiber& self = current_fiber();
  if (c.async.in_flight) land_some();
  self.waits_for = reason;
  if (++c.switches % 4096 == 0) {
    if (c.launch->failed) leave_cta();
    if (std::chrono::steady_clock::now() > c.launch->deadline)
      fail("the kernel hangs" + who_waits());
    std::this_thread::yield();
  }
  const std::size_t n = c.fibers.size();
  std::size_t next = self.index + 1;
  if (next_random(c) % 8 == 0) next = next_random(c) % n;
  for (std::size_t step = 0; step < n; ++step) {
    RunningFiber& fiber = c.fibers[(next + step) % n];
    if (fiber.done || &fiber == &self) continue;
    c.current = &fiber;
    switch_context(self.context, fiber.context);
    break;
  }
  self.waits_for = nullptr;
}

const Box* arrive(unsigned mask, const void* value, unsigned size_bytes, const char* name) {
  Warp& warp = current_warp();
  const unsigned self = 1u << current_lane();
  if (!(mask & self)) fail(name, "the calling lane is not named in the mask");
  // A lane that overtook the others waits until all have left the exchange before.
  while (warp.arrived & self) yield(name);
  std::memcpy(&warp.boxes[current_lane()], value, size_bytes);
  warp.arrived |= self;
  while ((warp.arrived & mask) != mask) {
    if (mask & warp.exited) fail(name, "a lane named in the mask has exited");
    yield(name);
  }
  return warp.boxes;
}

void depart(unsigned mask, const char* name) {
  Warp& warp = current_warp();
  const unsigned self = 1u << current_lane();
  warp.departed |= self;
  if ((warp.departed & mask) == mask) {
    warp.arrived &= ~mask;
    warp.departed &= ~mask;
  } else {
    while (warp.departed & self) yield(name);
  }
}

unsigned block_barrier(bool predicate, const char* name) {
  RunningCta& c = running();
  Barrier& barrier = c.barrier;
  const unsigned generation = barrier.generation;
  barrier.votes += predicate;
  ++barrier.arrived;
  while (barrier.generation == generation && barrier.arrived < c.live) yield(name);
  if (barrier.generation == generation) {
    barrier.result = barrier.votes;
    barrier.arrived = barrier.votes = 0;
    ++barrier.generation;
  }
  return barrier.result;
}

}  // namespace cufuse::host

// Run the grid; returns 0, or 1 with what went wrong in `message`.
extern "C" int cufuse_run(void (*kernel)(const void*),
                          const void* args,
                          const unsigned* grid,
                          unsigned block,
                          unsigned long long shared_bytes,
                          int cooperative,
                          unsigned long long seed,
                          double seconds,
                          char* message,
                          unsigned long long capacity) {
  cufuse::host::Launch launch;
  launch.kernel = kernel;
  launch.args = args;
  launch.grid = {grid[0], grid[1], grid[2]};
  launch.block = {block, 1, 1};
  launch.shared_bytes = shared_bytes;
  launch.seed = seed;
  launch.deadline = std::chrono::steady_clock::now() +
                    std::chrono::milliseconds(static_cast<std::int64_t>(seconds * 1000));
  const std::string fault = cufuse::host::run_grid(launch, cooperative);
  std::snprintf(message, capacity, "%s", fault.c_str());
  return !fault.empty();
}
