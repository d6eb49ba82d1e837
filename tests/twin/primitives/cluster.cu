// out[c, j] = sum over the CTAs d of c's cluster of (x[d + 1, j] + d), plus 1000 x[c + 1, j], where
// c + 1 wraps within the cluster: CTAs read each other's rows, write into each other's inboxes and
// say so at each other's mbarriers.
// instantiate: cluster
// needs: 90
#include "device/hw.cuh"

namespace cufuse {

constexpr u32 kRow = 64;

struct ClusterArgs {
  const u32* x;  // [ctas, kRow]
  u32* out;      // [ctas, kRow]
};

// kRow threads.
__global__ void cluster(const ClusterArgs args) {
  __shared__ u32 row[kRow];
  u32* inbox = dynamic_shared<u32>();  // [cluster, kRow]
  u64* full = reinterpret_cast<u64*>(inbox + cluster_size() * kRow);
  const u32 j = threadIdx.x;
  const u32 rank = cluster_rank();
  const u32 next = (rank + 1) % cluster_size();
  row[j] = args.x[blockIdx.x * kRow + j];
  if (j == 0) {
    mbarrier_init(full, cluster_size());
    fence_mbarrier_init();
  }
  cluster_sync();  // rows and barriers are there

  const u32 value = map_shared(row, next)[j] + rank;
  for (u32 there = 0; there < cluster_size(); ++there) {
    map_shared(inbox, there)[rank * kRow + j] = value;
  }
  __syncthreads();  // the CTA has written
  if (j < cluster_size()) mbarrier_arrive_remote(full, j);
  mbarrier_wait_cluster(full, 0);

  u32 sum = 1000 * map_shared(row, next)[j];
  for (u32 from = 0; from < cluster_size(); ++from) sum += inbox[from * kRow + j];
  args.out[blockIdx.x * kRow + j] = sum;
  cluster_arrive();  // the CTA has read
  cluster_wait();
}

}  // namespace cufuse
