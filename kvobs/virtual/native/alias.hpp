// Tensors of a virtual device seen as the host's, over the same memory, and results taken back.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/_efficientzerotensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/SmallVector.h>

#include "guard.hpp"

namespace kvobs::vgpu {

inline bool is_virtual(const at::Tensor &tensor) { return tensor.defined() && tensor.device().type() == TYPE; }

inline void drop_storage(void *storage) {
    c10::raw::intrusive_ptr::decref(static_cast<c10::StorageImpl *>(storage));
}

// The host's view of a storage; it keeps the storage alive. Only a resizable one may grow, into memory of the host.
inline c10::Storage host_storage(const c10::Storage &storage, bool resizable = false) {
    c10::StorageImpl *own = storage.unsafeGetStorageImpl();
    c10::raw::intrusive_ptr::incref(own);
    c10::DataPtr data(own->mutable_data(), own, &drop_storage, c10::Device(c10::DeviceType::CPU));
    return c10::Storage(c10::Storage::use_byte_size_t(), own->nbytes(), std::move(data),
                        resizable ? c10::GetCPUAllocator() : nullptr, resizable);
}

inline at::Tensor make(c10::Storage storage, c10::DispatchKey key, const at::Tensor &like) {
    at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
    c10::TensorImpl *impl = made.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
    if (like.is_conj()) made._set_conj(true);
    if (like.is_neg()) made._set_neg(true);
    if (like.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
    return made;
}

inline at::Tensor host_alias(const at::Tensor &tensor) {
    return is_virtual(tensor) ? make(host_storage(tensor.storage()), c10::DispatchKey::CPU, tensor) : tensor;
}

// A tensor of the device with the contents of one of the host; dense strides are kept.
inline at::Tensor to_device(const at::Tensor &host, int index) {
    c10::DeviceGuard guard(device_of(index));
    const auto options = host.options().device(device_of(index)).requires_grad(false);
    const bool dense = host.is_non_overlapping_and_dense();
    at::Tensor made = dense ? at::empty_strided(host.sizes(), host.strides(), options) : at::empty(host.sizes(), options);
    if (host.numel() == 0) return made;
    if (dense) std::memcpy(made.mutable_data_ptr(), host.const_data_ptr(), host.nbytes());
    else host_alias(made).copy_(host);
    return made;
}

// The tensors of one call: who is whose alias.
class Aliases {
public:
    // The host's alias of a tensor; of one that the call writes to, one that can be resized.
    at::Tensor host(const at::Tensor &tensor, bool written) {
        if (!is_virtual(tensor)) return tensor;
        meet(tensor);
        if (tensor._is_zerotensor()) return at::_efficientzerotensor(tensor.sizes(), tensor.options().device(c10::kCPU));
        for (const Known &known : known_)
            if (known.tensor.is_same(tensor)) return known.alias;
        const c10::StorageImpl *own = tensor.storage().unsafeGetStorageImpl();
        c10::Storage storage;
        for (const Known &known : known_)
            if (known.tensor.storage().unsafeGetStorageImpl() == own) storage = known.alias.storage();
        if (!storage) storage = host_storage(tensor.storage(), written);
        known_.push_back({tensor, make(std::move(storage), c10::DispatchKey::CPU, tensor), tensor.storage().data(), written});
        return known_.back().alias;
    }

    void meet(const at::Tensor &tensor) {
        const int index = tensor.device().index();
        TORCH_CHECK(device_ < 0 || device_ == index,
                    "Expected all tensors to be on the same device, but found at least two devices, vgpu:", device_,
                    " and vgpu:", index, "!");
        device_ = index;
    }
    void aim(c10::Device device) { device_ = device.has_index() ? device.index() : current.device; }
    int device() const { return device_ < 0 ? current.device : device_; }

    // What a result of the call is on the device: an argument, a view of one, or new.
    at::Tensor device_result(const at::Tensor &result) const {
        if (!result.defined() || result.device().type() != c10::DeviceType::CPU) return result;
        for (const Known &known : known_)
            if (known.alias.is_same(result)) return known.tensor;
        if (result.has_storage()) {
            const c10::StorageImpl *own = result.storage().unsafeGetStorageImpl();
            for (const Known &known : known_)
                if (known.alias.storage().unsafeGetStorageImpl() == own && known.data == result.storage().data())
                    return make(known.tensor.storage(), c10::DispatchKey::PrivateUse1, result);
        }
        return to_device(result, device());
    }

    // Arguments that the call resized or moved.
    void settle() const {
        for (const Known &known : known_) {
            if (!known.written) continue;
            const at::Tensor &alias = known.alias;
            if (alias.storage().data() != known.data) {
                const c10::Storage &storage = known.tensor.storage();
                resize_storage(storage, alias.storage().nbytes());
                if (alias.storage().nbytes())
                    std::memcpy(storage.unsafeGetStorageImpl()->mutable_data(), alias.storage().data(), alias.storage().nbytes());
            }
            if (alias.sizes() != known.tensor.sizes() || alias.strides() != known.tensor.strides() ||
                alias.storage_offset() != known.tensor.storage_offset())
                known.tensor.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides(),
                                                                          alias.storage_offset());
        }
    }

    static void resize_storage(const c10::Storage &storage, size_t size) {
        c10::StorageImpl *own = storage.unsafeGetStorageImpl();
        TORCH_CHECK(own->resizable(), "A storage that is not resizable cannot be resized.");
        c10::DeviceGuard guard(own->device());
        c10::DataPtr data = torch_allocator().allocate(size);
        const size_t kept = std::min(size, own->nbytes());
        if (kept) std::memcpy(data.get(), own->data(), kept);
        own->set_data_ptr_noswap(std::move(data));
        own->set_nbytes(size);
    }

private:
    struct Known {
        at::Tensor tensor, alias;
        const void *data;
        bool written;
    };
    c10::SmallVector<Known, 6> known_;
    int device_ = -1;
};

inline void Hooks::resizePrivateUse1Bytes(const c10::Storage &storage, size_t size) const {
    Aliases::resize_storage(storage, size);
}

}  // namespace kvobs::vgpu
