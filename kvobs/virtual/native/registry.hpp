// What there is once per process: the devices, the settings that torch parsed, who listens, and the copies made.
#pragma once

#include <c10/core/AllocatorConfig.h>
#include <c10/core/Device.h>
#include <pthread.h>

#include <atomic>
#include <memory>

#include "device.hpp"

namespace kvobs::vgpu {

constexpr int MOST_DEVICES = 16;
constexpr int64_t DEFAULT_STREAM = 0;
constexpr int64_t STREAMS = 32;  // of a device's pool, handed out in turn, as torch's CUDA streams are

using OomObserver = void (*)(int device, uint64_t requested, uint64_t allowed, uint64_t free);

struct Copies {
    std::atomic<uint64_t> count{0}, bytes{0};
};

struct Registry {
    std::vector<std::unique_ptr<VirtualDevice>> devices;
    std::vector<uint64_t> bounds;  // of latency buckets, ns
    std::atomic<OomObserver> observer{nullptr};
    std::atomic<uint64_t> settings_version{1};
    std::array<uint64_t, MOST_DEVICES> seen_version{};
    std::array<double, MOST_DEVICES> fraction;
    std::array<std::array<Copies, MOST_DEVICES + 1>, MOST_DEVICES + 1> copies;  // 0 is the host
    std::atomic<int64_t> next_stream{0};

    Registry() { fraction.fill(-1.0); }

    VirtualDevice &at(int index) {
        TORCH_CHECK(index >= 0 && index < static_cast<int>(devices.size()), "There is no device vgpu:", index, "; ",
                    devices.size(), " are set up.");
        return *devices[static_cast<size_t>(index)];
    }

    VirtualDevice *holding(const void *data) {
        for (const auto &device : devices)
            if (device->space().holds(reinterpret_cast<uint64_t>(data))) return device.get();
        return nullptr;
    }
};

inline Registry &registry() {
    static Registry *const only = new Registry;  // never destroyed: tensors may outlive static destructors
    return *only;
}

// What a thread works with.
struct Current {
    int device = 0;
    std::array<int64_t, MOST_DEVICES> stream{};
    std::array<int64_t, MOST_DEVICES> pool{};
};
inline thread_local Current current;

inline Settings parsed_settings(double fraction) {
    using Config = c10::CachingAllocator::AcceleratorAllocatorConfig;
    Settings found{};
    found.max_split_size = Config::max_split_size();
    found.max_non_split_rounding = Config::max_non_split_rounding_size();
    found.large_segment_size = Config::large_segment_size();
    found.garbage_collection_threshold = Config::garbage_collection_threshold();
    found.memory_fraction = fraction;
    found.expandable_segments = Config::use_expandable_segments();
    const std::vector<size_t> &divisions = Config::roundup_power2_divisions();
    for (size_t i = 0; i < KVOBS_INTERVALS; ++i)
        found.roundup_power2_divisions[i] = i < divisions.size() ? divisions[i] : 0;
    return found;
}

// Under the device's lock: take over settings that were changed since.
inline void refresh(VirtualDevice &device) {
    Registry &all = registry();
    const uint64_t version = all.settings_version.load(std::memory_order_acquire);
    uint64_t &seen = all.seen_version[static_cast<size_t>(device.index)];
    if (seen == version) return;
    seen = version;
    device.core().set(parsed_settings(all.fraction[static_cast<size_t>(device.index)]));
}

class Locked {
public:
    explicit Locked(VirtualDevice &device) : guard_(device.mutex) { refresh(device); }

private:
    std::lock_guard<std::mutex> guard_;
};

inline void lock_all() {
    for (const auto &device : registry().devices) device->mutex.lock();
}
inline void unlock_all() {
    for (const auto &device : registry().devices) device->mutex.unlock();
}

// torch has one place for a back end's parser of settings; whoever was there is still called. Options of CUDA's
// allocator stay allowed: kvobs/virtual reads the fraction, and the others do nothing here.
inline void follow_settings() {
    using Config = c10::CachingAllocator::AcceleratorAllocatorConfig;
    std::unordered_set<std::string> options;
    for (const char *option : {"backend", "graph_capture_record_stream_reuse", "per_process_memory_fraction",
                               "pinned_num_register_threads", "pinned_use_cuda_host_register",
                               "pinned_use_hip_host_register", "release_lock_on_cudamalloc",
                               "release_lock_on_hipmalloc", "throw_on_cudamalloc_oom"})
        if (!Config::getKeys().count(option)) options.insert(option);
    auto before = Config::getConfigParserHook();
    Config::registerDeviceConfigParserHook(
        [before](const std::string &text) {
            if (before) before(text);
            registry().settings_version.fetch_add(1, std::memory_order_release);
        },
        options);
}

}  // namespace kvobs::vgpu
