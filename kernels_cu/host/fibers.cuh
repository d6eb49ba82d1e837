// A CUDA grid on the CPU, as its kernels see it: where a thread is, and how it waits for others.
//
// Each CUDA thread is a fiber. It runs until it has to wait (barrier, shuffle, flag) and then hands
// over to another fiber of its CTA, or of another CTA. All that needs no template is compiled once,
// in fibers.cpp and memory.cpp: this header stands in front of every kernel's compile.
// Guarded by name: a precompiled header may come from another checkout, where the file has another
// date, and `#pragma once` would take it for another file.
#ifndef CUFUSE_HOST_FIBERS_CUH
#define CUFUSE_HOST_FIBERS_CUH

#include <cstddef>
#include <cstring>

#include "host/async.cuh"
#include "host/wgmma.cuh"

namespace cufuse::host {

constexpr std::size_t kMaxSharedBytes = 232448;

// An array that a launch was given.
struct Array {
  const void* begin;
  unsigned long long size_bytes;
  int read_only;  // the kernel's struct says const
  const char* name;
};

struct Dim3 {
  unsigned x = 1, y = 1, z = 1;
  unsigned count() const { return x * y * z; }
};

struct Fiber {
  Dim3 thread;
  unsigned index = 0;
  const unsigned char* stack_end = nullptr;
};

struct Cta {
  Dim3 grid, block, block_index;
  Fiber* current = nullptr;
  unsigned char* dynamic_shared = nullptr;
  std::size_t dynamic_shared_bytes = 0;
  unsigned long long seed = 0;
  AsyncState async;
  WgmmaState wgmma;
};

// The CTA whose turn it is. A launch never changes threads.
extern __thread Cta* cta __attribute__((tls_model("initial-exec")));

inline unsigned current_lane() { return cta->current->index % 32; }

// Leave the CTA for good and end the launch with "name: what (where)".
[[noreturn]] void fail(const char* name, const char* what);

// Hand over to another fiber that is still running.
void yield(const char* reason);

// ---- what the check of memory has to know of what the compiler does not see

// The caller's place in the kernel, for reports; our own functions that a kernel calls say it.
void called_from(const void* return_address);
// Who acquires an object of the CTA has seen all that was done before its releases.
void release(const void* object);
void acquire(const void* object, bool for_cluster = false);
// A fence of the calling thread, for relaxed words before and after it.
void fence();
// Memory that the kernel's own code does not touch: `shared` may be global memory too.
void accessed(const void* memory, unsigned size_bytes, bool is_write);
// Count as one of a thread's copies until `copies_end` of its group or, with group -1, until
// `copy_landed`.
enum class CopyGroups { load, store_reads, store_writes };
enum class CopyKind { read, write, update };
void copy_begins(
    const void* memory, unsigned size_bytes, int group, CopyGroups groups, CopyKind kind);
void copies_end(int newest_group, CopyGroups groups);
// A copy of `issuer` landed; who acquires the object has seen that.
void copy_landed(const void* shared,
                 const void* source,
                 unsigned size_bytes,
                 unsigned issuer,
                 const void* object);
// The calling thread's warp reads shared memory for a product until it says that this is over.
void operand_begins(const void* shared, unsigned size_bytes);
void operand_ends(const void* shared, unsigned size_bytes);
// What the thread stored before, or has seen stored, is there for bulk copies and products.
void fence_proxy_async();

// ---- clusters

unsigned cluster_rank();
unsigned cluster_size();
// Where the CTA of this rank has what lies here in the calling one.
void* map_shared(const void* shared, unsigned rank);
void cluster_arrive();
void cluster_wait();
// Do something in the name of another CTA of the cluster, with its copy of what lies here.
void in_cta(unsigned rank, void* shared, const char* name, void (*work)(void* there));

// ---- barriers

// __syncthreads in all its forms: returns how many threads came with a true predicate.
unsigned block_barrier(bool predicate, const char* name);

// ---- collectives

constexpr unsigned kMaxPayloadBytes = 48;

struct alignas(16) Box {
  unsigned char bytes[kMaxPayloadBytes];
};

// Deposit a value in the lane's box and wait for every lane of the mask; returns the 32 boxes.
const Box* arrive(unsigned mask, const void* value, unsigned size_bytes, const char* name);
// The boxes were read; the last lane opens the next exchange.
void depart(unsigned mask, const char* name);

// Every lane named in `mask` deposits a value and gets to see all of them through `read(box)`.
template <typename T, typename Read>
auto exchange(unsigned mask, const T& value, const char* name, Read read) {
  static_assert(sizeof(T) <= kMaxPayloadBytes, "a lane's payload must fit into its box");
  const Box* boxes = arrive(mask, &value, sizeof(T), name);
  auto result = read([&](unsigned lane) {
    T v;
    std::memcpy(&v, &boxes[lane % 32], sizeof(T));
    return v;
  });
  depart(mask, name);
  return result;
}

}  // namespace cufuse::host

#endif  // CUFUSE_HOST_FIBERS_CUH
