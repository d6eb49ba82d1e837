// The twin of device/hw.cuh for g++: CUDA's words and our instructions in plain C++ on fibers.
// Guarded by name: a precompiled header may come from another checkout, where the file has another
// date, and `#pragma once` would take it for another file.
#ifndef CUFUSE_HOST_HW_CUH
#define CUFUSE_HOST_HW_CUH

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "host/fibers.cuh"

// ---- CUDA's words

#define CUFUSE_DEVICE inline
#define __device__
#define __host__
#define __global__ static
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __restrict__ __restrict
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ static thread_local

#define threadIdx (cufuse::host::cta->current->thread)
#define blockIdx (cufuse::host::cta->block_index)
#define blockDim (cufuse::host::cta->block)
#define gridDim (cufuse::host::cta->grid)

struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) ulonglong2 {
  unsigned long long x, y;
};
struct alignas(8) int2 {
  int x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};

inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline ulonglong2 make_ulonglong2(unsigned long long x, unsigned long long y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

using std::max;
using std::min;

inline float __uint_as_float(unsigned v) {
  float f;
  std::memcpy(&f, &v, sizeof f);
  return f;
}
inline unsigned __float_as_uint(float v) {
  unsigned u;
  std::memcpy(&u, &v, sizeof u);
  return u;
}
inline int __float_as_int(float v) { return static_cast<int>(__float_as_uint(v)); }
inline float __int_as_float(int v) { return __uint_as_float(static_cast<unsigned>(v)); }
inline float rsqrtf(float v) { return 1.0f / std::sqrt(v); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __log2f(float v) { return std::log2(v); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline int __clz(int v) { return v ? __builtin_clz(static_cast<unsigned>(v)) : 32; }
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>((static_cast<std::uint64_t>(a) * b) >> 32);
}
inline long long __float2ll_rn(float v) { return std::llrint(v); }
inline unsigned long long __float2ull_rn(float v) {
  return static_cast<unsigned long long>(std::llrint(v));
}
inline int __float2int_rn(float v) { return static_cast<int>(std::lrint(v)); }
inline float __ull2float_rn(unsigned long long v) { return static_cast<float>(v); }
template <typename T>
T __ldg(const T* p) {
  return *p;
}
template <typename T>
T __ldcs(const T* p) {
  return *p;
}
inline void __nanosleep(unsigned) { cufuse::host::yield("__nanosleep"); }
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __trap() { cufuse::host::fail("__trap", "was executed"); }

// ---- barriers, shuffles, votes

inline void __syncthreads() { cufuse::host::block_barrier(false, "__syncthreads"); }
inline int __syncthreads_count(int predicate) {
  return static_cast<int>(cufuse::host::block_barrier(predicate != 0, "__syncthreads_count"));
}
inline int __syncthreads_or(int predicate) {
  return cufuse::host::block_barrier(predicate != 0, "__syncthreads_or") != 0;
}
inline int __syncthreads_and(int predicate) {
  return cufuse::host::block_barrier(predicate == 0, "__syncthreads_and") == 0;
}

inline void __syncwarp(unsigned mask = 0xffffffffu) {
  cufuse::host::exchange(mask, 0, "__syncwarp", [](auto) { return 0; });
}

// The value of lane `source(lane)` within the calling lane's group of `width` lanes.
template <typename T, typename Source>
T cufuse_shuffle(unsigned mask, T value, const char* name, Source source) {
  const unsigned lane = cufuse::host::current_lane();
  return cufuse::host::exchange(mask, value, name, [&](auto box) {
    const unsigned from = source(lane);
    if (!(mask >> from & 1)) {
      cufuse::host::fail(name, "reads a lane that is not named in the mask");
    }
    return box(from);
  });
}
template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  return cufuse_shuffle(mask, value, "__shfl_sync", [=](unsigned lane) {
    return (lane & ~(width - 1u)) | (static_cast<unsigned>(source) & (width - 1u));
  });
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32) {
  return cufuse_shuffle(mask, value, "__shfl_xor_sync", [=](unsigned lane) {
    const unsigned from = lane ^ static_cast<unsigned>(lane_mask);
    return from < (lane & ~(width - 1u)) + width ? from : lane;
  });
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  return cufuse_shuffle(mask, value, "__shfl_down_sync", [=](unsigned lane) {
    return (lane & (width - 1u)) + delta < static_cast<unsigned>(width) ? lane + delta : lane;
  });
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  return cufuse_shuffle(mask, value, "__shfl_up_sync", [=](unsigned lane) {
    return (lane & (width - 1u)) >= delta ? lane - delta : lane;
  });
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  return cufuse::host::exchange(mask, predicate != 0, "__ballot_sync", [=](auto box) {
    unsigned votes = 0;
    for (unsigned lane = 0; lane < 32; ++lane) {
      if ((mask >> lane & 1) && box(lane)) votes |= 1u << lane;
    }
    return votes;
  });
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) {
  return __ballot_sync(mask, predicate) == mask;
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned value) {
  return cufuse::host::exchange(mask, value, "__reduce_max_sync", [=](auto box) {
    unsigned largest = 0;
    for (unsigned lane = 0; lane < 32; ++lane) {
      if (mask >> lane & 1) largest = std::max(largest, box(lane));
    }
    return largest;
  });
}

// ---- atomics

template <typename T>
T atomicAdd(T* p, T v) {
  static_assert(std::is_integral_v<T>, "floating-point atomics depend on the order of arrival");
  return __atomic_fetch_add(p, v, __ATOMIC_RELAXED);
}
template <typename T>
T atomicOr(T* p, T v) {
  return __atomic_fetch_or(p, v, __ATOMIC_RELAXED);
}
template <typename T>
T atomicExch(T* p, T v) {
  return __atomic_exchange_n(p, v, __ATOMIC_RELAXED);
}
template <typename T>
T atomicMax(T* p, T v) {
  T old = __atomic_load_n(p, __ATOMIC_RELAXED);
  while (old < v &&
         !__atomic_compare_exchange_n(p, &old, v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  return old;
}
template <typename T>
T atomicMin(T* p, T v) {
  T old = __atomic_load_n(p, __ATOMIC_RELAXED);
  while (v < old &&
         !__atomic_compare_exchange_n(p, &old, v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  return old;
}

#include "device/fp8.cuh"  // which is written in the words above

namespace cufuse {

using i32 = int;
using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using i64 = long long;
using u64 = unsigned long long;

constexpr u32 kFullMask = 0xffffffffu;

using TensorMap = host::TensorMap;

template <typename T>
T* dynamic_shared() {
  return reinterpret_cast<T*>(host::cta->dynamic_shared);
}

// ---- conversions, round to nearest even

struct half {
  u16 bits;
};
struct bfloat16 {
  u16 bits;
};
inline u16 __half_as_ushort(half v) { return v.bits; }
inline u16 __bfloat16_as_ushort(bfloat16 v) { return v.bits; }
inline half __ushort_as_half(u16 bits) { return {bits}; }
inline bfloat16 __ushort_as_bfloat16(u16 bits) { return {bits}; }

inline float to_float(float v) { return v; }
inline float to_float(bfloat16 v) { return __uint_as_float(static_cast<u32>(v.bits) << 16); }
inline float to_float(half v) {
  const u32 sign = static_cast<u32>(v.bits & 0x8000u) << 16;
  const u32 exponent = v.bits >> 10 & 0x1f;
  const u32 mantissa = v.bits & 0x3ffu;
  if (exponent == 31) return __uint_as_float(sign | 0x7f800000u | mantissa << 13);
  if (exponent) return __uint_as_float(sign | (exponent + 112) << 23 | mantissa << 13);
  const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
  return sign ? -magnitude : magnitude;
}

inline float to_float(e4m3 v) { return fp8_to_float(v); }
inline float to_float(e5m2 v) { return fp8_to_float(v); }

inline float max_or_nan(float a, float b) { return a != a || b != b ? a + b : a < b ? b : a; }

template <typename T>
T from_float(float v);
template <>
inline e4m3 from_float<e4m3>(float v) {
  return to_e4m3(v);
}
template <>
inline e5m2 from_float<e5m2>(float v) {
  return to_e5m2(v);
}
template <>
inline float from_float<float>(float v) {
  return v;
}
template <>
inline bfloat16 from_float<bfloat16>(float v) {
  const u32 u = __float_as_uint(v);
  if ((u & 0x7fffffffu) > 0x7f800000u) return {0x7fff};
  return {static_cast<u16>((u + 0x7fffu + (u >> 16 & 1)) >> 16)};
}
template <>
inline half from_float<half>(float v) {
  const u32 u = __float_as_uint(v);
  const u16 sign = static_cast<u16>(u >> 16 & 0x8000u);
  const u32 magnitude = u & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {0x7fff};
  if (magnitude >= 0x477ff000u) return {static_cast<u16>(sign | 0x7c00u)};
  if (magnitude < 0x38800000u) {  // subnormal or zero: a multiple of 2^-24
    const long units = std::lrint(std::ldexp(static_cast<double>(__uint_as_float(magnitude)), 24));
    return {static_cast<u16>(sign | units)};
  }
  const u32 rounded = magnitude + 0xfffu + (magnitude >> 13 & 1);
  return {static_cast<u16>(sign | (rounded - 0x38000000u) >> 13)};
}
template <typename T>
u32 pair_from_floats(float low, float high) {
  return from_float<T>(low).bits | static_cast<u32>(from_float<T>(high).bits) << 16;
}
template <typename T>
void round_pair(float& a, float& b) {
  a = to_float(from_float<T>(a));
  b = to_float(from_float<T>(b));
}

inline u32 select_bits(u32 mask, u32 a, u32 b) { return (a & mask) | (b & ~mask); }
inline u32 rotate_left(u32 word, u32 by) { return word << by | word >> (32 - by); }

// In doubles: this thread may flush floats below the normal ones to zero.
template <typename T>
u32 mul_pair(u32 a, u32 b) {
  static_assert(std::is_same_v<T, bfloat16>, "products of bfloat16");
  const auto value = [](u32 bits) {
    const int exponent = static_cast<int>(bits >> 7 & 0xff);
    const int fraction = static_cast<int>(bits & 0x7f);
    const double magnitude = exponent == 255 ? (fraction ? NAN : INFINITY)
                             : exponent      ? std::ldexp(128.0 + fraction, exponent - 134)
                                             : std::ldexp(static_cast<double>(fraction), -133);
    return bits & 0x8000u ? -magnitude : magnitude;
  };
  const auto product = [&](int shift) -> u32 {
    const double exact = value(a >> shift & 0xffffu) * value(b >> shift & 0xffffu);
    if (!(std::fabs(exact) < 0x1p-126)) return from_float<T>(static_cast<float>(exact)).bits;
    const u32 units = static_cast<u32>(std::lrint(std::ldexp(std::fabs(exact), 133)));
    return units | (std::signbit(exact) ? 0x8000u : 0u);
  };
  return product(0) | product(16) << 16;
}

// ---- global memory

inline uint4 load_stream(const void* p) { return *static_cast<const uint4*>(p); }

// ---- words that threads publish to each other

enum class Order { relaxed, acquire, release, acq_rel };
enum class Scope { gpu, sys };

constexpr int host_order(Order order) {
  return order == Order::relaxed   ? __ATOMIC_RELAXED
         : order == Order::acquire ? __ATOMIC_ACQUIRE
         : order == Order::release ? __ATOMIC_RELEASE
                                   : __ATOMIC_ACQ_REL;
}

// Threads that poll take turns; so do those that publish, or the others would never come between.
template <Order kOrder, Scope kScope = Scope::gpu, typename T>
T load_word(const T* p) {
  static_assert(kOrder == Order::relaxed || kOrder == Order::acquire, "a load releases nothing");
  host::yield(kOrder == Order::acquire ? "an acquiring load" : "a relaxed load");
  return __atomic_load_n(p, host_order(kOrder));
}
template <Order kOrder, Scope kScope = Scope::gpu, typename T>
void store_word(T* p, std::common_type_t<T> v) {
  static_assert(kOrder == Order::relaxed || kOrder == Order::release, "a store acquires nothing");
  if (host::chance(2)) host::yield("a store");
  __atomic_store_n(p, v, host_order(kOrder));
}
// Two words of 8 bytes in either order, and others may come between.
template <Order kOrder, Scope kScope = Scope::gpu>
ulonglong2 load_word(const ulonglong2* p) {
  if (reinterpret_cast<std::uintptr_t>(p) & 15) host::fail("load_word", "not 16-byte aligned");
  ulonglong2 v;
  const bool forward = host::chance(2);
  (forward ? v.x : v.y) = load_word<kOrder>(forward ? &p->x : &p->y);
  (forward ? v.y : v.x) = load_word<kOrder>(forward ? &p->y : &p->x);
  return v;
}
template <Order kOrder, Scope kScope = Scope::gpu>
void store_word(ulonglong2* p, ulonglong2 v) {
  if (reinterpret_cast<std::uintptr_t>(p) & 15) host::fail("store_word", "not 16-byte aligned");
  const bool forward = host::chance(2);
  store_word<kOrder>(forward ? &p->x : &p->y, forward ? v.x : v.y);
  store_word<kOrder>(forward ? &p->y : &p->x, forward ? v.y : v.x);
}

template <Order kOrder, Scope kScope = Scope::gpu, typename T>
T atomic_add(T* p, std::common_type_t<T> v) {
  if (host::chance(2)) host::yield("atomic_add");
  return __atomic_fetch_add(p, v, host_order(kOrder));
}
template <Order kOrder, Scope kScope = Scope::gpu, typename T>
T atomic_exchange(T* p, std::common_type_t<T> v) {
  host::yield("atomic_exchange");
  return __atomic_exchange_n(p, v, host_order(kOrder));
}
template <Order kOrder, Scope kScope = Scope::gpu, typename T>
T atomic_compare_exchange(T* p, std::common_type_t<T> wanted, std::common_type_t<T> v) {
  host::yield("atomic_compare_exchange");
  constexpr int failed =
      kOrder == Order::acq_rel || kOrder == Order::acquire ? __ATOMIC_ACQUIRE : __ATOMIC_RELAXED;
  __atomic_compare_exchange_n(p, &wanted, v, false, host_order(kOrder), failed);
  return wanted;
}

inline u32 load_acquire(const u32* p) { return load_word<Order::acquire>(p); }
inline void store_release(u32* p, u32 v) { store_word<Order::release>(p, v); }
inline u32 add_acq_rel(u32* p, u32 v) { return atomic_add<Order::acq_rel>(p, v); }

// ---- shared memory

inline u32 shared_address(const void* p) { return host::shared_address(p); }
inline u32 load_shared_acquire(const u32* p) { return load_word<Order::acquire>(p); }
inline void store_shared_release(u32* p, u32 v) { store_word<Order::release>(p, v); }

}  // namespace cufuse

#include "device/swizzle.cuh"  // which is written in the words above

namespace cufuse {

inline void copy_async(void* shared, const void* source, u32 size_bytes) {
  host::copy_async(shared, source, size_bytes);
}
inline void copy_async_commit() { host::copy_async_commit(); }
template <int kPending>
void copy_async_wait() {
  host::copy_async_wait(kPending);
}

// ---- barriers of some warps of a CTA

inline void come_to_barrier(u32 id, u32 threads, bool wait, const char* name) {
  const u64 mine = static_cast<u64>(id) << 32 | threads;
  const bool alike = host::exchange(kFullMask, mine, name, [=](auto box) {
    for (u32 lane = 0; lane < 32; ++lane) {
      if (box(lane) != mine) return false;
    }
    return true;
  });
  if (!alike) host::fail(name, "the lanes of a warp name different barriers or counts");
  host::named_barrier(id, threads, wait, name);
}
inline void barrier_sync(u32 id, u32 threads) {
  come_to_barrier(id, threads, true, "barrier_sync");
}
inline void barrier_arrive(u32 id, u32 threads) {
  come_to_barrier(id, threads, false, "barrier_arrive");
}

inline int thread_here() { return static_cast<int>(threadIdx.x); }
inline int lane_here() { return static_cast<int>(threadIdx.x % 32); }
inline int warp_here() { return static_cast<int>(threadIdx.x / 32); }

inline int uniform(int v) { return __shfl_sync(kFullMask, v, 0); }

// ---- time

inline u64 timer_ns() {
  using namespace std::chrono;
  return static_cast<u64>(
      duration_cast<nanoseconds>(steady_clock::now().time_since_epoch()).count());
}

// A cycle of 4096 ns: a launch takes seconds, and 27 bits of the clock are to tell its cycles apart
// (device/trace.cuh).
inline u64 clock_cycles() { return timer_ns() >> 12; }
inline u32 clock_low() { return static_cast<u32>(clock_cycles()); }

// ---- mbarrier

inline void mbarrier_init(u64* barrier, u32 count) { host::mbarrier_init(barrier, count); }
inline void fence_mbarrier_init() {}
inline void mbarrier_arrive(u64* barrier) {
  host::mbarrier_arrive(barrier, 0, "mbarrier_arrive");
  if (host::chance(4)) host::yield("mbarrier_arrive");
}
// The arrival comes when the thread calls, its copies just before: in the hardware both come later.
inline void copy_async_arrive(u64* barrier) {
  host::yield("copy_async_arrive");
  host::copy_async_commit();
  host::copy_async_wait(0);
  host::mbarrier_arrive(barrier, 0, "copy_async_arrive");
}
template <typename U>
U by_now(U value) {
  return value;
}
inline bool mbarrier_test_wait(u64* barrier, u32 parity) {
  return host::mbarrier_wait(barrier, parity, 1, "mbarrier_test_wait");
}
inline bool mbarrier_try_wait(u64* barrier, u32 parity) {
  return host::mbarrier_wait(barrier, parity, 2, "mbarrier_try_wait");
}
inline bool mbarrier_try_wait(u64* barrier, u32 parity, u32) {
  return mbarrier_try_wait(barrier, parity);
}
inline void mbarrier_wait(u64* barrier, u32 parity) {
  host::mbarrier_wait(barrier, parity, 0, "mbarrier_wait");
}
inline bool mbarrier_wait_bounded(u64* barrier, u32 parity, u32 tries) {
  return host::mbarrier_wait(barrier, parity, tries ? tries : 1, "mbarrier_wait_bounded");
}

// ---- bulk copies

inline void mbarrier_arrive_expect_tx(u64* barrier, u32 size_bytes) {
  host::mbarrier_arrive(barrier, size_bytes, "mbarrier_arrive_expect_tx");
}
inline u64 evict_first_policy() { return 0; }
inline void copy_bulk(
    void* shared, const void* source, u32 size_bytes, u64* barrier, u64 policy = 0) {
  host::bulk_load(shared, source, size_bytes, barrier);
}
inline void store_bulk(void* target, const void* shared, u32 size_bytes) {
  host::bulk_store(target, shared, size_bytes);
}
// Done by the copy engine: no accesses of the thread that happens to run.
enum class Reduce { add, min, max };
template <Reduce kReduce, typename T>
__attribute__((no_sanitize("thread"))) void combine(void* target,
                                                    const void* source,
                                                    unsigned size_bytes) {
  T* to = static_cast<T*>(target);
  const T* from = static_cast<const T*>(source);
  for (u32 i = 0; i < size_bytes / sizeof(T); ++i) {
    if (kReduce == Reduce::add) {
      to[i] += from[i];
    } else if (kReduce == Reduce::min ? from[i] < to[i] : from[i] > to[i]) {
      to[i] = from[i];
    }
  }
}
template <Reduce kReduce, typename T>
void reduce_bulk(T* target, const T* shared, u32 size_bytes) {
  static_assert(std::is_integral_v<T>, "floating-point sums depend on the order of arrival");
  host::bulk_store(target, shared, size_bytes, combine<kReduce, T>);
}
inline void store_bulk_commit() { host::bulk_store_commit(); }
template <int kPending>
void store_bulk_wait() {
  host::bulk_store_wait(kPending, false);
}
template <int kPending>
void store_bulk_wait_read() {
  host::bulk_store_wait(kPending, true);
}
inline void prefetch_bulk(const void* source, u32 size_bytes) {
  host::bulk_prefetch(source, size_bytes);
}

// ---- tensor copies

inline void prefetch_map(const TensorMap& map) { host::tensor_check(map, "prefetch_map"); }
template <typename... Coordinates>
inline void copy_tensor(void* shared, const TensorMap& map, u64* barrier, Coordinates... at) {
  const int coordinates[] = {at...};
  host::tensor_load(shared, map, coordinates, sizeof...(at), barrier);
}
template <typename... Coordinates>
inline void copy_tensor_hinted(
    void* shared, const TensorMap& map, u64* barrier, u64, Coordinates... at) {
  copy_tensor(shared, map, barrier, at...);
}
template <typename... Coordinates>
inline void store_tensor(const TensorMap& map, const void* shared, Coordinates... at) {
  const int coordinates[] = {at...};
  host::tensor_store(map, coordinates, sizeof...(at), shared);
}
template <int kCount>
void give_registers() {
  static_assert(kCount % 8 == 0 && kCount >= 24 && kCount <= 256, "what setmaxnreg takes");
}
template <int kCount>
void take_registers() {
  static_assert(kCount % 8 == 0 && kCount >= 24 && kCount <= 256, "what setmaxnreg takes");
}
inline void fence_proxy_async() { host::fence_proxy_async(); }
inline void fence_proxy_async_shared() { host::fence_proxy_async(); }

// ---- clusters

inline u32 cluster_rank() { return host::cluster_rank(); }
inline u32 cluster_size() { return host::cluster_size(); }
inline void cluster_arrive() { host::cluster_arrive(); }
inline void cluster_wait() { host::cluster_wait(); }
inline void cluster_sync() {
  host::cluster_arrive();
  host::cluster_wait();
}
template <typename T>
T* map_shared(T* shared, u32 rank) {
  return static_cast<T*>(host::map_shared(shared, rank));
}
inline void mbarrier_arrive_remote(u64* barrier, u32 rank) {
  host::mbarrier_arrive_remote(barrier, rank);
  if (host::chance(4)) host::yield("mbarrier_arrive_remote");
}
inline void mbarrier_wait_cluster(u64* barrier, u32 parity) {
  host::mbarrier_wait(barrier, parity, 0, "mbarrier_wait_cluster", true);
}

// ---- tensor cores

template <int kMatrices>
inline void load_matrix_rows(u32 (&r)[kMatrices],
                             const void* shared,
                             bool transposed,
                             const char* name) {
  static_assert(kMatrices == 1 || kMatrices == 2 || kMatrices == 4, "ldmatrix has x1, x2 and x4");
  struct Pairs {
    u32 r[kMatrices];
  };
  const u32 lane = host::current_lane();
  if (lane < kMatrices * 8 && reinterpret_cast<std::uintptr_t>(shared) & 15) {
    host::fail(name, "a row is not 16-byte aligned");
  }
  const Pairs pairs = host::exchange(kFullMask, shared, name, [=](auto row_of) {
    Pairs p;
    for (u32 matrix = 0; matrix < kMatrices; ++matrix) {
      u32 word = 0;
      for (u32 i = 0; i < 2; ++i) {
        const u32 row = transposed ? lane % 4 * 2 + i : lane / 4;
        const u32 column = transposed ? lane / 4 : lane % 4 * 2 + i;
        const u16* source = static_cast<const u16*>(row_of(matrix * 8 + row));
        word |= static_cast<u32>(source[column]) << (16 * i);
      }
      p.r[matrix] = word;
    }
    return p;
  });
  for (int i = 0; i < kMatrices; ++i) r[i] = pairs.r[i];
}
template <int kMatrices>
inline void load_matrix(u32 (&r)[kMatrices], const void* shared) {
  load_matrix_rows(r, shared, false, "load_matrix");
}
template <int kMatrices>
inline void load_matrix_transposed(u32 (&r)[kMatrices], const void* shared) {
  load_matrix_rows(r, shared, true, "load_matrix_transposed");
}

// Each lane stores the rows that it gave the addresses of.
inline void store_matrix(void* shared, const u32 (&r)[4]) {
  struct Words {
    u32 r[4];
  };
  const u32 lane = host::current_lane();
  if (reinterpret_cast<std::uintptr_t>(shared) & 15) {
    host::fail("store_matrix", "a row is not 16-byte aligned");
  }
  const Words mine{{r[0], r[1], r[2], r[3]}};
  const uint4 row = host::exchange(kFullMask, mine, "store_matrix", [=](auto words) {
    const u32 matrix = lane / 8, first = lane % 8 * 4;
    return uint4{words(first).r[matrix], words(first + 1).r[matrix], words(first + 2).r[matrix],
                 words(first + 3).r[matrix]};
  });
  *static_cast<uint4*>(shared) = row;
}
template <int kMatrices>
inline void store_matrix_transposed(void* shared, const u32 (&r)[kMatrices]) {
  static_assert(kMatrices == 1 || kMatrices == 2 || kMatrices == 4, "stmatrix has x1, x2 and x4");
  struct Words {
    u32 r[kMatrices];
  };
  const u32 lane = host::current_lane();
  const bool stores = lane < kMatrices * 8;
  if (stores && reinterpret_cast<std::uintptr_t>(shared) & 15) {
    host::fail("store_matrix_transposed", "a row is not 16-byte aligned");
  }
  Words mine;
  std::copy_n(r, kMatrices, mine.r);
  const uint4 row = host::exchange(kFullMask, mine, "store_matrix_transposed", [=](auto words) {
    u32 pairs[4] = {};
    for (u32 i = 0; stores && i < 8; ++i) {
      const u32 word = words(i * 4 + lane % 8 / 2).r[lane / 8];
      pairs[i / 2] |= (word >> (16 * (lane % 2)) & 0xffff) << (16 * (i % 2));
    }
    return uint4{pairs[0], pairs[1], pairs[2], pairs[3]};
  });
  if (stores) *static_cast<uint4*>(shared) = row;
}

template <typename T>
void mma_m16n8k16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  struct Fragment {
    u32 a[4], b[2];
  };
  struct Sums {
    float c[4];
  };
  const Fragment mine{{a[0], a[1], a[2], a[3]}, {b0, b1}};
  const u32 lane = host::current_lane();
  auto element = [](u32 word, u32 i) { return to_float(T{static_cast<u16>(word >> (16 * i))}); };
  const Sums sums = host::exchange(kFullMask, mine, "mma_m16n8k16", [&](auto fragment) {
    Sums s;
    for (u32 i = 0; i < 4; ++i) {
      const u32 row = lane / 4 + i / 2 * 8;
      const u32 column = lane % 4 * 2 + i % 2;
      float sum = 0.0f;
      for (u32 k = 0; k < 16; ++k) {
        const u32 pair = k % 8 / 2;
        const Fragment left = fragment(row % 8 * 4 + pair);
        const Fragment right = fragment(column * 4 + pair);
        sum += element(left.a[row / 8 + k / 8 * 2], k % 2) * element(right.b[k / 8], k % 2);
      }
      s.c[i] = sum;
    }
    return s;
  });
  for (int i = 0; i < 4; ++i) c[i] += sums.c[i];
}

// Sum over k of a [16, 32] b [32, 8], where a register holds four elements of a row or column.
template <typename Sum, typename Product>
void mma_bytes(Sum (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, const char* name, Product product) {
  struct Fragment {
    u32 a[4], b[2];
  };
  struct Sums {
    Sum c[4];
  };
  const Fragment mine{{a[0], a[1], a[2], a[3]}, {b0, b1}};
  const u32 lane = host::current_lane();
  const Sums sums = host::exchange(kFullMask, mine, name, [&](auto fragment) {
    Sums s;
    for (u32 i = 0; i < 4; ++i) {
      const u32 row = lane / 4 + i / 2 * 8;
      const u32 column = lane % 4 * 2 + i % 2;
      Sum sum = 0;
      for (u32 k = 0; k < 32; ++k) {
        const u32 left = fragment(row % 8 * 4 + k % 16 / 4).a[row / 8 + k / 16 * 2];
        const u32 right = fragment(column * 4 + k % 16 / 4).b[k / 16];
        sum += product(static_cast<u8>(left >> k % 4 * 8), static_cast<u8>(right >> k % 4 * 8));
      }
      s.c[i] = sum;
    }
    return s;
  });
  for (int i = 0; i < 4; ++i) c[i] += sums.c[i];
}

inline void mma_m16n8k32_s8(i32 (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  mma_bytes(c, a, b0, b1, "mma_m16n8k32_s8", [](u8 x, u8 y) {
    return static_cast<i32>(static_cast<signed char>(x)) * static_cast<signed char>(y);
  });
}
template <typename TA, typename TB = TA>
void mma_m16n8k32(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  mma_bytes(c, a, b0, b1, "mma_m16n8k32",
            [](u8 x, u8 y) { return to_float(TA{x}) * to_float(TB{y}); });
}

// ---- tensor cores of sm_90a

template <typename T, int kSums>
inline void wgmma_product(float (&d)[kSums],
                          const u32* a,
                          u64 a_shared,
                          u64 b,
                          bool accumulate,
                          bool along_m,
                          bool along_n) {
  static_assert(kSums % 4 == 0 && kSums <= 128, "n is 8, 16, ... 256");
  host::wgmma({d, a, a_shared, b, [](u16 bits) { return to_float(T{bits}); }, kSums * 2, accumulate,
               along_m, along_n});
}
template <typename T, Major kMajorA = Major::k, Major kMajorB = Major::k, int kSums>
inline void wgmma(float (&d)[kSums], u64 a, u64 b, bool accumulate) {
  wgmma_product<T>(d, nullptr, a, b, accumulate, kMajorA == Major::mn, kMajorB == Major::mn);
}
template <typename T, Major kMajorB = Major::k, int kSums>
inline void wgmma(float (&d)[kSums], const u32 (&a)[4], u64 b, bool accumulate) {
  wgmma_product<T>(d, a, 0, b, accumulate, false, kMajorB == Major::mn);
}
template <typename... Registers>
inline void wgmma_fence(Registers&...) {
  host::wgmma_fence();
}
inline void wgmma_commit() { host::wgmma_commit(); }
template <int kPending, typename... Sums>
inline void wgmma_wait(Sums&... sums) {
  const host::Named named[] = {{&sums, sizeof sums}..., {}};
  host::wgmma_wait(kPending, named, sizeof...(sums));
}

}  // namespace cufuse

#endif  // CUFUSE_HOST_HW_CUH
