"""Failures of the standard library, and of what kvobs depends on."""

from __future__ import annotations

import asyncio
import concurrent.futures
import http.client
import json
import os
import queue
import socket
import sqlite3
import ssl
import tomllib
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import msgspec

from tests.failures import answering, case, closed_port


@case("network_unreachable")
def socket_refused(_: Path) -> None:
    socket.create_connection(("127.0.0.1", closed_port()), timeout=5)


@case("network_timeout")
def socket_timed_out(_: Path) -> None:
    with answering(b"", hold=True) as port, socket.create_connection(("127.0.0.1", port), timeout=0.01) as client:
        client.recv(1)


@case("network_unreachable")
def socket_no_such_name(_: Path) -> None:
    socket.getaddrinfo("127.0.0.1", "no-such-service-here")


@case("network_unreachable")
def socket_no_route(_: Path) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.bind(("192.0.2.1", 0))  # an address of documentation, which is not this machine's


@case("upstream")
def socket_broken_pipe(_: Path) -> None:
    one, other = socket.socketpair()
    other.close()
    with one:
        one.sendall(b"x")


@case("upstream")
def socket_reset(_: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        peer, _address = server.accept()
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        peer.close()
        with client:
            client.recv(1)


@case("network_unreachable")
def ssl_peer_is_not_tls(_: Path) -> None:
    with answering(b"HTTP/1.1 400 Bad Request\r\n\r\n") as port, \
            socket.create_connection(("127.0.0.1", port), timeout=5) as client:
        ssl.create_default_context().wrap_socket(client, server_hostname="localhost")


@case("network_unreachable")
def ssl_no_such_certificate(directory: Path) -> None:
    empty = directory / "empty.pem"
    empty.write_text("nothing")
    ssl.create_default_context(cafile=str(empty))


@case("network_unreachable")
def urllib_refused(_: Path) -> None:
    urllib.request.urlopen(f"http://127.0.0.1:{closed_port()}/", timeout=5)


@case("network_timeout")
def urllib_timed_out(_: Path) -> None:
    with answering(b"", hold=True) as port:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=0.01)


@case("upstream")
def urllib_answered_500(_: Path) -> None:
    with answering(b"HTTP/1.1 500 No\r\ncontent-length: 0\r\n\r\n") as port:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5)


@case("upstream")
def http_client_disconnected(_: Path) -> None:
    with answering(b"") as port:
        _get(port)


@case("upstream")
def http_client_bad_status_line(_: Path) -> None:
    with answering(b"hello\r\n\r\n") as port:
        _get(port)


@case("upstream")
def http_client_incomplete_read(_: Path) -> None:
    with answering(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf") as port:
        _get(port)


@case("upstream")
def http_client_used_wrongly(_: Path) -> None:
    http.client.HTTPConnection("127.0.0.1").getresponse()


def _get(port: int) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/")
        return connection.getresponse().read()
    finally:
        connection.close()


@case("network_timeout")
def asyncio_timed_out(_: Path) -> None:
    async def wait() -> None:
        async with asyncio.timeout(0):
            await asyncio.Event().wait()

    asyncio.run(wait())


@case("cancelled")
def asyncio_cancelled(_: Path) -> None:
    async def wait() -> None:
        task = asyncio.ensure_future(asyncio.Event().wait())
        await asyncio.sleep(0)
        task.cancel()
        await task

    asyncio.run(wait())


@case("upstream")
def asyncio_incomplete_read(_: Path) -> None:
    async def read() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(b"ab")
        reader.feed_eof()
        await reader.readexactly(3)

    asyncio.run(read())


@case("unavailable")
def asyncio_queue_full(_: Path) -> None:
    waiting: asyncio.Queue[int] = asyncio.Queue(1)
    waiting.put_nowait(1)
    waiting.put_nowait(2)


@case("network_unreachable")
def asyncio_task_group(_: Path) -> None:
    async def work() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.Event().wait())
            group.create_task(_connect(closed_port()))

    asyncio.run(work())


async def _connect(port: int) -> None:
    await asyncio.open_connection("127.0.0.1", port)


@case("unavailable")
def queue_full(_: Path) -> None:
    waiting: queue.SimpleQueue[int] | queue.Queue[int] = queue.Queue(1)
    waiting.put(1)
    waiting.put_nowait(2)


@case("db_deadlock")
def sqlite_locked(directory: Path) -> None:
    one, other = (sqlite3.connect(directory / "x.db", timeout=0, isolation_level=None) for _ in range(2))
    try:
        one.execute("create table t (x)")
        one.execute("begin exclusive")
        other.execute("insert into t values (1)")
    finally:
        one.close()
        other.close()


