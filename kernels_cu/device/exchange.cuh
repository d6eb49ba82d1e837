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

// The first bytes of a CTA's dynamic shared memory: nobody waits for ever. When the time of a
// launch is over, in whatever CTA, waits end at once and what follows computes garbage, quickly, to
// the end of the launch; the host sees `fault` and takes none of it.
struct Deadline {
  static constexpr int kBytes = 128;
  u32* fault;    // global: whether a launch has been over
  u64 ns;        // of timer_ns()
  u64 finished;  // an mbarrier on which every other warp of the CTA arrives at its end
  u32 over;      // what those who wait look at

  static CUFUSE_DEVICE Deadline& here() { return *dynamic_shared<Deadline>(); }
};

CUFUSE_DEVICE bool is_over() { return load_shared_acquire(&Deadline::here().over) != 0; }

// By one thread of a warp that does nothing else: keeps `over` until all others have finished.
// Those who wait have neither a clock nor global memory to look at.
CUFUSE_DEVICE void keep_deadline() {
  constexpr u32 kSleepNs = 20000;
  Deadline& deadline = Deadline::here();
  while (!mbarrier_try_wait(&deadline.finished, 0, kSleepNs)) {
    if (load_word<Order::relaxed>(deadline.fault) == 0) {
      if (timer_ns() < deadline.ns) continue;
      store_word<Order::relaxed>(deadline.fault, 1u);
    }
    store_shared_release(&deadline.over, 1);
    return;
  }
}

CUFUSE_DEVICE void wait_for(u64* barrier, u32 parity) {
  // A first look that cannot put the thread to sleep: mostly there is nothing to wait for.
  if (mbarrier_test_wait(barrier, parity)) return;
  while (!mbarrier_try_wait(barrier, parity) && !is_over()) {
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

// A word that stands for memory: whoever awaits it sees what this thread stored before. Only when
// such words were awaited in turn may that memory be written again.
CUFUSE_DEVICE void publish_all(u64* word, u32 data, u32 tag) {
  store_word<Order::release>(word, tagged(data, tag));
}
CUFUSE_DEVICE u32 await_all(const u64* word, u32 tag) {
  u64 seen = load_word<Order::acquire>(word);
  while (!has_tag(seen, tag) && !is_over()) seen = load_word<Order::acquire>(word);
  return static_cast<u32>(seen);
}

// A look at one word or two, which may be stale; `settle` looks again until it is not. Looks that
// are issued together before the first is settled share their latency.
CUFUSE_DEVICE u64 look(const u64* word) { return load_word<Order::relaxed>(word); }
CUFUSE_DEVICE ulonglong2 look_pair(const u64* words) {
  return load_word<Order::relaxed>(reinterpret_cast<const ulonglong2*>(words));
}
CUFUSE_DEVICE u32 settle(u64 seen, const u64* word, u32 tag) {
  for (bool over = false; !has_tag(seen, tag) && !over;) {
    over = is_over();
    seen = look(word);
  }
  return static_cast<u32>(seen);
}
CUFUSE_DEVICE uint2 settle(ulonglong2 seen, const u64* words, u32 tag) {
  for (bool over = false; !(has_tag(seen.x, tag) && has_tag(seen.y, tag)) && !over;) {
    over = is_over();
    seen = look_pair(words);
  }
  return make_uint2(static_cast<u32>(seen.x), static_cast<u32>(seen.y));
}

// Values of T in the 4 bytes of a word.
template <typename T>
constexpr int kPerWord = 4 / static_cast<int>(sizeof(T));

// Through registers: a value's address would send it through memory.
CUFUSE_DEVICE u32 bits_of(float v) { return __float_as_uint(v); }
CUFUSE_DEVICE u32 bits_of(half v) { return __half_as_ushort(v); }
CUFUSE_DEVICE u32 bits_of(bfloat16 v) { return __bfloat16_as_ushort(v); }

template <typename T>
CUFUSE_DEVICE T from_bits(u32 bits);
template <>
CUFUSE_DEVICE float from_bits<float>(u32 bits) {
  return __uint_as_float(bits);
}
template <>
CUFUSE_DEVICE half from_bits<half>(u32 bits) {
  return __ushort_as_half(static_cast<u16>(bits));
}
template <>
CUFUSE_DEVICE bfloat16 from_bits<bfloat16>(u32 bits) {
  return __ushort_as_bfloat16(static_cast<u16>(bits));
}

// Value i of a word, in float32.
template <typename T>
CUFUSE_DEVICE float value_in(u32 word, int i) {
  return to_float(from_bits<T>(kPerWord<T> == 2 ? word >> i % 2 * 16 : word));
}

template <typename T>
CUFUSE_DEVICE u32 word_of(T low, T high) {
  static_assert(kPerWord<T> == 2, "two values make a word");
  return bits_of(low) | bits_of(high) << 16;
}

}  // namespace cufuse
