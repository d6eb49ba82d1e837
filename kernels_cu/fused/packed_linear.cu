// y = act(pre) + residual, pre = norm(x) w^T + b, w packed (device/packed.cuh): what
// fused/linear.cu does with rows. packed_linear_rows takes a few rows of x, bounded by reading w
// once; packed_linear_tiles many, on tensor cores (float32: FFMA), and has no norm: a launch of
// rmsnorm goes before it.
// instantiate: packed_linear_rows<bfloat16, Act::none, Rounding::cast_first, 1, 8, 4, 8>
// instantiate: packed_linear_rows<bfloat16, Act::gelu, Rounding::scale_first, 8, 8, 4, 8>
// instantiate: packed_linear_rows<half, Act::silu, Rounding::cast_first, 4, 8, 4, 1>
// instantiate: packed_linear_rows<float, Act::gelu_tanh, Rounding::one_plus, 8, 8, 4, 4>
// instantiate: packed_linear_tiles<bfloat16, Act::gelu, 128, 128, 64, 4, 2, 3, 8>
// instantiate: packed_linear_tiles<bfloat16, Act::none, 64, 128, 64, 2, 4, 3, 8>
// instantiate: packed_linear_tiles<half, Act::none, 16, 32, 64, 1, 2, 8, 1>
// instantiate: packed_linear_tiles<float, Act::silu, 128, 128, 16, 4, 2, 2, 4>
// instantiate: packed_linear_tiles<float, Act::none, 64, 64, 16, 2, 2, 2, 1>
#include "device/packed_rows.cuh"
#include "device/packed_tiles.cuh"
#include "device/tile_epilogue.cuh"

namespace cufuse {

template <typename T>
struct PackedLinearRowsArgs {
  const T* x;            // [rows, k]
  const T* w;            // [n, k]; packed
  const T* b;            // [n]; may be null
  const T* residual;     // [rows, n]; may be null
  const T* norm_weight;  // [k]; null: x as it is
  T* y;                  // [rows, n]; may be residual
  T* pre;                // [rows, n]; null: not asked for
  int rows;
  int n;
  int k;
  float eps;
};

// blockIdx.y takes kM rows of x, blockIdx.x strides over the panels.
template <typename T, Act kAct, Rounding kRounding, int kM, int kWarps, int kUnroll, int kVec>
__global__ void __launch_bounds__(kWarps * 32, 16 / kWarps)
    packed_linear_rows(const PackedLinearRowsArgs<T> args) {
  using Shape = PackedRowsShape<kM, kWarps, kUnroll>;
  __shared__ float partial[Shape::kPartials];
  u32* x = dynamic_shared<u32>();
  const int n = args.n, k = args.k;
  const int first = blockIdx.y * kM;
  const int rows = min(args.rows - first, kM);

  auto fill = [&] {
    stage_fragments<Shape::kThreads, kM, kVec, kRounding>(
        x, args.x + static_cast<i64>(first) * k, rows, k, args.norm_weight, args.eps, partial);
  };
  auto finish = [&](int panel, PackedRowsSums<Shape> sums) {
    for (int i = threadIdx.x; i < kM * kPanelRows; i += Shape::kThreads) {
      const int m = i / kPanelRows, row = i % kPanelRows;
      const int column = panel * kPanelRows + row;
      if (m >= rows || column >= n) continue;
      const i64 at = static_cast<i64>(first + m) * n + column;
      store_linear<kAct>(args, at, column, sums(row, m));
    }
  };
  packed_rows<Shape>(args.w, Packing<T>::panels(n), k, reinterpret_cast<const uint4*>(x), partial,
                     fill, finish);
}

template <typename T>
struct PackedLinearTilesArgs {
  const T* x;         // [rows, k]
  const T* w;         // [n, k]; packed
  const T* b;         // [n]; may be null
  const T* residual;  // [rows, n]; may be null
  T* y;               // [rows, n]; may be residual
  T* pre;             // [rows, n]; null: not asked for
  int rows;
  int n;
  int k;
};

template <typename T,
          Act kAct,
          int kBlockM,
          int kBlockN,
          int kBlockK,
          int kWarpsM,
          int kWarpsN,
          int kStages,
          int kVec>
__global__ void __launch_bounds__(kWarpsM * kWarpsN * 32, kTileWarps<T> / (kWarpsM * kWarpsN))
    packed_linear_tiles(const PackedLinearTilesArgs<T> args) {
  using Shape = TileShape<T, kBlockM, kBlockN, kBlockK, kWarpsM, kWarpsN, kStages, kVec>;
  PackedTile<Shape, false, T> tile(args.x, args.w, args.rows, args.n, args.k);
  tile.sums.visit([&](int r, int c, const float (&values)[Shape::kWide]) {
    store_linear<kAct>(args, tile.first_row + r, tile.first_column + c, values);
  });
}

}  // namespace cufuse
