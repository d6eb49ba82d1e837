// How activations travel between CTAs of one launch: words of 8 bytes that carry their own flag.
//
// A word holds 4 bytes of data and a tag that no other word of this place ever had. It is written
// and read whole, so whoever sees the tag has the data: no fence, no counter, no barrier.
//
// A place may be written again when everybody has read it. That holds without a count as long as
// every reader of a phase publishes something in it on which all later writers of the place depend;
// a CTA that has no part in a phase therefore does not read either.
#pragma once

#include "device/hw.cuh"

namespace cufuse {

// What a waiting thread goes by: it does not wait for ever. When the time of a launch is over, or
// another thread has given up, waits end at once and what follows computes garbage, quickly, to the
// end of the launch; the host sees `fault` and takes none of it.
struct Watch {
  u32* fault;    // global: 0, or where the first thread gave up
  u64 deadline;  // of timer_ns()
  bool expired;

  // Called after each look in vain; whether to stop looking. `place` is not 0.
  CUFUSE_DEVICE bool gives_up(u32& looks, u32 place) {
    if (expired) return true;
    if (++looks % 64 != 0) return false;
    if (load_word<Order::relaxed>(fault) == 0) {
      if (timer_ns() < deadline) return false;
      atomic_compare_exchange<Order::relaxed>(fault, 0u, place);
    }
    expired = true;
    return true;
  }
};

// Where a thread waits, for `Watch`.
enum Place : u32 { kWaitsForWeights = 1, kWaitsForRoom = 2, kWaitsForWords = 3, kWaitsForSums = 4 };

CUFUSE_DEVICE void wait_for(u64* barrier, u32 parity, Watch& watch, Place place) {
  u32 looks = 0;
  while (!mbarrier_try_wait(barrier, parity)) {
    if (watch.gives_up(looks, place)) return;
  }
}

CUFUSE_DEVICE u64 tagged(u32 data, u32 tag) { return static_cast<u64>(tag) << 32 | data; }
CUFUSE_DEVICE bool has_tag(u64 word, u32 tag) { return static_cast<u32>(word >> 32) == tag; }

CUFUSE_DEVICE void publish(u64* word, u32 data, u32 tag) {
  store_word<Order::relaxed>(word, tagged(data, tag));
}
CUFUSE_DEVICE void publish(u64* words, u32 first, u32 second, u32 tag) {
  store_word<Order::relaxed>(reinterpret_cast<ulonglong2*>(words),
                             make_ulonglong2(tagged(first, tag), tagged(second, tag)));
}

// A look at one word or two, which may be stale; `settle` looks again until it is not. Looks that
// are issued together before the first is settled share their latency.
CUFUSE_DEVICE u64 look(const u64* word) { return load_word<Order::relaxed>(word); }
CUFUSE_DEVICE ulonglong2 look_pair(const u64* words) {
  return load_word<Order::relaxed>(reinterpret_cast<const ulonglong2*>(words));
}
CUFUSE_DEVICE u32 settle(u64 seen, const u64* word, u32 tag, Watch& watch) {
  u32 looks = 0;
  while (!has_tag(seen, tag) && !watch.gives_up(looks, kWaitsForWords)) seen = look(word);
  return static_cast<u32>(seen);
}
CUFUSE_DEVICE uint2 settle(ulonglong2 seen, const u64* words, u32 tag, Watch& watch) {
  u32 looks = 0;
  while (!(has_tag(seen.x, tag) && has_tag(seen.y, tag)) &&
         !watch.gives_up(looks, kWaitsForWords)) {
    seen = look_pair(words);
  }
  return make_uint2(static_cast<u32>(seen.x), static_cast<u32>(seen.y));
}

// Values of T in the 4 bytes of a word.
template <typename T>
constexpr int kPerWord = 4 / static_cast<int>(sizeof(T));

template <typename T>
CUFUSE_DEVICE u32 word_of(const T* values) {
  u32 word;
  memcpy(&word, values, sizeof word);
  return word;
}
template <typename T>
CUFUSE_DEVICE void values_of(T (&values)[kPerWord<T>], u32 word) {
  memcpy(values, &word, sizeof word);
}

}  // namespace cufuse
