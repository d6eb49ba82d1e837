// out[j] = out[j] and x[c, j] of all CTAs c combined, by bulk copies out of shared memory;
// whichever CTA comes last adds up the result.
// instantiate: reduce<Reduce::add, u32>
// instantiate: reduce<Reduce::add, i32>
// instantiate: reduce<Reduce::add, u64>
// instantiate: reduce<Reduce::min, u32>
// instantiate: reduce<Reduce::min, i32>
// instantiate: reduce<Reduce::min, u64>
// instantiate: reduce<Reduce::max, u32>
// instantiate: reduce<Reduce::max, i32>
// instantiate: reduce<Reduce::max, u64>
// needs: 90
#include "device/hw.cuh"

namespace cufuse {

template <typename T>
struct ReduceArgs {
  const T* x;    // [ctas, threads]
  T* out;        // [threads]
  u32* arrived;  // [1]; zero
  T* total;      // [1]; the sum of out
};

template <Reduce kReduce, typename T>
__global__ void reduce(const ReduceArgs<T> args) {
  T* row = dynamic_shared<T>();  // [threads]
  const u32 j = threadIdx.x;
  row[j] = args.x[blockIdx.x * blockDim.x + j];
  fence_proxy_async();
  __syncthreads();
  if (j > 0) return;
  reduce_bulk<kReduce>(args.out, row, blockDim.x * static_cast<u32>(sizeof(T)));
  store_bulk_commit();
  store_bulk_wait<0>();
  // Bulk copies and plain loads are kept in order by a fence on each side of the word between them.
  fence_proxy_async();
  if (add_acq_rel(args.arrived, 1) + 1 < gridDim.x) return;
  fence_proxy_async();
  T total = 0;
  for (u32 i = 0; i < blockDim.x; ++i) total += args.out[i];
  *args.total = total;
}

}  // namespace cufuse
