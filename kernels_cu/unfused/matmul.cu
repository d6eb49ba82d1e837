// y = x w^T and nothing else: the product alone, for steps that keep everything else apart. The
// same two ways as fused/linear.cu: matmul_rows reads the weights once for a few rows, matmul_tiles
// multiplies tiles of many.
// instantiate: matmul_rows<bfloat16, 1, 2, 4, 4, 4, 8>
// instantiate: matmul_rows<half, 8, 2, 4, 4, 2, 1>
// instantiate: matmul_rows<float, 4, 2, 4, 4, 1, 4>
// instantiate: matmul_tiles<bfloat16, 128, 64, 64, 4, 2, 3, 8>
// instantiate: matmul_tiles<half, 32, 32, 64, 2, 1, 6, 1>
// instantiate: matmul_tiles<float, 64, 64, 16, 2, 2, 2, 4>
#include "device/matvec.cuh"
#include "device/tile_epilogue.cuh"

namespace cufuse {

template <typename T>
struct MatmulArgs {
  const T* x;  // [rows, k]
  const T* w;  // [n, k]
  T* y;        // [rows, n]
  int rows;
  int n;
  int k;
};

template <typename T, int kM, int kOut, int kUnroll, int kWarps, int kSplit, int kVec>
__global__ void __launch_bounds__(kWarps * 32, kResidentWarps<kM> / kWarps)
    matmul_rows(const MatmulArgs<T> args) {
  using Shape = MatvecShape<kM, kOut, kUnroll, kWarps, kSplit, kVec>;
  __shared__ float partial[Shape::kPartials];
  T* x = dynamic_shared<T>();
  const int n = args.n, k = args.k;
  const int first = blockIdx.y * kM;
  const int rows = min(args.rows - first, kM);
  auto row = [&](int slot, int o) {
    return args.w + static_cast<i64>(min(slot * kOut + o, n - 1)) * k;
  };
  auto fill = [&] {
    stage_x<Shape::kThreads, kM, kVec, Rounding::cast_first>(
        x, args.x + static_cast<i64>(first) * k, rows, k, static_cast<const T*>(nullptr), 0.0f,
        partial);
  };
  auto finish = [&](int slot, int lane, MatvecSums<Shape> sums) {
    for (int i = lane; i < Shape::kSums; i += 32) {
      const int m = i / kOut;
      const int column = slot * kOut + i % kOut;
      if (m >= rows || column >= n) continue;
      args.y[static_cast<i64>(first + m) * n + column] = from_float<T>(sums(i % kOut, m));
    }
  };
  matvec<Shape>((n + kOut - 1) / kOut, k, x, partial, row, fill, finish);
}

template <typename T,
          int kBlockM,
          int kBlockN,
          int kBlockK,
          int kWarpsM,
          int kWarpsN,
          int kStages,
          int kVec>
__global__ void __launch_bounds__(kWarpsM * kWarpsN * 32, kTileWarps<T> / (kWarpsM * kWarpsN))
    matmul_tiles(const MatmulArgs<T> args) {
  using Shape = TileShape<T, kBlockM, kBlockN, kBlockK, kWarpsM, kWarpsN, kStages, kVec>;
  const int rows = args.rows, n = args.n, k = args.k;
  const TileIndex tile =
      tile_index(blockIdx.x, (rows + kBlockM - 1) / kBlockM, (n + kBlockN - 1) / kBlockN);
  const int first_row = tile.m * kBlockM, first_column = tile.n * kBlockN;
  TileSums<Shape> sums;
  multiply_tile(
      sums, dynamic_shared<T>(), k,
      [&](int r) { return args.x + static_cast<i64>(min(first_row + r, rows - 1)) * k; },
      [&](int r) { return args.w + static_cast<i64>(min(first_column + r, n - 1)) * k; });
  sums.visit([&](int r, int c, const float (&values)[Shape::kWide]) {
    store_product(args.y, rows, n, first_row + r, first_column + c, values);
  });
}

}  // namespace cufuse
