// Devices, streams, events and generators as torch asks for them.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "torch_allocator.hpp"

namespace kvobs::vgpu {

inline c10::Device device_of(int index) { return {TYPE, static_cast<c10::DeviceIndex>(index)}; }

inline int exchange_device(int index) {
    registry().at(index);
    const int before = current.device;
    current.device = index;
    return before;
}

inline c10::Stream stream_of(int index, int64_t id) { return c10::Stream(c10::Stream::UNSAFE, device_of(index), id); }

// An event of a stream: reached at once, or when a held stream is let go.
struct VirtualEvent {
    int device;
    int64_t stream;
    std::chrono::steady_clock::time_point at;
};

inline void finish(int index, int64_t stream) {
    VirtualDevice &device = registry().at(index);
    Locked lock(device);
    device.let_go(stream);
}

inline bool busy(int index, int64_t stream) {
    VirtualDevice &device = registry().at(index);
    Locked lock(device);
    return device.busy(stream);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override { return TYPE; }
    c10::Device exchangeDevice(c10::Device device) const override { return device_of(exchange_device(device.index())); }
    c10::Device getDevice() const override { return device_of(current.device); }
    void setDevice(c10::Device device) const override { exchange_device(device.index()); }
    void uncheckedSetDevice(c10::Device device) const noexcept override { current.device = device.index(); }

    c10::Stream getStream(c10::Device device) const override {
        const int index = index_of(device);
        return stream_of(index, current.stream[static_cast<size_t>(index)]);
    }
    c10::Stream getDefaultStream(c10::Device device) const override {
        return stream_of(index_of(device), DEFAULT_STREAM);
    }
    c10::Stream getStreamFromGlobalPool(c10::Device device, bool = false) const override { return getNewStream(device); }
    c10::Stream getNewStream(c10::Device device, int = 0) const override {
        return stream_of(index_of(device), 1 + registry().next_stream.fetch_add(1) % STREAMS);
    }
    c10::Stream exchangeStream(c10::Stream stream) const override {
        const int index = index_of(stream.device());
        int64_t &now = current.stream[static_cast<size_t>(index)];
        const int64_t before = now;
        now = stream.id();
        return stream_of(index, before);
    }
    bool queryStream(const c10::Stream &stream) const override { return !busy(stream.device_index(), stream.id()); }
    void synchronizeStream(const c10::Stream &stream) const override { finish(stream.device_index(), stream.id()); }
    void synchronizeDevice(const c10::DeviceIndex index) const override {
        VirtualDevice &device = registry().at(index);
        Locked lock(device);
        device.let_all_go();
    }

    void record(void **event, const c10::Stream &stream, const c10::DeviceIndex, const c10::EventFlag) const override {
        if (!*event) *event = new VirtualEvent;
        *static_cast<VirtualEvent *>(*event) = {stream.device_index(), stream.id(), std::chrono::steady_clock::now()};
    }
    void destroyEvent(void *event, const c10::DeviceIndex) const noexcept override {
        delete static_cast<VirtualEvent *>(event);
    }
    // Work is done when it is given, so that there is nothing to wait for; a held stream stays held.
    void block(void *, const c10::Stream &) const override {}
    bool queryEvent(void *event) const override {
        const auto *found = static_cast<VirtualEvent *>(event);
        return !found || !busy(found->device, found->stream);
    }
    void synchronizeEvent(void *event) const override {
        if (const auto *found = static_cast<VirtualEvent *>(event)) finish(found->device, found->stream);
    }
    double elapsedTime(void *first, void *second, const c10::DeviceIndex) const override {
        TORCH_CHECK(first && second, "Both events must be recorded before the time between them can be told.");
        return std::chrono::duration<double, std::milli>(static_cast<VirtualEvent *>(second)->at -
                                                         static_cast<VirtualEvent *>(first)->at).count();
    }
    void recordDataPtrOnStream(const c10::DataPtr &pointer, const c10::Stream &stream) const override {
        torch_allocator().recordStream(pointer, stream);
    }
    c10::DeviceIndex deviceCount() const noexcept override {
        return static_cast<c10::DeviceIndex>(registry().devices.size());
    }

private:
    static int index_of(c10::Device device) {
        const int index = device.has_index() ? device.index() : current.device;
        registry().at(index);
        return index;
    }
};

// A generator of a virtual device: the host's kernels draw from the host's generator inside.
struct Generator final : c10::GeneratorImpl {
    explicit Generator(c10::DeviceIndex index)
        : c10::GeneratorImpl(device_of(index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
          inner(at::make_generator<at::CPUGeneratorImpl>(c10::detail::getNonDeterministicRandom())) {}

    at::Generator inner;

    void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
    void set_offset(uint64_t offset) override { inner.set_offset(offset); }
    uint64_t get_offset() const override { return inner.get_offset(); }
    uint64_t current_seed() const override { return inner.current_seed(); }
    uint64_t seed() override { return inner.seed(); }
    void set_state(const c10::TensorImpl &state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
    c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }

private:
    Generator *clone_impl() const override {
        auto *made = new Generator(device().index());
        made->inner = inner.clone();
        return made;
    }
};

struct Hooks final : at::PrivateUse1HooksInterface {
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return !registry().devices.empty(); }
    bool hasPrimaryContext(c10::DeviceIndex index) const override {
        return index < static_cast<c10::DeviceIndex>(registry().devices.size());
    }
    c10::DeviceIndex deviceCount() const override {
        return static_cast<c10::DeviceIndex>(registry().devices.size());
    }
    void setCurrentDevice(c10::DeviceIndex index) const override { exchange_device(index); }
    c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current.device); }
    c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
        return static_cast<c10::DeviceIndex>(exchange_device(index));
    }
    c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }

    at::Device getDeviceFromPtr(void *data) const override {
        VirtualDevice *device = registry().holding(data);
        TORCH_CHECK(device, "The address belongs to no virtual device.");
        return device_of(device->index);
    }
    // Pages of the host are reached directly; none is pinned.
    bool isPinnedPtr(const void *) const override { return false; }
    c10::Allocator *getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }

    const at::Generator &getDefaultGenerator(c10::DeviceIndex index) const override {
        static std::mutex mutex;
        static auto *const made = new std::array<at::Generator, MOST_DEVICES>;
        const int at = index < 0 ? current.device : index;
        registry().at(at);
        std::lock_guard<std::mutex> lock(mutex);
        at::Generator &found = (*made)[static_cast<size_t>(at)];
        if (!found.defined()) found = at::make_generator<Generator>(static_cast<c10::DeviceIndex>(at));
        return found;
    }
    at::Generator getNewGenerator(c10::DeviceIndex index = -1) const override {
        const int at = index < 0 ? current.device : index;
        registry().at(at);
        return at::make_generator<Generator>(static_cast<c10::DeviceIndex>(at));
    }
    void resizePrivateUse1Bytes(const c10::Storage &storage, size_t size) const override;
};

}  // namespace kvobs::vgpu
