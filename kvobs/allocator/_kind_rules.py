"""Which frames tell what memory is for: one row per rule, from the libraries' own names of files and functions.

The first row that knows a frame counts, so special cases stand above general ones. Files are matched by the end of
their path, since snapshots name them by where they were installed. Function names are those that Python's and C++'s
stacks carry: without the class.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Rule(NamedTuple):
    """A row: the kind, what it recognises (words), and patterns that file and function must both contain."""

    kind: str
    name: str
    file: re.Pattern[str]
    function: re.Pattern[str]

    def knows(self, file: str, function: str) -> bool:
        """Whether a frame is of this rule."""
        return self.function.search(function) is not None and self.file.search(file) is not None


def _rule(kind: str, name: str, file: str, function: str = "") -> Rule:
    return Rule(kind, name, re.compile(file), re.compile(function))


# torch/csrc/autograd/engine.cpp runs it; torch/autograd/graph.py and __init__.py call it; AOTAutograd's compiled
# functions run theirs in _backward_impl; autograd.Function subclasses define backward.
BACKWARD = _rule(
    "gradient", "a backward pass", r"",
    r"^(?:_engine_run_backward|_?backward(?:_impl|_prologue|_epilogue)?|_?call_backward)$|torch::autograd::Engine::"
    r"|torch::autograd::generated::|CompiledFunctionBackward|AccumulateGrad")
# torch/utils/checkpoint.py runs forward again during backward to have its activations back.
RECOMPUTE = _rule("activation", "activations computed again by a checkpoint", r"(?:^|/)torch/utils/checkpoint\.py$")

RULES = (
    RECOMPUTE,
    # --- communication ---
    _rule("communication", "torch.distributed collectives",
          r"(?:^|/)torch/distributed/(?:distributed_c10d|_functional_collectives|nn/functional)\.py$"),
    _rule("communication", "collectives of an engine or trainer",
          r"(?:vllm/distributed|sglang/srt/distributed|deepspeed/comm|megatron/core/tensor_parallel/mappings)"),
    _rule("communication", "c10d or NCCL in C++", r"", r"c10d::|ncclComm|at::native::nccl|torch::cuda::nccl"),
    _rule("unknown", "Megatron's buffers of parameters and of gradients, which share a frame",
          r"megatron/core/distributed/param_and_grad_buffer\.py$"),
    _rule("communication", "DistributedDataParallel's buckets", r"(?:^|/)torch/nn/parallel/distributed\.py$",
          r"_ddp_init_helper|_sync_(?:module_states|buffers)|_distributed_broadcast"),
    # --- workspaces ---
    _rule("workspace", "a cuBLAS or cuDNN workspace", r"",
          r"at::cuda::getCurrentCUDABlas|CUDABlas\w*Workspace|cublas\w*[wW]orkspace|getNewWorkspace"
          r"|at::native::.*[cC]udnn.*::Workspace"),
    _rule("workspace", "Triton's benchmark of kernels", r"(?:^|/)triton/(?:testing|runtime/autotuner)\.py$"),
    _rule("workspace", "vLLM's metadata of attention back ends", r"vllm/",
          r"^(?:initialize_(?:attn_backend|metadata_builders)|init_attn_backend)$"),
    _rule("workspace", "vLLM's persistent inputs", r"vllm/v1/(?:worker/(?:gpu_input_batch|gpu/buffer_utils"
          r"|gpu/input_batch|block_table)|utils)\.py$"),
    _rule("workspace", "inputs of transformers' continuous batching",
          r"transformers/generation/continuous_batching/input_outputs\.py$"),
    _rule("workspace", "SGLang's tables of slots", r"sglang/srt/mem_cache/\w*allocator\w*(?:/\w+)?\.py$"),
    # --- KV ---
    # DynamicLayer.update, StaticLayer.lazy_initialization, QuantizedLayer._quantize … (and forks of the module).
    _rule("kv", "transformers' caches", r"(?:^|/)cache_utils\w*\.py$"),
    _rule("kv", "transformers' paged cache", r"transformers/generation/continuous_batching/cache\w*\.py$"),
    _rule("kv", "an engine's cache engine (vLLM V0, lmdeploy)", r"(?:^|/)cache_engine\.py$"),
    _rule("kv", "vLLM's KV cache", r"vllm/",
          r"^(?:_?allocate_kv_cache\w*|_?init(?:ialize)?_kv_caches?\w*|_?reshape_kv_cache\w*|_?init_cache_engine"
          r"|initialize_cache|initialize_from_config|_?allocate_(?:gpu|device)_cache)$"),
    # MHATokenToKVPool, MLATokenToKVPool, SWAKVPool … make their buffers here; memory_pool_host.py is host memory.
    _rule("kv", "SGLang's pools of KV", r"sglang/srt/mem_cache/(?:\w*memory_pool|\w*kv_pool\w*)\.py$"),
    # The classes Layer and TorchDevice of FlexGen: flex_opt.py, pytorch_backend.py, compression.py.
    _rule("kv", "FlexGen's cache", r"", r"^(?:init_cache_one_gpu_batch|init_cache|load_cache|store_cache)$"),
    _rule("kv", "LightLLM's KV manager", r"lightllm/common/\w*mem\w*manager\w*(?:/\w+)?\.py$"),
    _rule("kv", "a KV cache, by the file's name",
          r"(?:^|/)\w*(?:kv_?(?:cache|pool|buffer)|past_key_value|(?:paged|static|dynamic|sliding_window)_?cache"
          r"|paged_attention_cache)\w*\.py$"),
    # Functions that make or keep a KV cache; not those that compute with one, such as forward_with_kv_cache.
    _rule("kv", "a KV cache, by the function's name", r"\.py$",
          r"(?i)^_*(?:(?:pre)?alloc\w*|init\w*|create|make|build|grow|extend|append|update|reserve|expand|resize|setup"
          r"|set|store|save|write|concat|cat|new|copy|quantize\w*|compress|evict|crop|get_or_create)_"
          r"(?:\w*_)?(?:kv|kvs|k_?v_?caches?\w*|kv_?(?:pool|buffer|block)s?\w*|key_value\w*|past_key_values?|past_kv"
          r"|[kv]_caches?|key_caches?|value_caches?)$"
          r"|^_*(?:kv_?cache|past_key_values?|[kv]_cache|key_cache|value_cache)s?$|^setup_caches$"),
    # --- optimizer ---
    _rule("optimizer", "torch.optim", r"(?:^|/)torch/optim/\w+\.py$", r"^(?!zero_grad)"),
    _rule("optimizer", "an optimizer's package",
          r"(?:apex/optimizers|bitsandbytes/optim|megatron/core/optimizer|deepspeed/ops/(?:adam|lamb|lion|adagrad)"
          r"|deepspeed/runtime/(?:zero/stage|bf16_optimizer|fp16))"),
    _rule("optimizer", "an optimizer, by its file's name", r"(?:^|/)\w*optim(?:izer)?s?\w*\.py$",
          r"^(?:_?step\w*|_?init_group|_?init_state\w*|_?update\w*|_(?:single|multi)_tensor\w*)$"),
    # --- weights ---
    _rule("weights", "parameters of torch.nn, made or moved",
          r"(?:^|/)torch/nn/(?:parameter|init|modules/(?:module|linear|conv|sparse|normalization|batchnorm|rnn|lazy))"
          r"\.py$",
          r"^(?:convert|_apply|to|to_empty|cuda|cpu|half|float|double|bfloat16|type|<lambda>|__init__|reset_parameters"
          r"|load_state_dict|_load_from_state_dict|register_(?:parameter|buffer)|initialize_parameters|materialize"
          r"|__new__|__deepcopy__|\w*_)$"),
    _rule("weights", "a file of weights", r"(?:^|/)safetensors/|fastsafetensors/|runai_model_streamer/"),
    _rule("weights", "weights on their way into a model",
          r"(?:transformers/(?:core_model_loading|modeling_utils|integrations/(?:accelerate|bitsandbytes))"
          r"|accelerate/(?:utils/modeling|big_modeling|hooks)|bitsandbytes/nn/modules"
          r"|(?:vllm|sglang/srt)/model_loader/\w+|model_loader/\w+)\.py$",
          r"(?i)load|material|set_module|param|convert|weight|dispatch|quantize|^to$|^cuda$|_initialize_model"),
    _rule("weights", "FSDP's gathered parameters", r"(?:^|/)torch/distributed/(?:_composable/)?fsdp/"),
    _rule("weights", "parameters, by the function's name", r"",
          r"^_?(?:create_weights\w*|(?:load|init|initialize|reset|materialize|process)_(?:all_)?"
          r"(?:weights?|parameters?|params)\w*|load_(?:pretrained_)?(?:model|checkpoint)\w*|_?load_pretrained_model"
          r"|_?load_state_dict\w*|from_pretrained|weight_loader|init_all_weights)$"),
    _rule("weights", "a model's modules, being made",
          r"(?:vllm/model_executor/(?:layers|models)|sglang/srt/(?:layers|models)|transformers/models"
          r"|megatron/core/(?:models|tensor_parallel|transformer))/",
          r"^(?:__init__|make_layers|setup_embeddings_and_output_layer|build_module|_initialize_affine_weight\w*)$"),
    # --- gradients ---
    BACKWARD,
    # --- activations ---
    _rule("activation", "a module's forward pass", r"", r"^_?(?:\w+_)?forward(?:_\w+)?$|^_(?:wrapped_)?call_impl$"),
    _rule("activation", "generation: inputs, logits, tokens",
          r"transformers/(?:generation/\w+|masking_utils|modeling_attn_mask_utils)\.py$"),
    _rule("activation", "torch.nn.functional", r"(?:^|/)torch/nn/functional\.py$"),
    _rule("activation", "a layer's computation, by the function's name", r"\.py$",
          r"(?i)soft_?max|attention(?!_mask)|(?:^|_)attn(?!_mask)|(?:^|_)mlp|(?:layer|rms)_?norm|rotary|logits|gelu|silu"
          r"|swiglu|(?:^|_)loss"),
)
