"""Settings, and how they are read: from explicit overrides, ``KVOBS_*`` and the config file.

Precedence: explicit overrides, then environment, then the TOML file named by ``KVOBS_CONFIG``, then
defaults. Every refusal is a :class:`ConfigError` whose text says what is wrong, where, and what is allowed.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvobs.config._error_rows import ErrorRow, parse_error_rows
from kvobs.config._objectives import ARTICLE, Objective, parse_objectives
from kvobs.config._profiles import PROFILED, PROFILES, SAMPLER, of_profile, parse_retention, parse_sample

ENV_PREFIX = "KVOBS_"
FILE_VARIABLE = "KVOBS_CONFIG"
# Tables of the file, [[slo]] and [[error]]: they have no environment variables.
TABLES: dict[str, tuple[str, Callable[[object], Any]]] = {
    "slo": ("objectives", parse_objectives), "error": ("errors", parse_error_rows)}
# Set by `kvobs run` for its child, read by the test suite, or given to each pod by Kubernetes for a service whose name
# begins with "kvobs": not settings.
_FOREIGN = re.compile(r"KVOBS_(CONFIG|BOOTSTRAP|TEST_\w+|BENCH_\w+|(\w+_)?SERVICE_(HOST|PORT)(_\w+)?"
                      r"|(\w+_)?PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)$")
_OFF = {"0", "false", "no", "off", ""}
_ON = {"1", "true", "yes", "on"}


class ConfigError(ValueError):
    """A setting was refused; ``str()`` is one whole sentence."""


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """Every setting of a kvobs process. Sizes are in bytes, windows in milliseconds, the retention in seconds (0 is for
    ever), the sample of traces in percent (None leaves it to the SDK).
    """

    enabled: bool = True
    profile: str = "off"
    trace_sample: float | None = None
    retention: int = 0
    span_depth: str = "chain"
    mask: str = "off"
    store: Path | None = None
    store_max_bytes: int = 512 * 1024**2
    prometheus: tuple[str, int] | None = ("127.0.0.1", 9464)
    otlp: str = "auto"
    queue_events: int = 65_536
    window_ms: int = 64
    session_ids: str = "plain"
    session_key: bytes = b""
    record_prompts: bool = False
    max_series: int = 64
    deep: bool = False
    overhead_percent: float = 5.0
    jaeger_url: str = ""
    objectives: tuple[Objective, ...] = (ARTICLE,)
    errors: tuple[ErrorRow, ...] = ()
    native: str = "auto"
    cpu_allocations: str = "auto"
    virtual_gpu: tuple[int, ...] = ()
    virtual_latency: str = "off"
    breaker: str = "off"
    breaker_policy: str = "default"
    cut_pending_evict: bool = False
    control_token: str = ""


class Setting(msgspec.Struct, frozen=True):
    """One row of the settings table: how a text becomes a value, and what the docs say."""

    name: str
    parse: Callable[[str], Any]
    allowed: str
    meaning: str
    secret: bool = False


def _boolean(text: str) -> bool:
    word = text.strip().lower()
    if word in _ON:
        return True
    if word in _OFF:
        return False
    raise ValueError


def _whole(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = int(text.strip().replace("_", ""))
        if not low <= value <= high:
            raise ValueError
        return value

    return parse


def _percent(text: str) -> float:
    value = float(text.strip().removesuffix("%"))
    if not 0.1 <= value <= 100:  # NaN is refused too
        raise ValueError
    return value


def _web_address(text: str) -> str:
    word = text.strip().rstrip("/")
    if word.lower() in ("", "off"):
        return ""
    if not re.fullmatch(r"https?://[^\s/?#\"'<>]+(/[^\s?#\"'<>]*)?", word):
        raise ValueError
    return word


_SIZE_UNITS = {"": 1, "b": 1, "kib": 1024, "mib": 1024**2, "gib": 1024**3, "tib": 1024**4}


def parse_size(text: str) -> int:
    """Bytes of ``"512MiB"``, ``"2 GiB"`` or ``"1048576"``; ValueError otherwise."""
    match = re.fullmatch(r"\s*(\d+)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].lower() not in _SIZE_UNITS:
        raise ValueError(text)
    return int(match[1]) * _SIZE_UNITS[match[2].lower()]


LEAST_DEVICE, MOST_DEVICE = 32 * 1024**2, 1024**4
MOST_DEVICES = 16


def parse_devices(text: str) -> tuple[int, ...]:
    """Bytes of each virtual device of ``"24GiB,24GiB"``; none for ``off``. ValueError otherwise."""
    if text.strip().lower() == "off":
        return ()
    found = tuple(map(parse_size, text.split(",")))
    if len(found) > MOST_DEVICES or not all(LEAST_DEVICE <= size <= MOST_DEVICE for size in found):
        raise ValueError(text)
    return found


def _store_size(text: str) -> int:
    value = parse_size(text)
    if value < 1024**2:
        raise ValueError
    return value


def default_store() -> Path | None:
    """The directory of stores when none is named (XDG base directories); None for a user without a home."""
    try:
        base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    except RuntimeError:  # a container's arbitrary user id, and no HOME
        return None
    return Path(base) / "kvobs" / "store"


def _store(text: str) -> Path | None:
    word = text.strip()
    if word.lower() == "off":
        return None
    if not word or "\0" in word:
        raise ValueError
    try:
        return default_store() if word.lower() == "auto" else Path(word).expanduser()
    except RuntimeError:  # ~nobody-here
        raise ValueError from None


def _endpoint(text: str) -> tuple[str, int] | None:
    word = text.strip()
    if word.lower() == "off":
        return None
    host, colon, port = word.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65_535:
        raise ValueError
    return host.strip("[]"), int(port)


def _one_of(*words: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.strip().lower() not in words:
            raise ValueError
        return text.strip().lower()

    return parse


def _name(text: str) -> str:
    word = text.strip()
    if not word or "\0" in word:
        raise ValueError
    return word


def _token(text: str) -> str:
    word = text.strip()
    if word.lower() in ("", "off"):
        return ""
    if not 16 <= len(word) <= 256 or not word.isascii() or not word.isprintable() or " " in word:
        raise ValueError
    return word


SETTINGS: tuple[Setting, ...] = (
    Setting("enabled", _boolean, "true or false", "observe this process at all"),
    Setting("profile", _one_of("off", *PROFILES), ", ".join(PROFILES) + " or off",
            "what is traced and kept: sets " + ", ".join(PROFILED[:-1]) + f" and {PROFILED[-1]} where they are not set "
            "themselves"),
    Setting("trace_sample", parse_sample, "a percentage from 0% to 100%, or auto",
            "share of new traces that kvobs records; a caller's decision is followed; auto leaves it to "
            f"{SAMPLER}"),
    Setting("retention", parse_retention, "a duration from 1m to 3650d, such as 14d or 36h, or off",
            "how long stores and their rows are kept, within the bound on their size"),
    Setting("span_depth", _one_of("chain", "edges"), "chain or edges",
            "chain writes all spans of a turn; edges only the turn's own and those of the breaker"),
    Setting("mask", _one_of("off", "secrets", "payloads"), "off, secrets or payloads",
            "mask credentials and personal data on spans; payloads also masks message contents, token ids, headers "
            "and parameters of queries"),
    Setting("store", _store, "a directory, auto or off", "where this process writes its SQLite store"),
    Setting("store_max_bytes", _store_size, "a size of at least 1MiB, such as 512MiB",
            "bound on all stores of the directory, write-ahead logs included"),
    Setting("prometheus", _endpoint, "HOST:PORT (port 0 takes a free one) or off",
            "where /metrics and /healthz are served"),
    Setting("otlp", _one_of("auto", "on", "off"), "auto, on or off",
            "push over OTLP; auto means when OTEL_EXPORTER_OTLP_*ENDPOINT is set or the process has "
            "global OpenTelemetry providers"),
    Setting("queue_events", _whole(64, 10_000_000), "a whole number from 64 to 10000000",
            "bound on events waiting for the drain thread; more are dropped and counted"),
    Setting("window_ms", _whole(1, 60_000), "a whole number from 1 to 60000",
            "length of the sliding window in milliseconds"),
    Setting("session_ids", _one_of("plain", "hashed", "off"), "plain, hashed or off",
            "how session ids appear on spans and in the store"),
    Setting("session_key", os.fsencode, "any text",
            "key of the session hash; without one each process draws its own"),
    Setting("record_prompts", _boolean, "true or false", "put prompt and reply token ids on spans"),
    Setting("max_series", _whole(1, 10_000), "a whole number from 1 to 10000",
            "bound on attribute sets per metric; more fold into 'other' and are counted"),
    Setting("deep", _boolean, "true or false",
            "also sample attention, layers and cache updates, in as many decode steps as the overhead allows"),
    Setting("overhead_percent", _percent, "a number from 0.1 to 100",
            "share of the engine's time that kvobs may take; beyond it, it samples less and then passes through"),
    Setting("native", _one_of("auto", "off"), "auto or off",
            "the C++ parts, compiled on first use; without them the Python twin serves and single CPU allocations are "
            "not counted"),
    Setting("cpu_allocations", _one_of("auto", "off"), "auto or off",
            "count every CPU allocation of torch, with a compiled probe in front of its allocator"),
    Setting("virtual_gpu", parse_devices, "sizes of 1 to 16 devices from 32MiB to 1TiB, such as 24GiB,24GiB, or off",
            "give torch virtual GPUs (vgpu:0 …) of these sizes: compute on the CPU, memory as CUDA has it"),
    Setting("virtual_latency", _one_of("off", "a100", "l40s"), "off, A100 or L40S",
            "let device calls of the virtual GPU take the medians that are published of such a GPU (modelled)"),
    Setting("breaker", _one_of("off", "observe", "act"), "off, observe or act",
            "the breaker: observe decides and tells, act does it too"),
    Setting("breaker_policy", _name, "default, article, growing or a TOML file",
            "when the breaker's levels begin and end"),
    Setting("control_token", _token, "16 to 256 ASCII characters without a space, or off",
            "what POST /breaker/… demands; without it the one in the file control-token beside the store", secret=True),
    Setting("cut_pending_evict", _boolean, "true or false",
            "let level 1 of the breaker remove tokens from transformers caches that attention passes over (Pending "
            "Evict, which deep sampling tells): answers may change"),
    Setting("jaeger_url", _web_address, "an http:// or https:// address, or off",
            "where the live view's links to traces lead"),
)
_BY_NAME = {setting.name: setting for setting in SETTINGS}


def markdown() -> str:
    """The generated settings table of the README."""
    plain = Config(store=Path("~/.local/state/kvobs/store"))
    lines = ["| setting | environment | default | allowed | meaning |", "|---|---|---|---|---|"]
    for setting in SETTINGS:
        value = getattr(plain, setting.name)
        shown = ":".join(map(str, value)) if isinstance(value, tuple) and value else value or "-"
        lines.append(f"| `{setting.name}` | `{ENV_PREFIX}{setting.name.upper()}` | `{shown}` | {setting.allowed} | "
                     f"{setting.meaning} |")
    return "\n".join(lines) + "\n"


def load(environ: Mapping[str, str] | None = None, **overrides: str) -> Config:
    """The configuration of this process.

    Args:
        environ: the environment to read (default ``os.environ``).
        overrides: settings by name as texts, as from a command line; they win over everything.
    Raises:
        ConfigError: one sentence: which setting, where it came from, what is allowed.
    """
    return Config(**_collect(environ, overrides)[0])


def origins(environ: Mapping[str, str] | None = None, **overrides: str) -> dict[str, str]:
    """Where each value of ``load`` came from, by setting: ``the default``, ``the profile ci``, ``KVOBS_MASK``.

    Raises:
        ConfigError: as ``load``.
    """
    found = _collect(environ, overrides)[1]
    return {setting.name: found.get(setting.name, "the default") for setting in SETTINGS}


def _collect(environ: Mapping[str, str] | None, overrides: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {"store": default_store()}
    places: dict[str, str] = {}
    if path := environ.get(FILE_VARIABLE):
        settings, tables = _read_file(Path(path))
        for name, raw in settings.items():
            values[name], places[name] = _parse(name, raw, f"in {path}"), path
        values |= tables
    for variable, raw in environ.items():
        if variable.startswith(ENV_PREFIX) and not _FOREIGN.match(variable):
            name = _known(variable[len(ENV_PREFIX):].lower(), f"environment variable {variable}")
            values[name], places[name] = _parse(name, raw, f"from {variable}"), variable
    for name, raw in overrides.items():
        values[_known(name, f"option {name}")], places[name] = _parse(name, raw, "given explicitly"), "an option"
    for name, value in of_profile(values.get("profile", "off"), environ).items():
        if name not in values:
            values[name], places[name] = value, f"the profile {values['profile']}"
    return values, places


def _read_file(path: Path) -> tuple[dict[str, str], dict[str, Any]]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"The config file {path} named by {FILE_VARIABLE} does not exist.") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"The config file {path} cannot be read as TOML: {error}.") from None
    found: dict[str, Any] = {}
    for key, (field, parse) in TABLES.items():
        if key in table:
            try:
                found[field] = parse(table.pop(key))
            except ValueError as error:
                raise ConfigError(f"In {path}, {error}.") from None
    out: dict[str, str] = {}
    for name, value in table.items():
        _known(name, f"key in {path}")
        if not isinstance(value, str | int | float | bool):
            raise ConfigError(f"The setting {name!r} in {path} must be {_BY_NAME[name].allowed}.")
        out[name] = ("on" if value else "off") if isinstance(value, bool) else str(value)
    return out, found


def _known(name: str, where: str) -> str:
    if name in _BY_NAME:
        return name
    near = difflib.get_close_matches(name, _BY_NAME, n=1)
    hint = f"did you mean {near[0]!r}?" if near else "allowed are " + ", ".join(sorted(_BY_NAME)) + "."
    raise ConfigError(f"There is no setting {name!r} ({where}); {hint}")


def _parse(name: str, raw: str, where: str) -> Any:
    setting = _BY_NAME[_known(name, where)]
    try:
        return setting.parse(raw)
    except ValueError:
        found = "not one" if setting.secret else repr(raw)
        raise ConfigError(f"The setting {name!r} {where} is {found}; allowed is {setting.allowed}.") from None
