// Operators with kernels of their own: memory, views, copies; and those where the host would pick other kernels.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/histc.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/_reshape_alias_native.h>

#include "fallback.hpp"

namespace kvobs::vgpu {

inline c10::Device target(std::optional<c10::Device> device) {
    TORCH_CHECK(!device || device->type() == TYPE, "A tensor of ", device->str(), " is not of a virtual device.");
    return device && device->has_index() ? *device : device_of(current.device);
}

inline at::Tensor empty_memory_format(c10::SymIntArrayRef sizes, std::optional<at::ScalarType> dtype,
                                      std::optional<at::Layout> layout, std::optional<c10::Device> device,
                                      std::optional<bool>, std::optional<at::MemoryFormat> format) {
    TORCH_CHECK(!layout || *layout == at::kStrided, "Only strided tensors can be made on vgpu.");
    c10::DeviceGuard guard(target(device));
    return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(sizes), &torch_allocator(),
                                     c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                     c10::dtype_or_default(dtype), format);
}

inline at::Tensor empty_strided(c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides,
                                std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                                std::optional<c10::Device> device, std::optional<bool>) {
    TORCH_CHECK(!layout || *layout == at::kStrided, "Only strided tensors can be made on vgpu.");
    c10::DeviceGuard guard(target(device));
    return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides),
                                             &torch_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                             c10::dtype_or_default(dtype));
}

// A tensor of zeros that has no memory: gradients that are zero for sure.
inline at::Tensor zero_tensor(c10::SymIntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                              std::optional<c10::Device> device, std::optional<bool>) {
    const c10::Device where = target(device);
    at::native::ZeroTensorAllocator nothing(where);
    const c10::DispatchKeySet keys{c10::DispatchKey::PrivateUse1, c10::DispatchKey::ZeroTensor};
    return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(sizes), &nothing, keys, c10::dtype_or_default(dtype),
                                     std::nullopt);
}

inline at::Tensor as_strided(const at::Tensor &self, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides,
                             std::optional<c10::SymInt> offset) {
    return at::native::as_strided_tensorimpl(
        self, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides),
        offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt);
}

inline at::Tensor view(const at::Tensor &self, c10::SymIntArrayRef sizes) {
    return at::native::view(self, C10_AS_INTARRAYREF_SLOW(sizes));
}

inline at::Tensor reshape_alias(const at::Tensor &self, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides) {
    return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides));
}

inline const at::Tensor &resize_(const at::Tensor &self, c10::SymIntArrayRef sizes,
                                 std::optional<at::MemoryFormat> format) {
    const auto wanted = C10_AS_INTARRAYREF_SLOW(sizes);
    c10::TensorImpl *impl = self.unsafeGetTensorImpl();
    if (self.sizes() == wanted && !format) return self;
    impl->set_sizes_contiguous(wanted);
    if (format) impl->empty_tensor_restride(*format);
    const size_t needed = at::detail::computeStorageNbytes(impl->sizes(), impl->strides(), self.itemsize(),
                                                           static_cast<size_t>(impl->storage_offset()));
    if (needed > self.storage().nbytes()) Aliases::resize_storage(self.storage(), needed);
    return self;
}

inline at::Tensor &set_source(at::Tensor &self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef sizes,
                              c10::SymIntArrayRef strides) {
    c10::TensorImpl *impl = self.unsafeGetTensorImpl();
    TORCH_CHECK(source.device().type() == TYPE, "A tensor of vgpu cannot take a storage of ", source.device(), ".");
    const auto shape = C10_AS_INTARRAYREF_SLOW(sizes);
    at::native::checkSetStorage(self, source, offset.expect_int(), shape, C10_AS_INTARRAYREF_SLOW(strides));
    impl->set_storage_offset(offset.expect_int());
    if (strides.data() == nullptr || strides.size() != sizes.size()) impl->set_sizes_contiguous(shape);
    else impl->set_sizes_and_strides(shape, C10_AS_INTARRAYREF_SLOW(strides), offset.expect_int());
    return self;
}

