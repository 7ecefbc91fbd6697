"""The Explain page, run by Streamlit's own test runner over files that the twin wrote, and what it is made of."""

from __future__ import annotations

import contextlib
import io
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("streamlit")
pytest.importorskip("pandas")

from kvobs.allocator.growth import parse
from kvobs.allocator.readers import Unreadable
from kvobs.allocator.recorder import RecordingAllocator
from kvobs.allocator.search import SPLITS_MIB
from kvobs.allocator.settings import MIB, Settings
from kvobs.allocator.twin import OutOfMemory
from streamlit_app import explain_data, units
from tests.recordings import dump

HOSTILE = "![x](https://example.org/x.png) <img src=x onerror=alert(1)> **`$"


def started() -> Any:
    """The page on its first look, with a store that does not exist."""
    from streamlit.testing.v1 import AppTest

    script = "from streamlit_app.views import explain\nexplain.render('/nonexistent')\n"
    return AppTest.from_string(script, default_timeout=120).run()


def shown(path: Path) -> Any:
    found = started().text_input(key="explain-path").input(str(path)).run()
    assert not found.exception, found.exception
    return found


def read(markdown: str) -> str:
    return re.sub(r"\\([!-/:-@\[-`{-~])", r"\1", markdown)


def tables(found: Any) -> list[Any]:
    """The page's tables, with the spaces that people see."""
    return [table.value.replace("\u00a0", " ", regex=True) for table in found.table]


def press(found: Any, name: str) -> Any:
    next(button for button in found.button if button.label == name).click().run()
    assert not found.exception, found.exception
    return found


def field(found: Any, name: str) -> Any:
    return next(element for element in found.number_input if read(element.label) == name)


def worked_out(path: Path) -> explain_data.Explained:
    return explain_data.work_out(path, path.name, lambda share, words: None)


def test_without_a_file_the_page_says_what_to_do() -> None:
    """The page needs no store; it asks for a file."""
    found = started()
    assert not found.exception
    assert [element.value for element in found.info] == ["Name a file, or upload one."]


def test_a_file_is_explained(tmp_path: Path) -> None:
    """Sizes, the verdict, the waste that sums to what is reserved, holders and definitions are those of the file."""
    found = shown(dump(tmp_path / "made.pickle"))
    assert {metric.label: metric.value for metric in found.metric} == {
        "Reserved": "30.00 MiB", "Allocated": "16.00 MiB", "Pending free": "0 B", "Free": "14.00 MiB",
        "Largest free": "9.00 MiB"}
    (verdict,) = [read(element.value) for element in found.error]
    assert verdict.startswith("**CAPACITY**: 256.00 MiB requested by linear.py:134 forward (from serve.py:20 answer) "
                              "(activation), the device had 34.00 MiB left.")
    waste, pins, holders, definitions = tables(found)
    assert sum(int(value.split()[0].replace(",", "")) for value in waste["exactly"]) == 30 * MIB
    document = worked_out(tmp_path / "made.pickle").document["devices"][0]
    assert document["pins"]
    assert [int(value, 16) for value in pins["segment"]] == [pin["address"] for pin in document["pins"]]
    assert sum(pin["held_back_bytes"] for pin in document["pins"]) == document["waste"]["gaps_bytes"] == 14 * MIB
    assert sorted(pins["held back"]) == ["14.00 MiB"]
    assert holders["kind"].tolist() == ["weights", "kv"]
    assert holders["bytes"].tolist() == ["10.00 MiB", "6.00 MiB"]
    assert len(definitions) == 9
    assert "8/8 addresses" in "".join(read(element.value) for element in found.caption)


def many(path: Path) -> Path:
    """25 holders of 1 MiB each, and 18 requests that fail."""
    made = RecordingAllocator(Settings(), 64 * MIB, space=1 << 40)
    for line in range(25):
        made.alloc(MIB, frames=[("app/serve.py", line + 1, "hold")])
    for _ in range(18):
        with contextlib.suppress(OutOfMemory):
            made.alloc(256 * MIB)
    made.dump(path)
    return path


def test_what_is_not_shown_is_said(tmp_path: Path) -> None:
    """Holders beyond the first twenty are one row, with which the table sums to what is allocated; of many failed
    requests the page says how many it shows.
    """
    found = shown(many(tmp_path / "made.pickle"))
    holders = next(table for table in tables(found) if "decided by" in table)
    assert holders["allocated by"].iloc[-1] == "5 others"
    assert sum(float(value.removesuffix(" MiB")) for value in holders["bytes"]) == 25
    assert sum(float(value.removesuffix(" %")) for value in holders["share"]) == 100
    assert len(found.error) == 16
    assert "The first 16 of 18 are shown." in [element.value for element in found.caption]


def test_a_hostile_name_is_text(tmp_path: Path) -> None:
    """A function called like Markdown and markup is shown as it is called."""
    found = shown(dump(tmp_path / "made.pickle", HOSTILE))
    cell = next(cell for cell in found.table[2].value["allocated by"] if "example" in cell)
    assert HOSTILE in read(cell)
    assert re.search(r"(?<!\\)[<!`*$]", cell) is None


