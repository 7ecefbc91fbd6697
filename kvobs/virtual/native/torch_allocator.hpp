// The allocator that torch sees: c10::DeviceAllocator over the virtual devices.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/StringUtil.h>

#include <cstdio>
#include <cstring>

#include "registry.hpp"

namespace kvobs::vgpu {

constexpr c10::DeviceType TYPE = c10::DeviceType::PrivateUse1;

inline Context gather(VirtualDevice &device, Level least) {
    // Read without the lock: a history that starts meanwhile misses at most the stacks of events under way.
    const History &history = device.history();
    if (!history.recording() || history.level() < least) return nullptr;
    return gather_stack();
}

inline std::string size_text(uint64_t bytes) {
    char text[64];
    if (bytes < (1 << 10)) std::snprintf(text, sizeof text, "%llu bytes", static_cast<unsigned long long>(bytes));
    else if (bytes < (1 << 20)) std::snprintf(text, sizeof text, "%.2f KiB", static_cast<double>(bytes) / (1 << 10));
    else if (bytes < (1 << 30)) std::snprintf(text, sizeof text, "%.2f MiB", static_cast<double>(bytes) / (1 << 20));
    else std::snprintf(text, sizeof text, "%.2f GiB", static_cast<double>(bytes) / (1 << 30));
    return text;
}

[[noreturn]] inline void out_of_memory(VirtualDevice &device, uint64_t size, const Grant &grant) {
    TORCH_CHECK(!grant.host_failed, "The host could not map ", size_text(size), " for the virtual device vgpu:",
                device.index, ": it has no memory or no mappings left (vm.max_map_count).");
    if (OomObserver observer = registry().observer.load())
        observer(device.index, size, grant.allowed_bytes, grant.free_bytes);
    TORCH_CHECK_WITH(
        OutOfMemoryError, false, "vgpu out of memory. Tried to allocate ", size_text(size), ". Virtual device ",
        device.index, " has ", size_text(device.space().capacity()), ", of which ",
        size_text(grant.free_bytes), " are free and this process may use ", size_text(grant.allowed_bytes), ". ",
        size_text(grant.allocated), " are allocated, and ", size_text(grant.reserved - grant.allocated),
        " are reserved by the caching allocator but not allocated. `kvobs explain` tells from a snapshot "
        "(torch.vgpu.memory._dump_snapshot) why.");
    std::abort();  // not reached
}

struct TorchAllocator final : c10::DeviceAllocator {
    static void release(void *data) {
        VirtualDevice *device = registry().holding(data);
        if (!device) return;
        Context context = gather(*device, ALL);
        Locked lock(*device);
        device->free(reinterpret_cast<uint64_t>(data), std::move(context));
    }

    c10::DataPtr allocate(size_t size) override {
        const int index = current.device;
        const c10::Device where(TYPE, static_cast<c10::DeviceIndex>(index));
        VirtualDevice &device = registry().at(index);
        if (size == 0) return {nullptr, nullptr, &release, where};
        TORCH_CHECK_WITH(OutOfMemoryError, size < SIZE_LIMIT, "vgpu out of memory. Tried to allocate more than 1 EiB.");
        const auto began = std::chrono::steady_clock::now();  // before the lock, which the caller waits for
        Context context = gather(device, STATE);
        Grant grant;
        {
            Locked lock(device);
            const size_t at = static_cast<size_t>(index);
            grant = device.alloc(size, current.stream[at], current.pool[at], std::move(context), began,
                                 registry().bounds);
        }
        if (!grant.address) out_of_memory(device, size, grant);
        void *data = reinterpret_cast<void *>(grant.address);
        return {data, data, &release, where};
    }

    c10::DeleterFnPtr raw_deleter() const override { return &release; }

    void copy_data(void *to, const void *from, std::size_t size) const override { std::memcpy(to, from, size); }

    bool initialized() override { return !registry().devices.empty(); }

    void emptyCache(c10::MempoolId_t = {0, 0}) override {
        for (const auto &device : registry().devices) {
            Context context = gather(*device, ALL);
            Locked lock(*device);
            device->empty_cache(std::move(context));
        }
    }

    void recordStream(const c10::DataPtr &pointer, c10::Stream stream) override {
        VirtualDevice *device = pointer ? registry().holding(pointer.get()) : nullptr;
        if (!device) return;
        TORCH_CHECK(stream.device_index() == device->index, "A stream of ", stream.device(),
                    " cannot be recorded for memory of vgpu:", device->index, ".");
        Locked lock(*device);
        device->record_stream(reinterpret_cast<uint64_t>(pointer.get()), stream.id());
    }

    c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
        VirtualDevice &device = registry().at(index);
        Locked lock(device);
        return device.statistics();
    }

    void resetAccumulatedStats(c10::DeviceIndex index) override {
        VirtualDevice &device = registry().at(index);
        Locked lock(device);
        device.reset([](Stat &stat) { stat.reset_accumulated(); }, true);
    }

    void resetPeakStats(c10::DeviceIndex index) override {
        VirtualDevice &device = registry().at(index);
        Locked lock(device);
        device.reset([](Stat &stat) { stat.reset_peak(); }, false);
    }

    std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override {
        VirtualDevice &device = registry().at(index);
        Locked lock(device);
        return {device.space().capacity() - device.space().used(), device.space().capacity()};
    }
};

inline TorchAllocator &torch_allocator() {
    static TorchAllocator *const only = new TorchAllocator;
    return *only;
}

}  // namespace kvobs::vgpu
