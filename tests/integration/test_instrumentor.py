"""Starting in a host: cheap to import, once, on demand, without deadlocks, and never in the host's way."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT, child_environment, run_child

_FORBIDDEN = ("torch", "transformers", "numpy", "opentelemetry.sdk", "grpc", "prometheus_client", "pydantic", "typer")


@pytest.fixture
def fake(tmp_path: Path) -> Path:
    """A directory with a package that calls itself transformers and imports in no time."""
    package = tmp_path / "fake" / "transformers"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("import told\n__version__ = '5.24.0'\nyet = told.tell()\n")
    (package.parent / "told.py").write_text(
        "import sys\n"
        "def tell():\n"
        "    module = sys.modules.get('kvobs.runtime')\n"
        "    return module is not None and module.current() is not None\n")
    return package.parent


def _python(code: str, fake: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    settings = {"KVOBS_PROMETHEUS": "off", "KVOBS_STORE": "off", "PYTHONPATH": f"{fake}:{ROOT}"} | settings
    return run_child([sys.executable, "-c", code], env=child_environment(**settings), cwd=fake)


def test_importing_kvobs_is_light(tmp_path: Path) -> None:
    """import kvobs loads none of torch, numpy, the SDK and the exporters, and neither does naming a session."""
    code = (f"import sys, kvobs; kvobs.session; kvobs.__version__; "
            f"print([name for name in {_FORBIDDEN} if name in sys.modules])")
    assert run_child([sys.executable, "-c", code], cwd=tmp_path).stdout == "[]\n"


def test_importing_the_instrumentor_is_light(tmp_path: Path) -> None:
    """Arming through the entry point loads none of the heavy libraries either."""
    code = ("import sys; from kvobs.instrumentor import KvobsInstrumentor; KvobsInstrumentor()._instrument(); "
            f"print([name for name in {_FORBIDDEN} if name in sys.modules])")
    assert run_child([sys.executable, "-c", code], cwd=tmp_path).stdout == "[]\n"


def test_kvobs_starts_after_transformers_was_imported(fake: Path) -> None:
    """Probing for transformers starts nothing; importing it does, once its own code has run."""
    done = _python("""
import importlib.util, sys, told
from kvobs import autostart
autostart.arm()
print(told.tell())
importlib.util.find_spec("transformers")
print(told.tell())
import transformers
print(transformers.yet, told.tell(), type(transformers.__loader__).__name__)
print([f for f in sys.meta_path if type(f).__module__ == "kvobs.autostart"])
""", fake)
    assert done.stdout.split("\n")[:-1] == ["False", "False", "False True SourceFileLoader", "[]"], done.stderr


def test_an_import_that_fails_is_tried_again(fake: Path) -> None:
    """A failed import of transformers raises as ever and does not start kvobs; the next one that works does."""
    done = _python("""
import sys, told
from kvobs import autostart
autostart.arm()
told.fail = True
del told.__dict__["tell"]
try:
    import transformers
except AttributeError as error:
    print(error)
told.tell = lambda: "kvobs.runtime" in sys.modules
import transformers
print(transformers.yet, told.tell())
""", fake)
    assert done.stdout == "module 'told' has no attribute 'tell'\nFalse True\n", done.stderr


def test_a_missing_transformers_is_the_hosts_own_error(tmp_path: Path) -> None:
    """Where transformers does not exist the import raises ModuleNotFoundError, as without kvobs."""
    (tmp_path / "only").mkdir()
    done = _python("""
import sys
from kvobs import autostart
sys.path[:] = [entry for entry in sys.path if "site-packages" not in entry]
autostart.arm()
try:
    import transformers
except ModuleNotFoundError as error:
    print(error)
""", tmp_path / "only")
    assert done.stdout == "No module named 'transformers'\n", done.stderr


def test_many_threads_that_import_and_instrument_do_not_deadlock(fake: Path) -> None:
    """Threads that import transformers, arm and instrument at once all end, and one runtime is left."""
    done = _python("""
import threading, kvobs
from kvobs import autostart
gate = threading.Barrier(12)
found = []
def work(number):
    gate.wait()
    if number % 3 == 0:
        import transformers
    elif number % 3 == 1:
        autostart.arm()
    else:
        found.append(kvobs.instrument())
threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(12)]
for thread in threads: thread.start()
for thread in threads: thread.join(60)
print([thread for thread in threads if thread.is_alive()], len({id(handle.runtime) for handle in found}),
      all(handle.active for handle in found), sum(t.name == "kvobs-drain" for t in threading.enumerate()))
""", fake)
    assert done.stdout == "[] 1 True 1\n", done.stderr


def test_a_bad_environment_is_one_sentence_and_kvobs_stays_off(fake: Path) -> None:
    """With a refused KVOBS_ variable the host runs on, and reads one sentence however often kvobs would start."""
    done = _python("""
