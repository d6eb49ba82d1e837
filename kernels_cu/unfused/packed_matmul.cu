// y = x w^T and nothing else, w packed (device/packed.cuh): what unfused/matmul.cu does with rows.
// A gate and its up that are packed together give two products in one launch: half of a panel would
// read the other half with it.
// instantiate: packed_matmul_rows<bfloat16, false, 1, 8, 4, 8>
// instantiate: packed_matmul_rows<half, true, 8, 8, 4, 1>
// instantiate: packed_matmul_rows<float, false, 8, 8, 4, 4>
// instantiate: packed_matmul_tiles<bfloat16, false, 128, 128, 64, 4, 2, 3, 8>
// instantiate: packed_matmul_tiles<half, true, 32, 64, 64, 1, 4, 6, 1>
// instantiate: packed_matmul_tiles<float, true, 64, 64, 16, 2, 2, 2, 4>
#include "device/packed_rows.cuh"
#include "device/packed_tiles.cuh"
#include "device/tile_epilogue.cuh"

namespace cufuse {

template <typename T>
struct PackedMatmulArgs {
  const T* x;  // [rows, k]
  const T* w;  // [n, k], gated: twice; packed
  T* y;        // [rows, n]; gated: of the gate
  T* up;       // [rows, n]; null where there is none
  int rows;
  int n;
  int k;
};

template <typename T, bool kGated, int kM, int kWarps, int kUnroll, int kVec>
__global__ void __launch_bounds__(kWarps * 32, 16 / kWarps)
    packed_matmul_rows(const PackedMatmulArgs<T> args) {
  using Shape = PackedRowsShape<kM, kWarps, kUnroll>;
  constexpr int kOutputs = kGated ? Packing<T>::kGatedRows : kPanelRows;
  __shared__ float partial[Shape::kPartials];
  u32* x = dynamic_shared<u32>();
  const int n = args.n, k = args.k;
  const int first = blockIdx.y * kM;
  const int rows = min(args.rows - first, kM);
  auto fill = [&] {
    stage_fragments<Shape::kThreads, kM, kVec, Rounding::cast_first>(
        x, args.x + static_cast<i64>(first) * k, rows, k, static_cast<const T*>(nullptr), 0.0f,
        partial);
  };
  auto finish = [&](int panel, PackedRowsSums<Shape> sums) {
    for (int i = threadIdx.x; i < kM * kPanelRows; i += Shape::kThreads) {
      const int m = i / kPanelRows, row = i % kPanelRows;
      const int column = panel * kOutputs + row % kOutputs;
      if (m >= rows || column >= n) continue;
      T* y = row < kOutputs ? args.y : args.up;
      y[static_cast<i64>(first + m) * n + column] = from_float<T>(sums(row, m));
    }
  };
  packed_rows<Shape>(args.w, Packing<T>::panels(n, kGated), k, reinterpret_cast<const uint4*>(x),
                     partial, fill, finish);
}

template <typename T,
          bool kGated,
          int kBlockM,
          int kBlockN,
          int kBlockK,
          int kWarpsM,
          int kWarpsN,
          int kStages,
          int kVec>
__global__ void __launch_bounds__(kWarpsM * kWarpsN * 32, kTileWarps<T> / (kWarpsM * kWarpsN))
    packed_matmul_tiles(const PackedMatmulArgs<T> args) {
  using Shape = TileShape<T, kBlockM, kBlockN, kBlockK, kWarpsM, kWarpsN, kStages, kVec>;
  const int rows = args.rows, n = args.n;
  PackedTile<Shape, kGated, T> tile(args.x, args.w, rows, n, args.k);
  if constexpr (kGated) {
    tile.sums.visit_gated(
        [&](int r, int c, const float (&gates)[Shape::kWide], const float (&ups)[Shape::kWide]) {
          const int row = tile.first_row + r, column = tile.first_column + c;
          store_product(args.y, rows, n, row, column, gates);
          store_product(args.up, rows, n, row, column, ups);
        });
  } else {
    tile.sums.visit([&](int r, int c, const float (&values)[Shape::kWide]) {
      store_product(args.y, rows, n, tile.first_row + r, tile.first_column + c, values);
    });
  }
}

}  // namespace cufuse
