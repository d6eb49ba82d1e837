// Which accesses to a CTA's shared memory are ordered, and which race: vector clocks.
//
// A thread's epoch counts its synchronisations; its clock says up to which epoch it has seen every
// other thread. Threads that meet (a barrier, a warp collective) share one clock from then on, so
// that a meeting costs little. Each word of shared memory remembers the last four accesses that a
// later one could race with; when more are unordered (many readers) one of them is forgotten.
#ifndef CUFUSE_HOST_RACES_CUH
#define CUFUSE_HOST_RACES_CUH

#include <algorithm>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

namespace cufuse::host {

// Where something was done: offsets of return addresses in the kernel's library.
struct Site {
  std::uint32_t at = 0, caller = 0;
};

enum Access : std::uint8_t {
  kRead = 0,
  kWrite = 1,
  kAtomic = 2,
  kInFlight = 4,  // a copy that was issued and has not been waited for
  kProxy = 8,     // by the async proxy: stores come through fence_proxy_async only
};

struct Cell {
  std::uint32_t epoch;
  std::uint16_t thread;
  std::uint8_t bytes;  // which of the word's bytes; 0 is an empty cell
  std::uint8_t kind;
  Site site;
};

// What is remembered of a piece of shared memory.
struct Shadow {
  static constexpr int kCells = 4;

  unsigned char* begin = nullptr;
  std::size_t size_bytes = 0;
  std::vector<Cell> cells;

  void reset(unsigned char* memory, std::size_t size) {
    begin = memory;
    size_bytes = size;
    cells.assign((size + 3) / 4 * kCells, Cell{});
  }
  bool holds(const void* p) const {
    return static_cast<std::size_t>(static_cast<const unsigned char*>(p) - begin) < size_bytes;
  }
};

class Races {
 public:
  // One more than there are: the copy engine, which nobody's accesses are ordered before.
  explicit Races(unsigned n_threads) : threads_(n_threads + 1) {
    auto clock = std::make_shared<Clock>(n_threads + 1);
    for (Thread& thread : threads_) thread.seen = clock;
  }

  // All members have seen all that any of them has.
  void meet(const std::vector<unsigned>& members) {
    const std::shared_ptr<Clock> first = threads_[members[0]].seen;
    std::shared_ptr<Clock> joined = first;
    bool alone = static_cast<std::size_t>(first.use_count()) == members.size() + 2;
    for (unsigned m : members) alone = alone && threads_[m].seen == first;
    if (!alone) {
      joined = std::make_shared<Clock>(*first);
      const Clock* last = first.get();
      for (unsigned m : members) {
        const Clock* seen = threads_[m].seen.get();
        if (seen != last) join(*joined, *seen);
        last = seen;
      }
    }
    for (unsigned m : members) {
      (*joined)[m] = threads_[m].epoch++;
      if (!alone) threads_[m].seen = joined;
    }
  }

  // Who acquires the object from now on has seen what this thread has.
  void release(unsigned self, const void* object) {
    Object& o = objects_[object];
    Thread& thread = threads_[self];
    if (o.clock.empty()) o.clock.resize(threads_.size());
    join(o.clock, *thread.seen);
    o.clock[self] = thread.epoch++;
    ++o.version;
  }

  // Who acquires it has seen this thread, but not what this thread has seen.
  void release_only(unsigned self, const void* object) {
    Object& o = objects_[object];
    if (o.clock.empty()) o.clock.resize(threads_.size());
    o.clock[self] = threads_[self].epoch++;
    ++o.version;
  }

  // Copies in flight become accesses of this thread.
  void land(unsigned self, Shadow& shadow, const void* p, std::size_t size) {
    const std::size_t offset = static_cast<const unsigned char*>(p) - shadow.begin;
    const std::size_t end = std::min(offset + size, shadow.size_bytes);
    for (std::size_t i = offset / 4 * Shadow::kCells; i < (end + 3) / 4 * Shadow::kCells; ++i) {
      Cell& cell = shadow.cells[i];
      if (!(cell.kind & kInFlight) || (self != engine() && cell.thread != self)) continue;
      cell.kind &= ~kInFlight;
      cell.thread = static_cast<std::uint16_t>(self);
      cell.epoch = threads_[self].epoch;
    }
  }

