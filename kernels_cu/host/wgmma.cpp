// What a CTA's warpgroups multiply beside its threads, on the CPU.
#include "host/wgmma.cuh"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <map>
#include <string>
#include <vector>

#include "host/fibers.cuh"

namespace cufuse::host {

namespace {

using Descriptor = unsigned long long;
using Chunk = const unsigned char*;  // 16 bytes

constexpr unsigned kReservedBytes = 1024;  // where a CTA's own shared memory begins
constexpr unsigned kWarps = 4;             // in a warpgroup

// What products use of a thread's registers, from the first one to the fence after the wait.
struct Registers {
  unsigned char* begin;
  unsigned size_bytes;
  int group;
  const float* sums;  // where the warp's lane 0 has these accumulators; null: a fragment of a
  unsigned held[4];   // by the fragment
  bool in_flight = true, touched = false;

  bool overlap(const void* p, std::size_t size) const {
    const auto* other = static_cast<const unsigned char*>(p);
    return other < begin + size_bytes && begin < other + size;
  }
};

struct Reading {
  Chunk chunk;
  int group;
};

struct WgmmaThread {
  int groups = 0;
  std::uint64_t issued = 0;
  std::vector<Registers> registers;
  std::vector<Reading> reading;  // on behalf of its warp
  // The thread's stack as the last fence found it.
  bool fenced = false;
  const unsigned char* stack = nullptr;
  std::vector<unsigned char> at_fence;

