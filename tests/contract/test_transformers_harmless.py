"""kvobs leaves no trace in its host: compilation, tracing, identity, memory, copies, forks."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import tracemalloc
import weakref
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed; pip install 'kvobs[torch]' brings it.")
transformers = pytest.importorskip("transformers", reason="pip install 'kvobs[torch]' brings transformers.")

from kvobs import model as events  # noqa: E402
from tests.contract import tiny  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny.llama()


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# -- compilation ----------------------------------------------------------------------------------------


def compiled_frames(active: bool, watch: Any, run: Any) -> tuple[int, Any]:
    """(graphs that were compiled, result) of ``run(backend)``."""
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter = CompileCounter()
    watch.bus.active = active
    try:
        result = run(counter)
    finally:
        watch.bus.active = True
    return counter.frame_count, result


def loop(model: Any, cache: Any, passes: int = 5) -> Any:
    ids, found = tiny.prompt(6), []
    with torch.no_grad():
        for _ in range(passes):
            logits = model(input_ids=ids, **{tiny.CACHE: cache})[0]
            ids = logits[:, -1:].argmax(-1)
            found.append(ids)
    return torch.cat(found, dim=1)


@pytest.mark.parametrize("kind", ["module", "forward"])
@pytest.mark.parametrize("cache", ["DynamicCache", "StaticCache"])
def test_a_compiled_model_compiles_as_often_and_without_breaks(watch: Any, kind: str, cache: str) -> None:
    """``torch.compile(model, fullgraph=True)`` and a compiled ``forward``: same tokens, same number of graphs."""

    def run(backend: Any) -> Any:
        model = tiny.llama(layers=2)
        more = {"max_cache_len": 32} if cache == "StaticCache" else {}
        store = getattr(transformers, cache)(config=model.config, **more)
        if kind == "module":
            return loop(torch.compile(model, fullgraph=True, backend=backend), store)
        model.forward = torch.compile(model.forward, fullgraph=True, backend=backend)
        return loop(model, store)

    plain, expected = compiled_frames(False, watch, run)
    observed, result = compiled_frames(True, watch, run)
    assert torch.equal(result, expected)
    assert observed == plain > 0
    assert not watch.of(events.HookFailed)


def test_a_compiled_forward_is_still_followed(watch: Any) -> None:
    """With only ``forward`` compiled the pass runs through the model's call, so its steps are exact."""
    model = tiny.llama(layers=2)
    model.forward = torch.compile(model.forward, backend="eager")
    loop(model, transformers.StaticCache(config=model.config, max_cache_len=32))
    steps = watch.of(events.Step)
    assert [step.kv_bytes for step in steps] == [n * tiny.row_bytes(model) for n in range(6, 11)]


def test_the_compiled_decode_of_generate_is_followed(watch: Any) -> None:
    """Automatic compilation with a static cache: same tokens and graphs, and every compiled step is swept."""
    if not hasattr(transformers, "CompileConfig"):
        pytest.skip(f"transformers {transformers.__version__} has no CompileConfig.")

    def run(backend: Any) -> Any:
        model = tiny.llama(layers=2)
        config = transformers.CompileConfig(backend=backend, fullgraph=True, mode=None)
        config._compile_all_devices = True
        return tiny.greedy(model, tiny.prompt(6), 6, cache_implementation="static", compile_config=config)

    plain, expected = compiled_frames(False, watch, run)
    watch.events()
    observed, result = compiled_frames(True, watch, run)
    assert torch.equal(result, expected)
    assert observed == plain > 0
    turn = watch.turn()
    row = 2 * 2 * 2 * 8 * 4
    assert (turn.steps, turn.kv_bytes, turn.bytes_written, turn.reallocations) == (6, 11 * row, 11 * row, 0)
    assert turn.new_tokens == 6


