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

// ---- shared memory

CUFUSE_DEVICE u32 shared_address(const void* p) {
  return static_cast<u32>(__cvta_generic_to_shared(p));
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

// Order this thread's own accesses before the bulk copies that come after.
CUFUSE_DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async;" ::: "memory"); }

#endif  // sm_90

// ---- tensor cores

// Four 8x8 matrices of 16-bit values; lane l gives the address of row l % 8 of matrix l / 8.
CUFUSE_DEVICE void load_matrix(u32 (&r)[4], const void* shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(shared))
               : "memory");
}

CUFUSE_DEVICE void load_matrix_transposed(u32 (&r)[4], const void* shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(shared))
               : "memory");
}

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

}  // namespace cufuse

#endif  // CUFUSE_HOST
