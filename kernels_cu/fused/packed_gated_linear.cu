// y = act(norm(x) w_gate^T + b_gate) * (norm(x) w_up^T + b_up), or the clamped gate of gpt-oss, the
// weights packed together (device/packed.cuh): a panel has 8 rows of each, and gate and up of one
// output meet in one thread. A few rows and many as in fused/packed_linear.cu.
// instantiate: packed_gated_rows<bfloat16, Gate::plain, Act::silu, Rounding::cast_first, 1, 8, 4, 8>
// instantiate: packed_gated_rows<half, Gate::clamped, Act::none, Rounding::scale_first, 8, 8, 4, 1>
// instantiate: packed_gated_rows<float, Gate::plain, Act::silu, Rounding::one_plus, 8, 8, 4, 4>
// instantiate: packed_gated_tiles<bfloat16, Gate::plain, Act::silu, 128, 128, 64, 4, 2, 3, 8>
// instantiate: packed_gated_tiles<half, Gate::clamped, Act::none, 64, 64, 64, 2, 2, 4, 1>
// instantiate: packed_gated_tiles<float, Gate::plain, Act::gelu, 128, 128, 16, 4, 2, 2, 4>
#include "device/packed_rows.cuh"
#include "device/packed_tiles.cuh"
#include "device/tile_epilogue.cuh"

namespace cufuse {

template <typename T>
struct PackedGatedRowsArgs {
  const T* x;            // [rows, k]
  const T* w;            // [n, k] twice; packed, gated
  const T* b_gate;       // [n]; may be null
  const T* b_up;         // [n]; may be null
  const T* norm_weight;  // [k]; null: x as it is
  T* y;                  // [rows, n]
  int rows;
  int n;
  int k;
  float limit;  // of the clamped gate, like alpha
  float alpha;
  float eps;
};

// blockIdx.y takes kM rows of x, blockIdx.x strides over the panels.
template <typename T,
          Gate kGate,
          Act kAct,
          Rounding kRounding,
          int kM,
          int kWarps,
          int kUnroll,
          int kVec>
__global__ void __launch_bounds__(kWarps * 32, 16 / kWarps)
    packed_gated_rows(const PackedGatedRowsArgs<T> args) {
  using Shape = PackedRowsShape<kM, kWarps, kUnroll>;
  constexpr int kOutputs = Packing<T>::kGatedRows;
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
    for (int i = threadIdx.x; i < kM * kOutputs; i += Shape::kThreads) {
      const int m = i / kOutputs, row = i % kOutputs;
      const int column = panel * kOutputs + row;
      if (m >= rows || column >= n) continue;
      args.y[static_cast<i64>(first + m) * n + column] =
          gated_epilogue<kGate, kAct>(sums(row, m), sums(row + kOutputs, m), args.b_gate, args.b_up,
                                      column, args.limit, args.alpha);
    }
  };
  packed_rows<Shape>(args.w, Packing<T>::panels(n, true), k, reinterpret_cast<const uint4*>(x),
                     partial, fill, finish);
}

template <typename T>
struct PackedGatedTilesArgs {
  const T* x;       // [rows, k]
  const T* w;       // [n, k] twice; packed, gated
  const T* b_gate;  // [n]; may be null
  const T* b_up;    // [n]; may be null
  T* y;             // [rows, n]
  int rows;
  int n;
  int k;
  float limit;
  float alpha;
};

template <typename T,
          Gate kGate,
          Act kAct,
          int kBlockM,
          int kBlockN,
          int kBlockK,
          int kWarpsM,
          int kWarpsN,
          int kStages,
          int kVec>
__global__ void __launch_bounds__(kWarpsM * kWarpsN * 32, kTileWarps<T> / (kWarpsM * kWarpsN))
    packed_gated_tiles(const PackedGatedTilesArgs<T> args) {
  using Shape = TileShape<T, kBlockM, kBlockN, kBlockK, kWarpsM, kWarpsN, kStages, kVec>;
  PackedTile<Shape, true, T> tile(args.x, args.w, args.rows, args.n, args.k);
  tile.sums.visit_gated(
      [&](int r, int c, const float (&gates)[Shape::kWide], const float (&ups)[Shape::kWide]) {
        store_gated<kGate, kAct>(args, tile.first_row + r, tile.first_column + c, gates, ups);
      });
}

}  // namespace cufuse
