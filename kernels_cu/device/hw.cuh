// The hardware's own instructions, one small function each. This is the only kernel-side file with
// inline PTX; host/hw.cuh is its twin for a CPU compiler and offers the same names.
#pragma once

#ifdef CUFUSE_HOST
#include "host/hw.cuh"
#else

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#define CUFUSE_DEVICE __device__ __forceinline__

#include "device/fp8.cuh"

namespace cufuse {

using i32 = int;
using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using i64 = long long;
using u64 = unsigned long long;
using half = __half;
using bfloat16 = __nv_bfloat16;

constexpr u32 kFullMask = 0xffffffffu;

// An array in global memory, and the box of it that a tensor copy moves, as the driver encodes them
// (cufuse/tensor_map.py). It stands first in a kernel's __grid_constant__ argument.
struct alignas(64) TensorMap {
  unsigned char encoded[128];
};

// The CTA's dynamic shared memory, aligned for every copy instruction.
template <typename T>
CUFUSE_DEVICE T* dynamic_shared() {
  extern __shared__ __align__(1024) unsigned char cufuse_dynamic_shared[];
  return reinterpret_cast<T*>(cufuse_dynamic_shared);
}

// ---- conversions, round to nearest even

CUFUSE_DEVICE float to_float(float v) { return v; }
CUFUSE_DEVICE float to_float(half v) { return __half2float(v); }
CUFUSE_DEVICE float to_float(bfloat16 v) { return __bfloat162float(v); }
CUFUSE_DEVICE float to_float(e4m3 v) { return fp8_to_float(v); }
CUFUSE_DEVICE float to_float(e5m2 v) { return fp8_to_float(v); }

template <typename T>
CUFUSE_DEVICE T from_float(float v);
template <>
CUFUSE_DEVICE float from_float<float>(float v) {
  return v;
}
template <>
CUFUSE_DEVICE half from_float<half>(float v) {
  return __float2half_rn(v);
}
template <>
CUFUSE_DEVICE bfloat16 from_float<bfloat16>(float v) {
  return __float2bfloat16_rn(v);
}

// The larger one; NaN if either is.
CUFUSE_DEVICE float max_or_nan(float a, float b) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
}

// Two neighbours, the first in the lower half: one instruction, where each by itself takes a slow
// one.
template <typename T>
CUFUSE_DEVICE u32 pair_from_floats(float low, float high);
template <>
CUFUSE_DEVICE u32 pair_from_floats<half>(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return __half_as_ushort(pair.x) | static_cast<u32>(__half_as_ushort(pair.y)) << 16;
}
template <>
CUFUSE_DEVICE u32 pair_from_floats<bfloat16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return __bfloat16_as_ushort(pair.x) | static_cast<u32>(__bfloat16_as_ushort(pair.y)) << 16;
}

// Two values rounded to T, again by one instruction.
template <typename T>
CUFUSE_DEVICE void round_pair(float& a, float& b);
template <>
CUFUSE_DEVICE void round_pair<half>(float& a, float& b) {
  const float2 rounded = __half22float2(__floats2half2_rn(a, b));
  a = rounded.x;
  b = rounded.y;
}
template <>
CUFUSE_DEVICE void round_pair<bfloat16>(float& a, float& b) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
  const u32 word = *reinterpret_cast<const u32*>(&pair);
  a = __uint_as_float(word << 16);
  b = __uint_as_float(word & 0xffff0000u);
}

// One instruction each, which the compiler would take apart where it knows some of the bits: the
// bits of `a` where the mask has ones, of `b` elsewhere; and the word turned to the left, 1 to 31.
CUFUSE_DEVICE u32 select_bits(u32 mask, u32 a, u32 b) {
  u32 selected;
  asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(selected) : "r"(mask), "r"(a), "r"(b));
  return selected;
}
CUFUSE_DEVICE u32 rotate_left(u32 word, u32 by) {
  u32 rotated;
  asm("shf.l.wrap.b32 %0, %1, %1, %2;" : "=r"(rotated) : "r"(word), "r"(by));
  return rotated;
}

// The products of two pairs, each rounded once; numbers below the normal ones are kept.
template <typename T>
CUFUSE_DEVICE u32 mul_pair(u32 a, u32 b);
template <>
CUFUSE_DEVICE u32 mul_pair<bfloat16>(u32 a, u32 b) {
  u32 product;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(a), "r"(b), "r"(0x80008000u));
  return product;
}

// The 8-bit types take the largest finite value for what is larger.
template <>
CUFUSE_DEVICE e4m3 from_float<e4m3>(float v) {
#if __CUDA_ARCH__ >= 890
  u16 pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(v));
  return {static_cast<u8>(pair)};
#else
  return to_e4m3(v);
