// y = act(norm(x) w_gate^T + b_gate) * (norm(x) w_up^T + b_up), or the clamped gate of gpt-oss.
// gated_rows takes a few rows: a warp sums gate and up row of the same outputs together, so that
// neither product leaves the registers; bounded by reading both weights once. gated_tiles takes
// many: half of a tile's weight rows are gates, half are ups.
// instantiate: gated_rows<bfloat16, Gate::plain, Act::silu, Rounding::cast_first, 1, 2, 4, 4, 4, 8>
// instantiate: gated_rows<half, Gate::clamped, Act::none, Rounding::scale_first, 8, 2, 4, 4, 2, 8>
// instantiate: gated_rows<float, Gate::plain, Act::silu, Rounding::one_plus, 4, 2, 4, 4, 4, 1>
// instantiate: gated_tiles<bfloat16, Gate::plain, Act::silu, 128, 128, 64, 2, 4, 3, 8>
// instantiate: gated_tiles<half, Gate::clamped, Act::none, 64, 32, 64, 4, 1, 4, 1>
// instantiate: gated_tiles<float, Gate::plain, Act::gelu, 128, 128, 16, 4, 2, 2, 4>
#include "device/matvec.cuh"
#include "device/tile_epilogue.cuh"

namespace cufuse {

template <typename T>
struct GatedRowsArgs {
  const T* x;            // [rows, k]
  const T* w_gate;       // [n, k]
  const T* w_up;         // [n, k]
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

// blockIdx.y takes kM rows of x, blockIdx.x strides over the outputs; of a warp's kOut weight rows
// the first half are gates.
template <typename T,
          Gate kGate,
          Act kAct,
          Rounding kRounding,
          int kM,
          int kOut,
          int kUnroll,
          int kWarps,
          int kSplit,
          int kVec>
__global__ void __launch_bounds__(kWarps * 32, kResidentWarps<kM> / kWarps)
    gated_rows(const GatedRowsArgs<T> args) {
  static_assert(kOut % 2 == 0, "each output takes a gate and an up row");
  using Shape = MatvecShape<kM, kOut, kUnroll, kWarps, kSplit, kVec>;
  constexpr int kPairs = kOut / 2;
  __shared__ float partial[Shape::kPartials];
  T* x = dynamic_shared<T>();
  const int n = args.n, k = args.k;
  const int first = blockIdx.y * kM;
  const int rows = min(args.rows - first, kM);

  auto row = [&](int slot, int o) {
    const T* w = o < kPairs ? args.w_gate : args.w_up;
    return w + static_cast<i64>(min(slot * kPairs + o % kPairs, n - 1)) * k;
  };
  auto fill = [&] {
    stage_x<Shape::kThreads, kM, kVec, kRounding>(x, args.x + static_cast<i64>(first) * k, rows, k,
                                                  args.norm_weight, args.eps, partial);
  };
  auto finish = [&](int slot, int lane, MatvecSums<Shape> sums) {
    for (int i = lane; i < kPairs * kM; i += 32) {
      const int m = i / kPairs, o = i % kPairs;
      const int column = slot * kPairs + o;
      if (m >= rows || column >= n) continue;
      args.y[static_cast<i64>(first + m) * n + column] = gated_epilogue<kGate, kAct>(
          sums(o, m), sums(o + kPairs, m), args.b_gate, args.b_up, column, args.limit, args.alpha);
    }
  };
  matvec<Shape>((n + kPairs - 1) / kPairs, k, x, partial, row, fill, finish);
}

template <typename T>
struct GatedTilesArgs {
  const T* x;       // [rows, k]
  const T* w_gate;  // [n, k]
  const T* w_up;    // [n, k]
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
    gated_tiles(const GatedTilesArgs<T> args) {
  using Shape = TileShape<T, kBlockM, kBlockN, kBlockK, kWarpsM, kWarpsN, kStages, kVec>;
  constexpr int kOutputs = kBlockN / 2;
  const int rows = args.rows, n = args.n, k = args.k;
  const TileIndex tile =
      tile_index(blockIdx.x, (rows + kBlockM - 1) / kBlockM, (n + kOutputs - 1) / kOutputs);
  const int first_row = tile.m * kBlockM, first_column = tile.n * kOutputs;

  // Rows past the last repeat it and are not stored.
  TileSums<Shape> sums;
  multiply_tile(
      sums, dynamic_shared<T>(), k,
      [&](int r) { return args.x + static_cast<i64>(min(first_row + r, rows - 1)) * k; },
      [&](int r) {
        const T* w = Shape::is_up(r) ? args.w_up : args.w_gate;
        return w + static_cast<i64>(min(first_column + Shape::gated_column(r), n - 1)) * k;
      });

  sums.visit_gated(
      [&](int r, int c, const float (&gates)[Shape::kWide], const float (&ups)[Shape::kWide]) {
        store_gated<kGate, kAct>(args, first_row + r, first_column + c, gates, ups);
      });
}

}  // namespace cufuse
