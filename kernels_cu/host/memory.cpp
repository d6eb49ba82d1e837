// What a kernel does to memory: every access, as g++ -fsanitize=thread reports it. Those of shared
// memory and of the launch's arrays are checked for races and bounds; whatever else is not the
// kernel's own stack is no memory that a kernel could touch.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "host/fibers.cuh"
#include "host/races.cuh"
#include "host/running.cuh"

namespace cufuse::host {

namespace {

std::string block_of(const Launch& launch, unsigned linear) {
  const Dim3 grid = launch.grid;
  return std::to_string(linear % grid.x) + "," + std::to_string(linear / grid.x % grid.y) + "," +
         std::to_string(linear / grid.x / grid.y);
}

[[noreturn]] void report_race(RunningCta& c,
                              const Shadow& shadow,
                              const std::string& where,
                              const char* kind_of_memory,
                              const void* p,
                              unsigned size,
                              unsigned kind,
                              Site site,
                              const Cell& other) {
  RunningFiber& self = current_fiber();
  const bool in_cta = other.cta == c.linear;
  auto access = [&](unsigned k, unsigned cta_number, unsigned thread, Site at) {
    std::string text = k & kWrite ? "write" : "read";
    if (k & kAtomic) text = "atomic " + text;
    if (k & kInFlight) text = (k & kProxy ? "copy's or product's " : "copy's ") + text;
    if (thread == c.fibers.size()) return text + " by a copy that landed " + text_of(at);
    text += " by ";
    if (!in_cta) text += "block " + block_of(*c.launch, cta_number) + " ";
    return text + "warp " + std::to_string(thread / 32) + " lane " + std::to_string(thread % 32) +
           " " + text_of(at);
  };
  std::string text = other.kind & kInFlight ? "a copy in flight was not waited for: "
                     : kind & kProxy        ? "a store without fence_proxy_async, or a race: "
                                            : std::string("a race in ") + kind_of_memory + ": ";
  text += access(kind, c.linear, self.index, site) + " and " +
          access(other.kind, other.cta, other.thread, other.site) + ", " + std::to_string(size) +
          " bytes at " + where + " offset " +
          std::to_string(static_cast<const unsigned char*>(p) - shadow.begin);
  self.site = {};
  fail(text);
}

[[noreturn]] void report_bounds(Site site, const std::string& text) {
  current_fiber().site = site;
  fail(text);
}

Shadow* shadow_of(Workspace& w, const void* p) {
  return w.dynamic.holds(p) ? &w.dynamic : w.fixed.holds(p) ? &w.fixed : nullptr;
}

// Note an access of this CTA's shared memory; returns whether it was one.
bool note_shared(RunningCta& c, const void* p, unsigned size, unsigned kind, Site site) {
  Workspace& w = *c.workspace;
  Shadow* shadow = shadow_of(w, p);
  const auto* byte = static_cast<const unsigned char*>(p);
  if (w.is_near(p) && (!shadow || byte + size > w.dynamic.begin + w.dynamic.size_bytes)) {
    report_bounds(site, "an access of " + std::to_string(size) + " bytes at offset " +
                            std::to_string(byte - w.dynamic_shared) +
                            " of dynamic shared memory, which has " +
                            std::to_string(w.dynamic.size_bytes) + " bytes");
  }
  if (!shadow) return false;
  const Cell* other =
      c.races.access(c.current->index, *shadow, byte - shadow->begin, size, kind, site, c.random);
  if (other) {
    report_race(c, *shadow, shadow == &w.dynamic ? "dynamic" : "static", "shared memory", p, size,
                kind, site, *other);
  }
  return true;
}

// The CTA of a cluster whose shared memory this is, if it is another's than the calling one's.
RunningCta* owner_of(const RunningCta& c, const void* p) {
  for (RunningCta* mate : c.cluster->ctas) {
    if (!mate || mate == &c) continue;
    const auto* begin = mate->workspace->fixed_memory.data();
    const auto offset = static_cast<std::size_t>(static_cast<const unsigned char*>(p) - begin);
    if (mate->workspace->is_near(p) || offset < c.launch->tls_bytes) return mate;
  }
  return nullptr;
}

bool note_mates(RunningCta& c, const void* p, unsigned size, unsigned kind, Site site) {
  RunningCta* mate = owner_of(c, p);
  if (!mate) return false;
  const std::string block = block_of(*c.launch, mate->linear);
  Workspace& w = *mate->workspace;
  const auto* byte = static_cast<const unsigned char*>(p);
  const bool dynamic = w.is_near(p);
  Shadow& shadow = dynamic ? w.dynamic : w.fixed;
  const std::size_t offset = byte - (dynamic ? w.dynamic_shared : w.fixed_memory.data());
  if (mate->live == 0) {
    report_bounds(site, "an access of the shared memory of block " + block + ", which has ended");
  }
  if (offset + size > shadow.size_bytes) {
    report_bounds(site, "an access of " + std::to_string(size) + " bytes at offset " +
                            std::to_string(static_cast<std::ptrdiff_t>(offset)) +
                            " of the shared memory of block " + block + ", which has " +
                            std::to_string(shadow.size_bytes) + " bytes");
  }
  const Cell* other = c.races.access(c.current->index, shadow, offset, size, kind, site, c.random);
  if (other) {
    report_race(c, shadow, (dynamic ? "dynamic" : "static") + (" of block " + block),
                "shared memory", shadow.begin + offset, size, kind, site, *other);
  }
  return true;
}

Region* region_of(RunningCta& c, const void* p) {
  const auto* byte = static_cast<const unsigned char*>(p);
  const auto holds = [&](const Region* r) {
    return r && static_cast<std::size_t>(byte - r->begin) < r->size_bytes;
  };
  if (holds(c.last_region)) return c.last_region;
  std::vector<Region>& regions = c.launch->regions;
  auto after =
      std::upper_bound(regions.begin(), regions.end(), byte,
                       [](const unsigned char* b, const Region& r) { return b < r.begin; });
  if (after == regions.begin() || !holds(&*--after)) return nullptr;
  return c.last_region = &*after;
}

// What a kernel's code reads of the runtime itself, and its constants.
bool is_ours(const RunningCta& c, const void* p) {
  const auto at = reinterpret_cast<std::uintptr_t>(p);
  const auto within = [at](const void* begin, std::size_t size) {
    return at - reinterpret_cast<std::uintptr_t>(begin) < size;
  };
  return within(&c, sizeof c) || within(c.launch->args, c.launch->args_bytes) ||
         within(c.fibers.data(), c.fibers.size() * sizeof c.fibers[0]) ||
         within(c.warps.data(), c.warps.size() * sizeof c.warps[0]) ||
         at - c.launch->base < c.launch->library_bytes;
}

[[noreturn]] void report_stray(
    RunningCta& c, const void* p, unsigned size, unsigned kind, Site site) {
  const auto* byte = static_cast<const unsigned char*>(p);
  std::string text =
      std::string(kind & kWrite ? "a write" : "a read") + " of " + std::to_string(size) + " bytes ";
  const Region* nearest = nullptr;
  std::size_t distance = 1 << 20;
  for (const Region& r : c.launch->regions) {
    const std::size_t d = byte < r.begin ? r.begin - byte : byte + size - (r.begin + r.size_bytes);
    if (d < distance) {
      distance = d;
      nearest = &r;
    }
  }
  if (nearest) {
    const bool before = byte < nearest->begin;
    text += std::to_string(before ? distance : byte - nearest->begin) +
            (before ? " bytes before " : " bytes into ") + nearest->names + ", which has " +
            std::to_string(nearest->size_bytes) + " bytes";
  } else {
    text +=
        "in none of the launch's arrays (those that it reaches through other arrays are named "
        "by launch(through=...))";
  }
  report_bounds(site, text);
}

// Note an access of global memory; returns whether it was one and is remembered.
bool note_global(RunningCta& c, const void* p, unsigned size, unsigned kind, Site site) {
  const auto* byte = static_cast<const unsigned char*>(p);
  const auto* stack = reinterpret_cast<unsigned char*>(c.workspace->stacks[c.current->index].get());
  if (static_cast<std::size_t>(byte - stack) < kStackBytes) return false;
  if (p == &cta) return false;  // on its way to threadIdx
  Region* region = region_of(c, p);
  if (!region) {
    if (is_ours(c, p) || note_mates(c, p, size, kind, site)) return false;
    report_stray(c, p, size, kind, site);
  }
  if (size > region->size_bytes - (byte - region->begin)) report_stray(c, p, size, kind, site);
  if (region->read_only) {
    if (!(kind & kWrite)) return false;
    region->read_only = false;
  }
  Shadow& shadow = region->shadow;
  if (!shadow.cells) shadow.reset(const_cast<unsigned char*>(region->begin), region->size_bytes, 8);
  const Cell* other =
      c.races.access(c.current->index, shadow, byte - shadow.begin, size, kind, site, c.random);
  if (other) report_race(c, shadow, region->names, "global memory", p, size, kind, site, *other);
  return true;
}

bool is_shared(const RunningCta& c, const void* p) {
  return c.workspace->is_near(p) || c.workspace->fixed.holds(p);
}

bool note(RunningCta& c, const void* p, unsigned size, unsigned kind, Site site) {
  return is_shared(c, p) ? note_shared(c, p, size, kind, site)
                         : note_global(c, p, size, kind, site);
}

inline void touched(const void* p, unsigned size, unsigned kind, const void* return_address) {
  RunningCta& c = running();
  if (kind & kWrite) ++c.launch->progress;
  const Site site = site_of(return_address);
  if (!is_shared(c, p)) {
    if (c.wgmma.used()) {
      current_fiber().site = site;
      registers_touched(p, size, kind & kWrite);
      current_fiber().site = {};
    }
    // A thread that polls a plain word must let the others run.
    if (--c.far_countdown == 0) {
      c.far_countdown = 4096;
      preempt(c, site);
    }
    note_global(c, p, size, kind, site);
    return;
  }
  if (--c.countdown == 0) {
    c.countdown = 1 + next_random(c) % (2 * c.period);
    preempt(c, site);
  }
  note_shared(c, p, size, kind, site);
}

bool acquires(int order) {
  return order == __ATOMIC_ACQUIRE || order == __ATOMIC_CONSUME || order >= __ATOMIC_ACQ_REL;
}
bool releases(int order) { return order == __ATOMIC_RELEASE || order >= __ATOMIC_ACQ_REL; }

// Around an atomic access.
enum class Atomic { load, store, update };

void before_atomic(const volatile void* v, unsigned size, Atomic what, int order, void* from) {
  const void* p = const_cast<const void*>(v);
  RunningCta& c = running();
  const Site site = site_of(from);
  if (next_random(c) % 4 == 0) {
    if (what == Atomic::load)
      current_fiber().waits_for = acquires(order) ? "an acquiring load" : "a relaxed load";
    preempt(c, site);
    current_fiber().waits_for = nullptr;
  }
  note(c, p, size, kAtomic | (what == Atomic::load ? kRead : kWrite), site);
  if (what == Atomic::load) return;
  ++c.launch->progress;
  if (!is_shared(c, p)) {
    c.races.store(c.current->index, c.launch->words[p], releases(order), what == Atomic::update);
  } else if (releases(order)) {
    c.races.release(c.current->index, p);
  }
}
void after_atomic(const volatile void* v, int order) {
  const void* p = const_cast<const void*>(v);
  RunningCta& c = running();
  if (!is_shared(c, p)) {
    const auto word = c.launch->words.find(p);
    if (word != c.launch->words.end())
      c.races.load(c.current->index, word->second, acquires(order));
  } else if (acquires(order)) {
    c.races.acquire(c.current->index, p);
  }
}

}  // namespace

void describe_arrays(Launch& launch, const Array* arrays, unsigned n) {
  std::vector<const Array*> ascending;
  for (unsigned i = 0; i < n; ++i) {
    if (arrays[i].size_bytes) ascending.push_back(&arrays[i]);
  }
  std::sort(ascending.begin(), ascending.end(),
            [](const Array* a, const Array* b) { return a->begin < b->begin; });
  for (const Array* array : ascending) {
    const auto* begin = static_cast<const unsigned char*>(array->begin);
    Region* last = launch.regions.empty() ? nullptr : &launch.regions.back();
    if (last && begin < last->begin + last->size_bytes) {
      const std::size_t end = begin + array->size_bytes - last->begin;
      last->size_bytes = std::max(last->size_bytes, end);
      last->read_only = last->read_only && array->read_only;
      last->names += std::string(" and ") + array->name;
    } else {
      Region region;
      region.begin = begin;
      region.size_bytes = array->size_bytes;
      region.read_only = array->read_only;
      region.names = array->name;
      launch.regions.push_back(std::move(region));
    }
  }
}

void called_from(const void* return_address) {
  const Site site = site_of(return_address);
  current_fiber().outer = site;
}

void release(const void* object) {
  RunningCta& c = running();
  Launch& launch = *c.launch;
  ++launch.progress;
  if (!launch.checked) return;
  if (RunningCta* actor = launch.actor) {
    c.races.release_from(actor->races.publish(actor->current->index), object);
  } else {
    c.races.release(c.current->index, object);
  }
}
void acquire(const void* object, bool for_cluster) {
  RunningCta& c = running();
  if (c.launch->checked) c.races.acquire(c.current->index, object, for_cluster);
}
void accessed(const void* memory, unsigned size_bytes, bool is_write) {
  RunningCta& c = running();
  if (c.launch->checked) note(c, memory, size_bytes, is_write ? kWrite : kRead, {});
}

// ---- copies

void copy_begins(
    const void* memory, unsigned size_bytes, int group, CopyGroups groups, CopyKind kind) {
  RunningCta& c = running();
  RunningFiber& fiber = current_fiber();
  if (!c.launch->checked || !size_bytes) return;
  const unsigned access = groups == CopyGroups::store_reads ? kRead | kProxy
                          : kind == CopyKind::read          ? kRead
                          : kind == CopyKind::write         ? kWrite
                                                            : kWrite | kAtomic;
  const bool noted = note(c, memory, size_bytes, kInFlight | access, fiber.outer);
  if (noted && group >= 0) fiber.copies.push_back({memory, size_bytes, group, groups});
}

namespace {

void land(RunningCta& c, unsigned as, unsigned issuer, const void* memory, unsigned size_bytes) {
  Shadow* shadow = shadow_of(*c.workspace, memory);
  if (!shadow) {
    Region* region = region_of(c, memory);
    if (region && region->shadow.cells) shadow = &region->shadow;
  }
  if (shadow) c.races.land(as, issuer, *shadow, memory, size_bytes);
}

}  // namespace

void copies_end(int newest, CopyGroups groups) {
  RunningCta& c = running();
  std::vector<Copy>& copies = current_fiber().copies;
  auto later = copies.begin();
  for (const Copy& copy : copies) {
    if (copy.groups != groups || copy.group >= newest) {
      *later++ = copy;
    } else {
      land(c, c.current->index, c.current->index, copy.memory, copy.size_bytes);
    }
  }
  copies.erase(later, copies.end());
}

void copy_landed(const void* shared,
                 const void* source,
                 unsigned size_bytes,
                 unsigned issuer,
                 const void* object) {
  RunningCta& c = running();
  ++c.launch->progress;
  if (!c.launch->checked) return;
  const unsigned engine = c.fibers.size();
  land(c, engine, issuer, shared, size_bytes);
  land(c, engine, issuer, source, size_bytes);
  c.races.release_only(engine, object);
}

void operand_begins(const void* shared, unsigned size_bytes) {
  RunningCta& c = running();
  if (c.launch->checked)
    note(c, shared, size_bytes, kInFlight | kProxy | kRead, current_fiber().outer);
}

void operand_ends(const void* shared, unsigned size_bytes) {
  RunningCta& c = running();
  if (c.launch->checked) land(c, c.current->index, c.current->index, shared, size_bytes);
}

void fence_proxy_async() {
  RunningCta& c = running();
  if (c.launch->checked) c.races.fence_proxy(c.current->index);
}

// ---- clusters

unsigned cluster_rank() { return running().linear % running().launch->cluster_size; }
unsigned cluster_size() { return running().launch->cluster_size; }

namespace {

RunningCta& mate_of(RunningCta& c, unsigned rank, const char* name) {
  if (rank >= c.cluster->ctas.size()) {
    fail(std::string(name) + ": rank " + std::to_string(rank) + " of a cluster of " +
         std::to_string(c.cluster->ctas.size()) + " CTAs");
  }
  RunningCta* mate = c.cluster->ctas[rank];
  if (!mate || mate->live == 0) {
    fail(std::string(name) + ": the CTA of rank " + std::to_string(rank) + " has ended");
  }
  return *mate;
}

std::ptrdiff_t dynamic_offset(RunningCta& c, const void* shared, const char* name) {
  if (c.workspace->is_near(shared))
    return static_cast<const unsigned char*>(shared) - c.dynamic_shared;
  const auto offset = static_cast<const unsigned char*>(shared) - c.launch->fixed;
  if (static_cast<std::size_t>(offset) >= c.launch->tls_bytes)
    fail(std::string(name) + ": the address lies in no shared memory of the calling CTA");
  return -1;
}

}  // namespace

void* map_shared(const void* shared, unsigned rank) {
  called_from(__builtin_return_address(0));
  RunningCta& c = running();
  RunningCta& mate = mate_of(c, rank, "map_shared");
  if (&mate == &c) return const_cast<void*>(shared);
  const std::ptrdiff_t offset = dynamic_offset(c, shared, "map_shared");
  if (offset >= 0) return mate.dynamic_shared + offset;
  return mate.workspace->fixed_memory.data() +
         (static_cast<const unsigned char*>(shared) - c.launch->fixed);
}

void in_cta(unsigned rank, void* shared, const char* name, void (*work)(void* there)) {
  RunningCta& c = running();
  RunningCta& mate = mate_of(c, rank, name);
  if (&mate == &c) return work(shared);
  const std::ptrdiff_t offset = dynamic_offset(c, shared, name);
  swap_fixed(c, mate);
  c.launch->actor = &c;
  cta = &mate;
  work(offset >= 0 ? mate.dynamic_shared + offset : shared);
  cta = &c;
  c.launch->actor = nullptr;
  swap_fixed(mate, c);
}

void fence() {
  RunningCta& c = running();
  if (c.launch->checked) c.races.fence(c.current->index);
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
    cufuse::host::before_atomic(p, bits / 8, cufuse::host::Atomic::update, order, FROM);  \
    const Int##bits old = operation(p, v, __ATOMIC_SEQ_CST);                              \
    cufuse::host::after_atomic(p, order);                                                 \
    return old;                                                                           \
  }
#define EXCHANGE(bits, name)                                                               \
  int __tsan_atomic##bits##_compare_exchange_##name(volatile Int##bits* p, Int##bits* old, \
                                                    Int##bits v, int order, int) {         \
    cufuse::host::before_atomic(p, bits / 8, cufuse::host::Atomic::update, order, FROM);   \
    const bool done = __atomic_compare_exchange_n(p, old, v, false, 5, 5);                 \
    cufuse::host::after_atomic(p, order);                                                  \
    return done;                                                                           \
  }
