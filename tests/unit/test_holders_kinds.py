"""What an allocation is for, by its frames."""

from __future__ import annotations

from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import pytest

from kvobs.allocator.kinds import CUBLAS_WORKSPACE, KINDS, Kinds, kind_of

SNAPSHOTS = Path(__file__).parents[3] / "shared" / "data" / "snapshots"
SITE = "/opt/env/lib/python3.11/site-packages/"
LINEAR = (SITE + "torch/nn/modules/linear.py", "forward")
CALL = (SITE + "torch/nn/modules/module.py", "_call_impl")
ENGINE = (SITE + "torch/autograd/graph.py", "_engine_run_backward")
CHECKPOINT = (SITE + "torch/utils/checkpoint.py", "unpack_hook")
LLAMA = (SITE + "transformers/models/llama/modeling_llama.py", "forward")
STACKS = [
    # KV: each of the libraries by its own names.
    ("kv", [(SITE + "transformers/cache_utils.py", "update"), LLAMA, CALL]),
    ("kv", [(SITE + "transformers/cache_utils.py", "lazy_initialization"), LLAMA]),
    ("kv", [("app/quant.py", "quantize"), ("app/cache_utils_V2.py", "update_new"), LLAMA]),
    ("kv", [(SITE + "transformers/generation/continuous_batching/cache.py", "__init__")]),
    ("kv", [(SITE + "vllm/worker/cache_engine.py", "_allocate_kv_cache")]),
    ("kv", [(SITE + "vllm/v1/worker/gpu_model_runner.py", "_allocate_kv_cache_tensors"),
            (SITE + "vllm/v1/worker/gpu_model_runner.py", "initialize_kv_cache")]),
    ("kv", [(SITE + "sglang/srt/mem_cache/memory_pool.py", "_create_buffers"),
            (SITE + "sglang/srt/mem_cache/memory_pool.py", "__init__")]),
    ("kv", [("flexgen/pytorch_backend.py", "allocate"), ("flexgen/pytorch_backend.py", "init_cache_one_gpu_batch")]),
    ("kv", [("app/model.py", "__init__"), ("app/model.py", "setup_caches")]),
    ("kv", [("app/engine.py", "allocate_kv_cache")]),
    ("kv", [("app/engine.py", "update_past_key_values")]),
    ("kv", [("app/kv_cache.py", "grow")]),
    # Around a KV cache, but not it.
    ("activation", [LINEAR, CALL, ("app/engine.py", "append_kv_cache")]),
    ("activation", [LINEAR, LLAMA, ("app/serve.py", "generate_with_kv_cache")]),
    ("activation", [("app/engine.py", "forward_with_kv_cache")]),
    ("workspace", [("flashinfer/decode.py", "__init__"), (SITE + "vllm/v1/worker/gpu_model_runner.py",
                                                          "initialize_attn_backend"),
                   (SITE + "vllm/v1/worker/gpu_model_runner.py", "initialize_kv_cache")]),
    # Weights.
    ("weights", [(SITE + "torch/nn/modules/module.py", "convert"), (SITE + "torch/nn/modules/module.py", "_apply")]),
    ("weights", [(SITE + "safetensors/torch.py", "load_file"), ("app/x.py", "main")]),
    ("weights", [(SITE + "vllm/model_executor/layers/linear.py", "create_weights")]),
    ("weights", [("flexgen/pytorch_backend.py", "allocate"), ("flexgen/flex_opt.py", "init_weight_list")]),
    ("weights", [(SITE + "transformers/core_model_loading.py", "_materialize_copy")]),
    # Training.
    ("gradient", [ENGINE, (SITE + "torch/_tensor.py", "backward")]),
    ("gradient", [("app/model.py", "forward"), (SITE + "torch/_functorch/_aot_autograd/runtime_wrappers.py",
                                                "_backward_impl")]),
    ("activation", [LINEAR, CALL, CHECKPOINT, ENGINE]),
    ("gradient", [("??", "at::native::mm"), ("", "torch::autograd::Engine::evaluate_function(int)")]),
    ("optimizer", [(SITE + "torch/optim/adamw.py", "_init_group"), (SITE + "torch/optim/adamw.py", "step")]),
    ("optimizer", [("app/optimizer.py", "step")]),
    ("activation", [LINEAR, ("app/train.py", "closure"), (SITE + "torch/optim/lbfgs.py", "step")]),
    # Others.
    ("communication", [(SITE + "torch/distributed/distributed_c10d.py", "all_gather"), LLAMA]),
    ("workspace", [("", "at::cuda::getNewWorkspace()"), ("??", "at::native::addmm_out_cuda_impl"), LINEAR]),
    ("unknown", [(SITE + "megatron/core/distributed/param_and_grad_buffer.py", "__init__")]),
    ("unknown", [("app/serve.py", "main")]),
    ("unknown", []),
]


