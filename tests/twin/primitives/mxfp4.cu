// A panel of 4-bit weights (device/mxfp4.cuh) times one x, by one warp; and its values in the order
// of the A fragments.
// instantiate: mxfp4_panel<bfloat16>
// instantiate: mxfp4_panel<half>
// instantiate: mxfp4_panel<float>
// instantiate: mxfp4_fragments<bfloat16>
// instantiate: mxfp4_fragments<half>
// instantiate: pair_products
// needs: 80
#include "device/mxfp4.cuh"
#include "device/panels.cuh"

namespace cufuse {

template <typename T>
struct Mxfp4PanelArgs {
  const u8* panel;  // [tiles, Mxfp4::kTileBytes]
  const u32* x;     // [tiles * 64] values of T, zeros at the end
  float* out;       // [32, 2]; rows of every lane
  int tiles;
};

template <typename T>
__global__ void mxfp4_panel(const Mxfp4PanelArgs<T> args) {
  constexpr int kMostTiles = 46;  // k = 2880 and one more
  constexpr int kWords = Mxfp4::kTileK * static_cast<int>(sizeof(T)) / 4;
  __shared__ uint4 fragments[kMostTiles * kWords / 4];
  const int lane = threadIdx.x;
  u32* words = reinterpret_cast<u32*>(fragments);
  for (int i = lane; i < args.tiles * kWords / 2; i += 32) {
    const u32 place = fragment_place<T>(i);
    words[place] = args.x[2 * i];
    words[place + kNextFragment<T>] = args.x[2 * i + 1];
  }
  __syncthreads();
  Mxfp4Sums<T> sums;
  for (int tile = 0; tile < args.tiles; ++tile) {
    const u8* source = args.panel + tile * Mxfp4::kTileBytes;
    const uint4 values = *reinterpret_cast<const uint4*>(source + Mxfp4::value_place(lane));
    const u32 scales = *reinterpret_cast<const u32*>(source + Mxfp4::scale_place(lane));
    sums.add(values, scales, fragments + tile * kWords / 4 + lane % 4);
  }
  const float2 rows = sums.rows();
  args.out[lane * 2] = rows.x;
  args.out[lane * 2 + 1] = rows.y;
}

template <typename T>
struct Mxfp4FragmentsArgs {
  const u8* panel;  // [Mxfp4::kTileBytes], a tile
  T* out;           // [32, 4, 8]; lanes, fragments, values in their order, times kFp4Unit
};

template <typename T>
__global__ void mxfp4_fragments(const Mxfp4FragmentsArgs<T> args) {
  const int lane = threadIdx.x;
  const u32* words = reinterpret_cast<const u32*>(args.panel + Mxfp4::value_place(lane));
  for (int s = 0; s < 4; ++s) {
    u32 a[4];
    fp4_fragment<T>(words[s], a);
    for (int i = 0; i < 4; ++i) {
      reinterpret_cast<u32*>(args.out)[(lane * 4 + s) * 4 + i] = a[i];
    }
  }
}

struct PairProductsArgs {
  const u32* a;  // [count]; two bfloat16 each
  const u32* b;
  u32* out;
  int count;
};

__global__ void pair_products(const PairProductsArgs args) {
  for (int i = threadIdx.x; i < args.count; i += 32) {
    args.out[i] = mul_pair<bfloat16>(args.a[i], args.b[i]);
  }
}

}  // namespace cufuse
