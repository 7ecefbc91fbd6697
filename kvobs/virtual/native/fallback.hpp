// Every operator without a kernel of its own: the host's kernel runs over the device's memory, and what it makes anew is
// put into memory of the device. What a kernel takes for itself meanwhile is the host's, and not modelled.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include "alias.hpp"

namespace kvobs::vgpu {

class Call {
public:
    explicit Call(const c10::OperatorHandle &op) : op_(op), schema_(op.schema()) {}

    void run(torch::jit::Stack *stack) {
        const size_t count = schema_.arguments().size(), first = stack->size() - count;
        for (size_t i = 0; i < count; ++i) {
            const c10::AliasInfo *info = schema_.arguments()[i].alias_info();
            argument((*stack)[first + i], info && info->isWrite());
        }
        check_devices();
        op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
        aliases_.settle();
        const size_t returns = schema_.returns().size();
        for (size_t i = stack->size() - returns; i < stack->size(); ++i) result((*stack)[i]);
    }

private:
    at::Tensor host(const at::Tensor &tensor, bool written) {
        if (!tensor.defined()) return tensor;
        if (!is_virtual(tensor)) {
            if (tensor.device().type() == c10::DeviceType::CPU && tensor.dim() > 0) host_tensor_ = true;
            return tensor;
        }
        device_tensor_ = true;
        TORCH_CHECK(tensor.has_storage(), "The operator ", schema_.operator_name(),
                    " is not supported on vgpu for tensors without a storage (sparse or nested ones).");
        return aliases_.host(tensor, written);
    }

    void argument(c10::IValue &value, bool written) {
        if (value.isTensor()) {
            value = host(value.toTensor(), written);
        } else if (value.isTensorList()) {
            const std::vector<at::Tensor> given = value.toTensorVector();
            c10::List<at::Tensor> made;
            made.reserve(given.size());
            for (const at::Tensor &tensor : given) made.push_back(host(tensor, written));
            value = std::move(made);
        } else if (value.isOptionalTensorList()) {
            c10::List<std::optional<at::Tensor>> made;
            // Indices, which may be of the host beside a tensor of the device.
            for (const std::optional<at::Tensor> &tensor : value.toOptionalTensorVector())
                made.push_back(tensor && is_virtual(*tensor) ? std::optional<at::Tensor>(host(*tensor, written)) : tensor);
            value = std::move(made);
        } else if (value.isDevice()) {
            if (value.toDevice().type() != TYPE) return;
            aliases_.aim(value.toDevice());
            value = c10::Device(c10::DeviceType::CPU);
        } else if (value.isGenerator()) {
            const at::Generator &given = value.toGenerator();
            if (!given.defined()) return;
            generator_ = given.device().type();
            if (generator_ == TYPE) value = static_cast<Generator *>(given.unsafeGetGeneratorImpl())->inner;
        }
    }

    void result(c10::IValue &value) const {
        if (value.isTensor()) {
            value = aliases_.device_result(value.toTensor());
        } else if (value.isTensorList()) {
            c10::List<at::Tensor> made;
            for (const at::Tensor &tensor : value.toTensorVector()) made.push_back(aliases_.device_result(tensor));
            value = std::move(made);
        }
    }

    // As torch refuses them for other accelerators.
    void check_devices() const {
        TORCH_CHECK(!host_tensor_ || !device_tensor_,
                    "Expected all tensors to be on the same device, but found at least two devices, vgpu:",
                    aliases_.device(), " and cpu! (operator ", schema_.operator_name(), ")");
        const c10::DeviceType computes = host_tensor_ ? c10::DeviceType::CPU : TYPE;
        TORCH_CHECK(!generator_ || *generator_ == computes, "Expected a '", c10::Device(computes),
                    "' device type for generator but found '", c10::Device(*generator_), "'");
    }

    const c10::OperatorHandle &op_;
    const c10::FunctionSchema &schema_;
    Aliases aliases_;
    bool host_tensor_ = false, device_tensor_ = false;
    std::optional<c10::DeviceType> generator_;
};

inline void fallback(const c10::OperatorHandle &op, torch::jit::Stack *stack) { Call(op).run(stack); }

}  // namespace kvobs::vgpu
