"""Configuration: precedence, every setting's values, and refusals in one sentence."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from kvobs.config import SETTINGS, Config, ConfigError, ErrorRow, default_store, load, parse_size

# Setting: (text, value) pairs that are accepted, and texts that are refused. Written by hand.
ACCEPTED: dict[str, list[tuple[str, object]]] = {
    "enabled": [("1", True), ("true", True), (" YES ", True), ("on", True), ("0", False), ("False", False),
                ("no", False), ("off", False), ("", False)],
    "profile": [("off", "off"), ("production", "production"), ("Staging", "staging"), (" CI ", "ci")],
    "trace_sample": [("auto", None), ("1.5%", 1.5), (" 15 % ", 15.0), ("0%", 0.0), ("100%", 100.0)],
    "retention": [("off", 0), ("14d", 1_209_600), ("36 h", 129_600), ("1m", 60), ("3650D", 315_360_000)],
    "span_depth": [("chain", "chain"), ("EDGES", "edges")],
    "mask": [("off", "off"), ("Secrets", "secrets"), ("payloads", "payloads")],
    "store": [("off", None), ("OFF", None), ("/var/lib/kvobs", Path("/var/lib/kvobs")), ("here", Path("here"))],
    "store_max_bytes": [("1MiB", 1 << 20), ("512 mib", 1 << 29), ("2GiB", 1 << 31), ("1048576", 1 << 20),
                        ("1048576b", 1 << 20)],
    "prometheus": [("off", None), ("127.0.0.1:9464", ("127.0.0.1", 9464)), ("[::1]:0", ("::1", 0)),
                   ("localhost:65535", ("localhost", 65535))],
    "otlp": [("auto", "auto"), ("ON", "on"), ("off", "off")],
    "queue_events": [("64", 64), ("10_000_000", 10_000_000)],
    "window_ms": [("1", 1), ("60000", 60_000)],
    "session_ids": [("plain", "plain"), ("Hashed", "hashed"), ("off", "off")],
    "session_key": [("secret", b"secret"), ("ключ", "ключ".encode()), ("", b""), ("\udcff", b"\xff")],
    "record_prompts": [("true", True), ("off", False)],
    "max_series": [("1", 1), ("10000", 10_000)],
    "deep": [("on", True), ("0", False)],
    "overhead_percent": [("0.1", 0.1), ("100", 100.0), ("2.5%", 2.5), (" 7 ", 7.0)],
    "native": [("off", "off"), ("AUTO ", "auto")],
    "cpu_allocations": [("off", "off"), ("Auto", "auto")],
    "virtual_gpu": [("off", ()), ("24GiB", (24 << 30,)), ("32 MiB, 1TiB", (32 << 20, 1 << 40))],
    "virtual_latency": [("off", "off"), ("A100", "a100"), ("l40s", "l40s")],
    "breaker": [("off", "off"), ("Observe", "observe"), ("ACT", "act")],
    "breaker_policy": [("default", "default"), (" mine.toml ", "mine.toml")],
    "cut_pending_evict": [("on", True), ("false", False)],
    "control_token": [("off", ""), ("", ""), (" 0123456789abcdef ", "0123456789abcdef"), ("x" * 256, "x" * 256)],
    "jaeger_url": [("off", ""), ("http://jaeger:16686/", "http://jaeger:16686"),
                   ("https://x.example/jaeger", "https://x.example/jaeger")],
}
REFUSED: dict[str, list[str]] = {
    "enabled": ["2", "maybe", "tru"],
    "profile": ["prod", "none", ""],
    "trace_sample": ["1.5", "1", "", "%", "nan%", "-1%", "101%", "inf%", "half"],
    "retention": ["0d", "14", "3651d", "30s", "1.5d", "-1d", "", "two weeks", "\u0663d"],
    "span_depth": ["full", "edge", ""],
    "mask": ["on", "all", ""],
    "store": ["", "  ", "~nobody-has-this-name/x", "a\0b"],
    "store_max_bytes": ["1048575", "1KiB", "-1", "512MB", "many", "", "1.5GiB"],
    "prometheus": ["9464", ":9464", "localhost:", "localhost:65536", "localhost:-1", "localhost:x", ""],
    "otlp": ["yes", "true", ""],
    "queue_events": ["63", "10000001", "1e3", "-64", ""],
    "window_ms": ["0", "60001", "64.0", "64ms"],
    "session_ids": ["hash", "true", ""],
    "session_key": ["\ud800"],
    "record_prompts": ["all", "2"],
    "max_series": ["0", "10001", "ten"],
    "deep": ["deep", "2"],
    "overhead_percent": ["0", "0.09", "101", "nan", "inf", "-1", "five"],
    "native": ["on", "C++", ""],
    "cpu_allocations": ["on", "64", ""],
    "virtual_gpu": ["", "24", "31MiB", "2TiB", "24GiB,", "24GB", ",".join(["1GiB"] * 17)],
    "virtual_latency": ["on", "H100", ""],
    "breaker": ["on", "dry-run", ""],
    "breaker_policy": ["", " ", "a\0b"],
    "cut_pending_evict": ["all", "2"],
    "control_token": ["short", "0123456789abcde", "0123456789 abcdef", "ключключключключ", "x" * 257],
    "jaeger_url": ["jaeger:16686", "ftp://x", "http://", "http://a b", 'http://x"onclick=', "javascript:alert(1)",
                   "http://x/?q=1"],
}
CASES = [(name, text, value) for name, pairs in ACCEPTED.items() for text, value in pairs]
BAD = [(name, text) for name, texts in REFUSED.items() for text in texts]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "kvobs.toml"


def test_the_tables_of_this_test_cover_every_setting() -> None:
    """A new setting needs accepted and refused values here; every field of Config is a setting, but what tables say."""
    names = {setting.name for setting in SETTINGS}
    assert names == set(ACCEPTED) == set(REFUSED) == {
        field.name for field in msgspec.structs.fields(Config)} - {"objectives", "errors"}


@pytest.mark.parametrize(("name", "text", "value"), CASES)
def test_accepted_values(name: str, text: str, value: object) -> None:
    """A setting has the value that its text means, from the environment and from an override alike."""
    assert getattr(load({f"KVOBS_{name.upper()}": text}), name) == value
    assert getattr(load({}, **{name: text}), name) == value


@pytest.mark.parametrize(("name", "text"), BAD)
def test_refused_values(name: str, text: str) -> None:
    """A refusal says which setting, where it came from, what it was (but for a secret) and what is allowed, in one
    sentence.
    """
    allowed, secret = next((setting.allowed, setting.secret) for setting in SETTINGS if setting.name == name)
    for where, environ, overrides in ((f"from KVOBS_{name.upper()}", {f"KVOBS_{name.upper()}": text}, {}),
                                      ("given explicitly", {}, {name: text})):
        with pytest.raises(ConfigError) as caught:
            load(environ, **overrides)
        shown = "not one" if secret else repr(text)
        assert str(caught.value) == f"The setting {name!r} {where} is {shown}; allowed is {allowed}."


def test_defaults(tmp_path: Path) -> None:
    """Without any setting: on, loopback endpoint, plain ids, no prompts, and a store under XDG_STATE_HOME."""
    assert load({}) == Config(store=tmp_path / "state" / "kvobs" / "store")
    assert Config().prometheus == ("127.0.0.1", 9464)
    assert Config().record_prompts is False
    assert Config().store_max_bytes == 512 * 1024 * 1024
    assert Config().window_ms == 64


def test_defaults_pass_their_own_parsers() -> None:
    """Every default is a value that the setting's own text form can express."""
    for setting in SETTINGS:
        default = getattr(Config(), setting.name)
        own = {"store": "off", "prometheus": "127.0.0.1:9464", "session_key": "", "virtual_gpu": "off",
               "trace_sample": "auto", "retention": "off"}
        text = own.get(setting.name, str(default))
        assert setting.parse(text) == default, setting.name


