// Float and integer operations that have one right answer, element by element.
// instantiate: float_arithmetic
// instantiate: integer_arithmetic
// instantiate: integer_conversions
// needs: 80
#include "device/hash.cuh"
#include "device/order.cuh"

namespace cufuse {

struct FloatArithmeticArgs {
  const float* a;  // [n]
  const float* b;  // [n]
  const float* c;  // [n]
  float* out;      // [n, 4]
  int n;
};

__global__ void float_arithmetic(const FloatArithmeticArgs args) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= args.n) return;
  const float a = args.a[i], b = args.b[i], c = args.c[i];
  float* out = args.out + i * 4;
  out[0] = a + b;
  out[1] = a - b;
  out[2] = a * b;
  out[3] = fmaf(a, b, c);
}

struct IntegerArithmeticArgs {
  const u32* a;  // [n]
  const u32* b;  // [n]
  u64* out;      // [n, 8]
  int n;
};

__global__ void integer_arithmetic(const IntegerArithmeticArgs args) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= args.n) return;
  const u32 a = args.a[i], b = args.b[i];
  const u32 order = order_of(__uint_as_float(a));
  u64* out = args.out + i * 8;
  out[0] = mix64(static_cast<u64>(a) << 32 | b);
  out[1] = hash_word(a, hash_key(a, b, 7));
  out[2] = order;
  out[3] = __float_as_uint(value_of(order));
  out[4] = rank_of(order, static_cast<int>(b >> 1));
  out[5] = __umulhi(a, b);
  out[6] = static_cast<u64>(__popc(a)) << 32 | static_cast<u32>(__clz(static_cast<int>(a)));
  out[7] = static_cast<u32>(__ffs(static_cast<int>(a >> (b & 31))));
}

struct IntegerConversionsArgs {
  const float* x;    // [n]; between -2^31 and 2^31
  const u64* whole;  // [n]
  i64* rounded;      // [n, 3]
  float* wide;       // [n, 4]
  int n;
};

__global__ void integer_conversions(const IntegerConversionsArgs args) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= args.n) return;
  const float x = args.x[i];
  const u64 whole = args.whole[i];
  i64* rounded = args.rounded + i * 3;
  rounded[0] = __float2int_rn(x);
  rounded[1] = __float2ll_rn(x);
  rounded[2] = static_cast<int>(x);
  float* wide = args.wide + i * 4;
  wide[0] = static_cast<float>(whole);
  wide[1] = static_cast<float>(static_cast<i64>(whole));
  wide[2] = static_cast<float>(static_cast<u32>(whole));
  wide[3] = static_cast<float>(static_cast<int>(whole));
}

}  // namespace cufuse
