// What device/packed.cuh says of a layout, and a packed panel as the A operand of mma.
// instantiate: packed_places<half>
// instantiate: packed_places<bfloat16>
// instantiate: packed_places<float>
// instantiate: packed_mma<half>
// instantiate: packed_mma<bfloat16>
// needs: 80
#include "device/packed.cuh"

namespace cufuse {

struct PackedPlacesArgs {
  i64* places;  // [16, k]
  i64* sizes;   // [6]
  int n;
  int k;
};

template <typename T>
__global__ void packed_places(const PackedPlacesArgs args) {
  using P = Packing<T>;
  for (int i = threadIdx.x; i < P::kTileRows * args.k; i += blockDim.x) {
    args.places[i] = P::index(i / args.k, i % args.k);
  }
  if (threadIdx.x > 0) return;
  args.sizes[0] = P::tiles(args.k);
  args.sizes[1] = P::panel_elements(args.k);
  args.sizes[2] = P::panel_bytes(args.k);
  args.sizes[3] = P::panels(args.n);
  args.sizes[4] = P::panels(args.n, true);
  args.sizes[5] = P::kTileBytes;
}

template <typename T>
struct PackedMmaArgs {
  const T* packed;  // one panel
  const u32* b;     // [8, tiles * 8] words of two elements
  float* out;       // [16, 8]
  int tiles;
};

// The 16 bytes of a lane are its fragment, as they lie.
template <typename T>
__global__ void packed_mma(const PackedMmaArgs<T> args) {
  const int row = threadIdx.x / 4, quad = threadIdx.x % 4;
  float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  for (int tile = 0; tile < args.tiles; ++tile) {
    const uint4 lane = reinterpret_cast<const uint4*>(args.packed)[tile * 32 + threadIdx.x];
    const u32 a[4] = {lane.x, lane.y, lane.z, lane.w};
    const u32* b = args.b + (row * args.tiles + tile) * 8 + quad;
    mma_m16n8k16<T>(c, a, b[0], b[4]);
  }
  for (int i = 0; i < 4; ++i) args.out[(row + i / 2 * 8) * 8 + quad * 2 + i % 2] = c[i];
}

}  // namespace cufuse
