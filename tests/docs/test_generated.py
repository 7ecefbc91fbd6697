"""The generated parts of the documentation."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from kvobs import catalog, config
from tests.support import ROOT


@pytest.fixture
def generator(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_docs", ROOT / "scripts" / "generate_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "generate_docs", module)
    spec.loader.exec_module(module)
    return module


def test_the_readme_s_metric_table_is_the_catalog() -> None:
    """Between the markers of the README stands exactly the table that the catalog gives."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    between = text.split("<!-- metrics:begin -->\n")[1].split("<!-- metrics:end -->")[0]
    assert between == catalog.markdown()


def test_check_and_write(generator: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                         capsys: pytest.CaptureFixture[str]) -> None:
    """Check fails on an old table and changes nothing; write brings it up to date; then check passes."""
    monkeypatch.setattr(generator, "ROOT", tmp_path)
    page = tmp_path / "README.md"
    settings = f"<!-- settings:begin -->\n{config.markdown()}<!-- settings:end -->\n"
    old = f"A\n<!-- metrics:begin -->\nold\n<!-- metrics:end -->\nB\n{settings}"
    page.write_text(old, encoding="utf-8")
    assert generator.main(["--check"]) == 1
    assert capsys.readouterr().err == "README.md: the part 'metrics' is not up to date; make docs writes it.\n"
    assert page.read_text(encoding="utf-8") == old
    assert generator.main(["--write"]) == 0
    assert page.read_text(encoding="utf-8") == (
        f"A\n<!-- metrics:begin -->\n{catalog.markdown()}<!-- metrics:end -->\nB\n{settings}")
    assert generator.main(["--check"]) == 0


@pytest.mark.parametrize("text", ["", "<!-- metrics:begin -->\n", "<!-- metrics:end -->\n<!-- metrics:begin -->\n",
                                  "<!-- metrics:begin -->\n<!-- metrics:begin -->\n<!-- metrics:end -->\n"])
def test_missing_markers_are_one_sentence(generator: ModuleType, text: str) -> None:
    """A page without proper markers is refused rather than damaged."""
    with pytest.raises(ValueError, match=r"^The markers .* in this order\.$"):
        generator.filled(text, "metrics", "new\n")