  // What this thread did, or has seen done, may be read by the async proxy.
  void fence_proxy(unsigned self) {
    Thread& thread = threads_[self];
    thread.passed = thread.seen;
    thread.passed_epoch = thread.epoch++;
  }

  void acquire(unsigned self, const void* object) {
    const auto found = objects_.find(object);
    if (found == objects_.end()) return;
    Thread& thread = threads_[self];
    const Object& o = found->second;
    if (thread.acquired == object && thread.version == o.version) return;  // it polls
    thread.acquired = object;
    thread.version = o.version;
    auto joined = std::make_shared<Clock>(*thread.seen);
    join(*joined, o.clock);
    thread.seen = std::move(joined);
  }

  // Remember an access; returns an earlier one that it races with, or null.
  const Cell* access(unsigned self,
                     Shadow& shadow,
                     std::size_t offset,
                     std::size_t size,
                     unsigned kind,
                     Site site,
                     std::uint64_t random) {
    const std::size_t end = std::min(offset + size, shadow.size_bytes);
    const Thread& thread = threads_[self];
    const Clock& seen = *thread.seen;
    for (std::size_t word = offset / 4; word * 4 < end; ++word) {
      unsigned bytes = 0xf;
      if (word * 4 < offset) bytes &= 0xfu << (offset - word * 4);
      if (word * 4 + 4 > end) bytes &= 0xfu >> (word * 4 + 4 - end);
      Cell* cells = &shadow.cells[word * Shadow::kCells];
      Cell* free = nullptr;
      for (Cell* cell = cells; cell < cells + Shadow::kCells; ++cell) {
        if (cell->bytes) {
          const bool ordered = cell->thread == self || seen[cell->thread] >= cell->epoch;
          if (cell->bytes & bytes) {
            if (cell->kind & kInFlight) {
              if ((cell->kind | kind) & kWrite) return cell;
            } else if (!ordered && (cell->kind | kind) & kWrite && !(cell->kind & kind & kAtomic)) {
              return cell;
            } else if (kind & kProxy && cell->kind & kWrite && !has_passed(*cell, thread)) {
              return cell;
            }
          }
          // Whatever would race with the old access will race with this one.
          if (ordered && !(cell->bytes & ~bytes) && !(cell->kind & kInFlight) &&
              (kind & kWrite || !(cell->kind & kWrite)))
            *cell = {};
        }
        if (!cell->bytes) free = cell;
      }
      if (!free) free = evict(cells, random);
      *free = {thread.epoch, static_cast<std::uint16_t>(self), static_cast<std::uint8_t>(bytes),
               static_cast<std::uint8_t>(kind), site};
    }
    return nullptr;
  }

 private:
  using Clock = std::vector<std::uint32_t>;

  struct Thread {
    std::shared_ptr<Clock> seen;
    std::uint32_t epoch = 1;
    const void* acquired = nullptr;
    unsigned version = 0;
    // What it knew at its last fence_proxy.
    std::shared_ptr<Clock> passed;
    std::uint32_t passed_epoch = 0;
  };
  struct Object {
    Clock clock;
    unsigned version = 0;
  };

  unsigned engine() const { return static_cast<unsigned>(threads_.size()) - 1; }

  // Whether a fence of the writer or of the reader came between; copies need none.
  bool has_passed(const Cell& cell, const Thread& reader) const {
    return cell.thread == engine() || threads_[cell.thread].passed_epoch >= cell.epoch ||
           (reader.passed && (*reader.passed)[cell.thread] >= cell.epoch);
  }

  static void join(Clock& into, const Clock& from) {
    for (std::size_t i = 0; i < into.size(); ++i) into[i] = std::max(into[i], from[i]);
  }

  // A read rather than a write: the write races with everybody.
  static Cell* evict(Cell* cells, std::uint64_t random) {
    for (unsigned i = 0; i < Shadow::kCells; ++i) {
      Cell* cell = &cells[(random + i) % Shadow::kCells];
      if (!(cell->kind & (kWrite | kInFlight))) return cell;
    }
    return &cells[random % Shadow::kCells];
  }

  std::vector<Thread> threads_;
  std::unordered_map<const void*, Object> objects_;
};

}  // namespace cufuse::host

#endif  // CUFUSE_HOST_RACES_CUH