def test_a_profilers_trace_is_explained(tmp_path: Path) -> None:
    """A trace without a state of the allocator gives its calls for device memory, and no figures."""
    place = tmp_path / "trace.json"
    place.write_text(json.dumps({"schemaVersion": 1, "traceEvents": [
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaMalloc", "pid": 1, "tid": 1, "ts": 1.0 + start, "dur": length,
         "args": {}} for start, length in ((0, 4_000.0), (5_000, 1_000.0), (9_000, 2_000.0))]}))
    found = shown(place)
    assert not found.error
    (table,) = tables(found)
    assert table[["call", "times", "in all", "median"]].values.tolist() == [["cudaMalloc", 3, "7 ms", "2 ms"]]
    assert not found.metric


@pytest.mark.parametrize(("content", "told"), [(b"nonsense", "cannot be read"), (b"", "cannot be read"),
                                              (None, "There is no file")])
def test_what_cannot_be_read_is_one_sentence(tmp_path: Path, content: bytes | None, told: str) -> None:
    """A foreign, an empty or a missing file gives one sentence, and the page goes on."""
    place = tmp_path / "x.pickle"
    if content is not None:
        place.write_bytes(content)
    found = shown(place)
    (sentence,) = [read(element.value) for element in found.error]
    assert told in sentence
    assert str(place) in sentence
    assert sentence.endswith(".")


@pytest.mark.parametrize("path", ["/dev/zero", "a\0b", "x" * 5_000, "/proc/kcore", "/proc/kmsg"])
def test_no_path_harms_the_page(path: str) -> None:
    """Devices and endless files of the kernel are not read, and names that no file can have give a sentence too."""
    with pytest.raises(Unreadable, match=r"\.$"):
        explain_data.content_of(Path(path))


def test_the_home_of_nobody_is_one_sentence() -> None:
    """A path that begins with a user whom this machine does not know is refused on the page."""
    found = started().text_input(key="explain-path").input("~no-such-user/x.pickle").run()
    assert not found.exception
    (sentence,) = [read(element.value) for element in found.error]
    assert sentence == "~no-such-user/x.pickle cannot be found: there is no such home directory."


def test_a_copy_is_shown_under_its_own_name(tmp_path: Path) -> None:
    """The same content in another file is told with that file's name."""
    first = dump(tmp_path / "first.pickle")
    (tmp_path / "second.pickle").write_bytes(first.read_bytes())
    for name in ("first", "second"):
        captions = [read(element.value) for element in shown(tmp_path / f"{name}.pickle").caption]
        assert any(caption.startswith(f"{name}.pickle: torch snapshot") for caption in captions)


def test_what_if_is_compared(tmp_path: Path) -> None:
    """Compared with nothing changed, before and after are equal; more capacity lets the failed request succeed."""
    found = shown(dump(tmp_path / "made.pickle"))
    press(found, "Compare")
    table = tables(found)[3]
    assert table["before (modelled)"].tolist() == table["after (modelled)"].tolist()
    assert "No request ends otherwise." in [element.value for element in found.info]
    field(found, "Capacity in GiB").set_value(1.0)
    press(found, "Compare")
    changed = tables(found)[4]
    assert changed[["requested", "before", "after"]].values.tolist() == [["256.00 MiB", "CAPACITY", "succeeds"]]


def fragmented(path: Path) -> Path:
    """Two segments of 60 MiB, each with 5 MiB in use, and 100 MiB asked of a device of 160 MiB: 110 MiB are free, but
    two blocks pin them. Expandable segments give them back, and with a ``max_split_size_mb`` they would not be pinned.
    """
    made = RecordingAllocator(Settings(), 160 * MIB, space=1 << 40)
    first, second = made.alloc(60 * MIB), made.alloc(60 * MIB)
    made.free(first)
    made.alloc(5 * MIB)
    filler = made.alloc(55 * MIB)
    made.free(second)
    made.alloc(5 * MIB)
    made.free(filler)
    with contextlib.suppress(OutOfMemory):
        made.alloc(100 * MIB)
    made.dump(path)
    return path


def test_the_best_settings_are_found(tmp_path: Path) -> None:
    """Of memory that blocks pin, the search finds what lets the failed request succeed, with the least reserved bytes
    that any setting gives when it is compared alone. The line for the environment says it, and before and after stand
    below.
    """
    found = press(shown(fragmented(tmp_path / "made.pickle")), "Find the best settings")
    assert "FRAGMENTED" in found.error[0].value
    ranking, compared = tables(found)[3:5]
    made = worked_out(tmp_path / "made.pickle")
    alone = [explain_data.compare(made, 0, changes, None, None).after for changes in (
        {"expandable_segments": "True"}, *({"max_split_size_mb": str(size)} for size in SPLITS_MIB))]
    least = min(run.peak_reserved_bytes for run in alone if not run.ooms)
    assert len(ranking) == explain_data.RANKED
    assert ranking[["out of memory", "peak reserved"]].values.tolist()[0] == ["0", units.size(least)]
    best = read(ranking.iloc[0, 0])
    assert best in {run.settings for run in alone if (run.ooms, run.peak_reserved_bytes) == (0, least)}
    assert [element.value for element in found.code] == [f"PYTORCH_ALLOC_CONF={best}"]
    rows = compared.set_index("what")
    assert rows.loc["out of memory"].tolist() == ["1", "1", "0"]
    assert read(rows.loc["settings", "after (modelled)"]) == best
    (gain,) = [read(element.value) for element in found.success]
    assert "1 of 1 OOMs less" in gain
    assert "(modelled)" in gain