#endif
}
template <>
CUFUSE_DEVICE e5m2 from_float<e5m2>(float v) {
#if __CUDA_ARCH__ >= 890
  u16 pair;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(v));
  return {static_cast<u8>(pair)};
#else
  return to_e5m2(v);
#endif
}

// ---- global memory

// 16 bytes that are read once and never written in this launch: first to leave the caches.
CUFUSE_DEVICE uint4 load_stream(const void* p) { return __ldcs(static_cast<const uint4*>(p)); }

// ---- words that threads publish to each other

enum class Order { relaxed, acquire, release, acq_rel };
enum class Scope { gpu, sys };

// How PTX writes them.
template <Order kOrder>
struct OrderPtx;
template <>
struct OrderPtx<Order::relaxed> {
  static constexpr char kText[] = ".relaxed";
};
template <>
struct OrderPtx<Order::acquire> {
  static constexpr char kText[] = ".acquire";
};
template <>
struct OrderPtx<Order::release> {
  static constexpr char kText[] = ".release";
};
template <>
struct OrderPtx<Order::acq_rel> {
  static constexpr char kText[] = ".acq_rel";
};
template <Scope kScope>
struct ScopePtx;
template <>
struct ScopePtx<Scope::gpu> {
  static constexpr char kText[] = ".gpu";
};
template <>
struct ScopePtx<Scope::sys> {
  static constexpr char kText[] = ".sys";
};

template <Order kOrder, Scope kScope = Scope::gpu>
CUFUSE_DEVICE u32 load_word(const u32* p) {
  static_assert(kOrder == Order::relaxed || kOrder == Order::acquire, "a load releases nothing");
  u32 v;
  asm volatile("ld%2%3.global.u32 %0, [%1];"
               : "=r"(v)
               : "l"(p), "C"(OrderPtx<kOrder>::kText), "C"(ScopePtx<kScope>::kText)
               : "memory");
  return v;
}
template <Order kOrder, Scope kScope = Scope::gpu>
CUFUSE_DEVICE u64 load_word(const u64* p) {
  static_assert(kOrder == Order::relaxed || kOrder == Order::acquire, "a load releases nothing");
  u64 v;
  asm volatile("ld%2%3.global.u64 %0, [%1];"
               : "=l"(v)
               : "l"(p), "C"(OrderPtx<kOrder>::kText), "C"(ScopePtx<kScope>::kText)
               : "memory");
  return v;
}
// Two words of 8 bytes in one access: each is whole, but one may be older than the other.
template <Order kOrder, Scope kScope = Scope::gpu>
CUFUSE_DEVICE ulonglong2 load_word(const ulonglong2* p) {
  static_assert(kOrder == Order::relaxed || kOrder == Order::acquire, "a load releases nothing");
  ulonglong2 v;
  asm volatile("ld%3%4.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(v.x), "=l"(v.y)
               : "l"(p), "C"(OrderPtx<kOrder>::kText), "C"(ScopePtx<kScope>::kText)
               : "memory");
  return v;
}

template <Order kOrder, Scope kScope = Scope::gpu>
CUFUSE_DEVICE void store_word(u32* p, u32 v) {
  static_assert(kOrder == Order::relaxed || kOrder == Order::release, "a store acquires nothing");
  asm volatile("st%2%3.global.u32 [%0], %1;" ::"l"(p), "r"(v), "C"(OrderPtx<kOrder>::kText),
               "C"(ScopePtx<kScope>::kText)
               : "memory");
}
template <Order kOrder, Scope kScope = Scope::gpu>
CUFUSE_DEVICE void store_word(u64* p, u64 v) {
  static_assert(kOrder == Order::relaxed || kOrder == Order::release, "a store acquires nothing");
  asm volatile("st%2%3.global.u64 [%0], %1;" ::"l"(p), "l"(v), "C"(OrderPtx<kOrder>::kText),
               "C"(ScopePtx<kScope>::kText)
               : "memory");
}
template <Order kOrder, Scope kScope = Scope::gpu>
CUFUSE_DEVICE void store_word(ulonglong2* p, ulonglong2 v) {
  static_assert(kOrder == Order::relaxed || kOrder == Order::release, "a store acquires nothing");
  asm volatile("st%3%4.global.v2.u64 [%0], {%1, %2};" ::"l"(p), "l"(v.x), "l"(v.y),
               "C"(OrderPtx<kOrder>::kText), "C"(ScopePtx<kScope>::kText)
               : "memory");
}

