// Pair t of a head becomes (a cos - b sin, b cos + a sin) at the angle of its row's position; what
// is not rotated passes through. A CTA takes one row or a part of it, a thread one or two 16-byte
// groups of a head. Bounded by memory: one read and one write of x.
// instantiate: rope<bfloat16, Pairing::half_split, 8>
// instantiate: rope<half, Pairing::interleaved, 8>
// instantiate: rope<float, Pairing::half_split, 1>
// instantiate: rope<float, Pairing::interleaved, 1>
#include "device/rope.cuh"

namespace cufuse {

template <typename T>
struct RopeArgs {
  const T* x;            // [rows, heads, head_dim]
  const float* cos;      // [max_pos, n_pairs]
  const float* sin;      // [max_pos, n_pairs]
  const int* positions;  // [rows]
  T* y;                  // [rows, heads, head_dim]; may be x
  i64 rows;
  int heads;
  int head_dim;
  int n_pairs;
  int max_pos;
};

template <typename T, Pairing kPairing, int kVec>
__global__ void __launch_bounds__(256) rope(const RopeArgs<T> args) {
  constexpr int kThreads = 256;
  const i64 row = blockIdx.x;
  const Angles angles =
      angles_at(args.cos, args.sin, args.positions[row], args.max_pos, args.n_pairs);
  const i64 base = row * args.heads * args.head_dim;
  const int units = rotate_head_units<kPairing, kVec>(args.n_pairs, args.head_dim);
  const int row_units = args.heads * units;
  for (int i = blockIdx.y * kThreads + threadIdx.x; i < row_units; i += gridDim.y * kThreads) {
    const int head = i / units;
    const T* x = args.x + base + static_cast<i64>(head) * args.head_dim;
    T* y = args.y + (x - args.x);
    rotate_head_unit<kPairing, kVec>(x, y, i - head * units, angles,
                                     [](float v, int) { return v; });
  }
}

}  // namespace cufuse
