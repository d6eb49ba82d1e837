// out[c, i] = x[c + 1, i] + x[c + 2, i], where CTAs wrap: every CTA writes its row of x to a
// buffer, all meet, each reads its neighbours' rows. A counter is the barrier; its order, or fences
// around relaxed accesses, make what was written before it visible after it.
// instantiate: edges<Edge::ordered>
// instantiate: edges<Edge::fenced>
// needs: 80
#include "device/hw.cuh"

namespace cufuse {

enum class Edge { ordered, fenced };

struct EdgesArgs {
  const u32* x;  // [ctas, threads]
  u32* buffer;   // [ctas, threads]
  u32* arrived;  // [1]; zero
  u32* out;      // [ctas, threads]
};

// All CTAs are resident.
template <Edge kEdge>
__global__ void edges(const EdgesArgs args) {
  const u32 i = threadIdx.x;
  args.buffer[blockIdx.x * blockDim.x + i] = args.x[blockIdx.x * blockDim.x + i];
  __syncthreads();  // the CTA has written
  if (i == 0) {
    if constexpr (kEdge == Edge::ordered) {
      atomic_add<Order::release>(args.arrived, 1);
      while (load_word<Order::acquire>(args.arrived) < gridDim.x) {
      }
    } else {
      __threadfence();  // written before it is said
      atomic_add<Order::relaxed>(args.arrived, 1);
      while (load_word<Order::relaxed>(args.arrived) < gridDim.x) {
      }
      __threadfence();  // said before it is read
    }
  }
  __syncthreads();  // all CTAs have
  u32 sum = 0;
  for (u32 k = 1; k <= 2; ++k) {
    sum += args.buffer[(blockIdx.x + k) % gridDim.x * blockDim.x + i];
  }
  args.out[blockIdx.x * blockDim.x + i] = sum;
}

}  // namespace cufuse