def test_precedence(file: Path) -> None:
    """An override beats the environment, which beats the file, which beats the default."""
    file.write_text('window_ms = 10\nmax_series = 20\notlp = "off"\n', encoding="utf-8")
    environ = {"KVOBS_CONFIG": str(file), "KVOBS_WINDOW_MS": "11", "KVOBS_MAX_SERIES": "21"}
    config = load(environ, window_ms="12")
    assert (config.window_ms, config.max_series, config.otlp, config.queue_events) == (12, 21, "off", 65_536)


def test_a_file_may_use_toml_types(file: Path) -> None:
    """Booleans and integers of TOML mean what they say."""
    file.write_text('enabled = false\nstore_max_bytes = 1048576\nstore = "off"\n', encoding="utf-8")
    config = load({"KVOBS_CONFIG": str(file)})
    assert (config.enabled, config.store_max_bytes, config.store) == (False, 1 << 20, None)


@pytest.mark.parametrize(("text", "message"), [
    ("window_ms = 0", "The setting 'window_ms' in {file} is '0'; allowed is a whole number from 1 to 60000."),
    ("window_ms = [1]", "The setting 'window_ms' in {file} must be a whole number from 1 to 60000."),
    ("window_ms = 1.0", "The setting 'window_ms' in {file} is '1.0'; allowed is a whole number from 1 to 60000."),
    ("windowms = 1", "There is no setting 'windowms' (key in {file}); did you mean 'window_ms'?"),
])
def test_refusals_of_a_file_name_it(file: Path, text: str, message: str) -> None:
    """What a file gets wrong is said with the file's path."""
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load({"KVOBS_CONFIG": str(file)})
    assert str(caught.value).rstrip(".?") == message.format(file=file).rstrip(".?")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    """A missing file, a directory, bytes that are not text and text that is not TOML are each one sentence."""
    missing, broken, binary = tmp_path / "no.toml", tmp_path / "broken.toml", tmp_path / "binary.toml"
    broken.write_text("= 1", encoding="utf-8")
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"no\.toml named by KVOBS_CONFIG does not exist\.$"):
        load({"KVOBS_CONFIG": str(missing)})
    for path in (tmp_path, broken, binary):
        with pytest.raises(ConfigError, match=r"^The config file .* cannot be read as TOML: .*\.$"):
            load({"KVOBS_CONFIG": str(path)})


