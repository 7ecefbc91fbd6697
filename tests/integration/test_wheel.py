"""The wheel, alone with its declared dependencies, outside the clone."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from kvobs.catalog import ROWS
from kvobs.store import StoreWriter
from tests.browser import browsing, viewing
from tests.events import turn
from tests.support import ROOT, child_environment, run_child, wait_until


def _needed(requirements: list[str], extra: str = "") -> set[str]:
    """The installed projects that the requirements need, directly and through each other."""
    found: set[str] = set()
    waiting = [Requirement(text) for text in requirements]
    while waiting:
        requirement = waiting.pop()
        name = requirement.name.lower().replace("_", "-")
        if name in found or (requirement.marker is not None and not requirement.marker.evaluate({"extra": extra})):
            continue
        found.add(name)
        waiting += map(Requirement, importlib.metadata.requires(name) or [])
    return found


def _copy(name: str, site: Path) -> None:
    distribution = importlib.metadata.distribution(name)
    for file in distribution.files or []:
        if ".." not in file.parts and file.suffix != ".pyc":
            target = site / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(str(distribution.locate_file(file)), target)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree."""
    pytest.importorskip("hatchling", reason="hatchling, which builds the wheel, is not installed.")
    out = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation",
                    "--disable-pip-version-check", "--wheel-dir", out, ROOT], check=True, cwd=out)
    (built,) = out.glob("kvobs-*.whl")
    return built


@pytest.fixture(scope="module")
def empty(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin directory of an environment that holds the wheel and what its metadata asks for, and no more."""
    home = tmp_path_factory.mktemp("empty")
    venv.create(home, with_pip=False, symlinks=True)
    subprocess.run([sys.executable, "-m", "pip", "--python", home / "bin" / "python", "install", "--quiet", "--no-deps",
                    "--no-index", "--disable-pip-version-check", wheel], check=True, cwd=home)
    (site,) = home.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        lines = archive.read(metadata).decode().splitlines()
    for name in _needed([line.partition(": ")[2] for line in lines if line.startswith("Requires-Dist: ")]):
        _copy(name, site)
    return home / "bin"


def test_the_wheel_carries_what_is_not_imported(wheel: Path) -> None:
    """The bootstrap, the type marker and the entry points are in the wheel, and nothing but kvobs is installed."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (entries,) = [name for name in names if name.endswith("entry_points.txt")]
        told = archive.read(entries).decode()
    assert {"kvobs/_bootstrap/sitecustomize.py", "kvobs/py.typed", "kvobs/__main__.py"} <= names
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"kvobs"}
    assert "kvobs = kvobs.instrumentor:KvobsInstrumentor" in told
    assert "kvobs = kvobs.cli:main" in told


def test_every_module_of_the_tree_is_in_the_wheel(wheel: Path) -> None:
    """No Python file of the package is left out."""
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if name.endswith(".py")}
    package = {str(path.relative_to(ROOT)) for path in (ROOT / "kvobs").rglob("*.py")}
    pages = {f"kvobs/_app/{path.relative_to(ROOT)}" for path in (ROOT / "streamlit_app").rglob("*.py")}
    assert len(pages) > 5
    assert names == package | pages


def test_doctor_runs_with_the_core_alone(empty: Path, tmp_path: Path) -> None:
    """Without torch, SDK and exporters doctor exits 0 and says of each how to install it."""
    done = run_child([empty / "kvobs", "doctor", "--json"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = {fact["subject"]: fact for fact in json.loads(done.stdout)}
    for subject in ("torch", "transformers", "opentelemetry-sdk", "prometheus-client"):
        assert not found[subject]["available"]
        assert "pip install 'kvobs[" in found[subject]["reason"]
    assert found["python"]["available"]
    plain = run_child([empty / "kvobs", "doctor"], cwd=tmp_path)
    assert len(plain.stdout.splitlines()) == len(found) + 1


def test_catalog_runs_with_the_core_alone(empty: Path, tmp_path: Path) -> None:
    """The catalog of the installed wheel is the catalog of this tree."""
    done = run_child([empty / "kvobs", "catalog", "--json"], cwd=tmp_path)
    assert [row["name"] for row in json.loads(done.stdout)] == [row.name for row in ROWS]


def test_run_arms_with_the_core_alone(empty: Path, tmp_path: Path) -> None:
    """kvobs run of the installed wheel arms its own kvobs, not the clone's, and keeps the exit code."""
    code = ("import sys; finder = sys.meta_path[0]; print(sys.modules[type(finder).__module__].__file__); "
            "raise SystemExit(3)")
    done = run_child([empty / "kvobs", "run", "--", empty / "python", "-c", code], cwd=tmp_path)
    assert done.returncode == 3
    assert done.stdout.startswith(str(empty.parent))
    assert done.stdout.endswith("autostart.py\n")


def test_instrument_runs_with_the_core_alone(empty: Path, tmp_path: Path) -> None:
    """In a host without any extra kvobs starts, writes its store and ends without a word on stderr but sentences."""
    code = ("import kvobs\nwith kvobs.instrument() as handle:\n    handle.flush()\n    print(handle.active)\n")
    done = run_child([empty / "python", "-c", code], cwd=tmp_path, env=child_environment(
        KVOBS_STORE=str(tmp_path / "store")))
    assert done.stdout == "True\n", done.stderr
    assert "Traceback" not in done.stderr
    assert list((tmp_path / "store").iterdir())


def test_the_view_without_its_extra_is_one_sentence(empty: Path, tmp_path: Path) -> None:
    """The installed wheel knows the live view, and says what to install for it."""
    done = run_child([empty / "kvobs", "view", tmp_path], cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == ("kvobs: The live view needs streamlit and pandas and altair; install with: pip install "
                           "'kvobs[app]'.\n")


def test_the_view_of_the_wheel_runs_outside_the_clone(wheel: Path, tmp_path: Path) -> None:
    """Unpacked in front of an environment that has Streamlit, the wheel's own pages are served over a real store."""
    pytest.importorskip("streamlit", reason="streamlit is not installed: pip install 'kvobs[app]'")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    writer = StoreWriter(tmp_path / "store", 2**24, "p")
    writer.write([turn()])
    writer.close()
    where = run_child([sys.executable, "-c", "from kvobs.cli import _view; print(_view.app())"], cwd=tmp_path,
                      env=child_environment(PYTHONPATH=str(tmp_path / "site")))
    assert where.stdout.strip() == str(tmp_path / "site" / "kvobs" / "_app" / "streamlit_app" / "app.py")
    with viewing(tmp_path / "store", cwd=tmp_path, PYTHONPATH=str(tmp_path / "site")) as address, browsing() as window:
        window.page.goto(address)
        wait_until(lambda: window.state(), what="the page")
        window.open("Turns")
        wait_until(lambda: [row["KV held"] for row in window.table(0)] == ["1,000 B"], what="the turn")
        assert window.errors == []


def test_a_missing_extra_is_one_sentence(empty: Path, tmp_path: Path) -> None:
    """What needs an extra says which, and exits 2."""
    done = run_child([empty / "kvobs", "demo", "--turns", "1"], cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "pip install 'kvobs[" in done.stderr
