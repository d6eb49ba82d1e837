// A CUDA grid on the CPU: a CTA at a time on each worker thread, a CUDA thread on each fiber.
//
// A fiber runs until it has to wait (barrier, shuffle, flag) and then hands over to another fiber
// of its CTA. Cooperative grids get one worker thread per CTA, so that all CTAs are resident. A
// fault (wrong mask, hang, out of shared memory) ends the launch and becomes a Python exception.
// Guarded by name: a precompiled header may come from another checkout, where the file has another
// date, and `#pragma once` would take it for another file.
#ifndef CUFUSE_HOST_FIBERS_CUH
#define CUFUSE_HOST_FIBERS_CUH

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#else
#include <ucontext.h>
#endif

namespace cufuse::host {

struct Dim3 {
  unsigned x = 1, y = 1, z = 1;
  unsigned count() const { return x * y * z; }
};

constexpr std::size_t kStackBytes = 128 * 1024;
constexpr std::size_t kMaxSharedBytes = 232448;
constexpr unsigned kMaxPayloadBytes = 48;

#if defined(__x86_64__)
// Save the callee-saved registers and the stack pointer in *from, go on where `to` was saved.
extern "C" void cufuse_switch_fiber(void** from, void* to);
asm(R"(
.text
.weak cufuse_switch_fiber
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

inline void make_context(Context& context, char* stack, void (*entry)()) {
  auto top = reinterpret_cast<std::uintptr_t>(stack + kStackBytes) & ~std::uintptr_t{15};
  void** slot = reinterpret_cast<void**>(top);
  *--slot = nullptr;  // a return address for `entry`, which never returns
  *--slot = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; ++i) *--slot = nullptr;
  context.stack_pointer = slot;
}

inline void switch_context(Context& from, Context& to) {
  cufuse_switch_fiber(&from.stack_pointer, to.stack_pointer);
}

// Flush denormals to zero, as CuPy compiles for the GPU.
inline void set_float_mode() {
  _MM_SET_FLUSH_ZERO_MODE(_MM_FLUSH_ZERO_ON);
  _mm_setcsr(_mm_getcsr() | 0x0040);
}
#else
struct Context {
  ucontext_t ucontext;
};

inline void make_context(Context& context, char* stack, void (*entry)()) {
  getcontext(&context.ucontext);
  context.ucontext.uc_stack.ss_sp = stack;
  context.ucontext.uc_stack.ss_size = kStackBytes;
  context.ucontext.uc_link = nullptr;
  makecontext(&context.ucontext, entry, 0);
}

inline void switch_context(Context& from, Context& to) {
  swapcontext(&from.ucontext, &to.ucontext);
}

inline void set_float_mode() {}
#endif

// An asynchronous copy that was issued and has not landed yet.
struct PendingCopy {
  void* shared;
  const void* source;
  unsigned size_bytes;
  int group;
};

struct Fiber {
  Context context;
  std::vector<PendingCopy> copies;
  int copy_groups = 0;
  Dim3 thread;
  unsigned index = 0;
  bool done = false;
  const char* waits_for = nullptr;
};

// Lanes that deposited a value, and lanes that took the others' away, since the last exchange.
struct Warp {
  unsigned arrived = 0, departed = 0, exited = 0;
  alignas(16) unsigned char box[32][kMaxPayloadBytes];
};

struct Barrier {
  unsigned arrived = 0, generation = 0, votes = 0, result = 0;
};

// What all CTAs of a launch share.
struct Launch {
  Dim3 grid, block;
  std::size_t shared_bytes = 0;
  std::uint64_t seed = 0;
  std::function<void()> body;
  std::chrono::steady_clock::time_point deadline;
  std::atomic<bool> failed{false};
  std::string message;  // written once, by whoever set `failed`
};

struct Cta {
  Launch* launch = nullptr;
  Dim3 block_index;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  unsigned live = 0;
  Barrier barrier;
  Context main;
  Fiber* current = nullptr;
  std::uint64_t random = 0, switches = 0;
};

inline thread_local Cta* cta = nullptr;
alignas(1024) inline thread_local unsigned char dynamic_shared_bytes[kMaxSharedBytes];

inline std::uint64_t next_random() {
  std::uint64_t& state = cta->random;
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return state;
}

// Leave the CTA for good: its fibers are abandoned.
[[noreturn]] inline void leave_cta() {
  Context scrap;
  switch_context(scrap, cta->main);
  std::abort();
}

[[noreturn]] inline void fail(const std::string& what) {
  Launch& launch = *cta->launch;
  if (!launch.failed.exchange(true)) {
    const Fiber& fiber = *cta->current;
    launch.message = what + " (block " + std::to_string(cta->block_index.x) + "," +
                     std::to_string(cta->block_index.y) + "," + std::to_string(cta->block_index.z) +
                     " warp " + std::to_string(fiber.index / 32) + " lane " +
                     std::to_string(fiber.index % 32) + ")";
  }
  leave_cta();
}

inline std::string who_waits() {
  std::string text;
  for (std::size_t w = 0; w < cta->warps.size(); ++w) {
    const Fiber* waiting = nullptr;
    for (std::size_t i = w * 32; i < cta->fibers.size() && i < w * 32 + 32; ++i) {
      if (!cta->fibers[i].done && cta->fibers[i].waits_for) waiting = &cta->fibers[i];
    }
    if (waiting) text += "; warp " + std::to_string(w) + " waits at " + waiting->waits_for;
  }
  return text;
}

// Hand over to another fiber that is still running.
inline void yield(const char* reason) {
  Cta& c = *cta;
  Fiber* self = c.current;
  self->waits_for = reason;
  if (++c.switches % 4096 == 0) {
    if (c.launch->failed) leave_cta();
    if (std::chrono::steady_clock::now() > c.launch->deadline)
      fail("the kernel hangs" + who_waits());
    std::this_thread::yield();
  }
  const std::size_t n = c.fibers.size();
  std::size_t next = self->index + 1;
  if (next_random() % 8 == 0) next = next_random() % n;
  for (std::size_t step = 0; step < n; ++step) {
    Fiber* fiber = &c.fibers[(next + step) % n];
    if (fiber->done || fiber == self) continue;
    c.current = fiber;
    switch_context(self->context, fiber->context);
    break;
  }
  self->waits_for = nullptr;
}

inline void run_fiber() {
  cta->launch->body();
  Fiber* self = cta->current;
  self->done = true;
  cta->warps[self->index / 32].exited |= 1u << (self->index % 32);
  if (--cta->live == 0) leave_cta();
  // A barrier counts the threads that still run: this exit may complete it.
  yield("its end");
  std::abort();
}

inline void run_cta(Launch& launch, unsigned linear, std::vector<std::unique_ptr<char[]>>& stacks) {
  Cta c;
  c.launch = &launch;
  c.block_index = {linear % launch.grid.x, linear / launch.grid.x % launch.grid.y,
                   linear / launch.grid.x / launch.grid.y};
  c.random = (launch.seed + 1) * 0x9E3779B97F4A7C15ull + linear * 0xD1B54A32D192ED03ull + 1;
  const unsigned n = launch.block.count();
  c.fibers.resize(n);
  c.warps.resize((n + 31) / 32);
  c.live = n;
  while (stacks.size() < n) stacks.emplace_back(new char[kStackBytes]);
  for (unsigned i = 0; i < n; ++i) {
    Fiber& fiber = c.fibers[i];
    fiber.index = i;
    fiber.thread = {i % launch.block.x, i / launch.block.x % launch.block.y,
                    i / launch.block.x / launch.block.y};
    make_context(fiber.context, stacks[i].get(), run_fiber);
  }
  if (n % 32) c.warps.back().exited = ~0u << (n % 32);
  std::memset(dynamic_shared_bytes, 0xFF, launch.shared_bytes);
  cta = &c;
  c.current = &c.fibers[next_random() % n];
  switch_context(c.main, c.current->context);
  cta = nullptr;
}

// Run the grid; returns an empty string, or what went wrong.
inline std::string run_grid(Dim3 grid,
                            Dim3 block,
                            std::size_t shared_bytes,
                            bool cooperative,
                            std::uint64_t seed,
                            double seconds,
                            std::function<void()> body) {
  if (shared_bytes > kMaxSharedBytes) return "more shared memory asked than a CTA can have";
  if (block.count() > 1024) return "more than 1024 threads in a CTA";
  Launch launch;
  launch.grid = grid;
  launch.block = block;
  launch.shared_bytes = shared_bytes;
  launch.seed = seed;
  launch.body = std::move(body);
  launch.deadline = std::chrono::steady_clock::now() +
                    std::chrono::milliseconds(static_cast<std::int64_t>(seconds * 1000));
  std::atomic<unsigned> next{0};
  const unsigned n_ctas = grid.count();
  const unsigned cores = std::max(1u, std::thread::hardware_concurrency());
  const unsigned n_workers = cooperative ? n_ctas : std::min(n_ctas, cores);
  std::vector<std::thread> workers;
  for (unsigned w = 0; w < n_workers; ++w) {
    workers.emplace_back([&] {
      set_float_mode();
      std::vector<std::unique_ptr<char[]>> stacks;
      for (unsigned i = next++; i < n_ctas && !launch.failed; i = next++)
        run_cta(launch, i, stacks);
    });
  }
  for (auto& worker : workers) worker.join();
  return launch.failed ? launch.message : std::string();
}

// ---- collectives

inline Warp& current_warp() { return cta->warps[cta->current->index / 32]; }
inline unsigned current_lane() { return cta->current->index % 32; }

// Every lane named in `mask` deposits a value and gets to see all of them through `read(box)`.
template <typename T, typename Read>
auto exchange(unsigned mask, const T& value, const char* name, Read read) {
  static_assert(sizeof(T) <= kMaxPayloadBytes, "a lane's payload must fit into its box");
  Warp& warp = current_warp();
  const unsigned self = 1u << current_lane();
  if (!(mask & self)) fail(std::string(name) + ": the calling lane is not named in the mask");
  // A lane that overtook the others waits until all have left the exchange before.
  while (warp.arrived & self) yield(name);
  std::memcpy(warp.box[current_lane()], &value, sizeof(T));
  warp.arrived |= self;
  while ((warp.arrived & mask) != mask) {
    if (mask & warp.exited) fail(std::string(name) + ": a lane named in the mask has exited");
    yield(name);
  }
  auto result = read([&](unsigned lane) {
    T v;
    std::memcpy(&v, warp.box[lane % 32], sizeof(T));
    return v;
  });
  warp.departed |= self;
  if ((warp.departed & mask) == mask) {
    warp.arrived &= ~mask;
    warp.departed &= ~mask;
  } else {
    while (warp.departed & self) yield(name);
  }
  return result;
}

// __syncthreads in all its forms: returns how many threads came with a true predicate.
inline unsigned block_barrier(bool predicate, const char* name) {
  Barrier& barrier = cta->barrier;
  const unsigned generation = barrier.generation;
  barrier.votes += predicate;
  ++barrier.arrived;
  while (barrier.generation == generation && barrier.arrived < cta->live) yield(name);
  if (barrier.generation == generation) {
    barrier.result = barrier.votes;
    barrier.arrived = barrier.votes = 0;
    ++barrier.generation;
  }
  return barrier.result;
}

}  // namespace cufuse::host

#endif  // CUFUSE_HOST_FIBERS_CUH