@pytest.mark.parametrize("name", [
    "KVOBS_CONFIG", "KVOBS_BOOTSTRAP", "KVOBS_TEST_MODEL", "KVOBS_BENCH_STEPS",
    # What Kubernetes gives the pods beside a service "kvobs", or "kvobs-metrics" with a port named "http".
    "KVOBS_SERVICE_HOST", "KVOBS_SERVICE_PORT", "KVOBS_SERVICE_PORT_HTTP", "KVOBS_PORT", "KVOBS_PORT_9464_TCP",
    "KVOBS_PORT_9464_TCP_PROTO", "KVOBS_PORT_9464_TCP_PORT", "KVOBS_PORT_9464_TCP_ADDR", "KVOBS_METRICS_SERVICE_HOST",
    "KVOBS_METRICS_PORT"])
def test_variables_that_are_not_settings(name: str) -> None:
    """What `kvobs run` and the test suite set is not mistaken for a setting."""
    assert load({name: ""}) == load({})


def test_other_variables_are_ignored() -> None:
    """Only KVOBS_* is read."""
    assert load({"WINDOW_MS": "1", "OTEL_SDK_DISABLED": "true", "XKVOBS_WINDOW_MS": "1"}) == load({})


@pytest.mark.parametrize(("written", "meant"), [("windows_ms", "window_ms"), ("prometeus", "prometheus"),
                                                ("sesion_ids", "session_ids"), ("store_max_byte", "store_max_bytes")])
def test_an_unknown_setting_names_the_nearest(written: str, meant: str) -> None:
    """A misspelt setting is refused with the one that was probably meant."""
    with pytest.raises(ConfigError, match=f"^There is no setting '{written}' .*did you mean '{meant}'"):
        load({f"KVOBS_{written.upper()}": "1"})
    with pytest.raises(ConfigError, match=f"^There is no setting '{written}' .*did you mean '{meant}'"):
        load({}, **{written: "1"})


