"""Failures of libraries that may be installed."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.failures import Missing, answering, case, closed_port


@case("validation_failed", "pydantic")
def pydantic_wrong_type(pydantic: Any) -> None:
    pydantic.TypeAdapter(int).validate_python("x")


@case("validation_failed", "jsonschema")
def jsonschema_wrong_type(jsonschema: Any) -> None:
    jsonschema.validate("x", {"type": "integer"})


@case("validation_failed", "yaml")
def yaml_broken(yaml: Any) -> None:
    yaml.safe_load("a: [")


@case("network_unreachable", "requests")
def requests_refused(requests: Any) -> None:
    requests.get(f"http://127.0.0.1:{closed_port()}/", timeout=5)


@case("network_timeout", "requests")
def requests_timed_out(requests: Any) -> None:
    with answering(b"", hold=True) as port:
        requests.get(f"http://127.0.0.1:{port}/", timeout=0.01)


@case("upstream", "requests")
def requests_disconnected(requests: Any) -> None:
    with answering(b"") as port:
        requests.get(f"http://127.0.0.1:{port}/", timeout=5)


@case("upstream", "requests")
def requests_answered_503(requests: Any) -> None:
    with answering(b"HTTP/1.1 503 No\r\ncontent-length: 0\r\n\r\n") as port:
        requests.get(f"http://127.0.0.1:{port}/", timeout=5).raise_for_status()


@case("validation_failed", "requests")
def requests_answered_no_json(requests: Any) -> None:
    with answering(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n{") as port:
        requests.get(f"http://127.0.0.1:{port}/", timeout=5).json()


@case("network_unreachable", "urllib3")
def urllib3_refused(urllib3: Any) -> None:
    urllib3.PoolManager(retries=1).request("GET", f"http://127.0.0.1:{closed_port()}/")


@case("network_timeout", "urllib3")
def urllib3_timed_out(urllib3: Any) -> None:
    with answering(b"", hold=True) as port:
        urllib3.PoolManager(retries=False).request("GET", f"http://127.0.0.1:{port}/", timeout=0.01)


def _httpx(package: Any, port: int, timeout: float = 5) -> Any:
    with package.Client(timeout=timeout, trust_env=False) as client:
        return client.get(f"http://127.0.0.1:{port}/")


@case("network_unreachable", "httpx")
def httpx_refused(httpx: Any) -> None:
    _httpx(httpx, closed_port())


@case("network_timeout", "httpx")
def httpx_timed_out(httpx: Any) -> None:
    with answering(b"", hold=True) as port:
        _httpx(httpx, port, 0.01)


@case("network_unreachable", "httpx2")
def httpx2_refused(httpx2: Any) -> None:
    _httpx(httpx2, closed_port())


@case("network_timeout", "httpx2")
def httpx2_timed_out(httpx2: Any) -> None:
    with answering(b"", hold=True) as port:
        _httpx(httpx2, port, 0.01)


@case("upstream", "httpx2")
def httpx2_disconnected(httpx2: Any) -> None:
    with answering(b"") as port:
        _httpx(httpx2, port)


@case("upstream", "httpx2")
def httpx2_answered_500(httpx2: Any) -> None:
    with answering(b"HTTP/1.1 500 No\r\ncontent-length: 0\r\n\r\n") as port:
        _httpx(httpx2, port).raise_for_status()


@case("upstream", "h11")
def h11_not_http(h11: Any) -> None:
    connection = h11.Connection(h11.CLIENT)
    connection.receive_data(b"hello\r\n\r\n")
    connection.next_event()


@case("upstream", "websockets.sync.client")
def websockets_answered_200(client: Any) -> None:
    with answering(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n") as port:
        client.connect(f"ws://127.0.0.1:{port}/", proxy=None)


@case("network_timeout", "grpc")
def grpc_timed_out(grpc: Any) -> None:
    with answering(b"", hold=True) as port, grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        channel.unary_unary("/x/y")(b"", timeout=0.1, wait_for_ready=True)


@case("network_unreachable", "grpc")
def grpc_refused(grpc: Any) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{closed_port()}") as channel:
        channel.unary_unary("/x/y")(b"", timeout=20)


def _starlette(status: int) -> None:
    try:
        from starlette.exceptions import HTTPException
        from starlette.requests import Request
    except ImportError:
        raise Missing("starlette is not installed.") from None

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    async def run() -> None:
        await Request({"type": "http", "headers": []}, receive).body()

    if status == 499:
        asyncio.run(run())
    raise HTTPException(status)


@case("cancelled", "starlette")
def starlette_disconnected(_: Any) -> None:
    _starlette(499)


@case("validation_failed", "starlette")
def starlette_http_422(_: Any) -> None:
    _starlette(422)


@case("refused", "starlette")
def starlette_http_404(_: Any) -> None:
    _starlette(404)


@case("unavailable", "starlette")
def starlette_http_503(_: Any) -> None:
    _starlette(503)


@case("internal", "starlette")
def starlette_http_500(_: Any) -> None:
    _starlette(500)


@case("out_of_memory", "torch")
def torch_cpu_out_of_memory(torch: Any) -> None:
    torch.empty(2**50, dtype=torch.uint8)


@case("internal", "torch")
def torch_shapes(torch: Any) -> None:
    torch.ones(2) @ torch.ones(3)


@case("out_of_memory", "numpy")
def numpy_out_of_memory(numpy: Any) -> None:
    numpy.empty(2**50, dtype=numpy.uint8)


@case("upstream", "huggingface_hub")
def huggingface_hub_answered_500(hub: Any) -> None:
    with answering(b"HTTP/1.1 500 No\r\ncontent-length: 0\r\n\r\n") as port:
        hub.HfApi(endpoint=f"http://127.0.0.1:{port}").model_info("a/b", timeout=5)


@case("network_timeout", "anyio")
def anyio_timed_out(anyio: Any) -> None:
    async def wait() -> None:
        with anyio.fail_after(0):
            await anyio.sleep_forever()

    anyio.run(wait)


@case("validation_failed", "python_multipart.multipart")
def multipart_broken(multipart: Any) -> None:
    multipart.MultipartParser(b"b").write(b"nothing of that")
