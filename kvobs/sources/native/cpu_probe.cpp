// A counter around torch's CPU allocator: it hands every request on to the allocator that was there before, counts, and
// times one of some. Exceptions of the allocator beneath pass through; nothing here throws, locks or calls Python.
//
// A free is seen without a node of its own: where the block is the plain one of torch's default allocator, the deleter
// that torch keeps beside it is exchanged for one that counts and then calls the same. The block's size at both ends is
// what malloc says it is, because a deleter is not told what was asked for.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <dlfcn.h>
#include <malloc.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace {

constexpr int kStripes = 16;  // threads share them in turn, so that most have a cache line of their own
constexpr int kMaxBounds = 32;
constexpr c10::DeviceType kCpu = c10::DeviceType::CPU;

using Counter = std::atomic<uint64_t>;

struct alignas(64) Stripe {
  Counter allocations{0}, allocated_bytes{0}, untracked{0};
  alignas(64) Counter frees{0}, freed_bytes{0};
  alignas(64) Counter sum_ns{0}, buckets[kMaxBounds + 1]{};
};

Stripe stripes[kStripes];
std::atomic<unsigned> threads{0};
std::atomic<uint32_t> every{1};
std::atomic<bool> counting{false}, sized{false}, standing{false};
int64_t bounds_ns[kMaxBounds];
int bound_count = 0;
// The deleter of torch's default CPU allocator, the only one whose blocks are known to be malloc's.
c10::DeleterFnPtr known = nullptr;

struct Thread {
  Stripe* stripe;
  uint32_t until_timed;
  uint64_t random;
  bool passed;  // a request was handed on uncounted
};
thread_local Thread this_thread;  // zeros until the thread's first request

int64_t now_ns() {
  timespec at;
  clock_gettime(CLOCK_MONOTONIC, &at);
  return at.tv_sec * int64_t{1000000000} + at.tv_nsec;
}

// Requests come in the same order step after step: a fixed stride would time the same ones for ever.
uint32_t draw(Thread& thread) {
  thread.random ^= thread.random << 13;
  thread.random ^= thread.random >> 7;
  thread.random ^= thread.random << 17;
  return 1 + static_cast<uint32_t>(thread.random % (2 * uint64_t{every.load(std::memory_order_relaxed)} - 1));
}

Stripe& stripe_of(Thread& thread) {
  if (!thread.stripe) {
    const unsigned number = threads.fetch_add(1, std::memory_order_relaxed);
    thread.stripe = &stripes[number % kStripes];
    thread.random = (static_cast<uint64_t>(now_ns()) ^ (uint64_t{number} << 32)) | 1;
    thread.until_timed = draw(thread);
  }
  return *thread.stripe;
}

void count_and_free(void* block) {
  if (block) {
    Stripe& stripe = stripe_of(this_thread);
    if (sized.load(std::memory_order_relaxed)) {
      stripe.freed_bytes.fetch_add(malloc_usable_size(block), std::memory_order_release);
    }
    stripe.frees.fetch_add(1, std::memory_order_release);
  }
  known(block);
}

void count(Stripe& stripe, c10::DataPtr& given) {
  void* block = given.get_context();
  if (!block && !given.get()) {
    return;  // 0 bytes: there is nothing to free either
  }
  if (known && block == given.get() && given.compare_exchange_deleter(known, &count_and_free)) {
    if (sized.load(std::memory_order_relaxed)) {
      stripe.allocated_bytes.fetch_add(malloc_usable_size(block), std::memory_order_relaxed);
    }
    stripe.allocations.fetch_add(1, std::memory_order_relaxed);
  } else {
    stripe.untracked.fetch_add(1, std::memory_order_relaxed);
  }
}

void note_latency(Stripe& stripe, int64_t latency) {
  const int64_t* bucket = std::lower_bound(bounds_ns, bounds_ns + bound_count, latency);
  stripe.buckets[bucket - bounds_ns].fetch_add(1, std::memory_order_relaxed);
  stripe.sum_ns.fetch_add(static_cast<uint64_t>(latency), std::memory_order_relaxed);
}

class Probe final : public c10::Allocator {
 public:
  std::atomic<c10::Allocator*> beneath{nullptr};

  c10::DataPtr allocate(size_t bytes) override {
    c10::Allocator* allocator = beneath.load(std::memory_order_acquire);
    Thread& thread = this_thread;
    if (!counting.load(std::memory_order_relaxed)) {
      thread.passed = true;
      return allocator->allocate(bytes);
    }
    Stripe& stripe = stripe_of(thread);
    if (--thread.until_timed) {
      c10::DataPtr given = allocator->allocate(bytes);
      count(stripe, given);
      return given;
    }
    thread.until_timed = draw(thread);
    const int64_t began = now_ns();
    c10::DataPtr given = allocator->allocate(bytes);
    note_latency(stripe, now_ns() - began);
    count(stripe, given);
    return given;
  }

  bool is_simple_data_ptr(const c10::DataPtr& given) const override {
    return beneath.load(std::memory_order_acquire)->is_simple_data_ptr(given);
  }