// Add, exchange, compare and exchange; each returns what was there before.
template <Order kOrder, Scope kScope = Scope::gpu>
CUFUSE_DEVICE u32 atomic_add(u32* p, u32 v) {
  u32 old;
  asm volatile("atom%3%4.global.add.u32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(p), "r"(v), "C"(OrderPtx<kOrder>::kText), "C"(ScopePtx<kScope>::kText)
               : "memory");
  return old;
}
template <Order kOrder, Scope kScope = Scope::gpu>
CUFUSE_DEVICE u64 atomic_add(u64* p, u64 v) {
  u64 old;
  asm volatile("atom%3%4.global.add.u64 %0, [%1], %2;"
               : "=l"(old)
               : "l"(p), "l"(v), "C"(OrderPtx<kOrder>::kText), "C"(ScopePtx<kScope>::kText)
               : "memory");
  return old;
}
template <Order kOrder, Scope kScope = Scope::gpu>
CUFUSE_DEVICE u32 atomic_exchange(u32* p, u32 v) {
  u32 old;
  asm volatile("atom%3%4.global.exch.b32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(p), "r"(v), "C"(OrderPtx<kOrder>::kText), "C"(ScopePtx<kScope>::kText)
               : "memory");
  return old;
}
template <Order kOrder, Scope kScope = Scope::gpu>
CUFUSE_DEVICE u64 atomic_exchange(u64* p, u64 v) {
  u64 old;
  asm volatile("atom%3%4.global.exch.b64 %0, [%1], %2;"
               : "=l"(old)
               : "l"(p), "l"(v), "C"(OrderPtx<kOrder>::kText), "C"(ScopePtx<kScope>::kText)
               : "memory");
  return old;
}
template <Order kOrder, Scope kScope = Scope::gpu>
CUFUSE_DEVICE u32 atomic_compare_exchange(u32* p, u32 wanted, u32 v) {
  u32 old;
  asm volatile("atom%4%5.global.cas.b32 %0, [%1], %2, %3;"
               : "=r"(old)
               : "l"(p), "r"(wanted), "r"(v), "C"(OrderPtx<kOrder>::kText),
                 "C"(ScopePtx<kScope>::kText)
               : "memory");
  return old;
}
template <Order kOrder, Scope kScope = Scope::gpu>
CUFUSE_DEVICE u64 atomic_compare_exchange(u64* p, u64 wanted, u64 v) {
  u64 old;
  asm volatile("atom%4%5.global.cas.b64 %0, [%1], %2, %3;"
               : "=l"(old)
               : "l"(p), "l"(wanted), "l"(v), "C"(OrderPtx<kOrder>::kText),
                 "C"(ScopePtx<kScope>::kText)
               : "memory");
  return old;
}

// A word that another CTA publishes with `add_acq_rel` or `store_release`.
CUFUSE_DEVICE u32 load_acquire(const u32* p) { return load_word<Order::acquire>(p); }
CUFUSE_DEVICE void store_release(u32* p, u32 v) { store_word<Order::release>(p, v); }

// Add to a counter; what this CTA wrote before is visible to whoever sees the sum.
CUFUSE_DEVICE u32 add_acq_rel(u32* p, u32 v) { return atomic_add<Order::acq_rel>(p, v); }

// The index of this thread in its CTA, of which the compiler knows nothing: what follows from it is
// computed here and not kept in registers from far above.
CUFUSE_DEVICE int thread_here() {
  u32 thread = threadIdx.x;
  asm volatile("" : "+r"(thread));
  return static_cast<int>(thread);
}
// Of its warp, and the warp: neither is negative, which saves instructions.
CUFUSE_DEVICE int lane_here() { return static_cast<int>(static_cast<u32>(thread_here()) % 32); }
CUFUSE_DEVICE int warp_here() { return static_cast<int>(static_cast<u32>(thread_here()) / 32); }

// A value that all lanes of the warp have: said so, the compiler keeps it in a register of the
// warp.
CUFUSE_DEVICE int uniform(int v) { return __shfl_sync(kFullMask, v, 0); }

// ---- time

// Nanoseconds of a clock that all SMs share.
CUFUSE_DEVICE u64 timer_ns() {
  u64 ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns)::"memory");
  return ns;
}

// A count of this SM's cycles.
CUFUSE_DEVICE u64 clock_cycles() {
  u64 cycles;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(cycles)::"memory");
  return cycles;
}
// Its low half, in one instruction.
CUFUSE_DEVICE u32 clock_low() {
  u32 cycles;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(cycles)::"memory");
  return cycles;
}

// ---- shared memory

CUFUSE_DEVICE u32 shared_address(const void* p) {
  return static_cast<u32>(__cvta_generic_to_shared(p));
}

}  // namespace cufuse

#include "device/swizzle.cuh"  // which is written in the words above

namespace cufuse {

// A word of shared memory that another thread of the CTA publishes.
CUFUSE_DEVICE u32 load_shared_acquire(const u32* p) {
  u32 v;
  asm volatile("ld.acquire.cta.shared.u32 %0, [%1];" : "=r"(v) : "r"(shared_address(p)) : "memory");
  return v;
}
CUFUSE_DEVICE void store_shared_release(u32* p, u32 v) {
  asm volatile("st.release.cta.shared.u32 [%0], %1;" ::"r"(shared_address(p)), "r"(v) : "memory");
}

// Copy 16 bytes from global to shared memory without registers; of these `size_bytes` (0..16) come
// from `source`, the rest are zeros. Both addresses are 16-byte aligned.
CUFUSE_DEVICE void copy_async(void* shared, const void* source, u32 size_bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
               "l"(source), "r"(size_bytes)
               : "memory");
}

