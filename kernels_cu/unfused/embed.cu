// y[t] = table[ids[t]] * scale + position_table[position of t] + token_type, summed in float32 and
// rounded once. A thread makes one group of a row. Bounded by memory: the rows asked for and y.
// instantiate: embed<bfloat16, 8>
// instantiate: embed<half, 1>
// instantiate: embed<float, 4>
#include "device/vec.cuh"

namespace cufuse {

template <typename T>
struct EmbedArgs {
  const int* ids;           // [batch, q_len]
  const T* table;           // [vocab, dim]
  const int* start;         // [batch]; null for zeros
  const T* position_table;  // [max_pos, dim]; null for none
  const T* token_type;      // [dim]; null for none
  T* y;                     // [batch, q_len, dim]; a row is NaN when its id or position is no row
  int q_len;
  int dim;
  int vocab;
  int max_pos;
  int ctas_per_row;
  float scale;
};

template <typename T, int kVec>
__global__ void __launch_bounds__(128) embed(const EmbedArgs<T> args) {
  constexpr int kThreads = 128;
  const int row = static_cast<int>(blockIdx.x / static_cast<u32>(args.ctas_per_row));
  const int part = static_cast<int>(blockIdx.x % static_cast<u32>(args.ctas_per_row));
  const int i = (part * kThreads + static_cast<int>(threadIdx.x)) * kVec;
  if (i >= args.dim) return;
  const int id = args.ids[row];
  bool known = 0 <= id && id < args.vocab;
  i64 position = 0;
  if (args.position_table) {
    position = row % args.q_len + (args.start ? static_cast<i64>(args.start[row / args.q_len]) : 0);
    known = known && 0 <= position && position < args.max_pos;
  }

  float sum[kVec];
#pragma unroll
  for (int j = 0; j < kVec; ++j) sum[j] = __uint_as_float(0x7fffffffu);  // NaN
  if (known) {
    const auto word = load_vec<kVec>(args.table + static_cast<i64>(id) * args.dim + i);
#pragma unroll
    for (int j = 0; j < kVec; ++j) sum[j] = to_float(word.v[j]) * args.scale;
    if (args.position_table) {
      const auto place = load_vec<kVec>(args.position_table + position * args.dim + i);
#pragma unroll
      for (int j = 0; j < kVec; ++j) sum[j] += to_float(place.v[j]);
    }
    if (args.token_type) {
      const auto type = load_vec<kVec>(args.token_type + i);
#pragma unroll
      for (int j = 0; j < kVec; ++j) sum[j] += to_float(type.v[j]);
    }
  }
  Vec<T, kVec> result;
#pragma unroll
  for (int j = 0; j < kVec; ++j) result.v[j] = from_float<T>(sum[j]);
  store_vec<kVec>(args.y + static_cast<i64>(row) * args.dim + i, result);
}

}  // namespace cufuse
