// y = act(pre) + residual, pre = norm(x) w^T + b, which is stored too where that is asked for.
// linear_rows takes a few rows: a warp sums whole weight rows against x in shared memory, bounded
// by reading w once. linear_tiles takes many: tiles of x and w in shared memory, multiplied on
// tensor cores (float32: FFMA); it has no norm, a launch of rmsnorm goes before it. In both
// everything between the sum and the store happens in float32.
// instantiate: linear_rows<bfloat16, Act::none, Rounding::cast_first, 1, 2, 4, 4, 4, 8>
// instantiate: linear_rows<bfloat16, Act::gelu, Rounding::scale_first, 8, 2, 4, 4, 4, 8>
// instantiate: linear_rows<half, Act::silu, Rounding::cast_first, 4, 2, 4, 4, 2, 1>
// instantiate: linear_rows<float, Act::gelu_tanh, Rounding::one_plus, 2, 2, 4, 4, 1, 4>
// instantiate: linear_tiles<bfloat16, Act::gelu, 128, 128, 64, 2, 4, 3, 8>
// instantiate: linear_tiles<half, Act::none, 16, 32, 64, 1, 2, 8, 1>
// instantiate: linear_tiles<float, Act::silu, 128, 128, 16, 4, 2, 2, 4>
// instantiate: linear_tiles<float, Act::none, 64, 64, 16, 2, 2, 2, 1>
#include "device/matvec.cuh"
#include "device/tile_epilogue.cuh"

namespace cufuse {

template <typename T>
struct LinearRowsArgs {
  const T* x;            // [rows, k]
  const T* w;            // [n, k]
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

// blockIdx.y takes kM rows of x, blockIdx.x strides over the weight rows.
template <typename T,
          Act kAct,
          Rounding kRounding,
          int kM,
          int kOut,
          int kUnroll,
          int kWarps,
          int kSplit,
          int kVec>
__global__ void __launch_bounds__(kWarps * 32, kResidentWarps<kM> / kWarps)
    linear_rows(const LinearRowsArgs<T> args) {
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
    stage_x<Shape::kThreads, kM, kVec, kRounding>(x, args.x + static_cast<i64>(first) * k, rows, k,
                                                  args.norm_weight, args.eps, partial);
  };
  auto finish = [&](int slot, int lane, MatvecSums<Shape> sums) {
    for (int i = lane; i < Shape::kSums; i += 32) {
      const int m = i / kOut;
      const int column = slot * kOut + i % kOut;
      if (m >= rows || column >= n) continue;
      const i64 at = static_cast<i64>(first + m) * n + column;
      store_linear<kAct>(args, at, column, sums(i % kOut, m));
    }
  };
  matvec<Shape>((n + kOut - 1) / kOut, k, x, partial, row, fill, finish);
}

template <typename T>
struct LinearTilesArgs {
  const T* x;         // [rows, k]
  const T* w;         // [n, k]
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
    linear_tiles(const LinearTilesArgs<T> args) {
  using Shape = TileShape<T, kBlockM, kBlockN, kBlockK, kWarpsM, kWarpsN, kStages, kVec>;
  const int rows = args.rows, n = args.n, k = args.k;
  const TileIndex tile =
      tile_index(blockIdx.x, (rows + kBlockM - 1) / kBlockM, (n + kBlockN - 1) / kBlockN);
  const int first_row = tile.m * kBlockM, first_column = tile.n * kBlockN;

  // Rows past the last repeat it and are not stored.
  TileSums<Shape> sums;
  multiply_tile(
      sums, dynamic_shared<T>(), k,
      [&](int r) { return args.x + static_cast<i64>(min(first_row + r, rows - 1)) * k; },
      [&](int r) { return args.w + static_cast<i64>(min(first_column + r, n - 1)) * k; });

  sums.visit([&](int r, int c, const float (&values)[Shape::kWide]) {
    store_linear<kAct>(args, first_row + r, first_column + c, values);
  });
}

}  // namespace cufuse