  // What allocate() attaches now.
  c10::DeleterFnPtr raw_deleter() const override {
    const c10::DeleterFnPtr own = beneath.load(std::memory_order_acquire)->raw_deleter();
    return own && own == known && counting.load(std::memory_order_relaxed) ? &count_and_free : own;
  }

  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    beneath.load(std::memory_order_acquire)->copy_data(to, from, bytes);
  }
};

// Never destroyed: storages keep the allocator they came from.
Probe& probe() {
  static Probe* const made = new Probe;
  return *made;
}

// Does glibc's own bookkeeping show a block of the default allocator? One of another malloc may have no usable size.
bool blocks_are_mallocs() {
  struct Info {
    size_t arena, ordblks, smblks, hblks, hblkhd, usmblks, fsmblks, uordblks, fordblks, keepcost;
  };
  const auto mallinfo = reinterpret_cast<Info (*)()>(dlsym(RTLD_DEFAULT, "mallinfo2"));
  if (!mallinfo) {
    return false;
  }
  constexpr size_t kBytes = size_t{64} << 20, kNoise = size_t{4} << 20;
  for (int attempt = 0; attempt < 3; ++attempt) {  // other threads allocate meanwhile
    const Info before = mallinfo();
    size_t grown;
    {
      const c10::DataPtr block = c10::GetDefaultCPUAllocator()->allocate(kBytes);  // never touched
      const Info after = mallinfo();
      grown = after.uordblks + after.hblkhd - before.uordblks - before.hblkhd;
    }
    if (grown + kNoise >= kBytes && grown <= kBytes + kNoise) {
      return true;
    }
  }
  return false;
}

bool reaches_probe(c10::Allocator* allocator) {
  this_thread.passed = false;
  allocator->allocate(1);
  return this_thread.passed;
}

uint64_t sum(Counter Stripe::*counter) {
  uint64_t total = 0;
  for (const Stripe& stripe : stripes) {
    total += (stripe.*counter).load(std::memory_order_acquire);
  }
  return total;
}

}  // namespace

extern "C" {

enum { KVOBS_ON_TOP = 0, KVOBS_BENEATH = 1, KVOBS_AWAY = 2, KVOBS_REFUSED = 3 };

// Where the probe is: torch's CPU allocator, perhaps beneath the one that is, or taken away.
int kvobs_probe_place() {
  return !standing.load() ? KVOBS_AWAY : c10::GetAllocator(kCpu) == &probe() ? KVOBS_ON_TOP : KVOBS_BENEATH;
}

// Count from now on, one of `one_of` timed. One caller at a time; the first call's bounds hold for the process.
int kvobs_probe_install(const int64_t* bounds, int number, uint32_t one_of) {
  if (number < 1 || number > kMaxBounds || one_of < 1) {
    return KVOBS_REFUSED;
  }
  if (!bound_count) {
    std::copy(bounds, bounds + number, bounds_ns);
    bound_count = number;
    known = c10::GetDefaultCPUAllocator()->raw_deleter();
    sized.store(known && blocks_are_mallocs());
  }
  every.store(one_of);
  counting.store(false);
  c10::Allocator* const top = c10::GetAllocator(kCpu);
  // One that hands on to the probe must not be put beneath it: they would call each other for ever.
  if (top != &probe() && !reaches_probe(top)) {
    probe().beneath.store(top, std::memory_order_release);
    c10::SetAllocator(kCpu, &probe());
    if (c10::GetAllocator(kCpu) != &probe()) {
      standing.store(false);
      return KVOBS_REFUSED;  // somebody claimed a higher priority
    }
  }
  standing.store(true);
  counting.store(true);
  return kvobs_probe_place();
}

// Count no new allocations; the frees of those that were counted are counted whenever they come.
void kvobs_probe_pause(int paused) { counting.store(!paused); }

// Put the allocator from before back, unless another one came on top: then the probe stays, and hands everything on.
int kvobs_probe_remove() {
  counting.store(false);
  if (kvobs_probe_place() == KVOBS_ON_TOP) {
    c10::SetAllocator(kCpu, probe().beneath.load());
    standing.store(c10::GetAllocator(kCpu) == &probe());
  }
  return kvobs_probe_place();
}

// Whether sizes are known (else the bytes stay 0).
int kvobs_probe_sized() { return sized.load(); }

// allocations, frees, allocated bytes, freed bytes, untracked, sum of ns, then the buckets (one more than the bounds).
void kvobs_probe_read(uint64_t* out) {
  // Frees first: whatever is seen as freed is then seen as allocated.
  out[1] = sum(&Stripe::frees);
  out[3] = sum(&Stripe::freed_bytes);
  out[0] = sum(&Stripe::allocations);
  out[2] = sum(&Stripe::allocated_bytes);
  out[4] = sum(&Stripe::untracked);
  out[5] = sum(&Stripe::sum_ns);
  for (int bucket = 0; bucket <= bound_count; ++bucket) {
    uint64_t total = 0;
    for (const Stripe& stripe : stripes) {
      total += stripe.buckets[bucket].load(std::memory_order_relaxed);
    }
    out[6 + bucket] = total;
  }
}

}  // extern "C"
