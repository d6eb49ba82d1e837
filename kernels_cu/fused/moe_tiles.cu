// y = sum over a token's experts of weight * (down h + b), h = gated(gate x, up x), for many
// tokens:
//   moe_sort           slots (token * k + j) in the order of their experts, and tiles of at most
//                      kBlockM slots of one expert; one CTA, no atomics
//   moe_gate_up_tiles  h of each slot: gathered rows of x times gate and up rows
//   moe_scale          float16 only: h is a float32 there, which a row's power of two brings down
//   moe_down_tiles     the experts' outputs in float32, back in the order of slots
// and unfused/combine.cu adds them up. Bounded by tensor cores, or by reading the experts' weights.
// instantiate: moe_sort
// instantiate: moe_gate_up_tiles<bfloat16, Gate::plain, Act::silu, 128, 128, 64, 2, 4, 3, 8>
// instantiate: moe_gate_up_tiles<half, Gate::clamped, Act::none, 16, 32, 64, 1, 2, 8, 1>
// instantiate: moe_gate_up_tiles<float, Gate::plain, Act::gelu, 64, 64, 16, 2, 2, 2, 4>
// instantiate: moe_scale
// instantiate: moe_down_tiles<bfloat16, 128, 128, 64, 2, 4, 3, 8>
// instantiate: moe_down_tiles<half, 16, 32, 64, 1, 2, 8, 8>
// instantiate: moe_down_tiles<float, 64, 64, 16, 2, 2, 2, 1>
#include "device/activation.cuh"
#include "device/reduce.cuh"
#include "device/tile_matmul.cuh"

namespace cufuse {

struct MoeSortArgs {
  const int* ids;    // [slots]; a slot whose id is no expert is left out
  int* sorted;       // [slots]
  int* tile_expert;  // [tiles]; -1 for tiles that are not needed
  int* tile_first;   // [tiles]; place in `sorted`
  int* tile_rows;    // [tiles]
  int slots;
  int n_experts;
  int block_m;
  int tiles;
};

// f(place, slot, match) for every slot, 32 at a time: `place` counts the matching slots before.
template <typename F>
CUFUSE_DEVICE int for_slots_of(int expert, const int* ids, int slots, F f) {
  const int lane = threadIdx.x % 32;
  int found = 0;
#pragma unroll 4
  for (int first = 0; first < slots; first += 32) {
    const int slot = first + lane;
    const bool match = slot < slots && ids[slot] == expert;
    const u32 matches = __ballot_sync(kFullMask, match);
    if (match) f(found + __popc(matches & ((1u << lane) - 1)), slot);
    found += __popc(matches);
  }
  return found;
}

// The sum of `v` over this lane and those before it.
CUFUSE_DEVICE int warp_scan(int v) {
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int below = __shfl_up_sync(kFullMask, v, offset);
    if (static_cast<int>(threadIdx.x % 32) >= offset) v += below;
  }
  return v;
}

__global__ void __launch_bounds__(1024) moe_sort(const MoeSortArgs args) {
  const int n_experts = args.n_experts, block_m = args.block_m;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  int* counts = dynamic_shared<int>();         // [n_experts]
  int* slot_starts = counts + n_experts;       // [n_experts]
  int* tile_starts = slot_starts + n_experts;  // [n_experts + 1]

  for (int expert = warp; expert < n_experts; expert += warps) {
    const int count = for_slots_of(expert, args.ids, args.slots, [](int, int) {});
    if (lane == 0) counts[expert] = count;
  }
  __syncthreads();
  if (warp == 0) {
    int slots = 0, tiles = 0;
    for (int first = 0; first < n_experts; first += 32) {
      const int count = first + lane < n_experts ? counts[first + lane] : 0;
      const int needed = (count + block_m - 1) / block_m;
      const int slots_to_here = warp_scan(count), tiles_to_here = warp_scan(needed);
      if (first + lane < n_experts) {
        slot_starts[first + lane] = slots + slots_to_here - count;
        tile_starts[first + lane] = tiles + tiles_to_here - needed;
      }
      slots += __shfl_sync(kFullMask, slots_to_here, 31);
      tiles += __shfl_sync(kFullMask, tiles_to_here, 31);
    }
    if (lane == 0) tile_starts[n_experts] = tiles;
  }
  __syncthreads();
  for (int expert = warp; expert < n_experts; expert += warps) {
    const int count = counts[expert], start = slot_starts[expert];
    if (count == 0) continue;
    for_slots_of(expert, args.ids, args.slots,
                 [&](int place, int slot) { args.sorted[start + place] = slot; });
    for (int t = lane; t * block_m < count; t += 32) {
      const int tile = tile_starts[expert] + t;
      args.tile_expert[tile] = expert;
      args.tile_first[tile] = start + t * block_m;
      args.tile_rows[tile] = min(count - t * block_m, block_m);
    }
  }
  for (int t = tile_starts[n_experts] + threadIdx.x; t < args.tiles; t += blockDim.x) {
    args.tile_expert[t] = -1;
  }
}

