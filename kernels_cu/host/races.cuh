// Which accesses to shared and global memory are ordered, and which race: vector clocks.
//
// A thread's epoch counts its synchronisations; its clock says up to which epoch it has seen every
// other thread. Threads that meet (a barrier, a warp collective) share one clock from then on, so
// that a meeting costs little. What a thread knows of other CTAs it learned from words, fences and
// cluster barriers: copies of their threads' clocks, which never change. Each word of memory
// remembers the last four accesses that a later one could race with; when more are unordered (many
// readers) one of them is forgotten.
#ifndef CUFUSE_HOST_RACES_CUH
#define CUFUSE_HOST_RACES_CUH

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <unordered_map>
#include <utility>
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
  std::uint32_t cta;
  std::uint16_t thread;
  std::uint8_t bytes;  // which of the word's bytes; 0 is an empty cell
  std::uint8_t kind;
  Site site;
};

// What is remembered of a piece of memory, by words of 4 bytes (shared) or 8 (global).
struct Shadow {
  static constexpr int kCells = 4;

  unsigned char* begin = nullptr;
  std::size_t size_bytes = 0;
  unsigned word_bytes = 4;
  // From calloc: the pages of a large array that nobody touches cost nothing.
  std::unique_ptr<Cell[], void (*)(void*)> cells{nullptr, std::free};
  std::size_t n_cells = 0;

  void reset(unsigned char* memory, std::size_t size, unsigned word) {
    begin = memory;
    size_bytes = size;
    word_bytes = word;
    const std::size_t needed = (size + word - 1) / word * kCells;
    if (needed > n_cells) {
      cells.reset(static_cast<Cell*>(std::calloc(needed, sizeof(Cell))));
      n_cells = needed;
    } else if (needed) {
      std::fill_n(cells.get(), needed, Cell{});
    }
  }
  bool holds(const void* p) const {
    return static_cast<std::size_t>(static_cast<const unsigned char*>(p) - begin) < size_bytes;
  }
};

using ThreadClock = std::vector<std::uint32_t>;

inline void join(ThreadClock& into, const ThreadClock& from) {
  for (std::size_t i = 0; i < into.size(); ++i) into[i] = std::max(into[i], from[i]);
}

// What is known of the threads of other CTAs.
class Far {
 public:
  bool has(unsigned cta, unsigned thread, std::uint32_t epoch) const {
    const auto found = find(cta);
    return found != entries_.end() && found->first == cta && (*found->second)[thread] >= epoch;
  }
  bool empty() const { return entries_.empty(); }
  void clear() { entries_.clear(); }

  void join(unsigned cta, const std::shared_ptr<const ThreadClock>& clock) {
    const auto found = entries_.begin() + (find(cta) - entries_.begin());
    if (found == entries_.end() || found->first != cta) {
      entries_.insert(found, {cta, clock});
    } else {
      merge(found->second, clock);
    }
  }
  void join(const Far& other) {
    if (other.entries_.empty()) return;
    if (entries_.empty()) {
      entries_ = other.entries_;
      return;
    }
    std::vector<Entry> both;
    both.reserve(entries_.size() + other.entries_.size());
    auto mine = entries_.begin();
    for (const Entry& theirs : other.entries_) {
      while (mine != entries_.end() && mine->first < theirs.first)
        both.push_back(std::move(*mine++));
      if (mine != entries_.end() && mine->first == theirs.first) {
        both.push_back(std::move(*mine++));
        merge(both.back().second, theirs.second);
      } else {
        both.push_back(theirs);
      }
    }
    while (mine != entries_.end()) both.push_back(std::move(*mine++));
    entries_ = std::move(both);
  }
  // The clock of one CTA, or null.
  const ThreadClock* of(unsigned cta) const {
    const auto found = find(cta);
    return found != entries_.end() && found->first == cta ? found->second.get() : nullptr;
  }

 private:
  using Entry = std::pair<unsigned, std::shared_ptr<const ThreadClock>>;

  std::vector<Entry>::const_iterator find(unsigned cta) const {
    return std::lower_bound(entries_.begin(), entries_.end(), cta,
                            [](const Entry& entry, unsigned n) { return entry.first < n; });
  }
  static void merge(std::shared_ptr<const ThreadClock>& into,
                    const std::shared_ptr<const ThreadClock>& from) {
    if (into == from) return;
    bool newer = true, older = true;
    for (std::size_t i = 0; i < into->size() && (newer || older); ++i) {
      newer = newer && (*into)[i] >= (*from)[i];
      older = older && (*into)[i] <= (*from)[i];
    }
    if (newer) return;
    if (older) {
      into = from;
      return;
    }
    auto joined = std::make_shared<ThreadClock>(*into);
    host::join(*joined, *from);
    into = std::move(joined);
  }

