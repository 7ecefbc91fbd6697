// The virtual GPU as one library: loading it registers the device type's kernels, kvobs_vgpu_setup its devices.
#include "abi.hpp"
#include "autocast.hpp"
#include "kernels.hpp"

#include <thread>

namespace kvobs::vgpu {

void pass_time(uint64_t ns) {
    if (!ns) return;
    const auto end = std::chrono::steady_clock::now() + std::chrono::nanoseconds(ns);
    constexpr uint64_t SPUN = 100'000;  // what a sleep may be late by
    if (ns > 2 * SPUN) std::this_thread::sleep_for(std::chrono::nanoseconds(ns - SPUN));
    while (std::chrono::steady_clock::now() < end) continue;
}

}  // namespace kvobs::vgpu

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &kvobs::vgpu::sdp_choice)
}

namespace c10::detail {
C10_REGISTER_GUARD_IMPL(PrivateUse1, kvobs::vgpu::Guard)
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
    m.fallback(torch::CppFunction::makeFromBoxedFunction<&kvobs::vgpu::fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
    using namespace kvobs::vgpu;
    m.impl("empty.memory_format", TORCH_FN(empty_memory_format));
    m.impl("empty_strided", TORCH_FN(empty_strided));
    m.impl("_efficientzerotensor", TORCH_FN(zero_tensor));
    m.impl("as_strided", TORCH_FN(as_strided));
    m.impl("view", TORCH_FN(view));
    m.impl("_reshape_alias", TORCH_FN(reshape_alias));
    m.impl("resize_", TORCH_FN(resize_));
    m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_source));
    m.impl("set_.source_Storage", TORCH_FN(set_storage));
    m.impl("set_.source_Tensor", TORCH_FN(set_tensor));
    m.impl("_copy_from", TORCH_FN(copy_from));
    m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
    m.impl("histc", TORCH_FN(histc));
    m.impl("record_stream", TORCH_FN(record_stream));
    prefer_host_kernels(m);
}

// Conjugate and negated views are copied as they are: torch's general way clones them first, and that is a copy.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
    m.impl("_copy_from", torch::CppFunction::makeFallthrough());
    m.impl("_copy_from_and_resize", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
    m.impl("_copy_from", torch::CppFunction::makeFallthrough());
    m.impl("_copy_from_and_resize", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) { kvobs::vgpu::register_autocast(m); }
