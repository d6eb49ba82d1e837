// y = act(gate) * up, or the clamped gate of gpt-oss, element by element. Bounded by memory.
// instantiate: glu<bfloat16, Gate::plain, Act::silu, 8>
// instantiate: glu<half, Gate::clamped, Act::none, 1>
// instantiate: glu<float, Gate::plain, Act::gelu_tanh, 4>
#include "device/activation.cuh"
#include "device/elementwise.cuh"

namespace cufuse {

template <typename T>
struct GluArgs {
  const T* gate;  // [size]
  const T* up;    // [size]
  T* y;           // [size]; may be gate or up
  i64 size;
  float limit;  // of the clamped gate, like alpha
  float alpha;
};

template <typename T, Gate kGate, Act kAct, int kVec>
__global__ void __launch_bounds__(256) glu(const GluArgs<T> args) {
  const float limit = args.limit, alpha = args.alpha;
  for_each_pair<kVec>(args.gate, args.up, args.y, 1, args.size, [=](float gate, float up) {
    return gated<kGate, kAct>(gate, up, limit, alpha);
  });
}

}  // namespace cufuse