inline at::Tensor &set_storage(at::Tensor &self, at::Storage source) {
    const int64_t count = static_cast<int64_t>(source.nbytes() / self.itemsize());
    return set_source(self, std::move(source), 0, c10::SymIntArrayRef({c10::SymInt(count)}), {});
}

inline at::Tensor &set_tensor(at::Tensor &self, const at::Tensor &source) {
    return set_source(self, source.storage(), source.sym_storage_offset(), source.sym_sizes(), source.sym_strides());
}

inline void count_copy(const at::Tensor &from, const at::Tensor &to) {
    const size_t source = is_virtual(from) ? 1 + static_cast<size_t>(from.device().index()) : 0;
    const size_t sink = is_virtual(to) ? 1 + static_cast<size_t>(to.device().index()) : 0;
    if (source == sink) return;
    Copies &copies = registry().copies[source][sink];
    copies.count.fetch_add(1, std::memory_order_relaxed);
    copies.bytes.fetch_add(from.nbytes(), std::memory_order_relaxed);
}

inline at::Tensor copy_from(const at::Tensor &self, const at::Tensor &to, bool) {
    TORCH_CHECK((is_virtual(self) || self.is_cpu()) && (is_virtual(to) || to.is_cpu()), "A copy from ", self.device(),
                " to ", to.device(), " is not supported; vgpu copies to and from the host and other virtual devices.");
    count_copy(self, to);
    host_alias(to).copy_(host_alias(self));
    return to;
}

inline at::Tensor copy_from_and_resize(const at::Tensor &self, const at::Tensor &to) {
    to.resize_(self.sizes());
    return copy_from(self, to, false);
}

inline void record_stream(at::Tensor &self, c10::Stream stream) {
    torch_allocator().recordStream(self.storage().data_ptr(), stream);
}

// Of whole numbers too, as on CUDA; the host's kernel counts only floating-point numbers. Models with experts need it.
inline at::Tensor histc(const at::Tensor &self, int64_t bins, const at::Scalar &least, const at::Scalar &most) {
    const bool whole = at::isIntegralType(self.scalar_type(), /*includeBool=*/false);
    const at::Tensor host = host_alias(self);
    const at::Tensor found = at::histc(whole ? host.to(at::kDouble) : host, bins, least, most);
    return to_device(whole ? found.to(self.scalar_type()) : found, self.device().index());
}

// Whether a gradient is wanted decides which attention kernel may be chosen.
inline at::Tensor alias_with_grad(const at::Tensor &tensor) {
    at::Tensor alias = host_alias(tensor);
    if (is_virtual(tensor) && tensor.requires_grad()) alias.set_requires_grad(true);
    return alias;
}

// The host's own choice, so that the host's attention kernels run.
inline int64_t sdp_choice(const at::Tensor &query, const at::Tensor &key, const at::Tensor &value,
                          const std::optional<at::Tensor> &mask, double dropout, bool causal,
                          std::optional<double> scale, bool grouped) {
    const std::optional<at::Tensor> host_mask = mask ? std::optional<at::Tensor>(alias_with_grad(*mask)) : std::nullopt;
    return at::_fused_sdp_choice(alias_with_grad(query), alias_with_grad(key), alias_with_grad(value), host_mask, dropout,
                                 causal, scale, grouped);
}

// Operators of which torch has a general form beside the host's kernel, which would win over the fallback and round
// otherwise (layer norm), and those that look one up by the device of their tensors (convolution).
inline void prefer_host_kernels(torch::Library &library) {
    c10::Dispatcher &all = c10::Dispatcher::singleton();
    for (const c10::OperatorName &name : all.getAllOpNames()) {
        if (name.name.rfind("aten::", 0) != 0) continue;
        const auto op = all.findOp(name);
        if (!op || !op->hasKernelForDispatchKey(c10::DispatchKey::CPU) ||
            op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1))
            continue;
        if (op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) ||
            op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd))
            library.impl(c10::toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
    }
    for (const char *name : {"conj_physical_", "convolution", "convolution_backward"})
        library.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

}  // namespace kvobs::vgpu