def test_a_compiled_call_outlives_the_source(watching: Any) -> None:
    """A model compiled while observed runs on after uninstalling, and is observed again by a later source."""
    model = tiny.llama(layers=2)
    config = transformers.CompileConfig(backend="eager", mode=None)
    config._compile_all_devices = True
    more = {"cache_implementation": "static", "compile_config": config}
    first = watching()
    expected = tiny.greedy(model, tiny.prompt(6), 6, **more)
    first.close()
    assert torch.equal(tiny.greedy(model, tiny.prompt(6), 6, **more), expected)
    second = watching()
    assert torch.equal(tiny.greedy(model, tiny.prompt(6), 6, **more), expected)
    assert second.turn().steps == 6
    assert [turn.steps for turn in first.turns()] == [6]


def test_export_and_tracing_work(watch: Any, llama: Any) -> None:
    """``torch.export`` and ``torch.jit.trace`` give what they give without kvobs, without a hook failing."""

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = llama

        def forward(self, ids: Any) -> Any:
            return self.inner(input_ids=ids, use_cache=False)[0]

    ids = tiny.prompt(6)
    expected = Logits()(ids)
    for strict in (False, True):
        with torch.no_grad():
            program = torch.export.export(Logits(), (ids,), strict=strict)
        assert torch.allclose(program.module()(ids), expected)
    with torch.no_grad():
        traced = torch.jit.trace(Logits(), (ids,), check_trace=False)
    assert torch.allclose(traced(ids), expected)
    assert not watch.of(events.HookFailed)


