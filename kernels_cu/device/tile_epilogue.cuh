// What a thread of a tile of many rows does with its sums: kWide neighbouring columns of one row.
#pragma once

#include "device/epilogue.cuh"
#include "device/tile_matmul.cuh"

namespace cufuse {

// y = act(sum + b) + residual, y, residual and pre, which is sum + b, [rows, n]. Null pointers
// leave b, residual and pre out.
template <Act kAct, int kWide, typename T, template <typename> class Args>
CUFUSE_DEVICE void store_linear(const Args<T>& args,
                                int row,
                                int column,
                                const float (&sums)[kWide]) {
  if (row >= args.rows || column >= args.n) return;
  const i64 at = static_cast<i64>(row) * args.n + column;
  float biased[kWide];
  T result[kWide];
#pragma unroll
  for (int j = 0; j < kWide; ++j) {
    biased[j] = column + j < args.n ? add_bias(sums[j], args.b, column + j) : 0.0f;
    result[j] = from_float<T>(biased[j]);
  }
  if (args.pre) store_columns(args.pre + at, result, column, args.n);
#pragma unroll
  for (int j = 0; j < kWide; ++j) {
    if (column + j < args.n) result[j] = linear_epilogue<kAct>(biased[j], args.residual, at + j);
  }
  store_columns(args.y + at, result, column, args.n);
}

// y [rows, n] from gates and ups as gated_epilogue has it.
template <Gate kGate, Act kAct, int kWide, typename T, template <typename> class Args>
CUFUSE_DEVICE void store_gated(const Args<T>& args,
                               int row,
                               int column,
                               const float (&gates)[kWide],
                               const float (&ups)[kWide]) {
  if (row >= args.rows || column >= args.n) return;
  T result[kWide];
#pragma unroll
  for (int j = 0; j < kWide; ++j) {
    if (column + j < args.n) {
      result[j] = gated_epilogue<kGate, kAct>(gates[j], ups[j], args.b_gate, args.b_up, column + j,
                                              args.limit, args.alpha);
    }
  }
  store_columns(args.y + static_cast<i64>(row) * args.n + column, result, column, args.n);
}

// y [rows, n], rounded and nothing else.
template <int kWide, typename T>
CUFUSE_DEVICE void store_product(
    T* y, int rows, int n, int row, int column, const float (&sums)[kWide]) {
  if (row >= rows || column >= n) return;
  T result[kWide];
#pragma unroll
  for (int j = 0; j < kWide; ++j) result[j] = from_float<T>(sums[j]);
  store_columns(y + static_cast<i64>(row) * n + column, result, column, n);
}

}  // namespace cufuse
