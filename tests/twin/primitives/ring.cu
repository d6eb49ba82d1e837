// out[t, j] = 2 x[t, j] + x[t, j + 1], where j + 1 wraps: one warp streams tiles through a ring of
// bulk copies, the others compute, and a bulk copy takes each result away.
// instantiate: ring<2>
// instantiate: ring<3>
// needs: 90
#include "device/hw.cuh"

namespace cufuse {

constexpr int kTile = 192;
constexpr int kConsumers = 2;  // warps
constexpr u32 kTileBytes = kTile * sizeof(float);

struct RingArgs {
  const float* x;  // [tiles, kTile]
  float* out;      // [tiles, kTile]
  int tiles;
};

template <int kStages>
__global__ void ring(const RingArgs args) {
  float* stages = dynamic_shared<float>();   // [kStages, kTile]
  float* result = stages + kStages * kTile;  // [kTile]
  u64* full = reinterpret_cast<u64*>(result + kTile);
  u64* empty = full + kStages;
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;

  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      mbarrier_init(&full[stage], 1);
      mbarrier_init(&empty[stage], kConsumers);
    }
    fence_mbarrier_init();
  }
  __syncthreads();

  // The producer.
  if (warp == kConsumers) {
    if (lane != 0) return;
    const u64 policy = evict_first_policy();
    int i = 0;
    for (int tile = blockIdx.x; tile < args.tiles; tile += gridDim.x, ++i) {
      const int stage = i % kStages;
      if (i >= kStages) mbarrier_wait(&empty[stage], (i / kStages - 1) & 1);
      const float* source = args.x + static_cast<i64>(tile) * kTile;
      mbarrier_arrive_expect_tx(&full[stage], kTileBytes);
      copy_bulk(stages + stage * kTile, source, kTileBytes, &full[stage], policy);
      const int next = tile + gridDim.x;
      if (next < args.tiles) {
        prefetch_bulk(args.x + static_cast<i64>(next) * kTile, kTileBytes);
      }
    }
    return;
  }

  // The consumers.
  int i = 0;
  for (int tile = blockIdx.x; tile < args.tiles; tile += gridDim.x, ++i) {
    const int stage = i % kStages;
    const float* x = stages + stage * kTile;
    mbarrier_wait(&full[stage], i / kStages & 1);
    if (threadIdx.x == 0) store_bulk_wait_read<0>();
    barrier_sync(1, kConsumers * 32);
    for (int j = threadIdx.x; j < kTile; j += kConsumers * 32) {
      result[j] = fmaf(2.0f, x[j], x[(j + 1) % kTile]);
    }
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&empty[stage]);
    fence_proxy_async();
    barrier_sync(1, kConsumers * 32);
    if (threadIdx.x == 0) {
      store_bulk(args.out + static_cast<i64>(tile) * kTile, result, kTileBytes);
      store_bulk_commit();
    }
  }
  if (threadIdx.x == 0) store_bulk_wait<0>();
}

}  // namespace cufuse
