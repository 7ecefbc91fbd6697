// The CPU allocation probe on a clock that only moves when told, and allocators to put beneath and over it.

#include <time.h>

#include <cstdint>
#include <cstdlib>

namespace {
int64_t fake_now = 1;
int fake_clock_gettime(clockid_t, timespec* at) {
  at->tv_sec = fake_now / 1000000000;
  at->tv_nsec = fake_now % 1000000000;
  return 0;
}
}  // namespace

#define clock_gettime fake_clock_gettime
#include "cpu_probe.cpp"
#undef clock_gettime

namespace {

// Hands on to the allocator of when it was installed. Each request moves the clock; with `own`, memory is its own node's.
class Other final : public c10::Allocator {
 public:
  c10::Allocator* next = nullptr;
  int64_t takes_ns = 0;
  bool own = false;

  c10::DataPtr allocate(size_t bytes) override {
    fake_now += takes_ns;
    if (!own) {
      return next->allocate(bytes);
    }
    void* const block = std::malloc(bytes + 64);
    return {static_cast<char*>(block) + 64, block, &std::free, c10::Device(kCpu)};
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
};
Other* other() {
  static Other* const made = new Other;
  return made;
}

}  // namespace

extern "C" {
uint64_t test_allocator() { return reinterpret_cast<uint64_t>(c10::GetAllocator(kCpu)); }
void test_takes(int64_t nanoseconds) { other()->takes_ns = nanoseconds; }
void test_own(int own) { other()->own = own; }
void test_put_other() {
  other()->next = c10::GetAllocator(kCpu);
  c10::SetAllocator(kCpu, other());
}
void test_take_other() { c10::SetAllocator(kCpu, other()->next); }
}