CUFUSE_DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait until at most kPending of this thread's newest commit groups are still in flight.
template <int kPending>
CUFUSE_DEVICE void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// ---- barriers of some warps of a CTA

// Every lane of the warp comes. `threads` counts all threads that come, arriving or waiting: the
// same multiple of 32 each time. Ids are 1..15; 0 is __syncthreads'.
CUFUSE_DEVICE void barrier_sync(u32 id, u32 threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
CUFUSE_DEVICE void barrier_arrive(u32 id, u32 threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- mbarrier: 8 bytes of shared memory that count arrivals, and bytes of bulk copies

// The value, computed by here: the compiler does not leave that for behind a wait that follows.
template <typename U>
CUFUSE_DEVICE U* by_now(U* value) {
  asm volatile("" : "+l"(value));
  return value;
}
CUFUSE_DEVICE u32 by_now(u32 value) {
  asm volatile("" : "+r"(value));
  return value;
}

// A phase takes `count` arrivals. Others may use it after `fence_mbarrier_init` and a barrier.
CUFUSE_DEVICE void mbarrier_init(u64* barrier, u32 count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count)
               : "memory");
}
CUFUSE_DEVICE void fence_mbarrier_init() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

// What this thread wrote before is visible to whoever waits for the phase.
CUFUSE_DEVICE void mbarrier_arrive(u64* barrier) {
  u64 state;
  asm volatile("mbarrier.arrive.shared.b64 %0, [%1];"
               : "=l"(state)
               : "r"(shared_address(barrier))
               : "memory");
}

// Whether the phase of this parity has completed: 0 for the first one, then 1, 0 and so on.
CUFUSE_DEVICE bool mbarrier_test_wait(u64* barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{.reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
      : "=r"(done)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return done;
}

// The same, but the thread may sleep a while before it says no.
CUFUSE_DEVICE bool mbarrier_try_wait(u64* barrier, u32 parity) {
#if __CUDA_ARCH__ >= 900
  u32 done;
  asm volatile(
      "{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
      : "=r"(done)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return done;
#else
  return mbarrier_test_wait(barrier, parity);
#endif
}

// The same, asleep for about `sleep_ns` before it says no.
CUFUSE_DEVICE bool mbarrier_try_wait(u64* barrier, u32 parity, u32 sleep_ns) {
#if __CUDA_ARCH__ >= 900
  u32 done;
  asm volatile(
      "{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2, %3; selp.u32 %0, 1, 0, p;}"
      : "=r"(done)
      : "r"(shared_address(barrier)), "r"(parity), "r"(sleep_ns)
      : "memory");
  return done;
#else
  if (mbarrier_test_wait(barrier, parity)) return true;
  __nanosleep(min(sleep_ns, 1000u));
  return mbarrier_test_wait(barrier, parity);
#endif
}

CUFUSE_DEVICE void mbarrier_wait(u64* barrier, u32 parity) {
  while (!mbarrier_try_wait(barrier, parity)) {
  }
}

// The same with a way out: false after `tries` in vain.
CUFUSE_DEVICE bool mbarrier_wait_bounded(u64* barrier, u32 parity, u32 tries) {
  for (u32 i = 0; i < tries; ++i) {
    if (mbarrier_try_wait(barrier, parity)) return true;
  }
  return false;
}

// Arrive once all copies of `copy_async` that this thread has issued have landed.
CUFUSE_DEVICE void copy_async_arrive(u64* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

// ---- bulk copies: addresses and sizes are multiples of 16 bytes

#if __CUDA_ARCH__ >= 900

// Arrive and announce `size_bytes` of bulk copies that this phase waits for besides.
CUFUSE_DEVICE void mbarrier_arrive_expect_tx(u64* barrier, u32 size_bytes) {
  u64 state;
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 %0, [%1], %2;"
               : "=l"(state)
               : "r"(shared_address(barrier)), "r"(size_bytes)
               : "memory");
}

// What a bulk copy read is the first to leave L2.
CUFUSE_DEVICE u64 evict_first_policy() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Copy from global to shared memory; the barrier's phase hears of the bytes as they land.
CUFUSE_DEVICE void copy_bulk(void* shared, const void* source, u32 size_bytes, u64* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(shared_address(shared)),
      "l"(source), "r"(size_bytes), "r"(shared_address(barrier))
      : "memory");
}
CUFUSE_DEVICE void copy_bulk(
    void* shared, const void* source, u32 size_bytes, u64* barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1], %2, [%3], %4;" ::"r"(shared_address(shared)),
      "l"(source), "r"(size_bytes), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}

