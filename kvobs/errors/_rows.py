"""The built-in table. Types are texts, so that nothing is imported for them; the first row that fits decides."""

from __future__ import annotations

import errno

from kvobs.config import ErrorRow
from kvobs.errors._classes import (
    BY_STATUS,
    CANCELLED,
    DB_DEADLOCK,
    INTERNAL,
    KV_CAPACITY,
    NETWORK_TIMEOUT,
    NETWORK_UNREACHABLE,
    OUT_OF_MEMORY,
    PREEMPTED,
    REFUSED,
    UNAVAILABLE,
    UPSTREAM,
    VALIDATION_FAILED,
)


def _row(error_class: str, *types: str, message: str = "", codes: tuple[int | str, ...] = (),
         vague: bool = False) -> ErrorRow:
    return ErrorRow(error_class=error_class, types=types, message=message, codes=codes, vague=vague)


def _httpx(*names: str) -> tuple[str, ...]:
    return tuple(f"{package}.{name}" for package in ("httpx", "httpx2", "httpcore", "httpcore2") for name in names)


_ANSWERS = ("starlette.exceptions.HTTPException", "werkzeug.exceptions.HTTPException", "aiohttp.web_exceptions."
            "HTTPException", "django.http.response.Http404")
_STATUSES = tuple(_row(found, *_ANSWERS, codes=tuple(status for status, name in BY_STATUS.items() if name == found))
                  for found in sorted(set(BY_STATUS.values())))
_DATABASES = ("sqlite3.Error", "psycopg.Error", "psycopg2.Error", "pymysql.err.Error", "MySQLdb.Error",
              "mysql.connector.errors.Error", "asyncpg.exceptions._base.PostgresError", "oracledb.exceptions.Error",
              "sqlalchemy.exc.DBAPIError", "django.db.utils.Error", "duckdb.Error", "pyodbc.Error")

