// A row-major weight to its packed layout (device/packed.cuh) and back, bits unchanged. A thread
// takes the 16 bytes that one lane has of a tile, a warp a tile, a CTA neighbouring tiles of a
// panel. Bounded by memory: one read and one write of the weight.
// instantiate: pack<bfloat16, 2>
// instantiate: pack<half, 1>
// instantiate: pack<float, 2>
// instantiate: unpack<bfloat16, 1>
// instantiate: unpack<half, 2>
// instantiate: unpack<float, 2>
#include "device/packed.cuh"

namespace cufuse {

template <typename T>
struct PackArgs {
  const T* w;    // [n, k]; rows lie w_stride apart
  const T* up;   // [n, k]; rows lie up_stride apart; null for a weight that is not gated
  T* packed;     // [panels of n, tiles of k, 32, 16 bytes]; 16-byte aligned
  i64 w_stride;  // strides count elements
  i64 up_stride;
  int n;
  int k;
};

template <typename T>
struct UnpackArgs {
  const T* packed;  // [panels of n, tiles of k, 32, 16 bytes]; 16-byte aligned
  T* w;             // [end - begin, k]
  T* up;            // [end - begin, k]; null for a weight that is not gated
  int begin;        // rows of the weight
  int end;
  int k;
};

constexpr int kPackThreads = 256;

// The tile of this warp, which may lie beyond the panel's last.
CUFUSE_DEVICE int warp_tile() {
  return static_cast<int>(blockIdx.x) * (kPackThreads / 32) + static_cast<int>(threadIdx.x / 32);
}

// Which row of which matrix a panel's row is.
struct PackedRow {
  i64 row;
  bool up;
};
template <typename T>
CUFUSE_DEVICE PackedRow packed_row(int panel, int row, bool gated) {
  using P = Packing<T>;
  if (!gated) return {static_cast<i64>(panel) * P::kTileRows + row, false};
  return {static_cast<i64>(panel) * P::kGatedRows + row % P::kGatedRows, row >= P::kGatedRows};
}

// kVec is 2 where pairs of columns are aligned in w and up, else 1.
template <typename T, int kVec>
__global__ void __launch_bounds__(kPackThreads) pack(const PackArgs<T> args) {
  using P = Packing<T>;
  static_assert(kVec == 1 || kVec == 2, "a lane has pairs of neighbours");
  const int lane = threadIdx.x % 32, tile = warp_tile(), tiles = P::tiles(args.k);
  if (tile >= tiles) return;
  const bool gated = args.up != nullptr;
  const int panels = P::panels(args.n, gated);
  for (int panel = blockIdx.y; panel < panels; panel += gridDim.y) {
    Vec<T, kPer16<T>> group;
#pragma unroll
    for (int pair = 0; pair < P::kPairs; ++pair) {
      const PackedRow from = packed_row<T>(panel, P::pair_row(lane, pair), gated);
      const i64 column = static_cast<i64>(tile) * P::kTileK + P::pair_column(lane, pair);
      const i64 stride = from.up ? args.up_stride : args.w_stride;
      const T* source = (from.up ? args.up : args.w) + from.row * stride + column;
      Vec<T, 2> values = {from_float<T>(0.0f), from_float<T>(0.0f)};
      if (from.row < args.n) {
        if (kVec == 2 && column + 1 < args.k) {
          values = load_vec<2>(source);
        } else {
          if (column < args.k) values.v[0] = source[0];
          if (column + 1 < args.k) values.v[1] = source[1];
        }
      }
      group.v[2 * pair] = values.v[0];
      group.v[2 * pair + 1] = values.v[1];
    }
    const i64 place = panel * P::panel_elements(args.k) +
                      static_cast<i64>(tile) * P::kTileElements + lane * kPer16<T>;
    store_vec<kPer16<T>>(args.packed + place, group);
  }
}

// The inverse, for rows from `begin` to before `end`.
template <typename T, int kVec>
__global__ void __launch_bounds__(kPackThreads) unpack(const UnpackArgs<T> args) {
  using P = Packing<T>;
  static_assert(kVec == 1 || kVec == 2, "a lane has pairs of neighbours");
  const int lane = threadIdx.x % 32, tile = warp_tile(), tiles = P::tiles(args.k);
  if (tile >= tiles) return;
  const bool gated = args.up != nullptr;
  const int panels = P::panels(args.end, gated);
  const int first = args.begin / (gated ? P::kGatedRows : P::kTileRows);
  for (int panel = first + blockIdx.y; panel < panels; panel += gridDim.y) {
    const i64 place = panel * P::panel_elements(args.k) +
                      static_cast<i64>(tile) * P::kTileElements + lane * kPer16<T>;
    const auto group = load_vec<kPer16<T>>(args.packed + place);
#pragma unroll
    for (int pair = 0; pair < P::kPairs; ++pair) {
      const PackedRow to = packed_row<T>(panel, P::pair_row(lane, pair), gated);
      if (to.row < args.begin || to.row >= args.end) continue;
      const i64 column = static_cast<i64>(tile) * P::kTileK + P::pair_column(lane, pair);
      T* target = (to.up ? args.up : args.w) + (to.row - args.begin) * args.k + column;
      if (kVec == 2 && column + 1 < args.k) {
        store_vec<2>(target, Vec<T, 2>{group.v[2 * pair], group.v[2 * pair + 1]});
      } else {
        if (column < args.k) target[0] = group.v[2 * pair];
        if (column + 1 < args.k) target[1] = group.v[2 * pair + 1];
      }
    }
  }
}

}  // namespace cufuse