def test_a_setting_like_no_other_lists_what_there_is() -> None:
    """Where nothing is near, every setting is listed."""
    with pytest.raises(ConfigError) as caught:
        load({"KVOBS_QQQQQQQ": "1"})
    assert all(setting.name in str(caught.value) for setting in SETTINGS)


def test_the_configuration_is_frozen() -> None:
    """Nobody changes a setting after start."""
    config = Config()
    with pytest.raises(AttributeError, match="immutable"):
        config.window_ms = 1  # type: ignore[misc]


def test_the_default_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """XDG_STATE_HOME, else ~/.local/state; a user without a home has no default store instead of a traceback."""
    assert default_store() == Path(os.environ["XDG_STATE_HOME"]) / "kvobs" / "store"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", "/home/anna")
    assert default_store() == Path("/home/anna/.local/state/kvobs/store")
    assert load({}, store="~/kv").store == Path("/home/anna/kv")

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert default_store() is None
    assert load({}).store is None


@pytest.mark.parametrize(("text", "size"), [("0", 0), ("1KiB", 1024), (" 3 TiB ", 3 * 1024**4), ("7b", 7)])
def test_sizes(text: str, size: int) -> None:
    """Sizes are whole numbers of bytes or of binary units."""
    assert parse_size(text) == size


ERRORS = """
[[error]]
class = "db_deadlock"
types = ["shop.store.LockLost"]

[[error]]
class = "quota"
message = "quota (was )?exceeded"
codes = [402, "P0001"]
vague = true
"""


def test_rows_of_errors_come_from_the_file(file: Path) -> None:
    """Each ``[[error]]`` table is a row, in order; without any there is none."""
    file.write_text("deep = true\n" + ERRORS)
    found = load({"KVOBS_CONFIG": str(file)})
    assert found.deep
    assert found.errors == (
        ErrorRow(error_class="db_deadlock", types=("shop.store.LockLost",)),
        ErrorRow(error_class="quota", message="quota (was )?exceeded", codes=(402, "P0001"), vague=True))
    assert load({}).errors == ()


@pytest.mark.parametrize(("text", "why"), [
    ("error = 1", "error must be tables, each headed [[error]]"),
    ('[[error]]\nclas = "x"', "[[error]] number 1 has no key 'clas'; did you mean 'class'?"),
    ('[[error]]\ntypes = ["a.b"]', "[[error]] number 1 has the class ''; it must be a name of small letters"),
    ('[[error]]\nclass = "Bad Name"\ntypes = ["a.b"]', "[[error]] number 1 has the class 'Bad Name'; it must be"),
    ('[[error]]\nclass = "x"', "[[error]] number 1 needs types, a message or codes"),
    ('[[error]]\nclass = "x"\ntypes = "a.b"', "[[error]] number 1 has the types 'a.b'; it must be a list"),
    ('[[error]]\nclass = "x"\ntypes = ["b"]', "[[error]] number 1 names the type 'b'; types are a list"),
    ('[[error]]\nclass = "x"\nmessage = "("', "[[error]] number 1 has the message '(', which is no regular"),
    ('[[error]]\nclass = "x"\ncodes = [1.5]', "[[error]] number 1 has the codes [1.5]; it must be a list"),
    ('[[error]]\nclass = "x"\ncodes = [true]', "[[error]] number 1 has the codes [True]; it must be a list"),
    ('[[error]]\nclass = 3\ncodes = [1]', "[[error]] number 1 has the class 3; it must be a name"),
    ('[[error]]\nclass = "x"\nmessage = "x"\n' * 33, "there are 33 [[error]] tables; allowed are 32")])
def test_bad_rows_of_errors_are_refused(file: Path, text: str, why: str) -> None:
    """A refusal names the file, the table, what is wrong and what is allowed."""
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load({"KVOBS_CONFIG": str(file)})
    assert str(caught.value).startswith(f"In {file}, {why}")
    assert str(caught.value).endswith(".")
