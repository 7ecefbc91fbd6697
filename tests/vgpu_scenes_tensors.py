"""Scenes: tensors, storages, modules, generators and threads on the virtual GPU beside the same on the CPU."""

from __future__ import annotations

import copy
import io
import os
import pickle
import threading
from collections.abc import Callable
from typing import Any

import torch

VGPU = "vgpu:0"


def _told(call: Callable[[], Any]) -> str:
    """The error of a call, in its first line; empty where it raises none."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return ""


def _both(program: Callable[[str], list[Any]]) -> bool:
    """Does a program leave the same tensors on both devices?"""
    return all(torch.equal(one, other.cpu()) for one, other in zip(program("cpu"), program(VGPU), strict=True))


def views() -> dict[str, bool]:
    whole = torch.arange(24.0, device=VGPU).view(4, 6)
    made = {"slice": whole[1:3, ::2], "transpose": whole.t(), "expand": whole.unsqueeze(0).expand(3, 4, 6),
            "narrow": whole.narrow(0, 1, 2), "unfold": whole.unfold(0, 2, 1), "other type": whole.view(torch.int32),
            "complex": torch.view_as_complex(whole.view(4, 3, 2)), "detach": whole.detach(),
            "diagonal": whole.diagonal(), "real": torch.view_as_complex(whole.view(4, 3, 2)).imag,
            "select": whole[2], "split": whole.split(2)[1]}
    start = whole.untyped_storage().data_ptr()
    found = {name: view.untyped_storage().data_ptr() == start for name, view in made.items()}

    def program(device: str) -> list[Any]:
        tensor = torch.arange(24.0, device=device).view(4, 6)
        tensor[1:3, ::2].mul_(10)
        tensor.t()[2].zero_()
        tensor.diagonal().add_(0.5)
        tensor.view(-1)[5:9] = tensor[3, 2:]
        torch.view_as_complex(tensor.view(4, 3, 2)).conj().imag.neg_()
        return [tensor]

    return {**found, "written through": _both(program)}


def resizing() -> dict[str, Any]:
    def program(device: str) -> list[Any]:
        ones, empty = torch.ones(3, 4, device=device), torch.empty(0, device=device)
        torch.add(ones, 1, out=empty)
        grown = torch.zeros(2, device=device).resize_(0)
        torch.mm(ones, ones.t(), out=grown)
        shrunk = torch.zeros(50, device=device).resize_(0)
        torch.sum(ones, 0, out=shrunk)
        values, places = torch.empty(0, device=device), torch.empty(0, dtype=torch.int64, device=device)
        torch.topk(torch.arange(9.0, device=device), 3, out=(values, places))
        other, strided = torch.empty(0, device=device), torch.empty(0, device=device)
        source = torch.arange(6.0, device=device)
        other.set_(source)
        strided.set_(source.untyped_storage(), 1, (2,), (2,))
        source.resize_(2, 3)
        return [empty, grown, shrunk, values, places, other, strided, source, source.resize_(1, 2)]

    tensor = torch.arange(6.0, device=VGPU)
    shared = torch.empty(0, device=VGPU).set_(tensor)
    before = torch.vgpu.memory_stats()["requested_bytes.all.current"]
    tensor.untyped_storage().resize_(4096)
    after = torch.vgpu.memory_stats()["requested_bytes.all.current"]
    return {"same": _both(program), "shares": shared.data_ptr() == tensor.data_ptr(), "kept": tensor.tolist(),
            "grew": after - before, "foreign": _told(lambda: torch.empty(0, device=VGPU).set_(torch.ones(3)))}


def kinds() -> dict[str, Any]:
    types = (torch.bool, torch.int8, torch.uint8, torch.int16, torch.int64, torch.uint32, torch.float64, torch.bfloat16,
             torch.float16, torch.float8_e4m3fn, torch.complex64, torch.complex128)
    found = {str(kind): _both(lambda device, kind=kind: [
        torch.tensor([0, 1, 2, -3]).to(kind).to(device), torch.tensor([0, 1, 2], device=device).to(kind)])
        for kind in types}
    number = torch.tensor(3.5, device=VGPU)
    return {**found, "scalars": [number.item(), int(number), bool(number > 1), number.dim(), f"{number:.1f}",
                                 [7, 8, 9][torch.tensor(1, device=VGPU)]],
            "host scalar": (torch.ones(2, device=VGPU) * torch.tensor(2.0)).tolist(),
            "empty": [torch.empty(0, 3, device=VGPU).sum(0).tolist(), torch.empty(0, device=VGPU).data_ptr()],
            "printed": repr(torch.arange(3, device="vgpu:1")),
            "numpy": _told(lambda: torch.ones(1, device=VGPU).numpy())}


def other_devices() -> dict[str, str]:
    near, far, host = torch.ones(3, 3, device=VGPU), torch.ones(3, 3, device="vgpu:1"), torch.ones(3, 3)
    index = torch.tensor([0, 1])
    attention = torch.nn.functional.scaled_dot_product_attention
    return {
        "host": _told(lambda: near + host), "host first": _told(lambda: host @ near),
        "device": _told(lambda: near + far), "list": _told(lambda: torch.cat([near, far])),
        "out": _told(lambda: torch.add(near, 1, out=host)),
        "module": _told(lambda: torch.nn.Linear(3, 3)(near)), "gather": _told(lambda: near.gather(0, index[None])),
        "embedding": _told(lambda: torch.nn.functional.embedding(index, near)),
        "attention": _told(lambda: attention(near[None, None], host[None, None], host[None, None])),
        "index of the host": _told(lambda: near[index]), "index of another": _told(lambda: near[index.to("vgpu:1")]),
        "indexed host": _told(lambda: host.index_put_((index.to(VGPU),), torch.tensor(1.0))),
        "overlap": _told(lambda: torch.zeros(3, device=VGPU).expand(4, 3).add_(1)),
        "no such device": _told(lambda: torch.ones(1, device="vgpu:7"))}


def generators() -> dict[str, Any]:
    own, host = torch.Generator(device=VGPU).manual_seed(5), torch.Generator().manual_seed(5)
    same = torch.equal(torch.randn(4, generator=own, device=VGPU).cpu(), torch.randn(4, generator=host))
    state = own.get_state()
    first = torch.rand(3, generator=own, device=VGPU)
    own.set_state(state)
    again = torch.equal(first, torch.rand(3, generator=own, device=VGPU))

    def seeded(device: str) -> list[Any]:
        torch.manual_seed(3)
        ones = torch.ones(9, device=device)
        return [torch.randn(5, device=device), torch.randperm(9, device=device), torch.bernoulli(torch.rand_like(ones)),
                torch.multinomial(ones, 4), torch.nn.functional.dropout(ones)]

    torch.manual_seed(4)
    with torch.random.fork_rng(devices=[0], device_type="vgpu"):
        torch.rand(7, device=VGPU)
    after = torch.rand(3, device=VGPU)
    torch.manual_seed(4)
    forked = torch.equal(after, torch.rand(3, device=VGPU))
    return {"same": same, "again": again, "default": _both(seeded), "forked": forked,
            "of the host": _told(lambda: torch.randn(4, generator=host, device=VGPU)),
            "for the host": _told(lambda: torch.empty(4).normal_(generator=own))}


def _module() -> Any:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    return torch.nn.Sequential(torch.nn.Embedding(10, 8), layer, torch.nn.Linear(8, 10))


def serialised() -> dict[str, Any]:
    tensor = torch.randn(3, 4, device="vgpu:1")[:, 1:]
    file = io.BytesIO()
    torch.save({"tensor": tensor, "part": tensor[1:]}, file)
    loaded = {place: torch.load(io.BytesIO(file.getvalue()), map_location=place) for place in (None, "cpu", VGPU)}
    module = _module().to("vgpu:1")
    states = io.BytesIO()
    torch.save(module.state_dict(), states)
    made = {"pickle": pickle.loads(pickle.dumps(module)), "deepcopy": copy.deepcopy(module),
            "states": _module().to(VGPU)}
    made["states"].load_state_dict(torch.load(io.BytesIO(states.getvalue())))
    storage = copy.deepcopy(tensor.untyped_storage())
    return {"tensors": [torch.equal(each["tensor"].cpu(), tensor.cpu()) for each in loaded.values()],
            "devices": [str(each["tensor"].device) for each in loaded.values()],
            "shared": all(each["tensor"].untyped_storage().data_ptr() == each["part"].untyped_storage().data_ptr()
                          for each in loaded.values()),
            "copies": [torch.equal(other, tensor) and other.device == tensor.device
                       for other in (pickle.loads(pickle.dumps(tensor)), copy.deepcopy(tensor))],
            "storage": [str(storage.device), storage.tolist() == tensor.untyped_storage().tolist()],
            "modules": {name: [str(next(other.parameters()).device), all(
                torch.equal(one.cpu(), two.cpu()) for one, two in zip(
                    other.state_dict().values(), module.state_dict().values(), strict=True))]
                        for name, other in made.items()}}


def training() -> dict[str, Any]:
    tokens = torch.randint(0, 10, (3, 5), generator=torch.Generator().manual_seed(2))
    ends: dict[str, Any] = {}
    for mixed in (False, True):
        for device in ("cpu", VGPU):
            module, given = _module().to(device), tokens.to(device)
            optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
            for _ in range(3):
                optimizer.zero_grad()
                with torch.autocast(device.split(":")[0], torch.bfloat16, enabled=mixed and device != "cpu"):
                    out = module(given)
                torch.nn.functional.cross_entropy(out.flatten(0, 1).float(), given.flatten()).backward()
                torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
                optimizer.step()
            parameters = list(module.parameters())
            ends[f"{device} {mixed}"] = [*(parameter.grad for parameter in parameters), *parameters]
    plain = zip(ends["cpu False"], ends["vgpu:0 False"], strict=True)
    x = torch.ones(3, device=VGPU, requires_grad=True)
    (first,) = torch.autograd.grad((x ** 3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    half = len(ends["cpu False"]) // 2
    mixed_grads = zip(ends["cpu False"][:half], ends["vgpu:0 True"][:half], strict=True)
    return {"same": all(torch.equal(one, other.cpu()) for one, other in plain), "second": second.tolist(),
            "mixed": max(float((one - other.cpu()).abs().max()) for one, other in mixed_grads)}


def autocast() -> dict[str, Any]:
    module, given = torch.nn.Linear(3, 4), torch.randn(2, 3)
    with torch.autocast("cpu", torch.bfloat16):
        expected = module(given)
    other = copy.deepcopy(module).to(VGPU)
    with torch.autocast("vgpu", torch.bfloat16):
        found = other(given.to(VGPU))
        types = [found.dtype, torch.softmax(found, -1).dtype, (found + 1).dtype, other.weight.dtype]
    return {"same": torch.equal(expected, found.cpu()), "types": [str(kind) for kind in types]}


def modes() -> dict[str, Any]:
    with torch.inference_mode():
        inferred = torch.ones(3, device=VGPU) + 1
    with torch.no_grad():
        silent = torch.ones(3, device=VGPU, requires_grad=True) * 2
    with torch.device(VGPU):
        made = [torch.randn(3).device, torch.nn.Linear(2, 2).weight.device]
    with torch.vgpu.device(1):
        made.append(torch.empty(1, device="vgpu").device)
    vmapped = torch.func.vmap(torch.sin)(torch.ones(3, device=VGPU))
    return {"inference": inferred.is_inference(), "gradient": silent.requires_grad, "made": [str(one) for one in made],
            "vmap": torch.equal(vmapped.cpu(), torch.sin(torch.ones(3))),
            "eager": torch.compile(lambda x: x.sin() + 1, backend="eager")(torch.ones(3, device=VGPU)).tolist(),
            "compiled": _told(lambda: torch.compile(lambda x: x.sin() + 1)(torch.ones(3, device=VGPU)))}


def refusals() -> dict[str, str]:
    ones = torch.ones(3, device=VGPU)
    return {"sparse": _told(ones.to_sparse), "nested": _told(lambda: torch.nested.nested_tensor([ones]) + 1),
            "quantized": _told(lambda: torch.quantize_per_tensor(ones, 0.1, 0, torch.qint8)),
            "lstm": _told(lambda: torch.nn.LSTM(3, 4).to(VGPU)(ones[None]))}


def threads() -> list[int]:
    wrong: list[int] = []

    def work(number: int) -> None:
        with torch.inference_mode():
            for step in range(100):
                tensor = torch.full((64,), float(number), device=f"vgpu:{number % 2}") * 2 + step
                if tensor.sum().item() != 64 * (2 * number + step):
                    wrong.append(number)

    running = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    return wrong


def processes() -> dict[str, Any]:
    tensor, before = torch.ones(100, device=VGPU), torch.vgpu.memory_allocated()
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            tripled = tensor * 3
            os.write(writing, f"{tripled.sum().item()} {torch.vgpu.memory_allocated() - before}".encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    dataset = torch.utils.data.TensorDataset(torch.arange(20.0))
    batches = torch.utils.data.DataLoader(dataset, batch_size=4, num_workers=2, multiprocessing_context="fork")
    return {"child": os.read(reading, 100).decode(),
            "parent": [tensor.sum().item(), torch.vgpu.memory_allocated() - before],
            "loaded": sum(batch.to(VGPU).sum().item() for (batch,) in batches)}
