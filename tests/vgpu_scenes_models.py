"""Scenes: models on the virtual GPU beside the same on the CPU, which is the oracle."""

from __future__ import annotations

import copy
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.contract import tiny

transformers.logging.set_verbosity_error()
FIRST, SECOND = "vgpu:0", "vgpu:1"
NEW = 12
FAMILIES = {
    "llama": tiny.llama, "mistral": tiny.mistral, "t5": tiny.t5, "gemma2": tiny.gemma2, "gemma3": tiny.gemma3,
    "neox": lambda: tiny.build(transformers.GPTNeoXConfig(
        **{name: value for name, value in tiny.COMMON.items() if name not in ("num_key_value_heads", "head_dim")})),
    "mamba": lambda: tiny.build(tiny.config_of("MambaConfig", state_size=4)),
}
EAGER_ALONE = ("gemma2",)  # transformers has no SDPA for its capped logits
MODES: dict[str, dict[str, Any]] = {
    "greedy": {}, "sampled": {"do_sample": True, "temperature": 0.9, "top_k": 20}, "beams": {"num_beams": 3},
    "static": {"cache_implementation": "static"}}


def _model(family: str, dtype: str = "float32", attention: str = "sdpa") -> Any:
    """A model whose matrices are five times as large as drawn, so that its choices depend on its input."""
    model = FAMILIES[family]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(5)
    if family != "mamba":
        model.set_attn_implementation(attention)
    return model.to(getattr(torch, dtype))


def _padded(rows: int = 2, length: int = 11) -> dict[str, Any]:
    """Every row but the first begins with padding."""
    ids, mask = tiny.prompt(length, rows), torch.ones(rows, length, dtype=torch.int64)
    for row in range(1, rows):
        ids[row, : 2 * row] = mask[row, : 2 * row] = 0
    return {"input_ids": ids, "attention_mask": mask}


def _on(given: dict[str, Any], device: str) -> dict[str, Any]:
    return {name: tensor.to(device) for name, tensor in given.items()}


def _generated(model: Any, given: dict[str, Any], new: int = NEW, **more: Any) -> Any:
    torch.manual_seed(3)
    return model.generate(**given, max_new_tokens=new, **{"do_sample": False} | more).cpu()


def _compared(model: Any, other: Any, given: dict[str, Any], new: int = NEW) -> dict[str, Any]:
    """Greedy decoding on both: the largest difference of logits, and tokens that differ beyond what it explains.

    Rows are compared up to their first different token, which is explained where the CPU's best two logits lie no
    further apart than the largest difference.
    """
    told = [{"sequences": out.sequences.cpu(), "logits": torch.stack([step.float().cpu() for step in out.logits], 1)}
            for out in (each.generate(**_on(given, str(each.device)), max_new_tokens=new, do_sample=False,
                                      output_logits=True, return_dict_in_generate=True) for each in (model, other))]
    cpu, vgpu = told
    largest, unexplained, differ = 0.0, 0, 0
    picks = [each["sequences"][:, -new:] for each in told]
    for row in range(picks[0].shape[0]):
        apart = (picks[0][row] != picks[1][row]).nonzero()
        end = int(apart[0]) if len(apart) else new - 1
        largest = max(largest, float((cpu["logits"][row, : end + 1] - vgpu["logits"][row, : end + 1]).abs().max()))
        if len(apart):
            differ += 1
            best = cpu["logits"][row, end].topk(2).values
            unexplained += float(best[0] - best[1]) > largest
    return {"largest": largest, "differ": differ, "unexplained": unexplained,
            "distinct": int(torch.unique(picks[0]).numel())}


def single_precision() -> dict[str, Any]:
    """Every family: greedy with each attention, and with one of them the other ways; which sequences are the CPU's."""
    seen: dict[str, Any] = {}
    given = _padded()
    for family in FAMILIES:
        first, *second = ("eager",) if family in EAGER_ALONE else ("sdpa",) if family == "mamba" else ("sdpa", "eager")
        for attention in (first, *second):
            model = _model(family, attention=attention)
            other = copy.deepcopy(model).to(FIRST)
            for mode, settings in MODES.items():
                if (mode != "static" or family != "mamba") and (mode == "greedy" or attention == first):
                    seen[f"{family} {attention} {mode}"] = torch.equal(
                        _generated(model, given, **settings), _generated(other, _on(given, FIRST), **settings))
    return seen


def half_precision() -> dict[str, Any]:
    """Every family in bfloat16 and float16: how greedy decoding differs."""
    seen: dict[str, Any] = {}
    for dtype in ("bfloat16", "float16"):
        for family in FAMILIES:
            if family != "mamba" or dtype == "bfloat16":  # in float16 a random one overflows on the CPU
                model = _model(family, dtype, "eager" if family in EAGER_ALONE else "sdpa")
                seen[f"{family} {dtype}"] = _compared(model, copy.deepcopy(model).to(FIRST), _padded())
    return seen