// Copy from shared to global memory. Threads that wrote the shared memory say `fence_proxy_async`
// before the barrier that lets this thread go on.
CUFUSE_DEVICE void store_bulk(void* target, const void* shared, u32 size_bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(target),
               "r"(shared_address(shared)), "r"(size_bytes)
               : "memory");
}
// The same, but each element is added to what is there, or takes its place if it is smaller or
// larger. No floating-point sums: they would depend on the order of arrival.
enum class Reduce { add, min, max };
template <Reduce kReduce>
struct ReducePtx;
template <>
struct ReducePtx<Reduce::add> {
  static constexpr char kText[] = ".add";
};
template <>
struct ReducePtx<Reduce::min> {
  static constexpr char kText[] = ".min";
};
template <>
struct ReducePtx<Reduce::max> {
  static constexpr char kText[] = ".max";
};
template <typename T>
struct IntegerPtx;
template <>
struct IntegerPtx<u32> {
  static constexpr char kText[] = ".u32";
};
template <>
struct IntegerPtx<i32> {
  static constexpr char kText[] = ".s32";
};
template <>
struct IntegerPtx<u64> {
  static constexpr char kText[] = ".u64";
};

template <Reduce kReduce, typename T>
CUFUSE_DEVICE void reduce_bulk(T* target, const T* shared, u32 size_bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group%3%4 [%0], [%1], %2;" ::"l"(target),
      "r"(shared_address(shared)), "r"(size_bytes), "C"(ReducePtx<kReduce>::kText),
      "C"(IntegerPtx<T>::kText)
      : "memory");
}

CUFUSE_DEVICE void store_bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Wait until all but kPending of this thread's newest groups have been written.
template <int kPending>
CUFUSE_DEVICE void store_bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// Until their shared memory has been read and may be used again. Before a CTA ends, at least this.
template <int kPending>
CUFUSE_DEVICE void store_bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

CUFUSE_DEVICE void prefetch_bulk(const void* source, u32 size_bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(source), "r"(size_bytes)
               : "memory");
}

// ---- tensor copies: a box of an array of two to four dimensions, swizzled on the way

CUFUSE_DEVICE void prefetch_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Copy the box whose first element is `at`, the innermost coordinate first, to shared memory; what
// lies outside of the array becomes zeros. The barrier hears of all the box's bytes. The shared
// address is a multiple of 128; which chunks a swizzle swaps depends on the address, so who counts
// from a box's begin, as wgmma does, needs a multiple of 8 times the swizzle's bytes.
CUFUSE_DEVICE void copy_tensor(
    void* shared, const TensorMap& map, u64* barrier, int column, int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%2, %3}], [%4];" ::"r"(shared_address(shared)),
      "l"(&map), "r"(column), "r"(row), "r"(shared_address(barrier))
      : "memory");
}
CUFUSE_DEVICE void copy_tensor(
    void* shared, const TensorMap& map, u64* barrier, int at0, int at1, int at2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%2, %3, %4}], [%5];" ::"r"(shared_address(shared)),
      "l"(&map), "r"(at0), "r"(at1), "r"(at2), "r"(shared_address(barrier))
      : "memory");
}
CUFUSE_DEVICE void copy_tensor(
    void* shared, const TensorMap& map, u64* barrier, int at0, int at1, int at2, int at3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%2, %3, %4, %5}], [%6];" ::"r"(shared_address(shared)),
      "l"(&map), "r"(at0), "r"(at1), "r"(at2), "r"(at3), "r"(shared_address(barrier))
      : "memory");
}

// The same, read once and so the first to leave L2: `policy` is evict_first_policy().
CUFUSE_DEVICE void copy_tensor_hinted(
    void* shared, const TensorMap& map, u64* barrier, u64 policy, int column, int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(shared)),
      "l"(&map), "r"(column), "r"(row), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}
CUFUSE_DEVICE void copy_tensor_hinted(
    void* shared, const TensorMap& map, u64* barrier, u64 policy, int at0, int at1, int at2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared_address(shared)),
      "l"(&map), "r"(at0), "r"(at1), "r"(at2), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}

// Copy a box of a matrix from shared memory, but for what lies outside of it. Groups and fences as
// for `store_bulk`.
CUFUSE_DEVICE void store_tensor(const TensorMap& map, const void* shared, int column, int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map),
      "r"(column), "r"(row), "r"(shared_address(shared))
      : "memory");
}

// Order this thread's own accesses before the bulk copies that come after.
CUFUSE_DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async;" ::: "memory"); }
// The same for accesses to the CTA's shared memory alone.
CUFUSE_DEVICE void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- clusters: CTAs that run together and reach each other's shared memory