  std::vector<Entry> entries_;  // by CTA, ascending
};

// A word in global memory that threads publish with.
struct Word {
  Far released;
  unsigned version = 0;
};

// The clocks of one CTA.
class Races {
 public:
  // One more than there are: the copy engine, which nobody's accesses are ordered before.
  Races(unsigned cta, unsigned n_threads) : cta_(cta), threads_(n_threads + 1) {
    auto clock = std::make_shared<Clock>();
    clock->near.resize(n_threads + 1);
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
        if (seen != last) joined->join(*seen);
        last = seen;
      }
    }
    for (unsigned m : members) {
      joined->near[m] = threads_[m].epoch++;
      if (!alone) threads_[m].seen = joined;
    }
  }

  // Who acquires the object, one of this CTA, from now on has seen what this thread has.
  void release(unsigned self, const void* object) {
    Object& o = made(object);
    Thread& thread = threads_[self];
    o.clock.join(*thread.seen);
    o.clock.near[self] = thread.epoch++;
  }

  // Who acquires it has seen this thread, but not what this thread has seen.
  void release_only(unsigned self, const void* object) {
    made(object).clock.near[self] = threads_[self].epoch++;
  }

  // The same by a thread of another CTA: seen only by those who acquire for the cluster.
  void release_from(const Far& published, const void* object) {
    made(object).remote.join(published);
  }

  void acquire(unsigned self, const void* object, bool for_cluster = false) {
    const auto found = objects_.find(object);
    if (found == objects_.end()) return;
    const Object& o = found->second;
    if (polls(self, object, o.version * 2 + for_cluster)) return;
    auto joined = std::make_shared<Clock>(*threads_[self].seen);
    joined->join(o.clock);
    if (for_cluster) learn(*joined, o.remote);
    threads_[self].seen = std::move(joined);
  }

  // ---- between CTAs

  // All that a thread has seen and done, for others to keep; what it does from now on is not in it.
  Far publish(unsigned self) {
    Thread& thread = threads_[self];
    auto mine = std::make_shared<ThreadClock>(thread.seen->near);
    (*mine)[self] = thread.epoch++;
    Far all = thread.seen->far;
    all.join(cta_, std::move(mine));
    return all;
  }
  void learn(unsigned self, const Far& published) {
    if (published.empty()) return;
    auto joined = std::make_shared<Clock>(*threads_[self].seen);
    learn(*joined, published);
    threads_[self].seen = std::move(joined);
  }

  // A store puts an end to what was released through the word; an update carries it on. A relaxed
  // one releases what the thread did before its last fence.
  void store(unsigned self, Word& word, bool releases, bool updates) {
    if (!updates) word.released.clear();
    word.released.join(releases ? publish(self) : threads_[self].fenced);
    ++word.version;
  }
  // A relaxed load acquires at the next fence.
  void load(unsigned self, const Word& word, bool acquires) {
    if (polls(self, &word, word.version * 2 + acquires)) return;
    if (acquires) {
      learn(self, word.released);
    } else {
      threads_[self].to_acquire.join(word.released);
    }
  }
  void fence(unsigned self) {
    Thread& thread = threads_[self];
    learn(self, thread.to_acquire);
    thread.to_acquire.clear();
    thread.fenced = publish(self);
  }

  // ---- accesses

  // A copy of thread `issuer` that was in flight becomes an access of `self`.
  void land(unsigned self, unsigned issuer, Shadow& shadow, const void* p, std::size_t size) {
    const std::size_t offset = static_cast<const unsigned char*>(p) - shadow.begin;
    const std::size_t end = std::min(offset + size, shadow.size_bytes);
    const std::size_t last = (end + shadow.word_bytes - 1) / shadow.word_bytes * Shadow::kCells;
    for (std::size_t i = offset / shadow.word_bytes * Shadow::kCells; i < last; ++i) {
      Cell& cell = shadow.cells[i];
      if (!(cell.kind & kInFlight) || cell.cta != cta_ || cell.thread != issuer) continue;
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

  // Remember an access; returns an earlier one that it races with, or null.
  const Cell* access(unsigned self,
                     Shadow& shadow,
                     std::size_t offset,
                     std::size_t size,
                     unsigned kind,
                     Site site,
                     std::uint64_t random) {
    const std::size_t end = std::min(offset + size, shadow.size_bytes);
    const std::size_t word_bytes = shadow.word_bytes;
    const unsigned whole = (1u << word_bytes) - 1;
    const Thread& thread = threads_[self];
    const Clock& seen = *thread.seen;
    for (std::size_t word = offset / word_bytes; word * word_bytes < end; ++word) {
      const std::size_t at = word * word_bytes;
      unsigned bytes = whole;
      if (at < offset) bytes &= whole << (offset - at);
      if (at + word_bytes > end) bytes &= whole >> (at + word_bytes - end);
      Cell* cells = &shadow.cells[word * Shadow::kCells];
      Cell* free = nullptr;
      for (Cell* cell = cells; cell < cells + Shadow::kCells; ++cell) {
        if (cell->bytes) {
          const bool ordered = cell->cta == cta_
                                   ? cell->thread == self || seen.near[cell->thread] >= cell->epoch
                                   : seen.far.has(cell->cta, cell->thread, cell->epoch);
          if (cell->bytes & bytes && (cell->kind | kind) & kWrite &&
              !(cell->kind & kind & kAtomic)) {
            if (!ordered || cell->kind & kInFlight) return cell;
            if (kind & kProxy && cell->kind & kWrite && !has_passed(*cell, thread)) return cell;
          }
          // Whatever would race with the old access will race with this one.
          if (ordered && !(cell->bytes & ~bytes) && !(cell->kind & kInFlight) &&
              (kind & kWrite || !(cell->kind & kWrite)) && !(~cell->kind & kind & kAtomic))
            *cell = {};
        }
        if (!cell->bytes) free = cell;
      }
      if (!free) free = evict(cells, random);
      *free = {thread.epoch,
               cta_,
               static_cast<std::uint16_t>(self),
               static_cast<std::uint8_t>(bytes),
               static_cast<std::uint8_t>(kind),
               site};
    }
    return nullptr;
  }

 private:
  struct Clock {
    ThreadClock near;
    Far far;

    void join(const Clock& other) {
      host::join(near, other.near);
      far.join(other.far);
    }
  };
  struct Thread {
    std::shared_ptr<Clock> seen;
    std::uint32_t epoch = 1;
    const void* acquired = nullptr;
    unsigned version = 0;
    Far fenced, to_acquire;
    // What it knew at its last fence_proxy.
    std::shared_ptr<Clock> passed;
    std::uint32_t passed_epoch = 0;
  };
  struct Object {
    Clock clock;
    Far remote;
    unsigned version = 0;
  };

  Object& made(const void* object) {
    Object& o = objects_[object];
    if (o.clock.near.empty()) o.clock.near.resize(threads_.size());
    ++o.version;
    return o;
  }

  void learn(Clock& clock, const Far& published) const {
    if (const ThreadClock* mine = published.of(cta_)) host::join(clock.near, *mine);
    clock.far.join(published);
  }

  // Whether the thread has just acquired this very state.
  bool polls(unsigned self, const void* object, unsigned version) {
    Thread& thread = threads_[self];
    if (thread.acquired == object && thread.version == version) return true;
    thread.acquired = object;
    thread.version = version;
    return false;
  }

  unsigned engine() const { return static_cast<unsigned>(threads_.size()) - 1; }

  // Whether a fence of the writer or of the reader came between; copies need none. What other
  // CTAs did about it is not known.
  bool has_passed(const Cell& cell, const Thread& reader) const {
    return cell.cta != cta_ || cell.thread == engine() ||
           threads_[cell.thread].passed_epoch >= cell.epoch ||
           (reader.passed && reader.passed->near[cell.thread] >= cell.epoch);
  }

  // A read rather than a write: the write races with everybody.
  static Cell* evict(Cell* cells, std::uint64_t random) {
    for (unsigned spared : {kWrite | kInFlight, kWrite + 0}) {
      for (unsigned i = 0; i < Shadow::kCells; ++i) {
        Cell* cell = &cells[(random + i) % Shadow::kCells];
        if (!(cell->kind & spared)) return cell;
      }
    }
    return &cells[random % Shadow::kCells];
  }

  unsigned cta_;
  std::vector<Thread> threads_;
  std::unordered_map<const void*, Object> objects_;
};

}  // namespace cufuse::host

#endif  // CUFUSE_HOST_RACES_CUH
