// What a CTA's asynchronous copies, mbarriers and named barriers do on the CPU. All threads of a
// CTA are fibers of one worker thread, so its state needs no locks.
#include "host/async.cuh"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "host/fibers.cuh"

namespace cufuse::host {

namespace {

using u64 = unsigned long long;

// When a copy may land: at once it is not even queued.
enum class Landing { any_time, late };

struct ThreadCopy {
  unsigned char* shared;
  const void* source;
  unsigned size_bytes;
  int group;
  Landing landing;
};

struct BulkCopy {
  unsigned char* to;
  const unsigned char* from;
  unsigned size_bytes;
  u64* barrier;  // none: a store
  unsigned thread;
  int group;
  Landing landing;
  bool was_read;
  std::vector<unsigned char> bytes;  // what a store read, if it was
  Combine combine;                   // none: what was there is overwritten
  TensorMap map;                     // magic 0: the copy is of plain bytes
  int at[4];                         // of the box's first element
  unsigned line;                     // of the box, with which the copy begins
};

struct Thread {
  std::vector<ThreadCopy> copies;
  int copy_groups = 0, store_groups = 0;
};

struct NamedBarrier {
  unsigned count = 0, arrived = 0, generation = 0;
  std::vector<bool> here, group;
};

constexpr unsigned kNamedBarriers = 16;
constexpr unsigned kMaxExpectBytes = (1u << 20) - 1;

}  // namespace

struct AsyncState::Members {
  std::vector<Thread> threads;
  std::vector<BulkCopy> bulk;
  NamedBarrier named[kNamedBarriers];
  std::uint64_t random = 1;
};

AsyncState::~AsyncState() { delete members_; }

AsyncState::Members& AsyncState::members() {
  if (!members_) {
    members_ = new Members;
    members_->threads.resize(cta->block.count());
    const Dim3 at = cta->block_index;
    members_->random = (cta->seed + 1) * 0xD1342543DE82EF95ull +
                       (at.x + 1ull * at.y * cta->grid.x) * 0x9E3779B97F4A7C15ull;
    if (!members_->random) members_->random = 1;
    for (int i = 0; i < 8; ++i) chance(2);  // neighbouring seeds start alike
  }
  return *members_;
}

namespace {

AsyncState::Members& state() { return cta->async.members(); }
Thread& current_thread() { return state().threads[cta->current->index]; }

u64 draw() {
  std::uint64_t& random = state().random;
  random ^= random << 13;
  random ^= random >> 7;
  random ^= random << 17;
  return random * 0x2545F4914F6CDD1Dull >> 32;
}

[[noreturn]] void fault(const char* name, const std::string& what) {
  host::fail(name, (new std::string(what))->c_str());
}

std::uintptr_t number(const void* p) { return reinterpret_cast<std::uintptr_t>(p); }

// Where dynamic shared memory could be at most.
bool in_dynamic_shared(const void* p) {
  return number(p) - number(cta->dynamic_shared) < kMaxSharedBytes;
}

std::string place(const void* p) {
  char text[40];
  if (in_dynamic_shared(p)) {
    return "shared + " + std::to_string(number(p) - number(cta->dynamic_shared));
  }
  std::snprintf(text, sizeof text, "%p", p);
  return text;
}

void check_shared(const void* p, unsigned size_bytes, const char* name) {
  const std::uintptr_t begin = number(cta->dynamic_shared);
  const bool touches = number(p) < begin + kMaxSharedBytes && number(p) + size_bytes > begin;
  const bool inside =
      number(p) >= begin && number(p) + size_bytes <= begin + cta->dynamic_shared_bytes;
  if (touches && !inside) {
    fault(name, std::to_string(size_bytes) + " bytes at " + place(p) + " reach beyond the CTA's " +
                    std::to_string(cta->dynamic_shared_bytes) + " bytes of shared memory");
  }
}

void check_copy(const void* shared, const void* global, unsigned size_bytes, const char* name) {
  if ((number(shared) | number(global)) & 15) fault(name, "an address is not 16-byte aligned");
  if (size_bytes % 16) fault(name, std::to_string(size_bytes) + " bytes are no multiple of 16");
  if (in_dynamic_shared(global)) fault(name, "the global address lies in shared memory");
  if (shared) check_shared(shared, size_bytes, name);
}

// ---- mbarrier's word

struct Phase {
  unsigned count, pending, phase;
  int to_come;  // bytes announced and not landed; below zero while a copy overtakes its expect_tx
};

constexpr u64 kMagic = 1;  // poison is 3 and fresh static memory 0

Phase unpack(const u64* barrier, const char* name) {
  if (number(barrier) & 7) fault(name, "the mbarrier is not 8-byte aligned");
  check_shared(barrier, 8, name);
  const u64 word = *barrier;
  if (word >> 62 != kMagic) fault(name, "no mbarrier was initialized at " + place(barrier));
  return {static_cast<unsigned>(word & 0xfffff), static_cast<unsigned>(word >> 20 & 0xfffff),
          static_cast<unsigned>(word >> 61 & 1),
          static_cast<int>(word >> 40 & 0x1fffff) - (1 << 20)};
}

u64 pack(const Phase& word) {
  return word.count | static_cast<u64>(word.pending) << 20 |
         static_cast<u64>(word.to_come + (1 << 20)) << 40 | static_cast<u64>(word.phase) << 61 |
         kMagic << 62;
}

unsigned bytes_in_flight(const u64* barrier) {
  unsigned sum = 0;
  for (const BulkCopy& copy : state().bulk) {
    if (copy.barrier == barrier) sum += copy.size_bytes;
  }
  return sum;
}

// Put the word back and open the next phase if this one is complete.
void update(u64* barrier, Phase word, const char* name) {
  if (word.to_come > static_cast<int>(kMaxExpectBytes) ||
      word.to_come < -static_cast<int>(kMaxExpectBytes)) {
    fault(name, "more than 2^20 - 1 bytes are to come at the mbarrier at " + place(barrier));
  }
  if (word.pending == 0 && word.to_come == 0) {
    if (const unsigned bytes = bytes_in_flight(barrier)) {
      fault(name, "the phase of the mbarrier at " + place(barrier) + " completes while " +
                      std::to_string(bytes) + " bytes are in flight: too few were announced");
    }
    word.phase ^= 1;
    word.pending = word.count;
  }
  *barrier = pack(word);
}

void describe(
    char* text, std::size_t capacity, const u64* barrier, unsigned parity, const char* name) {
  const Phase word = unpack(barrier, name);
  std::snprintf(text, capacity,
                "%s of parity %u at %s (%u of %u arrivals missing, %d bytes announced, %u of them "
                "in flight)",
                name, parity, place(barrier).c_str(), word.pending, word.count, word.to_come,
                bytes_in_flight(barrier));
}

// ---- landing

void land(const ThreadCopy& copy) {
  std::memset(copy.shared, 0, 16);
  std::memcpy(copy.shared, copy.source, copy.size_bytes);
  --cta->async.in_flight;
}

// ---- boxes of an array

unsigned box_line_bytes(const TensorMap& map) { return map.box[0] * map.item_bytes; }
unsigned box_lines(const TensorMap& map) { return map.box[1] * map.box[2] * map.box[3]; }

// A line of a box: where it begins in the array, and how many of its bytes lie there.
struct Line {
  unsigned char* data;
  unsigned inside_bytes;
};

Line line_of_box(const TensorMap& map, const int (&at)[4], unsigned line) {
  unsigned char* data = static_cast<unsigned char*>(map.data);
  for (int i = 1; i < 4; ++i) {
    const long long index = at[i] + static_cast<long long>(line % map.box[i]);
    line /= map.box[i];
    if (index < 0 || static_cast<u64>(index) >= map.sizes[i]) return {nullptr, 0};
    data += index * static_cast<long long>(map.pitch_bytes[i - 1]);
  }
  const u64 first = static_cast<u64>(at[0]);
  if (first >= map.sizes[0]) return {nullptr, 0};
  const u64 inside = std::min<u64>(map.sizes[0] - first, map.box[0]);
  return {data + first * map.item_bytes, static_cast<unsigned>(inside * map.item_bytes)};
}

// Where a byte of the box lies: chunks of 16 bytes change places by the address, as in swizzle.cuh.
unsigned char* swizzled_place(const TensorMap& map, unsigned char* shared, unsigned offset) {
  if (!map.swizzle_bytes) return shared + offset;
  const std::uintptr_t at = number(shared) - number(cta->dynamic_shared) + offset;
  return cta->dynamic_shared + (at ^ (at >> 3 & (map.swizzle_bytes - 16)));
}

void read_box(BulkCopy& copy) {
  const TensorMap& map = copy.map;
  copy.bytes.assign(copy.size_bytes, 0);
  if (!copy.barrier) {
    unsigned char* shared = const_cast<unsigned char*>(copy.from);
    for (unsigned at = 0; at < copy.size_bytes; at += 16) {
      std::memcpy(copy.bytes.data() + at, swizzled_place(map, shared, at), 16);
    }
    return;
  }
  const unsigned line_bytes = box_line_bytes(map);
  for (unsigned i = 0; i < copy.size_bytes / line_bytes; ++i) {
    const Line line = line_of_box(map, copy.at, copy.line + i);
    std::copy_n(line.data, line.inside_bytes, copy.bytes.data() + i * line_bytes);
  }
}

void write_box(const BulkCopy& copy) {
  const TensorMap& map = copy.map;
  if (copy.barrier) {
    for (unsigned at = 0; at < copy.size_bytes; at += 16) {
      std::memcpy(swizzled_place(map, copy.to, at), copy.bytes.data() + at, 16);
    }
    return;
  }
  const unsigned line_bytes = box_line_bytes(map);
  for (unsigned i = 0; i < copy.size_bytes / line_bytes; ++i) {
    const Line line = line_of_box(map, copy.at, copy.line + i);
    std::copy_n(copy.bytes.data() + i * line_bytes, line.inside_bytes, line.data);
  }
}

void read_source(BulkCopy& copy) {
  if (copy.was_read) return;
  if (copy.map.magic) {
    read_box(copy);
    copy.was_read = true;
    return;
  }
  copy.bytes.assign(copy.from, copy.from + copy.size_bytes);
  copy.was_read = true;
}

void land_bulk(std::size_t i) {
  std::vector<BulkCopy>& bulk = state().bulk;
  BulkCopy copy = std::move(bulk[i]);
  if (i + 1 < bulk.size()) bulk[i] = std::move(bulk.back());
  bulk.pop_back();
  --cta->async.in_flight;
  read_source(copy);
  if (copy.map.magic) {
    write_box(copy);
  } else if (copy.combine) {
    copy.combine(copy.to, copy.bytes.data(), copy.size_bytes);
  } else {
    std::memcpy(copy.to, copy.bytes.data(), copy.size_bytes);
  }
  if (!copy.barrier) return;
  // The rows of a box were noted as read when it was issued.
  const void* source = copy.map.magic ? copy.to : copy.from;
  copy_landed(copy.to, source, copy.size_bytes, copy.thread, copy.barrier);
  Phase word = unpack(copy.barrier, "copy_bulk");
  word.to_come -= static_cast<int>(copy.size_bytes);
  update(copy.barrier, word, "copy_bulk");
}

// One bulk copy, perhaps; those that come late need a waiting thread or much luck.
void land_some_bulk(bool waiting) {
  const std::size_t n = state().bulk.size();
  if (!n || !chance(4)) return;
  const std::size_t i = draw() % n;
  if (state().bulk[i].landing == Landing::late && !waiting && !chance(32)) return;
  land_bulk(i);
}

// Queue a bulk copy in one to three pieces.
void queue(BulkCopy copy) {
  Thread& thread = current_thread();
  copy.thread = cta->current->index;
  copy.group = thread.store_groups;
  unsigned left = copy.size_bytes;
  for (unsigned pieces = 1 + draw() % 3; left; --pieces) {
    const unsigned units = left / 16;
    copy.size_bytes = pieces > 1 ? 16 * (1 + draw() % units) : left;
    copy.landing = chance(2) ? Landing::late : Landing::any_time;
    state().bulk.push_back(copy);
    ++cta->async.in_flight;
    copy.to += copy.size_bytes;
    copy.from += copy.size_bytes;
    left -= copy.size_bytes;
    if (pieces == 1) break;
  }
  land_some_bulk(false);
}

}  // namespace

bool chance(unsigned n) { return draw() % n == 0; }

void land_some() {
  std::vector<ThreadCopy>& copies = current_thread().copies;
  auto later = copies.begin();
  for (const ThreadCopy& copy : copies) {
    if (copy.landing == Landing::any_time && chance(4)) {
      land(copy);
    } else {
      *later++ = copy;
    }
  }
  copies.erase(later, copies.end());
  land_some_bulk(false);
  run_some_products();
}

void thread_ends() {
  products_end();
  if (++cta->async.ended < cta->block.count() || !cta->async.in_flight) return;
  while (!state().bulk.empty()) {
    const BulkCopy& copy = state().bulk.back();
    if (copy.barrier) fault("copy_bulk", "the CTA ends while its copy is in flight");
    if (!copy.was_read) fault("store_bulk", "the CTA ends before its shared memory was read");
    land_bulk(state().bulk.size() - 1);
  }
}

// ---- cp.async

void copy_async(void* shared, const void* source, unsigned size_bytes) {
  called_from(__builtin_return_address(0));
  if (size_bytes > 16) fault("copy_async", "not a 16-byte aligned copy");
  if ((number(shared) | (size_bytes ? number(source) : 0)) & 15) {
    fault("copy_async", "not a 16-byte aligned copy");
  }
  check_shared(shared, 16, "copy_async");
  Thread& thread = current_thread();
  copy_begins(shared, 16, thread.copy_groups, CopyGroups::load, CopyKind::write);
  copy_begins(source, size_bytes, thread.copy_groups, CopyGroups::load, CopyKind::read);
  const Landing landing = chance(2) ? Landing::late : Landing::any_time;
  const ThreadCopy copy{static_cast<unsigned char*>(shared), source, size_bytes, thread.copy_groups,
                        landing};
  ++cta->async.in_flight;
  if (chance(4)) {
    land(copy);
  } else {
    thread.copies.push_back(copy);
  }
}

void copy_async_commit() { ++current_thread().copy_groups; }

void copy_async_wait(int pending) {
  Thread& thread = current_thread();
  auto later = thread.copies.begin();
  for (const ThreadCopy& copy : thread.copies) {
    if (copy.group >= thread.copy_groups - pending) {
      *later++ = copy;
    } else {
      land(copy);
    }
  }
  thread.copies.erase(later, thread.copies.end());
  copies_end(thread.copy_groups - pending, CopyGroups::load);
}

// ---- mbarrier

void mbarrier_init(u64* barrier, unsigned count) {
  called_from(__builtin_return_address(0));
  const char* name = "mbarrier_init";
  if (number(barrier) & 7) fault(name, "the mbarrier is not 8-byte aligned");
  check_shared(barrier, 8, name);
  if (count == 0 || count > 0xfffff) fault(name, "the count is not in 1..2^20 - 1");
  if (bytes_in_flight(barrier)) fault(name, "copies are in flight to the mbarrier");
  *barrier = pack({count, count, 0, 0});
}

namespace {

void arrive_at(u64* barrier, unsigned expect_bytes, const char* name) {
  Phase word = unpack(barrier, name);
  if (word.pending == 0) {
    fault(name, "one arrival more than the mbarrier at " + place(barrier) + " counts");
  }
  if (expect_bytes > kMaxExpectBytes) fault(name, "more than 2^20 - 1 bytes are announced");
  release(barrier);
  word.to_come += static_cast<int>(expect_bytes);
  --word.pending;
  update(barrier, word, name);
}

}  // namespace

void mbarrier_arrive(u64* barrier, unsigned expect_bytes, const char* name) {
  called_from(__builtin_return_address(0));
  arrive_at(barrier, expect_bytes, name);
}

void mbarrier_arrive_remote(u64* barrier, unsigned rank) {
  called_from(__builtin_return_address(0));
  in_cta(rank, barrier, "mbarrier_arrive_remote",
         [](void* there) { arrive_at(static_cast<u64*>(there), 0, "mbarrier_arrive_remote"); });
}

bool mbarrier_test(u64* barrier, unsigned parity, const char* name, bool for_cluster) {
  if (parity > 1) fault(name, "the parity is neither 0 nor 1");
  land_some_bulk(true);
  if (unpack(barrier, name).phase == parity) return false;
  acquire(barrier, for_cluster);
  return true;
}

bool mbarrier_wait(u64* barrier, unsigned parity, u64 spins, const char* name, bool for_cluster) {
  called_from(__builtin_return_address(0));
  char reason[200];
  for (u64 spin = 0;; ++spin) {
    if (mbarrier_test(barrier, parity, name, for_cluster)) break;
    if (spins && spin + 1 >= spins) {
      yield(name);  // who polls lets the others go on
      return false;
    }
    if (spin % 64 == 0) describe(reason, sizeof reason, barrier, parity, name);
    yield(reason);
  }
  // The others may move before this thread uses what it waited for.
  if (chance(4)) yield(name);
  return true;
}

// ---- bulk copies

void bulk_load(void* shared, const void* source, unsigned size_bytes, u64* barrier) {
  called_from(__builtin_return_address(0));
  check_copy(shared, source, size_bytes, "copy_bulk");
  unpack(barrier, "copy_bulk");
  copy_begins(shared, size_bytes, -1, CopyGroups::load, CopyKind::write);
  copy_begins(source, size_bytes, -1, CopyGroups::load, CopyKind::read);
  BulkCopy copy{};
  copy.to = static_cast<unsigned char*>(shared);
  copy.from = static_cast<const unsigned char*>(source);
  copy.size_bytes = size_bytes;
  copy.barrier = barrier;
  queue(copy);
}

void bulk_store(void* target, const void* shared, unsigned size_bytes, Combine combine) {
  called_from(__builtin_return_address(0));
  check_copy(shared, target, size_bytes, combine ? "reduce_bulk" : "store_bulk");
  const int group = current_thread().store_groups;
  copy_begins(shared, size_bytes, group, CopyGroups::store_reads, CopyKind::read);
  copy_begins(target, size_bytes, group, CopyGroups::store_writes,
              combine ? CopyKind::update : CopyKind::write);
  BulkCopy copy{};
  copy.to = static_cast<unsigned char*>(target);
  copy.from = static_cast<const unsigned char*>(shared);
  copy.size_bytes = size_bytes;
  copy.combine = combine;
  queue(copy);
}

void bulk_store_commit() { ++current_thread().store_groups; }

void bulk_store_wait(int pending, bool only_read) {
  const int newest = current_thread().store_groups - pending;
  copies_end(newest, CopyGroups::store_reads);
  if (!only_read) copies_end(newest, CopyGroups::store_writes);
  std::vector<BulkCopy>& bulk = state().bulk;
  for (std::size_t i = 0; i < bulk.size();) {
    BulkCopy& copy = bulk[i];
    const bool waited_for =
        !copy.barrier && copy.thread == cta->current->index && copy.group < newest;
    if (waited_for && only_read) read_source(copy);
    if (waited_for && !only_read) {
      land_bulk(i);
    } else {
      ++i;
    }
  }
}

void bulk_prefetch(const void* source, unsigned size_bytes) {
  check_copy(nullptr, source, size_bytes, "prefetch_bulk");
}

// ---- tensor copies

void tensor_check(const TensorMap& map, const char* name) {
  if (map.magic != kTensorMagic) fault(name, "the map is none: tensor_map.py did not fill it");
}

namespace {

void check_box(
    const void* shared, const TensorMap& map, const int* at, unsigned rank, const char* name) {
  tensor_check(map, name);
  if (rank != map.rank) {
    fault(name, std::to_string(rank) + " coordinates for a map of " + std::to_string(map.rank) +
                    " dimensions");
  }
  if ((number(shared) - number(cta->dynamic_shared)) % 128) {
    fault(name, "the box at " + place(shared) + " does not start at a multiple of 128 bytes");
  }
  if (at[0] < 0) fault(name, "a box that starts left of the array is not modelled");
  check_shared(shared, box_lines(map) * box_line_bytes(map), name);
}

BulkCopy box_copy(const TensorMap& map, const int* at, unsigned rank) {
  BulkCopy copy{};
  copy.map = map;
  std::copy_n(at, rank, copy.at);
  return copy;
}

// Queue a box in one to three pieces of whole lines.
void queue_box(BulkCopy copy) {
  const unsigned line_bytes = box_line_bytes(copy.map);
  copy.thread = cta->current->index;
  unsigned left = box_lines(copy.map);
  for (unsigned pieces = 1 + draw() % 3; left; --pieces) {
    // Lines in eights: a piece starts where the swizzle does.
    const unsigned lines = pieces > 1 && left > 8 ? 8 * (1 + draw() % ((left - 1) / 8)) : left;
    copy.size_bytes = lines * line_bytes;
    copy.landing = chance(2) ? Landing::late : Landing::any_time;
    state().bulk.push_back(copy);
    ++cta->async.in_flight;
    copy.line += lines;
    (copy.barrier ? copy.to : const_cast<unsigned char*&>(copy.from)) += copy.size_bytes;
    left -= lines;
  }
}

}  // namespace

void tensor_load(void* shared, const TensorMap& map, const int* at, unsigned rank, u64* barrier) {
  called_from(__builtin_return_address(0));
  check_box(shared, map, at, rank, "copy_tensor");
  unpack(barrier, "copy_tensor");
  copy_begins(shared, box_lines(map) * box_line_bytes(map), -1, CopyGroups::load, CopyKind::write);
  BulkCopy copy = box_copy(map, at, rank);
  for (unsigned i = 0; i < box_lines(map); ++i) {
    const Line line = line_of_box(map, copy.at, i);
    if (line.inside_bytes) accessed(line.data, line.inside_bytes, false);
  }
  copy.to = static_cast<unsigned char*>(shared);
  copy.barrier = barrier;
  queue_box(copy);
  land_some_bulk(false);
}

void tensor_store(const TensorMap& map, const int* at, unsigned rank, const void* shared) {
  called_from(__builtin_return_address(0));
  check_box(shared, map, at, rank, "store_tensor");
  const int group = current_thread().store_groups;
  copy_begins(shared, box_lines(map) * box_line_bytes(map), group, CopyGroups::store_reads,
              CopyKind::read);
  BulkCopy copy = box_copy(map, at, rank);
  for (unsigned i = 0; i < box_lines(map); ++i) {
    const Line line = line_of_box(map, copy.at, i);
    if (line.inside_bytes) {
      copy_begins(line.data, line.inside_bytes, group, CopyGroups::store_writes, CopyKind::write);
    }
  }
  copy.from = static_cast<const unsigned char*>(shared);
  copy.group = group;
  queue_box(copy);
  land_some_bulk(false);
}

// ---- named barriers

void named_barrier(unsigned id, unsigned count, bool wait, const char* name) {
  called_from(__builtin_return_address(0));
  if (id == 0 || id >= kNamedBarriers) fault(name, "the id is not in 1..15");
  if (count == 0 || count % 32 || count > 1024) {
    fault(name, "a count of " + std::to_string(count) + " threads is no number of warps");
  }
  NamedBarrier& barrier = state().named[id];
  const unsigned self = cta->current->index;
  const std::string which = "barrier " + std::to_string(id);
  if (barrier.here.empty()) barrier.here.resize(cta->block.count());
  if (count > cta->block.count()) fault(name, which + " counts more threads than the CTA has");
  if (barrier.arrived == 0 && barrier.count != count) barrier.group.clear();  // another use of it
  if (barrier.arrived && barrier.count != count) {
    fault(name, which + " is used with counts of " + std::to_string(barrier.count) + " and " +
                    std::to_string(count));
  }
  if (!barrier.group.empty() && !barrier.group[self]) {
    fault(name, which + " was filled without this thread before: its count is too small");
  }
  if (barrier.here[self]) fault(name, "a thread comes to " + which + " twice before it is full");
  barrier.count = count;
  barrier.here[self] = true;
  const unsigned generation = barrier.generation;
  release(&barrier);
  if (++barrier.arrived == count) {
    barrier.group = barrier.here;
    barrier.here.assign(barrier.here.size(), false);
    barrier.arrived = 0;
    ++barrier.generation;
    if (wait) acquire(&barrier);
    if (wait && chance(4)) yield(name);
    return;
  }
  if (!wait) return;
  char reason[100];
  for (unsigned spin = 0; barrier.generation == generation; ++spin) {
    if (spin % 64 == 0) {
      std::snprintf(reason, sizeof reason, "%s on barrier %u (%u of %u threads came)", name, id,
                    barrier.arrived, count);
    }
    yield(reason);
  }
  acquire(&barrier);
}

}  // namespace cufuse::host