CUFUSE_DEVICE u32 cluster_rank() {
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
CUFUSE_DEVICE u32 cluster_size() {
  u32 size;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
}

// Every thread of the cluster comes; who waits sees what the others wrote before they arrived.
// Shared memory of another CTA may be touched only between a first such barrier, which says that
// the CTA runs, and a last one, before which it does not end.
CUFUSE_DEVICE void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}
CUFUSE_DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
CUFUSE_DEVICE void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}

// Where the CTA of this rank has what lies here in the calling one; for plain loads and stores.
template <typename T>
CUFUSE_DEVICE T* map_shared(T* shared, u32 rank) {
  u64 there;
  asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(shared), "r"(rank));
  return reinterpret_cast<T*>(there);
}

// Arrive at the mbarrier that the CTA of this rank has in this place. That CTA sees what this
// thread wrote before if it waits with `mbarrier_wait_cluster`.
CUFUSE_DEVICE void mbarrier_arrive_remote(u64* barrier, u32 rank) {
  asm volatile(
      "{.reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; "
      "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [there];}" ::"r"(
          shared_address(barrier)),
      "r"(rank)
      : "memory");
}
CUFUSE_DEVICE void mbarrier_wait_cluster(u64* barrier, u32 parity) {
  u32 done;
  do {
    asm volatile(
        "{.reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2; "
        "selp.u32 %0, 1, 0, p;}"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  } while (!done);
}

#endif  // sm_90

// ---- tensor cores

// One, two or four 8x8 matrices of 16-bit values; lane l gives the address of row l % 8 of matrix
// l / 8, 16-byte aligned. Then r[i] of lane l holds columns 2 (l % 4) and the next of row l / 4 of
// matrix i, transposed the same rows of a column.
template <int kMatrices>
CUFUSE_DEVICE void load_matrix(u32 (&r)[kMatrices], const void* shared) {
  static_assert(kMatrices == 1 || kMatrices == 2 || kMatrices == 4, "ldmatrix has x1, x2 and x4");
  if constexpr (kMatrices == 1) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];"
                 : "=r"(r[0])
                 : "r"(shared_address(shared))
                 : "memory");
  } else if constexpr (kMatrices == 2) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(shared_address(shared))
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(shared))
                 : "memory");
  }
}

template <int kMatrices>
CUFUSE_DEVICE void load_matrix_transposed(u32 (&r)[kMatrices], const void* shared) {
  static_assert(kMatrices == 1 || kMatrices == 2 || kMatrices == 4, "ldmatrix has x1, x2 and x4");
  if constexpr (kMatrices == 1) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];"
                 : "=r"(r[0])
                 : "r"(shared_address(shared))
                 : "memory");
  } else if constexpr (kMatrices == 2) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(shared_address(shared))
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(shared))
                 : "memory");
  }
}

#if __CUDA_ARCH__ >= 900

// The way back: four matrices, addresses and registers as `load_matrix` has them.
CUFUSE_DEVICE void store_matrix(void* shared, const u32 (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                   shared_address(shared)),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}
// One, two or four, as `load_matrix_transposed` has them.
template <int kMatrices>
CUFUSE_DEVICE void store_matrix_transposed(void* shared, const u32 (&r)[kMatrices]) {
  static_assert(kMatrices == 1 || kMatrices == 2 || kMatrices == 4, "stmatrix has x1, x2 and x4");
  if constexpr (kMatrices == 1) {
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(shared_address(shared)),
        "r"(r[0])
        : "memory");
  } else if constexpr (kMatrices == 2) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(
                     shared_address(shared)),
                 "r"(r[0]), "r"(r[1])
                 : "memory");
  } else {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                     shared_address(shared)),
                 "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
  }
}

#endif  // sm_90

// c [16, 8] += a [16, 16] b [16, 8], fragments in PTX's order for m16n8k16.
template <typename T>
CUFUSE_DEVICE void mma_m16n8k16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1);

