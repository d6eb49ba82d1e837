// Which keys a query sees, and the online softmax that all attention stages share.
#pragma once

#include "device/reduce.cuh"
#include "device/vec.cuh"

namespace cufuse {

// Keys [first, last) of a sequence.
struct KeySpan {
  int first;
  int last;
};

// The keys that the query at `position` sees: below `length` and kv_len; if causal up to its own
// position; with a window (0: none) the last `window` positions, its own included.
CUFUSE_DEVICE KeySpan visible_keys(i64 position, i64 length, int kv_len, bool causal, int window) {
  i64 last = min(length, static_cast<i64>(kv_len));
  if (causal) last = min(last, position + 1);
  i64 first = window > 0 ? position + 1 - window : 0;
  first = max(first, static_cast<i64>(0));
  return {static_cast<int>(min(first, static_cast<i64>(kv_len))),
          static_cast<int>(max(last, min(first, static_cast<i64>(kv_len))))};
}

// How many keys one split of a decode reads. It depends on the number of visible keys alone, so
// that a row's bits do not depend on the batch or on the capacity; ops/attention.py has its twin.
CUFUSE_DEVICE int keys_per_split(int n_keys) {
  return n_keys <= 2048 ? 64 : n_keys <= 8192 ? 128 : n_keys <= 32768 ? 256 : 512;
}

// How a dot product becomes a logit.
struct Logit {
  float scale;
  float softcap;      // 0: none
  float inv_softcap;  // 1 / softcap

  CUFUSE_DEVICE float operator()(float dot) const {
    const float s = dot * scale;
    return softcap > 0.0f ? softcap * tanhf(s * inv_softcap) : s;
  }
};

CUFUSE_DEVICE float minus_infinity() { return __int_as_float(static_cast<int>(0xff800000u)); }

// What is subtracted before exp: a maximum of -inf would make NaN of a row that sees nothing.
CUFUSE_DEVICE float softmax_shift(float max) { return max == minus_infinity() ? 0.0f : max; }

}  // namespace cufuse
