// What a thread of a tile of many rows does with its sums: kWide neighbouring columns of one row.
#pragma once

#include "device/epilogue.cuh"
#include "device/tile_matmul.cuh"

namespace cufuse {

// y = act(sum + b) + residual, y and residual [rows, n]; null pointers as in linear_epilogue.
template <Act kAct, int kWide, typename T, template <typename> class Args>
CUFUSE_DEVICE void store_linear(const Args<T>& args,
                                int row,
                                int column,
                                const float (&sums)[kWide]) {
  if (row >= args.rows || column >= args.n) return;
  const i64 at = static_cast<i64>(row) * args.n + column;
  T result[kWide];
#pragma unroll
  for (int j = 0; j < kWide; ++j) {
    if (column + j < args.n) {
      result[j] = linear_epilogue<kAct>(sums[j], args.b, column + j, args.residual, at + j);
    }
  }
  store_columns(args.y + at, result, column, args.n);
}

// The same of the sums that a thread has of 64 columns, four of each eight as wgmma leaves them:
// columns `column` + 8 j and the next, in `row` and `row` + 8; their bias is word 4 j of `bias`.
// Returned as words of two values; n and `column` are even, and what lies outside of y is of no
// account.
template <Act kAct, typename T, template <typename> class Args>
CUFUSE_DEVICE void finish_columns(u32 (&results)[8][2],
                                  const Args<T>& args,
                                  int row,
                                  int column,
                                  const u32* bias,
                                  const float* sums) {
  float c[32];
#pragma unroll
  for (int i = 0; i < 32; ++i) c[i] = sums[i];
  if (args.b) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      float first, second;
      unpack_pair(first, second, bias[j * 4], T{});
      c[j * 4] += first;
      c[j * 4 + 1] += second;
      c[j * 4 + 2] += first;
      c[j * 4 + 3] += second;
    }
  }
#pragma unroll
  for (int i = 0; i < 32; ++i) c[i] = activate_for_16_bits<kAct, T>(c[i]);
  if (args.residual) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const T* from = args.residual + static_cast<i64>(row + h * 8) * args.n + column;
      u32 words[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const bool inside = row + h * 8 < args.rows && column + j * 8 < args.n;
        words[j] = inside ? *reinterpret_cast<const u32*>(from + j * 8) : 0;
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        float first, second;
        unpack_pair(first, second, words[j], T{});
        c[j * 4 + h * 2] += first;
        c[j * 4 + h * 2 + 1] += second;
      }
    }
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    results[j][0] = pair_from_floats<T>(c[j * 4], c[j * 4 + 1]);
    results[j][1] = pair_from_floats<T>(c[j * 4 + 2], c[j * 4 + 3]);
  }
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