import told, kvobs
from kvobs.instrumentor import KvobsInstrumentor
KvobsInstrumentor().instrument(skip_dep_check=True)
import transformers
print(kvobs.instrument().active, told.tell())
""", fake, KVOBS_WINDOW_MS="soon")
    assert done.stdout == "False False\n", done.stderr
    assert done.stderr.count("\n") == 1
    assert "KVOBS_WINDOW_MS" in done.stderr


def test_a_bad_argument_raises_and_starts_nothing(fake: Path) -> None:
    """instrument() refuses an unknown name or value with ConfigError, whatever the environment says."""
    done = _python("""
import told, kvobs
from kvobs.config import ConfigError
for settings in ({"window_ms": 0}, {"windows": 5}, {"store_max_bytes": "1"}):
    try:
        kvobs.instrument(**settings)
    except ConfigError as error:
        print(error)
print(told.tell())
""", fake, KVOBS_OTLP="maybe")
    lines = done.stdout.splitlines()
    assert len(lines) == 4, done.stderr
    assert "window_ms" in lines[0]
    assert "windows" in lines[1]
    assert lines[3] == "False"


def test_values_mean_what_their_texts_mean(fake: Path, tmp_path: Path) -> None:
    """Python values of instrument() give the configuration that their texts give in the environment."""
    done = _python("""
import kvobs, pathlib
handle = kvobs.instrument(store=None, prometheus=("127.0.0.1", 0), window_ms=5, record_prompts=True,
                          session_key=b"k", otlp=False)
config = handle.runtime.config
print(config.store, config.prometheus, config.window_ms, config.record_prompts, config.session_key, config.otlp)
handle.uninstrument()
print(handle.active)
""", fake, KVOBS_STORE=str(tmp_path / "s"))
    assert done.stdout == "None ('127.0.0.1', 0) 5 True b'k' off\nFalse\n", done.stderr


def test_off_means_off(fake: Path) -> None:
    """KVOBS_ENABLED=off starts nothing and says nothing."""
    done = _python("""
import told, kvobs
from kvobs import autostart
autostart.arm()
import transformers
print(told.tell(), kvobs.instrument().active)
""", fake, KVOBS_ENABLED="off")
    assert (done.stdout, done.stderr) == ("False False\n", "")


def test_uninstrument_before_the_import_leaves_nothing(fake: Path) -> None:
    """An instrumentor that is taken back before transformers is imported starts nothing later."""
    done = _python("""
import sys, told
from kvobs.instrumentor import KvobsInstrumentor
before = list(sys.meta_path)
KvobsInstrumentor().instrument(skip_dep_check=True)
KvobsInstrumentor().uninstrument()
print(sys.meta_path == before)
import transformers
print(told.tell())
""", fake)
    assert done.stdout == "True\nFalse\n", done.stderr


def test_kvobs_can_be_taken_back_and_started_again(fake: Path) -> None:
    """instrument, uninstrument and instrument again leave one drain thread, then none."""
    done = _python("""
import threading, kvobs
def drains():
    return sum(thread.name == "kvobs-drain" for thread in threading.enumerate())
seen = []
for _ in range(3):
    with kvobs.instrument():
        kvobs.instrument()
        seen.append(drains())
    seen.append(drains())
kvobs.uninstrument()
print(seen)
""", fake)
    assert done.stdout == "[1, 0, 1, 0, 1, 0]\n", done.stderr


def test_the_entry_point_and_the_extra_agree() -> None:
    """OpenTelemetry finds the instrumentor under the name kvobs, and its dependencies are the instruments extra."""
    import importlib.metadata
    import tomllib

    from packaging.requirements import Requirement

    from kvobs import __version__
    from kvobs.instrumentor import KvobsInstrumentor

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    entries = importlib.metadata.entry_points(group="opentelemetry_instrumentor", name="kvobs")
    assert [entry.load() for entry in entries] == [KvobsInstrumentor] * len(entries)
    assert entries
    assert {str(Requirement(text)) for text in KvobsInstrumentor().instrumentation_dependencies()} == {
        str(Requirement(text)) for text in project["optional-dependencies"]["instruments"]}
    assert __version__ == project["version"]


@pytest.mark.parametrize("version", ["4.57.0", "5.0.0", "5.24.0", "5.99", "6.0.0", "6.1"])
def test_the_source_and_the_metadata_support_the_same_versions(version: str) -> None:
    """What the instruments extra admits is what the transformers source hooks into."""
    from kvobs.instrumentor import supported
    from kvobs.sources.transformers._source import supported as hooked

    assert supported()["transformers"].specifier.contains(version) == hooked(version)