def test_where_nothing_gains_it_is_said(tmp_path: Path) -> None:
    """A request for more than the device has fails under all settings: nothing is better, and there is no line. The
    search begins with the controls, and ranks them first.
    """
    found = shown(dump(tmp_path / "made.pickle"))
    field(found, "max_split_size_mb").set_value(50)
    press(found, "Find the best settings")
    assert not found.code
    assert any("None of the settings that were tried is better" in element.value for element in found.info)
    assert read(tables(found)[3].iloc[0, 0]) == "max_split_size_mb:50"


def test_the_search_tells_its_progress(tmp_path: Path) -> None:
    """Progress of the search goes from 0 to 1 in steps of one setting."""
    told: list[float] = []
    _, best = explain_data.compare_with_best(worked_out(fragmented(tmp_path / "made.pickle")), 0, {}, None, None,
                                             lambda share, words: told.append(share))
    assert told == [step / len(best.ranking) for step in range(len(best.ranking) + 1)]


def test_an_impossible_change_is_one_sentence(tmp_path: Path) -> None:
    """A change that is not possible is refused in words."""
    found = shown(dump(tmp_path / "made.pickle"))
    field(found, "max_split_size_mb").set_value(5)
    press(found, "Compare")
    assert any("max_split_size_mb" in read(element.value) for element in found.error)


def test_the_controls_mean_options() -> None:
    """What is left alone is not among the options; the others have PyTorch's names and forms."""
    assert explain_data.changes_of("as recorded", None, "as recorded", None) == {}
    assert explain_data.changes_of("True", 64, "8", 0.8) == {
        "expandable_segments": "True", "max_split_size_mb": "64", "roundup_power2_divisions": "8",
        "garbage_collection_threshold": "0.8"}


def test_a_kv_cache_that_does_not_copy_is_compared(tmp_path: Path) -> None:
    """Held once in its final size, the cache copies nothing, so the peak of allocated bytes is 16 instead of 21 MiB."""
    found = worked_out(dump(tmp_path / "made.pickle"))
    compared = explain_data.compare(found, 0, {}, None, parse("static"))
    assert compared.before.peak_allocated_bytes == 21 * MIB
    assert compared.after.peak_allocated_bytes < 21 * MIB
    rows = {row["what"]: row for row in explain_data.compared_rows(compared)}
    assert rows["KV growth"]["after (modelled)"] == "static"


def test_an_upload_is_gone_after_it_was_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An upload is a private file while it is read, whole, and removed whatever happens."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    source = io.BytesIO(dump(tmp_path / "made.pickle").read_bytes())
    source.read()
    seen = []

    def look() -> None:
        with explain_data.uploaded(source) as place:
            seen.append((place.read_bytes(), place.stat().st_mode & 0o077))
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        look()
    assert seen == [((tmp_path / "made.pickle").read_bytes(), 0)]
    assert [one.name for one in tmp_path.iterdir()] == ["made.pickle"]


def test_the_same_content_is_worked_out_once(tmp_path: Path) -> None:
    """Files are known by their bytes: a copy is not explained again, a changed one is, and only the last few stay."""
    kept, made = explain_data.Kept(), []

    def look(content: str) -> Any:
        def make() -> Any:
            made.append(content)
            return f"explained {content}"
        return kept.get(content, make)

    first = dump(tmp_path / "a.pickle")
    copy = tmp_path / "b.pickle"
    copy.write_bytes(first.read_bytes())
    assert explain_data.content_of(first) == explain_data.content_of(copy)
    copy.write_bytes(first.read_bytes() + b".")
    assert explain_data.content_of(first) != explain_data.content_of(copy)
    assert [look(content) for content in "aab"] == ["explained a", "explained a", "explained b"]
    assert made == ["a", "b"]
    for content in "cdea":
        look(content)
    assert made == ["a", "b", "c", "d", "e", "a"]
    assert len(kept.found) == explain_data.KEPT


def test_progress_is_told_in_order(tmp_path: Path) -> None:
    """Progress goes from 0 towards 1, never back, with words."""
    told: list[tuple[float, str]] = []
    explain_data.work_out(dump(tmp_path / "made.pickle"), "made.pickle",
                          lambda share, words: told.append((share, words)))
    shares = [share for share, _ in told]
    assert shares == sorted(shares)
    assert 0 <= shares[0] < shares[-1] <= 1
    assert all(words for _, words in told)
