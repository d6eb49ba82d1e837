// How a weight [n, k] is packed: panels of 16 rows, one after the other; a panel is its tiles along
// k; a tile is 16 bytes for each lane of a warp. The lane of row g (g + 8 too) and columns 2 t and
// 2 t + 1 (plus 8 too, in 16-bit types) is 4 g + t, as in the A fragment of mma_m16n8k16.
// Two matrices in one, a gate and its up: 8 rows of each make a panel, the gate's first.
#pragma once

#include "device/vec.cuh"

namespace cufuse {

enum class Layout { rows, packed, mxfp4, mixed };  // of weights; mixed: one or the other

template <typename T>
struct Packing {
  static constexpr int kTileRows = 16;
  static constexpr int kGatedRows = 8;  // of the gate and of the up in a panel
  static constexpr int kTileBytes = 512;
  static constexpr int kTileK = 32 / static_cast<int>(sizeof(T));
  static constexpr int kTileElements = kTileRows * kTileK;
  static constexpr int kPairs = kPer16<T> / 2;  // neighbours in a row, that a lane has of a tile

  // k is padded to two tiles, so that a lane may take 32 bytes at a time.
  CUFUSE_DEVICE static constexpr int tiles(int k) { return ((k - 1) / (2 * kTileK) + 1) * 2; }
  CUFUSE_DEVICE static constexpr i64 panel_bytes(int k) {
    return static_cast<i64>(tiles(k)) * kTileBytes;
  }
  CUFUSE_DEVICE static constexpr i64 panel_elements(int k) {
    return static_cast<i64>(tiles(k)) * kTileElements;
  }
  CUFUSE_DEVICE static constexpr int panels(int n, bool gated = false) {
    return (n - 1) / (gated ? kGatedRows : kTileRows) + 1;
  }

  // Where row [0, 16) and column [0, k) of a panel are, counted from its first element.
  CUFUSE_DEVICE static constexpr i64 index(int row, int column) {
    const int lane = row % 8 * 4 + column % 8 / 2;
    const int pair = column % kTileK / 8 * 2 + row / 8;
    return static_cast<i64>(column / kTileK) * kTileElements + lane * kPer16<T> + pair * 2 +
           column % 2;
  }

  // The way back: row and first column, in a tile, of a lane's pair [0, kPairs).
  CUFUSE_DEVICE static constexpr int pair_row(int lane, int pair) {
    return lane / 4 + pair % 2 * 8;
  }
  CUFUSE_DEVICE static constexpr int pair_column(int lane, int pair) {
    return lane % 4 * 2 + pair / 2 * 8;
  }
};

}  // namespace cufuse