@case("db_deadlock")
def sqlite_two_readers_that_write(directory: Path) -> None:
    one, other = (sqlite3.connect(directory / "x.db", timeout=0, isolation_level=None) for _ in range(2))
    try:
        one.execute("create table t (x)")
        for connection in (one, other):
            connection.execute("begin")
            connection.execute("select * from t").fetchall()
        one.execute("insert into t values (1)")
        other.execute("insert into t values (2)")
    finally:
        one.close()
        other.close()


@case("db_deadlock")
def sqlite_shared_cache_table_locked(_: Path) -> None:
    one, other = (sqlite3.connect("file:shared?mode=memory&cache=shared", uri=True, isolation_level=None)
                  for _ in range(2))
    try:
        one.execute("create table t (x)")
        one.execute("begin")
        one.execute("insert into t values (1)")
        other.execute("select * from t").fetchall()
    finally:
        one.close()
        other.close()


@case("validation_failed")
def sqlite_constraint(_: Path) -> None:
    connection = sqlite3.connect(":memory:")
    connection.execute("create table t (x unique)")
    connection.executemany("insert into t values (?)", [(1,), (1,)])


@case("internal")
def sqlite_no_such_table(_: Path) -> None:
    sqlite3.connect(":memory:").execute("select * from nothing")


@case("network_timeout")
def futures_timed_out(_: Path) -> None:
    concurrent.futures.Future[int]().result(timeout=0)


@case("cancelled")
def futures_cancelled(_: Path) -> None:
    future: concurrent.futures.Future[int] = concurrent.futures.Future()
    future.cancel()
    future.result()


@case("unavailable")
def futures_after_shutdown(_: Path) -> None:
    pool = concurrent.futures.ThreadPoolExecutor(1)
    pool.shutdown()
    pool.submit(int)


@case("unavailable")
def futures_broken_pool(_: Path) -> None:
    with concurrent.futures.ThreadPoolExecutor(1, initializer=_raise_key_error) as pool:
        pool.submit(int).result()


def _raise_key_error() -> None:
    raise KeyError("initializer")


@case("upstream")
def futures_carry_what_was_raised(_: Path) -> None:
    with answering(b"") as port, concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(_get, port).result()


@case("validation_failed")
def json_broken(_: Path) -> None:
    json.loads('{"a": ')


@case("validation_failed")
def text_is_not_utf8(_: Path) -> None:
    b"\xff".decode()


@case("validation_failed")
def toml_broken(_: Path) -> None:
    tomllib.loads("a =")


@case("validation_failed")
def msgspec_wrong_type(_: Path) -> None:
    msgspec.json.decode(b'"x"', type=int)


@case("validation_failed")
def msgspec_broken(_: Path) -> None:
    msgspec.json.decode(b"{")


@case("out_of_memory")
def bytes_too_many(_: Path) -> None:
    bytearray(2**62)


@case("out_of_memory")
def mmap_no_memory(_: Path) -> None:
    import mmap

    mmap.mmap(-1, 2**46)


@case("unavailable")
def disk_is_full(_: Path) -> None:
    with open("/dev/full", "wb", buffering=0) as full:
        full.write(b"x")


@case("unavailable")
def socket_would_block(_: Path) -> None:
    one, other = socket.socketpair()
    with one, other:
        one.setblocking(False)
        one.recv(1)


@case("cancelled")
def generator_closed(_: Path) -> None:
    def parts() -> Any:
        try:
            yield 1
        except GeneratorExit as error:
            seen.append(error)
            raise

    seen: list[BaseException] = []
    one = parts()
    next(one)
    one.close()
    raise seen[0]


@case("unavailable")
def process_exits(_: Path) -> None:
    raise SystemExit(1)


@case("kv_capacity")
def engine_has_too_few_blocks(_: Path) -> None:
    raise ValueError("To serve at least one request with the models's max seq len (4096), (0.9 GiB KV cache is needed, "
                     "which is larger than the available KV cache memory (0.2 GiB).")


@case("preempted")
def engine_preempted(_: Path) -> None:
    raise RuntimeError("Request 7 was preempted by a request of a higher priority.")


@case("internal")
def no_such_key(_: Path) -> None:
    {}["x"]


@case("internal")
def no_such_file(directory: Path) -> None:
    (directory / "nothing").read_text()


@case("internal")
def not_allowed_to_write(_: Path) -> None:
    os.close(-1)


@case("internal")
def wrong_type(_: Path) -> None:
    len(5)  # type: ignore[arg-type]