  // What the fence saw there; null if that was no place of the stack then.
  unsigned char* seen(const void* p, std::size_t size) {
    const auto* byte = static_cast<const unsigned char*>(p);
    if (byte < stack || byte + size > stack + at_fence.size()) return nullptr;
    return at_fence.data() + (byte - stack);
  }
};

// A warp's 16 rows of one product.
struct Rows {
  Product what;
  std::uint64_t number;
  int group;
  bool late;
  unsigned lanes = 0;  // that came
  unsigned a[32][4];
};

struct Sums {
  unsigned lanes_waiting = 0;
  std::vector<float> values;  // [32, n / 2]
};

struct WgmmaWarp {
  std::deque<Rows> queue;
  std::map<const float*, Sums> sums;  // by where lane 0 has them
};

// A product as the first warp of the warpgroup said it.
struct Call {
  Product what;
  unsigned warp;
  unsigned came = 0, made = 0;
};

struct Warpgroup {
  std::uint64_t first = 0;  // the number of calls[0]
  std::deque<Call> calls;
};

}  // namespace

struct WgmmaState::Members {
  std::vector<WgmmaThread> threads;
  std::vector<WgmmaWarp> warps;
  std::vector<Warpgroup> groups;
};

WgmmaState::~WgmmaState() { delete members_; }

WgmmaState::Members& WgmmaState::members() {
  if (!members_) {
    members_ = new Members;
    const unsigned threads = cta->block.count();
    members_->threads.resize(threads);
    members_->warps.resize((threads + 31) / 32);
    members_->groups.resize((threads + 127) / 128);
  }
  return *members_;
}

namespace {

[[noreturn]] void wgmma_fault(const char* name, const std::string& what) {
  host::fail(name, (new std::string(what))->c_str());
}

WgmmaThread& wgmma_thread() { return cta->wgmma.members().threads[cta->current->index]; }

// ---- operands in shared memory

// The 16 bytes that hold element (row, k) of a matrix.
Chunk chunk_of(Descriptor descriptor, bool along_row, unsigned row, unsigned k) {
  const unsigned start = (descriptor & 0x3fff) << 4;
  const unsigned leading = (descriptor >> 16 & 0x3fff) << 4;
  const unsigned stride = (descriptor >> 32 & 0x3fff) << 4;
  const unsigned mode = descriptor >> 62;
  const unsigned line = mode ? 256u >> mode : 16;  // bytes
  unsigned address = start;
  if (along_row) {
    const unsigned per_line = line / 2;
    address += row / per_line * (mode ? leading : stride) + row % per_line / 8 * 16;
    address += k / 8 * (mode ? stride : leading) + k % 8 * line;
  } else {
    address += row / 8 * stride + row % 8 * line + k / 8 * (mode ? 16 : leading);
  }
  address ^= address >> 3 & (line - 16);
  const unsigned offset = address - kReservedBytes;
  if (address < kReservedBytes || offset + 16 > cta->dynamic_shared_bytes) {
    wgmma_fault("wgmma", "row " + std::to_string(row) + " at k " + std::to_string(k) +
                             " of an operand would lie at shared + " +
                             std::to_string(static_cast<int>(offset)) + "; the CTA has " +
                             std::to_string(cta->dynamic_shared_bytes) + " bytes");
  }
  return cta->dynamic_shared + offset;
}

unsigned short element(Descriptor descriptor, bool along_row, unsigned row, unsigned k) {
  unsigned short bits;
  const unsigned place = (along_row ? row : k) % 8 * 2;
  std::memcpy(&bits, chunk_of(descriptor, along_row, row, k) + place, 2);
  return bits;
}

void check_descriptor(Descriptor descriptor, const char* which) {
  constexpr Descriptor kFields = 0x3fffull | 0x3fffull << 16 | 0x3fffull << 32 | 3ull << 62;
  if (descriptor & 7ull << 49) {
    wgmma_fault("wgmma", std::string(which) +
                             "'s descriptor has a base offset, which the twin "
                             "does not know: align the matrix");
  }
  if (descriptor & ~kFields) {
    wgmma_fault("wgmma", std::string(which) + "'s descriptor has bits that mean nothing");
  }
  const unsigned mode = descriptor >> 62, start = (descriptor & 0x3fff) << 4;
  if (mode && start / (256u >> mode) % 8) {
    wgmma_fault("wgmma", std::string(which) +
                             "'s descriptor starts in the midst of 8 lines that are swizzled "
                             "together: align the matrix");
  }
}

// The race check hears of all 16 k of some rows; `thread` reads them until its group is waited for.
void start_reading(
    WgmmaThread& thread, Descriptor descriptor, bool along_row, unsigned first, unsigned rows) {
  const unsigned row_step = along_row ? 8 : 1, k_step = along_row ? 1 : 8;
  for (unsigned row = first; row < first + rows; row += row_step) {
    for (unsigned k = 0; k < 16; k += k_step) {
      const Chunk chunk = chunk_of(descriptor, along_row, row, k);
      operand_begins(chunk, 16);
      thread.reading.push_back({chunk, thread.groups});
    }
  }
}

// ---- products

bool alike(const Product& x, const Product& y) {
  return !x.a == !y.a && x.a_shared == y.a_shared && x.b == y.b && x.to_float == y.to_float &&
         x.n == y.n && x.accumulate == y.accumulate && x.a_along_m == y.a_along_m &&
         x.b_along_n == y.b_along_n;
}

std::string difference(const Product& x, const Product& y) {
  if (x.n != y.n || x.to_float != y.to_float) return "different shapes or types";
  if (!x.a != !y.a) return "a in registers and in shared memory";
  if (x.a_shared != y.a_shared) return "different descriptors of a";
  if (x.b != y.b) return "different descriptors of b";
  return "different flags";
}

bool is_ready(unsigned warp) {
  WgmmaState::Members& m = cta->wgmma.members();
  const std::deque<Rows>& queue = m.warps[warp].queue;
  if (queue.empty() || queue.front().lanes != ~0u) return false;
  const Warpgroup& group = m.groups[warp / kWarps];
  return group.calls[queue.front().number - group.first].came == kWarps;
}

// Make the oldest product of a warp.
void make_product(unsigned warp) {
  WgmmaState::Members& m = cta->wgmma.members();
  WgmmaWarp& w = m.warps[warp];
  const Rows rows = w.queue.front();
  w.queue.pop_front();
  --cta->async.in_flight;
  const Product& p = rows.what;
  float a[16][16], b[256][16];
  for (unsigned k = 0; k < 16; ++k) {
    for (unsigned r = 0; r < 16; ++r) {
      unsigned short bits;
      if (p.a) {
        bits = rows.a[r % 8 * 4 + k % 8 / 2][r / 8 + k / 8 * 2] >> k % 2 * 16;
      } else {
        bits = element(p.a_shared, p.a_along_m, warp % kWarps * 16 + r, k);
      }
      a[r][k] = p.to_float(bits);
    }
    for (unsigned n = 0; n < p.n; ++n) b[n][k] = p.to_float(element(p.b, p.b_along_n, n, k));
  }
  float* values = w.sums.at(p.sums).values.data();
  for (unsigned r = 0; r < 16; ++r) {
    for (unsigned n = 0; n < p.n; ++n) {
      float sum = 0.0f;
      for (unsigned k = 0; k < 16; ++k) sum += a[r][k] * b[n][k];
      const unsigned lane = r % 8 * 4 + n % 8 / 2;
      float& value = values[lane * (p.n / 2) + n / 8 * 4 + r / 8 * 2 + n % 2];
      value = p.accumulate ? value + sum : sum;
    }
  }
  Warpgroup& group = m.groups[warp / kWarps];
  ++group.calls[rows.number - group.first].made;
  while (!group.calls.empty() && group.calls.front().made == kWarps) {
    group.calls.pop_front();
    ++group.first;
  }
}

// The product of this number in the calling warp's queue; its first lane puts it there.
Rows& queued(WgmmaThread& thread, unsigned warp, const Product& what) {
  WgmmaState::Members& m = cta->wgmma.members();
  const std::uint64_t number = thread.issued++;
  std::deque<Rows>& queue = m.warps[warp].queue;
  for (Rows& rows : queue) {
    if (rows.number == number) return rows;
  }
  Warpgroup& group = m.groups[warp / kWarps];
  if (number - group.first == group.calls.size()) group.calls.push_back({what, warp});
  Call& call = group.calls[number - group.first];
  if (!alike(call.what, what)) {
    wgmma_fault("wgmma", "warps " + std::to_string(call.warp) + " and " + std::to_string(warp) +
                             " of a warpgroup name " + difference(call.what, what));
  }
  ++call.came;
  if (!what.a) start_reading(thread, what.a_shared, what.a_along_m, warp % kWarps * 16, 16);
  start_reading(thread, what.b, what.b_along_n, 0, what.n);
  queue.push_back({what, number, thread.groups, chance(2)});
  ++cta->async.in_flight;
  return queue.back();
}

// ---- registers

// Whether the fence saw what is there now. What is no part of a stack, nobody looks after.
bool as_fenced(WgmmaThread& thread, const void* p, std::size_t size) {
  const auto* end = cta->current->stack_end;
  const auto* byte = static_cast<const unsigned char*>(p);
  const auto* here = static_cast<const unsigned char*>(__builtin_frame_address(0));
  if (byte < here || byte >= end) return true;
  const unsigned char* seen = thread.seen(p, size);
  return seen && std::memcmp(seen, p, size) == 0;
}

void check_registers(WgmmaThread& thread, const Product& product) {
  if (!thread.fenced) wgmma_fault("wgmma", "no wgmma_fence came before the first product");
  const std::size_t size = product.n * 2;
  bool in_flight = false;
  for (const Registers& registers : thread.registers) {
    if (!registers.sums || !registers.overlap(product.sums, size)) continue;
    const auto* begin = reinterpret_cast<const unsigned char*>(product.sums);
    const bool same = registers.begin == begin && registers.size_bytes == size;
    if (registers.in_flight && !same) {
      wgmma_fault("wgmma", "some of its accumulators belong to a product in flight");
    }
    in_flight = in_flight || registers.in_flight;
    if (registers.touched) {
      wgmma_fault("wgmma", "its accumulators were used after the last wgmma_fence");
    }
  }
  if (product.accumulate && !in_flight && !as_fenced(thread, product.sums, size)) {
    wgmma_fault("wgmma", "its accumulators were written after the last wgmma_fence");
  }
  if (product.a && !as_fenced(thread, product.a, 16)) {
    wgmma_fault("wgmma", "a's registers were written after the last wgmma_fence");
  }
}

// Take the accumulators away and leave NaN.
void take_registers(WgmmaThread& thread,
                    WgmmaWarp& warp,
                    const float* key,
                    const Product& product) {
  const unsigned lane = current_lane();
  auto* begin = reinterpret_cast<unsigned char*>(product.sums);
  auto found = thread.registers.end();
  for (auto i = thread.registers.begin(); i != thread.registers.end(); ++i) {
    if (i->sums && i->begin == begin) found = i;
  }
  if (found == thread.registers.end() || !found->in_flight) {
    if (found != thread.registers.end()) thread.registers.erase(found);
    Sums& sums = warp.sums[key];
    sums.values.resize(32 * product.n / 2);
    std::memcpy(&sums.values[lane * (product.n / 2)], begin, product.n * 2);
    std::memset(begin, 0xFF, product.n * 2);
    sums.lanes_waiting |= 1u << lane;
    thread.registers.push_back({begin, product.n * 2u, thread.groups, key, {}});
  } else {
    found->group = thread.groups;
  }
  if (!product.a) return;
  auto* fragment = reinterpret_cast<unsigned char*>(const_cast<unsigned*>(product.a));
  Registers a{fragment, 16, thread.groups, nullptr, {}};
  std::memcpy(a.held, product.a, 16);
  thread.registers.push_back(a);
}

// Put the results of all groups before `newest` where the thread expects them.
void deliver(
    WgmmaThread& thread, WgmmaWarp& warp, int newest, const Named* named, unsigned n_named) {
  const unsigned lane = current_lane();
  auto later = thread.registers.begin();
  for (Registers& registers : thread.registers) {
    const bool done = registers.in_flight && registers.group < newest;
    if (done && !registers.sums) {
      if (std::memcmp(registers.begin, registers.held, 16) != 0) {
        wgmma_fault("wgmma_wait", "a's registers were written while the product was in flight");
      }
      continue;
    }
    if (done) {
      const bool is_named = std::any_of(named, named + n_named, [&](const Named& sums) {
        const auto* begin = static_cast<const unsigned char*>(sums.begin);
        return begin <= registers.begin &&
               registers.begin + registers.size_bytes <= begin + sums.size_bytes;
      });
      if (!is_named) {
        wgmma_fault("wgmma_wait", "it does not name the accumulators that it waits for");
      }
      const auto found = warp.sums.find(registers.sums);
      Sums& sums = found->second;
      std::memcpy(registers.begin, &sums.values[lane * registers.size_bytes / 4],
                  registers.size_bytes);
      sums.lanes_waiting &= ~(1u << lane);
      if (!sums.lanes_waiting) warp.sums.erase(found);
      registers.in_flight = false;
      if (unsigned char* seen = thread.seen(registers.begin, registers.size_bytes)) {
        std::memcpy(seen, registers.begin, registers.size_bytes);
      }
    }
    *later++ = registers;
  }
  thread.registers.erase(later, thread.registers.end());
}

// The lanes of a warp meet, and say the same.
void meet_warp(int what, const char* name) {
  const bool alike = exchange(~0u, what, name, [=](auto box) {
    for (unsigned lane = 0; lane < 32; ++lane) {
      if (box(lane) != what) return false;
    }
    return true;
  });
  if (!alike) wgmma_fault(name, "the lanes of a warp do not wait for the same groups");
}

}  // namespace

void wgmma(const Product& product) {
  called_from(__builtin_return_address(0));
  WgmmaState::Members& m = cta->wgmma.members();
  WgmmaThread& thread = wgmma_thread();
  const unsigned lane = current_lane(), index = cta->current->index / 32;
  if ((index / kWarps + 1) * kWarps * 32 > cta->block.count()) {
    wgmma_fault("wgmma", "the warpgroup of warp " + std::to_string(index) + " has not four warps");
  }
  check_registers(thread, product);
  if (!product.a) check_descriptor(product.a_shared, "a");
  check_descriptor(product.b, "b");
  const Box* boxes = arrive(~0u, &product, sizeof product, "wgmma");
  Product first;
  for (unsigned l = 32; l-- > 0;) {
    std::memcpy(&first, &boxes[l], sizeof first);
    if (!alike(first, product)) {
      wgmma_fault("wgmma", "the lanes of a warp name " + difference(first, product));
    }
  }
  WgmmaWarp& warp = m.warps[index];
  Rows& rows = queued(thread, index, first);
  if (product.a) std::memcpy(rows.a[lane], product.a, 16);
  take_registers(thread, warp, first.sums, product);
  rows.lanes |= 1u << lane;
  depart(~0u, "wgmma");
}

void wgmma_fence() {
  called_from(__builtin_return_address(0));
  WgmmaThread& thread = wgmma_thread();
  auto& registers = thread.registers;
  registers.erase(std::remove_if(registers.begin(), registers.end(),
                                 [](const Registers& r) { return !r.in_flight; }),
                  registers.end());
  thread.stack = static_cast<const unsigned char*>(__builtin_frame_address(0));
  thread.at_fence.assign(thread.stack, cta->current->stack_end);
  thread.fenced = true;
  meet_warp(0, "wgmma_fence");
}

void wgmma_commit() {
  called_from(__builtin_return_address(0));
  ++wgmma_thread().groups;
  meet_warp(0, "wgmma_commit");
}

void wgmma_wait(int pending, const Named* sums, unsigned n_sums) {
  called_from(__builtin_return_address(0));
  WgmmaThread& thread = wgmma_thread();
  const unsigned index = cta->current->index / 32;
  const int newest = thread.groups - pending;
  WgmmaState::Members& m = cta->wgmma.members();
  WgmmaWarp& warp = m.warps[index];
  char reason[100];
  for (unsigned spin = 0; !warp.queue.empty() && warp.queue.front().group < newest; ++spin) {
    if (is_ready(index)) {
      make_product(index);
      continue;
    }
    if (spin % 64 == 0) {
      const Warpgroup& group = m.groups[index / kWarps];
      const std::uint64_t number = warp.queue.front().number;
      std::snprintf(reason, sizeof reason,
                    "wgmma_wait for product %llu, to which %u of 4 warps of warpgroup %u came",
                    static_cast<unsigned long long>(number), group.calls[number - group.first].came,
                    index / kWarps);
    }
    yield(reason);
  }
  deliver(thread, warp, newest, sums, n_sums);
  auto later = thread.reading.begin();
  for (const Reading& reading : thread.reading) {
    if (reading.group >= newest) {
      *later++ = reading;
    } else {
      operand_ends(reading.chunk, 16);
    }
  }
  thread.reading.erase(later, thread.reading.end());
  meet_warp(pending, "wgmma_wait");
}

void run_some_products() {
  if (!cta->wgmma.used()) return;
  WgmmaState::Members& m = cta->wgmma.members();
  for (unsigned warp = 0; warp < m.warps.size(); ++warp) {
    if (!is_ready(warp) || !chance(m.warps[warp].queue.front().late ? 256 : 8)) continue;
    make_product(warp);
  }
}

void registers_touched(const void* p, unsigned size_bytes, bool is_write) {
  for (Registers& registers : wgmma_thread().registers) {
    if (!registers.overlap(p, size_bytes)) continue;
    const bool allowed = !registers.sums && !is_write;
    if (registers.in_flight && !allowed) {
      wgmma_fault("wgmma",
                  std::string(registers.sums ? "its accumulators are" : "a's registers are") +
                      (is_write ? " written" : " read") + " before wgmma_wait");
    }
    if (registers.sums) registers.touched = true;
  }
}

void products_end() {
  if (!cta->wgmma.used()) return;
  for (const Registers& registers : wgmma_thread().registers) {
    if (registers.in_flight) {
      wgmma_fault("wgmma", "a thread ends while its product is in flight: no wgmma_wait");
    }
  }
}

unsigned shared_address(const void* p) {
  const auto* byte = static_cast<const unsigned char*>(p);
  if (byte < cta->dynamic_shared || byte > cta->dynamic_shared + cta->dynamic_shared_bytes) {
    called_from(__builtin_return_address(0));
    host::fail("shared_address", "this is no address of dynamic shared memory");
  }
  return static_cast<unsigned>(byte - cta->dynamic_shared) + kReservedBytes;
}

}  // namespace cufuse::host
