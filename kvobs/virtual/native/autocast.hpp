// Mixed precision: under torch.autocast("vgpu") operators get their tensors in the type that they get on CUDA.
#pragma once

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include "alias.hpp"

// Declared here because their header compiles every operator of torch.
namespace at::autocast {
TORCH_API at::ScalarType get_autocast_dtype(at::DeviceType device_type);
TORCH_API at::Tensor cached_cast(at::ScalarType to_type, const at::Tensor &arg, at::DeviceType device_type);
}  // namespace at::autocast

namespace kvobs::vgpu {

inline void cast_tensors(c10::IValue &value, at::ScalarType type) {
    const auto cast = [type](const at::Tensor &one) {
        return one.defined() ? at::autocast::cached_cast(type, one, TYPE) : one;
    };
    if (value.isTensor()) {
        value = cast(value.toTensor());
    } else if (value.isTensorList()) {
        c10::List<at::Tensor> made;
        for (const at::Tensor &one : value.toTensorVector()) made.push_back(cast(one));
        value = std::move(made);
    }
}

inline void call_with(const c10::OperatorHandle &op, torch::jit::Stack *stack, at::ScalarType type) {
    c10::impl::ExcludeDispatchKeyGuard once(c10::DispatchKeySet(c10::DispatchKey::AutocastPrivateUse1));
    for (size_t i = stack->size() - op.schema().arguments().size(); i < stack->size(); ++i)
        cast_tensors((*stack)[i], type);
    op.callBoxed(stack);
}

inline void in_lower_precision(const c10::OperatorHandle &op, torch::jit::Stack *stack) {
    call_with(op, stack, at::autocast::get_autocast_dtype(TYPE));
}
inline void in_float(const c10::OperatorHandle &op, torch::jit::Stack *stack) { call_with(op, stack, at::kFloat); }

inline void register_autocast(torch::Library &library) {
    for (const char *name : {"addbmm", "addmm", "addmv", "addr", "baddbmm", "bmm", "chain_matmul", "conv1d", "conv2d",
                             "conv3d", "conv_tbc", "conv_transpose1d", "conv_transpose2d.input",
                             "conv_transpose3d.input", "convolution", "einsum", "linalg_multi_dot", "linalg_vecdot",
                             "linear", "matmul", "mm", "mv", "prelu", "scaled_dot_product_attention"})
        library.impl(name, torch::CppFunction::makeFromBoxedFunction<&in_lower_precision>());
    for (const char *name : {"acos", "asin", "cosh", "cosine_embedding_loss", "cosine_similarity", "cumprod", "cumsum",
                             "erfinv", "exp", "expm1", "group_norm", "hinge_embedding_loss", "huber_loss", "kl_div",
                             "l1_loss", "layer_norm", "log", "log10", "log1p", "log2", "log_softmax.int",
                             "margin_ranking_loss", "mse_loss", "native_layer_norm", "nll_loss", "nll_loss2d",
                             "poisson_nll_loss", "pow.Scalar", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "prod",
                             "prod.dim_int", "reciprocal", "rms_norm", "rsqrt", "sinh", "smooth_l1_loss", "softmax.int",
                             "softplus", "sum", "sum.dim_IntList", "tan"})
        library.impl(name, torch::CppFunction::makeFromBoxedFunction<&in_float>());
}

}  // namespace kvobs::vgpu
