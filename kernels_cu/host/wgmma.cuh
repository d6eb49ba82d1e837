// A warpgroup's products beside its threads, as wgmma makes them.
//
// Descriptors are read bit by bit as the hardware does. Shared memory is read at some moment
// between the instruction and the wait, accumulators hold NaN until then, and registers have to be
// as the last wgmma_fence found them.
#ifndef CUFUSE_HOST_WGMMA_CUH
#define CUFUSE_HOST_WGMMA_CUH

#include <cstddef>

namespace cufuse::host {

// A CTA's products in flight.
class WgmmaState {
 public:
  struct Members;

  WgmmaState() = default;
  ~WgmmaState();
  WgmmaState(const WgmmaState&) = delete;
  WgmmaState& operator=(const WgmmaState&) = delete;
  Members& members();
  bool used() const { return members_; }

 private:
  Members* members_ = nullptr;  // made when first used
};

// One wgmma as one thread says it: sums [64, n] (+)= a [64, 16] b [16, n].
struct Product {
  float* sums;                  // [n / 2]
  const unsigned* a;            // [4]; null: a lies in shared memory
  unsigned long long a_shared;  // descriptors
  unsigned long long b;
  float (*to_float)(unsigned short bits);
  unsigned short n;
  bool accumulate;
  bool a_along_m, b_along_n;  // what runs fastest: the row, not k
};

void wgmma(const Product& product);
void wgmma_fence();
void wgmma_commit();

struct Named {
  const void* begin;
  std::size_t size_bytes;
};
// Until at most `pending` of the newest groups are in flight. Accumulators of the others must be
// named: a compiler that does not see them here may read them too early.
void wgmma_wait(int pending, const Named* sums, unsigned n_sums);

// Let a product be made, perhaps.
void run_some_products();
// The kernel's code reads or writes memory that is neither shared nor global: registers, perhaps.
void registers_touched(const void* p, unsigned size_bytes, bool is_write);
// A thread returned from the kernel.
void products_end();

// Where the hardware has this byte of dynamic shared memory.
unsigned shared_address(const void* p);

}  // namespace cufuse::host

#endif  // CUFUSE_HOST_WGMMA_CUH
