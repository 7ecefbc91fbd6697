"""kvobs leaves no trace in its host: compilation, tracing, identity, memory, copies, forks."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import sys
import tracemalloc
import weakref
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed; pip install 'kvobs[torch]' brings it.")
transformers = pytest.importorskip("transformers", reason="pip install 'kvobs[torch]' brings transformers.")

from kvobs import model as events
from tests.contract import tiny

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny.llama()


@pytest.fixture(scope="module", autouse=True)
def warm_dynamo() -> None:
    """Dynamo's first compilation patches nn.Module for good: not within a test, where it would look like ours."""
    torch.compile(torch.nn.Linear(1, 1), backend="eager")(torch.ones(1, 1))


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# -- compilation ----------------------------------------------------------------------------------------


GRAPHS: list[Any] = []


def counting(graph: Any, inputs: Any) -> Any:
    """A backend that runs graphs as they are and counts them (a function, since configurations are deep-copied)."""
    GRAPHS.append(len(graph.graph.nodes))
    return graph


def compiled(active: bool, watch: Any, run: Any) -> tuple[list[int], Any]:
    """(sizes of the graphs that were compiled, result) of ``run()``."""
    torch._dynamo.reset()
    GRAPHS.clear()
    watch.bus.active = active
    try:
        result = run()
    finally:
        watch.bus.active = True
    return list(GRAPHS), result


def loop(model: Any, cache: Any, passes: int = 5) -> Any:
    ids, found = tiny.prompt(6), []
    with torch.no_grad():
        for _ in range(passes):
            logits = model(input_ids=ids, **{tiny.CACHE: cache})[0]
            ids = logits[:, -1:].argmax(-1)
            found.append(ids)
    return torch.cat(found, dim=1)


@pytest.mark.parametrize(("kind", "cache"), [
    ("module", "DynamicCache"), ("module", "StaticCache"), ("forward", "StaticCache")])
def test_a_compiled_model_compiles_as_often_and_without_breaks(watch: Any, kind: str, cache: str) -> None:
    """``torch.compile(model, fullgraph=True)`` and a compiled ``forward``: same tokens, the very same graphs.

    A wholly compiled model is not followed; a model whose ``forward`` alone is compiled is, exactly.
    """

    def run() -> Any:
        model = tiny.llama(layers=1)
        more = {"max_cache_len": 32} if cache == "StaticCache" else {}
        store = getattr(transformers, cache)(config=model.config, **more)
        if kind == "module":
            return loop(torch.compile(model, fullgraph=True, backend=counting), store, passes=4)
        model.forward = torch.compile(model.forward, fullgraph=True, backend=counting)
        return loop(model, store, passes=4)

    plain, expected = compiled(False, watch, run)
    observed, result = compiled(True, watch, run)
    assert torch.equal(result, expected)
    assert observed == plain != []
    seen = watch.events()
    assert not [e for e in seen if isinstance(e, events.HookFailed)]
    row = 2 * 2 * 8 * 4
    held = [e.kv_bytes for e in seen if isinstance(e, events.Step)]
    assert held == ([n * row for n in range(6, 10)] if kind == "forward" else [])


def test_the_compiled_decode_of_generate_is_followed(watch: Any) -> None:
    """Automatic compilation with a static cache: same tokens and graphs, and every compiled step is swept."""

    def run() -> Any:
        config = transformers.CompileConfig(backend=counting, fullgraph=True, mode=None)
        config._compile_all_devices = True
        return tiny.greedy(tiny.llama(layers=1), tiny.prompt(6), 5, cache_implementation="static",
                           compile_config=config)

    plain, expected = compiled(False, watch, run)
    watch.events()
    observed, result = compiled(True, watch, run)
    assert torch.equal(result, expected)
    assert observed == plain != []
    turn = watch.turn()
    row = 2 * 2 * 8 * 4
    assert (turn.steps, turn.kv_bytes, turn.bytes_written, turn.reallocations) == (5, 10 * row, 10 * row, 0)
    assert turn.new_tokens == 5


def test_a_compiled_call_outlives_the_source(watching: Any) -> None:
    """A model compiled while observed runs on after uninstalling, and is observed again by a later source."""
    model = tiny.llama(layers=1)
    config = transformers.CompileConfig(backend=counting, mode=None)
    config._compile_all_devices = True
    more = {"cache_implementation": "static", "compile_config": config}
    first = watching()
    GRAPHS.clear()
    expected = tiny.greedy(model, tiny.prompt(6), 6, **more)
    first.close()
    assert torch.equal(tiny.greedy(model, tiny.prompt(6), 6, **more), expected)
    second = watching()
    assert torch.equal(tiny.greedy(model, tiny.prompt(6), 6, **more), expected)
    assert second.turn().steps == 6
    assert [turn.steps for turn in first.turns()] == [6]
    assert GRAPHS