ROWS: tuple[ErrorRow, ...] = (
    # Somebody stopped it.
    _row(CANCELLED, "asyncio.exceptions.CancelledError", "concurrent.futures._base.CancelledError",
         "trio.Cancelled", "builtins.GeneratorExit", "builtins.KeyboardInterrupt",
         "starlette.requests.ClientDisconnect", "uvicorn.protocols.utils.ClientDisconnected",
         "daphne.http_protocol.RequestAborted", "django.core.exceptions.RequestAborted", "grpc.FutureCancelledError"),
    _row(CANCELLED, "grpc.RpcError", message=r"StatusCode\.CANCELLED"),
    # Memory.
    _row(KV_CAPACITY, message=r"larger than the available KV cache memory|No available memory for the cache blocks"
                              r"|(prefill|decode) out of memory\. try to lower|KV cache (pool )?is full"
                              r"|not enough (free )?(KV )?cache blocks"),
    _row(OUT_OF_MEMORY, "builtins.MemoryError", "torch.OutOfMemoryError", "torch.cuda.OutOfMemoryError",
         "numpy._core._exceptions._ArrayMemoryError", "cupy.cuda.memory.OutOfMemoryError",
         "pyarrow.lib.ArrowMemoryError"),
    _row(OUT_OF_MEMORY, "builtins.OSError", codes=(errno.ENOMEM,)),
    _row(OUT_OF_MEMORY, "builtins.RuntimeError", message=r"out of memory|can't allocate memory|RESOURCE_EXHAUSTED"
                                                         r"|(CUBLAS|CUDNN)_STATUS_(ALLOC_FAILED|NOT_INITIALIZED)"
                                                         r"|cannot allocate memory"),
    _row(PREEMPTED, message=r"\b(was|been|got|is) (preempted|retracted)\b|^(request )?preempted\b"),
    _row(PREEMPTED, "ray.exceptions.NodeDiedError", "ray.exceptions.NodePreemptedError"),
    # Databases.
    _row(DB_DEADLOCK, "psycopg.errors.DeadlockDetected", "psycopg2.errors.DeadlockDetected",
         "psycopg.errors.LockNotAvailable", "psycopg2.errors.LockNotAvailable",
         "asyncpg.exceptions.DeadlockDetectedError", "asyncpg.exceptions.LockNotAvailableError"),
    _row(DB_DEADLOCK, *_DATABASES, codes=("40P01", "55P03", 1205, 1213)),
    _row(DB_DEADLOCK, *_DATABASES, message=r"deadlock|database (table )?(\w+ )?is locked|lock wait timeout|"
                                           r"ORA-00060|could not (obtain|set) lock"),
    _row(VALIDATION_FAILED, "sqlite3.IntegrityError", "psycopg.IntegrityError", "psycopg2.IntegrityError",
         "sqlalchemy.exc.IntegrityError", "django.db.utils.IntegrityError"),
    # What was given.
    _row(VALIDATION_FAILED, "pydantic_core._pydantic_core.ValidationError", "pydantic.error_wrappers.ValidationError",
         "fastapi.exceptions.ValidationException", "msgspec.ValidationError", "msgspec.DecodeError",
         "json.decoder.JSONDecodeError", "builtins.UnicodeDecodeError", "marshmallow.exceptions.ValidationError",
         "jsonschema.exceptions.ValidationError", "django.core.exceptions.ValidationError",
         "vllm.exceptions.VLLMValidationError", "orjson.JSONDecodeError", "tomllib.TOMLDecodeError",
         "yaml.YAMLError", "yaml.error.YAMLError", "xml.etree.ElementTree.ParseError", "binascii.Error",
         "starlette.formparsers.MultiPartException", "python_multipart.exceptions.FormParserError"),
    _row(VALIDATION_FAILED, "grpc.RpcError", message=r"StatusCode\.(INVALID_ARGUMENT|OUT_OF_RANGE)"),
    *_STATUSES,
    _row(REFUSED, *_ANSWERS, codes=tuple(status for status in range(400, 500) if status not in BY_STATUS)),
    _row(INTERNAL, *_ANSWERS),
    # Time limits, but for an error of urllib3 that only descends from one.
    _row(NETWORK_UNREACHABLE, "urllib3.exceptions.NewConnectionError"),
    _row(NETWORK_TIMEOUT, "builtins.TimeoutError", "concurrent.futures._base.TimeoutError",
         "asyncio.exceptions.TimeoutError", "urllib3.exceptions.TimeoutError", "requests.exceptions.Timeout",
         "aiohttp.client_exceptions.ServerTimeoutError", "redis.exceptions.TimeoutError", "openai.APITimeoutError",
         "botocore.exceptions.ReadTimeoutError", "botocore.exceptions.ConnectTimeoutError", "trio.TooSlowError",
         "grpc.FutureTimeoutError", *_httpx("TimeoutException")),
    _row(NETWORK_TIMEOUT, "grpc.RpcError", message=r"StatusCode\.DEADLINE_EXCEEDED"),
    _row(NETWORK_TIMEOUT, "builtins.OSError", codes=(errno.ETIMEDOUT,)),
    # No connection.
    _row(NETWORK_UNREACHABLE, "builtins.ConnectionRefusedError", "socket.gaierror", "socket.herror", "ssl.SSLError",
         "urllib3.exceptions.SSLError", "requests.exceptions.SSLError", "requests.exceptions.ProxyError",
         "aiohttp.client_exceptions.ClientConnectorError", "botocore.exceptions.EndpointConnectionError",
         *_httpx("ConnectError", "ProxyError")),
    _row(NETWORK_UNREACHABLE, "builtins.OSError", codes=(errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN,
                                                        errno.EHOSTDOWN, errno.EADDRNOTAVAIL)),
    # Another service.
    _row(UPSTREAM, "builtins.ConnectionResetError", "builtins.ConnectionAbortedError", "builtins.BrokenPipeError",
         "http.client.IncompleteRead", "http.client.BadStatusLine", "http.client.LineTooLong",
         "urllib.error.HTTPError", "urllib.error.ContentTooShortError", "asyncio.exceptions.IncompleteReadError",
         "urllib3.exceptions.ResponseError", "requests.exceptions.HTTPError", "requests.exceptions.TooManyRedirects",
         "requests.exceptions.ChunkedEncodingError", "requests.exceptions.ContentDecodingError",
         "websockets.exceptions.ConnectionClosed", "websockets.exceptions.InvalidHandshake",
         "websockets.exceptions.InvalidMessage",
         "h11._util.RemoteProtocolError", "aiohttp.client_exceptions.ServerDisconnectedError",
         "aiohttp.client_exceptions.ClientResponseError", "openai.APIStatusError", "botocore.exceptions.ClientError",
         *_httpx("RemoteProtocolError", "HTTPStatusError", "ReadError", "WriteError", "DecodingError",
                 "TooManyRedirects")),
    # This service.
    _row(UNAVAILABLE, "vllm.v1.engine.exceptions.EngineDeadError", "vllm.engine.protocol.EngineDeadError",
         "concurrent.futures.process.BrokenProcessPool", "concurrent.futures._base.BrokenExecutor",
         "concurrent.futures.thread.BrokenThreadPool", "asyncio.queues.QueueFull", "queue.Full", "_queue.Full",
         "builtins.SystemExit", "ray.exceptions.RayActorError"),
    _row(UNAVAILABLE, "builtins.OSError", codes=(errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EAGAIN)),
    _row(UNAVAILABLE, "builtins.RuntimeError", message=r"cannot schedule new futures after|can't start new thread"),
    # What only wraps something that may say more.
    _row(NETWORK_UNREACHABLE, "urllib.error.URLError", "requests.exceptions.ConnectionError",
         "urllib3.exceptions.MaxRetryError", "redis.exceptions.ConnectionError", "openai.APIConnectionError",
         "aiohttp.client_exceptions.ClientConnectionError", "sqlalchemy.exc.InterfaceError", vague=True),
    _row(NETWORK_UNREACHABLE, "grpc.RpcError", message=r"StatusCode\.UNAVAILABLE", vague=True),
    _row(UPSTREAM, "grpc.RpcError", "http.client.HTTPException", "urllib3.exceptions.HTTPError",
         "requests.exceptions.RequestException", "aiohttp.client_exceptions.ClientError", "openai.OpenAIError",
         "builtins.ConnectionError", "huggingface_hub.errors.HfHubHTTPError", "redis.exceptions.RedisError",
         *_httpx("HTTPError", "NetworkError", "ProtocolError"), vague=True),
)
