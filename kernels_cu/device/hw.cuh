// The hardware's own instructions, one small function each. This is the only kernel-side file with
// inline PTX; host/hw.cuh is its twin for a CPU compiler and offers the same names.
#pragma once

#ifdef CUFUSE_HOST
#include "host/hw.cuh"
#else

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#define CUFUSE_DEVICE __device__ __forceinline__

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

// ---- global memory

// 16 bytes that are read once and never written in this launch: first to leave the caches.
CUFUSE_DEVICE uint4 load_stream(const void* p) { return __ldcs(static_cast<const uint4*>(p)); }

// A word that another CTA publishes with `add_acq_rel` or `store_release`.
CUFUSE_DEVICE u32 load_acquire(const u32* p) {
  u32 v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

CUFUSE_DEVICE void store_release(u32* p, u32 v) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

// Add to a counter; what this CTA wrote before is visible to whoever sees the sum.
CUFUSE_DEVICE u32 add_acq_rel(u32* p, u32 v) {
  u32 old;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(p), "r"(v)
               : "memory");
  return old;
}

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

}  // namespace cufuse

#endif  // CUFUSE_HOST