// What h is kept in: the product of gate and up may pass float16's 65504.
template <typename T>
struct HiddenOf {
  using Type = T;
};
template <>
struct HiddenOf<half> {
  using Type = float;
};

template <typename T>
struct MoeGateUpTilesArgs {
  const T* x;              // [tokens, dim]
  const T* w_gate;         // [n_experts, hidden_dim, dim]
  const T* w_up;           // [n_experts, hidden_dim, dim]
  const T* b_gate;         // [n_experts, hidden_dim]; may be null
  const T* b_up;           // [n_experts, hidden_dim]; may be null
  const int* sorted;       // [slots]
  const int* tile_expert;  // [tiles]
  const int* tile_first;   // [tiles]
  const int* tile_rows;    // [tiles]
  void* hidden;            // HiddenOf<T> [slots, hidden_dim], in the order of `sorted`
  int tiles;
  int k;
  int dim;
  int hidden_dim;
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
__global__ void __launch_bounds__(kWarpsM * kWarpsN * 32)
    moe_gate_up_tiles(const MoeGateUpTilesArgs<T> args) {
  using THidden = typename HiddenOf<T>::Type;
  using Shape = TileShape<T, kBlockM, kBlockN, kBlockK, kWarpsM, kWarpsN, kStages, kVec>;
  constexpr int kColumns = kBlockN / 2;
  const int dim = args.dim, n = args.hidden_dim;
  const TileIndex tile = tile_index(blockIdx.x, args.tiles, (n + kColumns - 1) / kColumns);
  const int expert = args.tile_expert[tile.m];
  if (expert < 0) return;
  const int first = args.tile_first[tile.m], rows = args.tile_rows[tile.m];
  const int first_column = tile.n * kColumns;
  const i64 first_weight = static_cast<i64>(expert) * n;  // of the expert's rows

  // Rows past the last repeat it and are not stored.
  TileSums<Shape> sums;
  multiply_tile(
      sums, dynamic_shared<T>(), dim,
      [&](int r) {
        const int token = args.sorted[first + min(r, rows - 1)] / args.k;
        return args.x + static_cast<i64>(token) * dim;
      },
      [&](int r) {
        const i64 row = first_weight + min(first_column + Shape::gated_column(r), n - 1);
        return (Shape::is_up(r) ? args.w_up : args.w_gate) + row * dim;
      });

  sums.visit_gated(
      [&](int r, int c, const float (&gates)[Shape::kWide], const float (&ups)[Shape::kWide]) {
        const int column = first_column + c;
        if (r >= rows || column >= n) return;
        THidden result[Shape::kWide];
#pragma unroll
        for (int j = 0; j < Shape::kWide; ++j) {
          if (column + j >= n) break;
          float gate = gates[j], up = ups[j];
          if (args.b_gate) gate += to_float(args.b_gate[first_weight + column + j]);
          if (args.b_up) up += to_float(args.b_up[first_weight + column + j]);
          result[j] = from_float<THidden>(gated<kGate, kAct>(gate, up, args.limit, args.alpha));
        }
        store_columns(static_cast<THidden*>(args.hidden) + static_cast<i64>(first + r) * n + column,
                      result, column, n);
      });
}

struct MoeScaleArgs {
  const float* hidden;  // [slots, n]
  half* scaled;         // [slots, n]
  float* factor;        // [slots]; hidden = scaled * factor
  int n;
};

// The factor is 1 where a row's values are all within half of what float16 holds.
__global__ void __launch_bounds__(256) moe_scale(const MoeScaleArgs args) {
  constexpr int kThreads = 256;
  __shared__ float partial[kThreads / 32];
  const i64 row = static_cast<i64>(blockIdx.x) * args.n;
  float largest = 0.0f;
  for (int i = threadIdx.x; i < args.n; i += kThreads) {
    largest = fmaxf(largest, fabsf(args.hidden[row + i]));
  }
  largest = block_max<kThreads>(largest, partial);
  const int exponent = static_cast<int>(__float_as_uint(largest) >> 23) - 127;
  const int down = max(exponent - 14, 0);
  const float scale = __uint_as_float(static_cast<u32>(127 - down) << 23);
  for (int i = threadIdx.x; i < args.n; i += kThreads) {
    args.scaled[row + i] = from_float<half>(args.hidden[row + i] * scale);
  }
  if (threadIdx.x == 0) {
    args.factor[blockIdx.x] = __uint_as_float(static_cast<u32>(127 + down) << 23);
  }
}

template <typename T>
struct MoeDownTilesArgs {
  const T* hidden;         // [slots, hidden_dim], in the order of `sorted`
  const float* factor;     // [slots], likewise; null for ones
  const T* w;              // [n_experts, dim, hidden_dim]
  const T* b;              // [n_experts, dim]; may be null
  const int* sorted;       // [slots]
  const int* tile_expert;  // [tiles]
  const int* tile_first;   // [tiles]
  const int* tile_rows;    // [tiles]
  float* y;                // [slots, dim]
  int tiles;
  int dim;
  int hidden_dim;
};

template <typename T,
          int kBlockM,
          int kBlockN,
          int kBlockK,
          int kWarpsM,
          int kWarpsN,
          int kStages,
          int kVec>
__global__ void __launch_bounds__(kWarpsM * kWarpsN * 32)
    moe_down_tiles(const MoeDownTilesArgs<T> args) {
  using Shape = TileShape<T, kBlockM, kBlockN, kBlockK, kWarpsM, kWarpsN, kStages, kVec>;
  const int k = args.hidden_dim, n = args.dim;
  const TileIndex tile = tile_index(blockIdx.x, args.tiles, (n + kBlockN - 1) / kBlockN);
  const int expert = args.tile_expert[tile.m];
  if (expert < 0) return;
  const int first = args.tile_first[tile.m], rows = args.tile_rows[tile.m];
  const int first_column = tile.n * kBlockN;
  const i64 first_weight = static_cast<i64>(expert) * n;

  TileSums<Shape> sums;
  multiply_tile(
      sums, dynamic_shared<T>(), k,
      [&](int r) { return args.hidden + static_cast<i64>(first + min(r, rows - 1)) * k; },
      [&](int r) { return args.w + (first_weight + min(first_column + r, n - 1)) * k; });

  sums.visit([&](int r, int c, const float (&values)[Shape::kWide]) {
    const int column = first_column + c;
    if (r >= rows || column >= n) return;
    const float factor = args.factor ? args.factor[first + r] : 1.0f;
    float result[Shape::kWide];
#pragma unroll
    for (int j = 0; j < Shape::kWide; ++j) {
      if (column + j >= n) break;
      const float bias = args.b ? to_float(args.b[first_weight + column + j]) : 0.0f;
      result[j] = fmaf(values[j], factor, bias);
    }
    const i64 slot = args.sorted[first + r];
    store_columns(args.y + slot * n + column, result, column, n);
  });
}

}  // namespace cufuse