def instrumented() -> dict[str, Any]:
    """Every family with source transformers installed: the CPU's tokens without it, and the turns that it saw."""
    from opentelemetry.trace import NoOpTracer

    from kvobs import model as events
    from tests.contract.conftest import Watch

    seen: dict[str, Any] = {}
    for family in FAMILIES:
        model = _model(family, attention="eager" if family in EAGER_ALONE else "sdpa")
        expected = _generated(model, _padded())
        other = model.to(FIRST)
        silent = NoOpTracer()
        watch = Watch(lambda tracer=silent: tracer)
        try:
            same = torch.equal(expected, _generated(other, _on(_padded(), FIRST)))
            turns = watch.of(events.Turn, events.HookFailed)
        finally:
            watch.close()
        seen[family] = [same, [type(turn).__name__ for turn in turns], [turn.origin.device for turn in turns]]
    return seen


def smollm2() -> dict[str, Any]:
    """SmolLM2 in float32, observed by all of kvobs and not, and in bfloat16."""
    import kvobs
    from kvobs.lab.demo._cache import NAME, models_directory

    directory = models_directory() / NAME
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    given = dict(tokenizer("The memory of a computer is", return_tensors="pt"))
    seen: dict[str, Any] = {}
    for dtype in ("float32", "bfloat16"):
        kind = getattr(torch, dtype)
        model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=kind)
        other = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=kind, device_map=FIRST)
        seen[dtype] = _compared(model, other, given, 32)
        if dtype == "float32":
            expected = _generated(model, given, 32)
            with kvobs.instrument(store=None, prometheus=None) as handle:
                seen["observed"] = [handle.active, torch.equal(expected, _generated(other, _on(given, FIRST), 32))]
    return seen


def other_ways() -> dict[str, Any]:
    """Assisted decoding, look-up, several sequences of beams, and threads that generate at the same time."""
    model, helper = _model("llama"), _model("llama", attention="eager")
    other, other_helper = copy.deepcopy(model).to(FIRST), copy.deepcopy(helper).to(FIRST)
    one, both = {"input_ids": tiny.prompt(7)}, _padded()
    seen = {"assisted": torch.equal(_generated(model, one, assistant_model=helper),
                                    _generated(other, _on(one, FIRST), assistant_model=other_helper))}
    for name, given, more in (("look-up", one, {"prompt_lookup_num_tokens": 3}),
                              ("sequences", both, {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.7})):
        seen[name] = torch.equal(_generated(model, given, **more), _generated(other, _on(given, FIRST), **more))
    models = [other, copy.deepcopy(model).to(SECOND)]
    prompts = [{"input_ids": tiny.prompt(5, seed=seed)} for seed in range(4)]
    expected = [_generated(model, given) for given in prompts]
    found: list[Any] = [None] * len(prompts)

    def work(number: int) -> None:
        own = models[number % 2]
        found[number] = own.generate(**_on(prompts[number], str(own.device)), max_new_tokens=NEW, do_sample=False).cpu()

    running = [threading.Thread(target=work, args=(number,)) for number in range(len(prompts))]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    seen["threads"] = all(torch.equal(one, two) for one, two in zip(expected, found, strict=True))
    return seen


def _halves(layers: int) -> dict[str, str]:
    return {"model.embed_tokens": FIRST, "model.rotary_emb": FIRST, "model.norm": SECOND, "lm_head": SECOND,
            **{f"model.layers.{index}": SECOND if index >= layers - 1 else FIRST for index in range(layers)}}


def split() -> dict[str, Any]:
    """A model whose last layer lies on the second device."""
    from accelerate import dispatch_model

    model, given = _model("llama"), _padded()
    other = dispatch_model(copy.deepcopy(model), device_map=_halves(3))
    before = torch.vgpu.copies().get((FIRST, SECOND), (0, 0))[0]
    seen: dict[str, Any] = {mode: torch.equal(_generated(model, given, **MODES[mode]),
                                              _generated(other, _on(given, FIRST), **MODES[mode])) for mode in MODES}
    out = other.generate(**_on(given, FIRST), max_new_tokens=2, do_sample=False, return_dict_in_generate=True)
    seen["layers"] = [str(layer.keys.device) for layer in tiny.cache_of(out).layers]
    seen["copied"] = torch.vgpu.copies()[FIRST, SECOND][0] > before
    return seen


def loaded() -> dict[str, Any]:
    """A model saved and loaded as safetensors, onto one device, onto two, and by hand."""
    from safetensors.torch import load_file

    model, given = _model("llama"), _padded()
    expected, kind = _generated(model, given), type(model)
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        whole = kind.from_pretrained(directory, device_map=FIRST, dtype=torch.float32)
        halves = kind.from_pretrained(directory, device_map=_halves(3), dtype=torch.float32)
        file = Path(directory) / "model.safetensors"
        states = {name: tensor.to(SECOND) for name, tensor in load_file(file).items()}
        by_hand = kind(model.config).to(FIRST)
        by_hand.load_state_dict(states, strict=False)
        second = Path(directory) / "again"
        whole.save_pretrained(second)
        again, saved = load_file(second / "model.safetensors"), load_file(file)
    made = (whole, halves, by_hand)
    return {"tokens": [torch.equal(expected, _generated(other, _on(given, FIRST))) for other in made],
            "halves": str(halves.model.layers[2].mlp.up_proj.weight.device),
            "again": all(torch.equal(again[name], saved[name]) for name in saved)}