def test_fake_and_meta_tensors_pass(watch: Any, llama: Any) -> None:
    """Models without memory run as they do alone: fake tensors are not measured, and no hook fails."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        fake = tiny.llama(layers=2)
        for given in (None, transformers.DynamicCache(config=fake.config)):
            with torch.no_grad():
                output = fake(input_ids=torch.zeros(1, 5, dtype=torch.long), **{tiny.CACHE: given})
                fake(input_ids=torch.zeros(1, 1, dtype=torch.long), **{tiny.CACHE: tiny.cache_of(output)})
    assert mode is not None
    with torch.device("meta"):
        empty = tiny.llama(layers=2)
        output = empty(input_ids=torch.zeros(1, 5, dtype=torch.long))
    assert output[0].device.type == "meta"
    assert not watch.of(events.HookFailed)
    assert tiny.greedy(llama, tiny.prompt(4), 2).shape == (1, 6)
    assert watch.turns()[-1].kv_bytes == 5 * tiny.row_bytes(llama)


# -- identity and memory ---------------------------------------------------------------------------------


def test_uninstalling_restores_every_object(watching: Any, llama: Any) -> None:
    """Every patched attribute is the object it was; inherited ones are not left on the class; twice is safe."""
    from transformers import cache_utils, modeling_utils
    from transformers.generation import utils

    owners = [modeling_utils.PreTrainedModel, utils.GenerationMixin, cache_utils.Cache, cache_utils.CacheLayerMixin]
    before = [dict(vars(owner)) for owner in owners]
    assert "__call__" not in vars(modeling_utils.PreTrainedModel)
    for _ in range(2):
        watch = watching()
        assert "__call__" in vars(modeling_utils.PreTrainedModel)
        tiny.greedy(llama, tiny.prompt(4), 2)
        watch.close()
        watch.source.uninstall()
        for owner, names in zip(owners, before, strict=True):
            now = dict(vars(owner))
            assert now.keys() == names.keys()
            assert all(now[name] is names[name] for name in names)


def test_nothing_lives_longer_because_it_is_observed(watch: Any) -> None:
    """Cache, tensors, model and exception are freed as soon as the host drops them."""
    model = tiny.llama(layers=2)
    cache = transformers.DynamicCache(config=model.config)
    tiny.greedy(model, tiny.prompt(4), 3, **{tiny.CACHE: cache})
    loop(model, cache, passes=2)
    with pytest.raises(Exception, match=r".+"):
        tiny.greedy(model, tiny.prompt(4), 3, no_such_argument=1)
    refs = [weakref.ref(item) for item in (cache, cache.layers[0], cache.layers[0].keys, cache.layers[1].values)]
    gone = weakref.ref(model)
    del cache
    assert [ref() for ref in refs] == [None] * 4
    watch.events()
    del model
    gc.collect()
    assert gone() is None


def test_thousands_of_calls_leave_nothing_behind(watch: Any) -> None:
    """Between 200 and 2,200 small calls what kvobs's own files hold does not grow by more than 64 KiB."""
    model = tiny.llama(layers=1, hidden_size=8, intermediate_size=8, num_attention_heads=1, num_key_value_heads=1)
    ids = tiny.prompt(2)

    def calls(number: int) -> None:
        for _ in range(number):
            cache = transformers.DynamicCache(config=model.config)
            with torch.no_grad():
                model(input_ids=ids, **{tiny.CACHE: cache})
                model(input_ids=ids[:, :1], **{tiny.CACHE: cache})
            del cache
            watch.bus.clear()
        for _ in range(number // 20):
            tiny.greedy(model, ids, 1)
            watch.bus.clear()
        watch.events()

    ours = tracemalloc.Filter(True, "*/kvobs/*")
    calls(20)
    tracemalloc.start()
    try:
        calls(200)
        gc.collect()
        before = tracemalloc.take_snapshot().filter_traces([ours])
        calls(2_000)
        gc.collect()
        after = tracemalloc.take_snapshot().filter_traces([ours])
    finally:
        tracemalloc.stop()
    grown = sum(row.size_diff for row in after.compare_to(before, "filename"))
    # The turn counts of 2,000 sessions more are kept (up to 10,000 of them, about 200 bytes each).
    assert grown < 2_200 * 400


def test_caches_can_be_copied_and_pickled(watch: Any, llama: Any) -> None:
    """A followed cache copies and pickles to an equal one, whose first pass copies what it holds and writes its own."""
    cache = transformers.DynamicCache(config=llama.config)
    loop(llama, cache, passes=3)
    buffer = io.BytesIO()
    torch.save(cache, buffer)
    buffer.seek(0)
    row, held = tiny.row_bytes(llama), cache.get_seq_length()
    for twin in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache)), torch.load(buffer, weights_only=False)):
        assert vars(twin).keys() == vars(cache).keys()
        assert torch.equal(twin.layers[0].keys, cache.layers[0].keys)
        watch.events()
        with torch.no_grad():
            llama(input_ids=tiny.prompt(1), **{tiny.CACHE: twin})
        (step,) = watch.of(events.Step)
        assert (step.bytes_written, step.bytes_copied) == (row, held * row)


def test_a_fork_goes_on_in_both_processes(watch: Any, llama: Any) -> None:
    """Forked between turns and inside one, parent and child generate the same tokens and count them alike."""
    cache = transformers.DynamicCache(config=llama.config)
    ids = tiny.greedy(llama, tiny.prompt(4), 3, **{tiny.CACHE: cache})
    watch.events()
    reader, writer = os.pipe()
    children: list[int] = []

    class Forker:
        calls = 0

        def put(self, value: Any) -> None:
            self.calls += 1
            if self.calls == 3:
                child = os.fork()
                if child:
                    children.append(child)

        def end(self) -> None:
            pass

    output = tiny.greedy(llama, ids, 4, streamer=Forker(), **{tiny.CACHE: cache})
    turn = watch.turn()
    report = repr((output.tolist(), turn.turn, turn.steps, turn.reallocations, turn.bytes_copied, turn.new_tokens))
    if not children:
        os.write(writer, report.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        told = pipe.read()
    assert os.waitpid(children[0], 0)[1] == 0
    assert told == report
    assert (turn.turn, turn.new_tokens) == (2, 4)
