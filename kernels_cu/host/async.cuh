// Copies that run beside the threads of a CTA, and the barriers that count them.
//
// A copy lands when a seed says so: at once, at some thread's wait, or as late as it can, whole or
// in pieces and in any order. Copies land from `yield` and from waits.
#ifndef CUFUSE_HOST_ASYNC_CUH
#define CUFUSE_HOST_ASYNC_CUH

namespace cufuse::host {

// A CTA's copies in flight and its named barriers.
class AsyncState {
 public:
  struct Members;

  AsyncState() = default;
  ~AsyncState();
  AsyncState(const AsyncState&) = delete;
  AsyncState& operator=(const AsyncState&) = delete;
  Members& members();

  unsigned in_flight = 0;
  unsigned ended = 0;

 private:
  Members* members_ = nullptr;  // made when first used
};

// True about once in n, by the launch's seed.
bool chance(unsigned n);

// Let copies land: the calling thread's own 16-byte ones, anyone's bulk copies.
void land_some();

// A thread returned from the kernel; the last one answers for copies still in flight.
void thread_ends();

// ---- cp.async: 16 bytes a thread

void copy_async(void* shared, const void* source, unsigned size_bytes);
void copy_async_commit();
void copy_async_wait(int pending);

// ---- mbarrier: a word of shared memory holds arrivals, bytes to come and the phase, as in
// hardware

void mbarrier_init(unsigned long long* barrier, unsigned count);
void mbarrier_arrive(unsigned long long* barrier, unsigned expect_bytes, const char* name);
// The same at the barrier that another CTA of the cluster has in this place.
void mbarrier_arrive_remote(unsigned long long* barrier, unsigned rank);
// Whether the phase with this parity has completed; `for_cluster` takes over what arrivals from
// other CTAs released.
bool mbarrier_test(unsigned long long* barrier,
                   unsigned parity,
                   const char* name,
                   bool for_cluster);
// Wait for it; false after `spins` tries in vain, where 0 never gives up.
bool mbarrier_wait(unsigned long long* barrier,
                   unsigned parity,
                   unsigned long long spins,
                   const char* name,
                   bool for_cluster = false);

// ---- cp.async.bulk

void bulk_load(void* shared, const void* source, unsigned size_bytes, unsigned long long* barrier);
// How bytes that arrive change those that are there.
using Combine = void (*)(void* target, const void* source, unsigned size_bytes);
void bulk_store(void* target, const void* shared, unsigned size_bytes, Combine combine = nullptr);
void bulk_store_commit();
// Until at most `pending` of this thread's newest groups are unfinished; with `only_read`, until
// the others' shared memory was read, though nothing of it need have been written.
void bulk_store_wait(int pending, bool only_read);
void bulk_prefetch(const void* source, unsigned size_bytes);

// ---- cp.async.bulk.tensor

// What stands for the driver's map: an array of up to four dimensions, the innermost first, and a
// box of it (cufuse/tensor_map.py). Dimensions that there are not have size 1.
struct alignas(64) TensorMap {
  void* data;
  unsigned long long sizes[4];         // elements
  unsigned long long pitch_bytes[3];   // from one to the next in dimensions 1, 2 and 3
  unsigned box[4];                     // elements
  unsigned item_bytes, swizzle_bytes;  // 0: no swizzle
  unsigned long long magic, rank, reserved[3];
};
static_assert(sizeof(TensorMap) == 128, "the driver's map has 128 bytes");
constexpr unsigned long long kTensorMagic = 0x70616d5f746e6574;

void tensor_check(const TensorMap& map, const char* name);
// `at`: the box's first element, a coordinate for each of `rank` dimensions.
void tensor_load(
    void* shared, const TensorMap& map, const int* at, unsigned rank, unsigned long long* barrier);
void tensor_store(const TensorMap& map, const int* at, unsigned rank, const void* shared);

// ---- bar.sync, bar.arrive: called by every thread of a whole warp

// An id belongs to the threads that filled it first: others who come show that a count is wrong.
// The hardware allows more; no kernel of ours needs it.
void named_barrier(unsigned id, unsigned count, bool wait, const char* name);

}  // namespace cufuse::host

#endif  // CUFUSE_HOST_ASYNC_CUH