@pytest.mark.parametrize(("kind", "stack"), STACKS)
def test_a_stack_is_of_the_kind_that_its_library_says(kind: str, stack: list[tuple[str, str]]) -> None:
    """The innermost frame that a library's own names tell something about decides, whatever lies around it."""
    assert kind_of([(file, 7, function) for file, function in stack]) == kind


def test_the_rule_and_the_deciding_frame_are_named() -> None:
    """A decision says which frame decided and by which rule, and where none did, that."""
    frames = [("a.py", 1, "x"), (SITE + "transformers/cache_utils.py", 119, "update"), ("b.py", 2, "forward")]
    decided = Kinds().decide(frames)
    assert decided == ("kv", "transformers' caches", frames[1])
    assert Kinds().decide([]).rule == "no stack was recorded"
    assert Kinds().decide([("a.py", 1, "x")]) == ("unknown", "no frame is known", None)


def test_cublas_workspace_is_told_by_its_size_within_a_computation_only() -> None:
    """8,320 KiB inside a forward pass are cuBLAS' workspace; a KV tensor or a weight of that size stays what it is."""
    assert kind_of([(*LINEAR[:1], 1, LINEAR[1])], 8 * 1024 * 1040) == "workspace"
    assert kind_of([(*LINEAR[:1], 1, LINEAR[1])], 8 * 1024 * 1040 + 512) == "activation"
    for kind, stack in STACKS:
        if kind in {"kv", "weights", "optimizer"}:
            assert kind_of([(file, 1, function) for file, function in stack], CUBLAS_WORKSPACE) == kind


@hypothesis.given(st.lists(st.tuples(st.text(), st.integers(), st.text()), max_size=8), st.integers())
def test_any_frames_have_a_kind(frames: list[tuple[str, int, str]], size: int) -> None:
    """Whatever frames are called, the kind is one of the list, and a deciding frame is one of the stack."""
    decided = Kinds().decide(frames, size)
    assert decided.kind in KINDS
    assert decided.frame is None or decided.frame in frames


@pytest.mark.skipif(not SNAPSHOTS.exists(), reason="the shared snapshots are not on this machine")
def test_real_files_agree() -> None:
    """In real files with C++ frames, cuBLAS' workspaces have the size that the rule by size knows, and vLLM's cache in
    verl_mem is KV: 24 layers, found here by the file's name alone.
    """
    from kvobs.allocator.readers import read
    from kvobs.allocator.state import ALLOCATED

    workspaces, kv, cache = set(), 0, 0
    for name in ("verl_mem", "silmont_mem", "zijiandu_attention"):
        recording = read(SNAPSHOTS / f"{name}.pickle")
        for device in recording.devices:
            for block in (block for segment in device.state for block in segment.blocks if block.state == ALLOCATED):
                frames = recording.stacks.of(block.stack)
                if any("at::cuda::getNewWorkspace" in frame[2] for frame in frames):
                    workspaces.add(block.requested)
                kv += kind_of(frames, block.requested) == "kv"
                cache += any("cache_engine" in frame[0] for frame in frames)
    assert workspaces == {CUBLAS_WORKSPACE}
    assert kv == cache == 24