def test_export_and_tracing_work(watch: Any) -> None:
    """``torch.export`` and ``torch.jit.trace`` give what they give without kvobs, without a hook failing."""

    model = tiny.llama(layers=1)

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

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


def test_fake_tensors_pass(watch: Any, llama: Any) -> None:
    """Fake tensors have no memory to measure: they pass, no hook fails, and real models are followed afterwards."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = tiny.llama(layers=1)
        for given in (None, transformers.DynamicCache(config=fake.config)):
            with torch.no_grad():
                output = fake(input_ids=torch.zeros(1, 5, dtype=torch.long), **{tiny.CACHE: given})
                fake(input_ids=torch.zeros(1, 1, dtype=torch.long), **{tiny.CACHE: tiny.cache_of(output)})
    assert not watch.of(events.HookFailed)
    assert tiny.greedy(llama, tiny.prompt(4), 2).shape == (1, 6)
    assert watch.turns()[-1].kv_bytes == 5 * tiny.row_bytes(llama)


def test_models_on_the_meta_device_pass(watch: Any) -> None:
    """A model without weights runs as it does alone."""
    outputs = []
    for active in (False, True):
        watch.bus.active = active
        with torch.device("meta"):
            empty = tiny.llama(layers=1)
            try:
                outputs.append(empty(input_ids=torch.zeros(1, 5, dtype=torch.long))[0])
            except RuntimeError as error:
                pytest.skip(f"transformers {transformers.__version__} does not run on the meta device: {error}")
    assert outputs[0].shape == outputs[1].shape
    assert outputs[1].device.type == "meta"
    assert not watch.of(events.HookFailed)


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


class Toy(transformers.PreTrainedModel):
    """A model that does nothing but feed its cache, so that thousands of calls take a moment."""

    config_class = transformers.LlamaConfig

    def forward(self, input_ids: Any, past_key_values: Any = None) -> tuple[Any, ...]:
        states = torch.zeros(1, 1, input_ids.shape[1], 2)
        past_key_values.update(states, states, 0)
        return (states, past_key_values)


def test_thousands_of_calls_leave_nothing_behind(watch: Any) -> None:
    """2,000 more caches, turns and sessions add to kvobs's memory only their turn counts (the last 10,000 are kept)."""
    model, real, ids = Toy(transformers.LlamaConfig(num_hidden_layers=1)), tiny.llama(layers=1), tiny.prompt(2)
    size = 0

    def calls(number: int) -> None:
        nonlocal size
        for _ in range(number):
            cache = transformers.DynamicCache()
            model(input_ids=ids, past_key_values=cache)
            model(input_ids=ids[:, :1], past_key_values=cache)
            del cache
            watch.events()
        for _ in range(number // 20):
            tiny.greedy(real, ids, 1)
            watch.events()
        numbers = watch.source._hooks._turns._numbers._turns
        size = sys.getsizeof(numbers) + sum(sys.getsizeof(id) + 112 for id in numbers)

    ours = tracemalloc.Filter(True, "*/kvobs/*")
    calls(20)
    tracemalloc.start()
    try:
        calls(200)
        gc.collect()
        first, before = size, tracemalloc.take_snapshot().filter_traces([ours])
        calls(2_000)
        gc.collect()
        after = tracemalloc.take_snapshot().filter_traces([ours])
    finally:
        tracemalloc.stop()
    grown = sum(row.size_diff for row in after.compare_to(before, "filename"))
    assert grown < size - first + 64 * 1024


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
    """Forked inside a turn, both processes generate the same tokens; the turn is told by the parent alone."""
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

    parent = os.getpid()
    try:
        output = tiny.greedy(llama, ids, 4, streamer=Forker(), **{tiny.CACHE: cache})
        turns = watch.turns()
    finally:
        if os.getpid() != parent:
            os.write(writer, repr((output.tolist(), turns)).encode())
            os._exit(0)
    (turn,) = turns
    os.close(writer)
    with os.fdopen(reader) as pipe:
        told = pipe.read()
    assert os.waitpid(children[0], 0)[1] == 0
    assert told == repr((output.tolist(), []))
    assert (turn.turn, turn.new_tokens) == (2, 4)
