// y = act(x), element by element. Bounded by memory.
// instantiate: activation<bfloat16, Act::gelu, 8>
// instantiate: activation<half, Act::silu, 1>
// instantiate: activation<float, Act::gelu_tanh, 4>
#include "device/activation.cuh"
#include "device/elementwise.cuh"

namespace cufuse {

template <typename T>
struct ActivationArgs {
  const T* x;  // [size]
  T* y;        // [size]; may be x
  i64 size;
};

template <typename T, Act kAct, int kVec>
__global__ void __launch_bounds__(256) activation(const ActivationArgs<T> args) {
  for_each<kVec>(args.x, args.y, args.size, [](float v) { return activate<kAct>(v); });
}

}  // namespace cufuse