#define ATOMIC(bits)                                                                    \
  using Int##bits = std::int##bits##_t;                                                 \
  Int##bits __tsan_atomic##bits##_load(const volatile Int##bits* p, int order) {        \
    cufuse::host::before_atomic(p, bits / 8, cufuse::host::Atomic::load, order, FROM);  \
    const Int##bits v = __atomic_load_n(p, __ATOMIC_SEQ_CST);                           \
    cufuse::host::after_atomic(p, order);                                               \
    return v;                                                                           \
  }                                                                                     \
  void __tsan_atomic##bits##_store(volatile Int##bits* p, Int##bits v, int order) {     \
    cufuse::host::before_atomic(p, bits / 8, cufuse::host::Atomic::store, order, FROM); \
    __atomic_store_n(p, v, __ATOMIC_SEQ_CST);                                           \
  }                                                                                     \
  UPDATE(bits, exchange, __atomic_exchange_n)                                           \
  UPDATE(bits, fetch_add, __atomic_fetch_add)                                           \
  UPDATE(bits, fetch_sub, __atomic_fetch_sub)                                           \
  UPDATE(bits, fetch_and, __atomic_fetch_and)                                           \
  UPDATE(bits, fetch_or, __atomic_fetch_or)                                             \
  UPDATE(bits, fetch_xor, __atomic_fetch_xor)                                           \
  EXCHANGE(bits, strong)                                                                \
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
void __tsan_atomic_thread_fence(int) { cufuse::host::fence(); }
void __tsan_atomic_signal_fence(int) {}

}  // extern "C"

#undef FROM
#undef ACCESS
#undef UPDATE
#undef EXCHANGE
#undef ATOMIC