template <>
CUFUSE_DEVICE void mma_m16n8k16<bfloat16>(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
CUFUSE_DEVICE void mma_m16n8k16<half>(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// c [16, 8] += a [16, 32] b [32, 8] of 8-bit integers, fragments in PTX's order for m16n8k32.
CUFUSE_DEVICE void mma_m16n8k32_s8(i32 (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#if __CUDA_ARCH__ >= 890

template <typename T>
struct Fp8Ptx;
template <>
struct Fp8Ptx<e4m3> {
  static constexpr char kText[] = ".e4m3";
};
template <>
struct Fp8Ptx<e5m2> {
  static constexpr char kText[] = ".e5m2";
};

// The same of 8-bit floats. Some tensor cores keep fewer bits of the sum than a float has.
template <typename TA, typename TB = TA>
CUFUSE_DEVICE void mma_m16n8k32(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.f32%10%11.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "C"(Fp8Ptx<TA>::kText),
        "C"(Fp8Ptx<TB>::kText));
}

#endif  // sm_89

// ---- tensor cores of sm_90a: a warpgroup multiplies, from shared memory, beside its threads

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// A number as PTX writes it.
template <int kN, char... kTail>
struct NumberPtx : NumberPtx<kN / 10, '0' + kN % 10, kTail...> {};
template <char... kTail>
struct NumberPtx<0, kTail...> {
  static constexpr char kText[] = {kTail..., 0};
};

template <typename T>
struct WgmmaPtx;
template <>
struct WgmmaPtx<bfloat16> {
  static constexpr char kText[] = "k16.f32.bf16.bf16 ";
};
template <>
struct WgmmaPtx<half> {
  static constexpr char kText[] = "k16.f32.f16.f16 ";
};

// The text of a wgmma names 128 accumulators; a comment takes away those that there are not.
template <bool kHere>
struct CommentPtx {
  static constexpr char kOpen[] = "";
  static constexpr char kClose[] = "";
};
template <>
struct CommentPtx<true> {
  static constexpr char kOpen[] = "/*";
  static constexpr char kClose[] = "*/";
};

template <int kIndex, int kSums>
CUFUSE_DEVICE float& sum_or(float (&d)[kSums], float& none) {
  if constexpr (kIndex < kSums) {
    return d[kIndex];
  } else {
    return none;
  }
}

#define CUFUSE_SUMS_TEXT                                                                 \
  "%0, %1, %2, %3%129, %4, %5, %6, %7%130, %8, %9, %10, %11%131, %12, %13, %14, %15"     \
  "%132, %16, %17, %18, %19%133, %20, %21, %22, %23%134, %24, %25, %26, %27"             \
  "%135, %28, %29, %30, %31%136, %32, %33, %34, %35%137, %36, %37, %38, %39"             \
  "%138, %40, %41, %42, %43%139, %44, %45, %46, %47%140, %48, %49, %50, %51"             \
  "%141, %52, %53, %54, %55%142, %56, %57, %58, %59%143, %60, %61, %62, %63"             \
  "%144, %64, %65, %66, %67%145, %68, %69, %70, %71%146, %72, %73, %74, %75"             \
  "%147, %76, %77, %78, %79%148, %80, %81, %82, %83%149, %84, %85, %86, %87"             \
  "%150, %88, %89, %90, %91%151, %92, %93, %94, %95%152, %96, %97, %98, %99"             \
  "%153, %100, %101, %102, %103%154, %104, %105, %106, %107%155, %108, %109, %110, %111" \
  "%156, %112, %113, %114, %115%157, %116, %117, %118, %119%158, %120, %121, %122, %123" \
  "%159, %124, %125, %126, %127%160"
#define CUFUSE_SUMS_4(i)                                                                \
  "+f"(sum_or<i>(d, none)), "+f"(sum_or<i + 1>(d, none)), "+f"(sum_or<i + 2>(d, none)), \
      "+f"(sum_or<i + 3>(d, none))
#define CUFUSE_SUMS_32(i)                                                              \
  CUFUSE_SUMS_4(i), CUFUSE_SUMS_4(i + 4), CUFUSE_SUMS_4(i + 8), CUFUSE_SUMS_4(i + 12), \
      CUFUSE_SUMS_4(i + 16), CUFUSE_SUMS_4(i + 20), CUFUSE_SUMS_4(i + 24), CUFUSE_SUMS_4(i + 28)
#define CUFUSE_SUMS CUFUSE_SUMS_32(0), CUFUSE_SUMS_32(32), CUFUSE_SUMS_32(64), CUFUSE_SUMS_32(96)
#define CUFUSE_END(n) "C"(CommentPtx<kSums == n>::kOpen)
#define CUFUSE_ENDS                                                                             \
  CUFUSE_END(4), CUFUSE_END(8), CUFUSE_END(12), CUFUSE_END(16), CUFUSE_END(20), CUFUSE_END(24), \
      CUFUSE_END(28), CUFUSE_END(32), CUFUSE_END(36), CUFUSE_END(40), CUFUSE_END(44),           \
      CUFUSE_END(48), CUFUSE_END(52), CUFUSE_END(56), CUFUSE_END(60), CUFUSE_END(64),           \
      CUFUSE_END(68), CUFUSE_END(72), CUFUSE_END(76), CUFUSE_END(80), CUFUSE_END(84),           \
      CUFUSE_END(88), CUFUSE_END(92), CUFUSE_END(96), CUFUSE_END(100), CUFUSE_END(104),         \
      CUFUSE_END(108), CUFUSE_END(112), CUFUSE_END(116), CUFUSE_END(120), CUFUSE_END(124),      \
      "C"(CommentPtx<(kSums < 128)>::kClose)

// d [64, n] (+)= a [64, 16] b [16, n], n twice the accumulators of a thread: 8 to 256 in steps of
// 8. All four warps of a warpgroup (four neighbours, the first a multiple of 4) come with the same
// descriptors; warp w has rows 16 w to 16 w + 15, a and d in the order of mma_m16n8k16: d's columns
// 8 j to 8 j + 7 are d[4 j] to d[4 j + 3]. Without `accumulate` d starts at zero.
//
// Around a chain of products: `wgmma_fence` after registers that take part were touched, and
// `wgmma_commit`, `wgmma_wait` after it. In between d, a and the shared memory stay untouched.
template <typename T, Major kMajorA = Major::k, Major kMajorB = Major::k, int kSums>
CUFUSE_DEVICE void wgmma(float (&d)[kSums], u64 a, u64 b, bool accumulate) {
  static_assert(kSums % 4 == 0 && kSums <= 128, "n is 8, 16, ... 256");
  float none = 0.0f;
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %161, 0; wgmma.mma_async.sync.aligned.m64n%162%163"
      "{" CUFUSE_SUMS_TEXT "}, %164, %128, p, 1, 1, %165, %166;}"
      : CUFUSE_SUMS
      : "l"(b), CUFUSE_ENDS, "r"(static_cast<u32>(accumulate)), "C"(NumberPtx<kSums * 2>::kText),
        "C"(WgmmaPtx<T>::kText), "l"(a), "n"(kMajorA == Major::mn), "n"(kMajorB == Major::mn)
      : "memory");
}

// The same with a in registers.
template <typename T, Major kMajorB = Major::k, int kSums>
CUFUSE_DEVICE void wgmma(float (&d)[kSums], const u32 (&a)[4], u64 b, bool accumulate) {
  static_assert(kSums % 4 == 0 && kSums <= 128, "n is 8, 16, ... 256");
  float none = 0.0f;
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %161, 0; wgmma.mma_async.sync.aligned.m64n%162%163"
      "{" CUFUSE_SUMS_TEXT "}, {%164, %165, %166, %167}, %128, p, 1, 1, %168;}"
      : CUFUSE_SUMS
      : "l"(b), CUFUSE_ENDS, "r"(static_cast<u32>(accumulate)), "C"(NumberPtx<kSums * 2>::kText),
        "C"(WgmmaPtx<T>::kText), "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]),
        "n"(kMajorB == Major::mn)
      : "memory");
}

#undef CUFUSE_SUMS_TEXT
#undef CUFUSE_SUMS_4
#undef CUFUSE_SUMS_32
#undef CUFUSE_SUMS
#undef CUFUSE_END
#undef CUFUSE_ENDS

// Take registers from the warpgroup, or give it some, up to kCount a thread: a multiple of 8, 24 to
// 256. All its warps come. A CTA has what it was launched with, so some give before others get.
template <int kCount>
CUFUSE_DEVICE void give_registers() {
  static_assert(kCount % 8 == 0 && kCount >= 24 && kCount <= 256, "what setmaxnreg takes");
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
CUFUSE_DEVICE void take_registers() {
  static_assert(kCount % 8 == 0 && kCount >= 24 && kCount <= 256, "what setmaxnreg takes");
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

// Keep the compiler from moving what it does with registers over this place.
CUFUSE_DEVICE void pin(float& v) { asm volatile("" : "+f"(v)::"memory"); }
CUFUSE_DEVICE void pin(u32& v) { asm volatile("" : "+r"(v)::"memory"); }
template <typename T, int kCount>
CUFUSE_DEVICE void pin(T (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) pin(values[i]);
}

// Order what this thread did with registers before the products that come after; `registers` are
// the accumulators, and fragments of a, that were written.
template <typename... Registers>
CUFUSE_DEVICE void wgmma_fence(Registers&... registers) {
  (pin(registers), ...);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

CUFUSE_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Wait until at most kPending of the newest groups are in flight; `sums` are all accumulators that
// are used afterwards.
template <int kPending, typename... Sums>
CUFUSE_DEVICE void wgmma_wait(Sums&... sums) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
  (pin(sums), ...);
}

#else

template <typename T, Major kMajorA = Major::k, Major kMajorB = Major::k, int kSums, typename A>
CUFUSE_DEVICE void wgmma(float (&)[kSums], const A&, u64, bool) {
  static_assert(sizeof(T) == 0, "wgmma is an instruction of sm_90a alone");
}
template <typename... Registers>
CUFUSE_DEVICE void wgmma_fence(Registers&...) {}
CUFUSE_DEVICE void wgmma_commit() {}
template <int kPending, typename... Sums>
CUFUSE_DEVICE void wgmma_wait(Sums&...) {}

#endif  // sm_90a

}  // namespace cufuse

#endif  // CUFUSE_HOST
