"""The ``[[slo]]`` tables of the config file: what is taken, what is refused, and with which words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvobs.catalog import LATENCY_BUCKETS
from kvobs.config import ARTICLE, LATENCY_BOUNDS_NS, ConfigError, Objective, load, parse_duration, parse_share

GOOD = """
deep = true

[[slo]]
name = "first-token"
signal = "time_to_first_token"
at_most = "1.5s"
target = "99%"

[[slo]]
name = "allocations"
signal = "allocation_latency"
at_most = "2.5 ms"
quantile = "90 %"
target = 0.999
window = "30s"

[[slo]]
name = "calm"
signal = "preemptions"
target = 0.9

[[slo]]
name = "whole"
signal = "out_of_memory"
target = 0.9999
"""


def _file(directory: Path, text: str) -> dict[str, str]:
    (directory / "kvobs.toml").write_text(text)
    return {"KVOBS_CONFIG": str(directory / "kvobs.toml")}


def test_tables_become_objectives(tmp_path: Path) -> None:
    """Durations become ns, shares numbers; what is left out has the documented default; settings are still read."""
    config = load(_file(tmp_path, GOOD))
    assert config.objectives == (
        Objective(name="first-token", signal="time_to_first_token", at_most=1_500_000_000, target=0.99),
        Objective(name="allocations", signal="allocation_latency", at_most=2_500_000, quantile=0.9, target=0.999,
                  window_s=30),
        Objective(name="calm", signal="preemptions", target=0.9, at_most=0),
        Objective(name="whole", signal="out_of_memory", target=0.9999))
    assert config.deep


def test_without_tables_the_article_s_objective_holds(tmp_path: Path) -> None:
    """P95 of allocation latencies at most 12 ms, in 99.5 % of windows of 60 s."""
    assert load(_file(tmp_path, "deep = false\n")).objectives == (ARTICLE,) == load({}).objectives
    assert (ARTICLE.at_most, ARTICLE.quantile, ARTICLE.target, ARTICLE.window_s) == (12_000_000, 0.95, 0.995, 60)


@pytest.mark.parametrize(("change", "words"), [
    (('name = "calm"', 'name = "whole"'), "two [[slo]] tables are named 'whole'"),
    (('name = "calm"', 'name = "Calm!"'), "needs a name of small letters"),
    (('name = "calm"', ""), "[[slo]] number 3 needs a name"),
    (('signal = "preemptions"', 'signal = "speed"'), "has the signal 'speed'; allowed are allocation_latency"),
    (('at_most = "1.5s"', ""), "needs at_most: a duration such as 12ms"),
    (('at_most = "1.5s"', 'at_most = "1.5 hours"'), "has at_most = '1.5 hours'; allowed is a duration"),
    (('at_most = "2.5 ms"', 'at_most = "11ms"'), "allowed are 1 us, 10 us"),
    (("target = 0.999\n", "target = 1\n"), "has target = 1; allowed is a share below 1"),
    (("target = 0.999\n", "target = nan\n"), "has target = nan; allowed is a share below 1"),
    (("target = 0.999\n", "target = true\n"), "has target = True; allowed is a share below 1"),
    (('window = "30s"', 'window = "5s"'), "has window = '5s'; allowed is whole seconds from 10s"),
    (('window = "30s"', 'windw = "30s"'), "has no key 'windw'; did you mean 'window'?"),
    (('signal = "preemptions"', 'signal = "preemptions"\nquantile = 0.5'), "has 'quantile', which means nothing for"),
    (('signal = "preemptions"', 'signal = "preemptions"\nat_most = "1ms"'), "has at_most = '1ms'"),
    (("[[slo]]", "[slo]"), ""),
])
def test_refusals_name_the_table_and_what_is_allowed(tmp_path: Path, change: tuple[str, str], words: str) -> None:
    """One sentence: the file, the table, what is wrong and what is allowed."""
    with pytest.raises(ConfigError) as refused:
        load(_file(tmp_path, GOOD.replace(*change)))
    assert words in str(refused.value)
    assert "kvobs.toml" in str(refused.value)
    assert str(refused.value).endswith(".")


def test_one_table_is_not_a_list(tmp_path: Path) -> None:
    """``[slo]`` instead of ``[[slo]]`` is told as such."""
    with pytest.raises(ConfigError, match=r"slo must be tables, each headed \[\[slo\]\]"):
        load(_file(tmp_path, '[slo]\nname = "x"\n'))


def test_there_is_a_bound(tmp_path: Path) -> None:
    """More than 32 objectives are refused."""
    table = '[[slo]]\nname = "n{}"\nsignal = "out_of_memory"\ntarget = 0.9\n'
    assert len(load(_file(tmp_path, "".join(map(table.format, range(32))))).objectives) == 32
    with pytest.raises(ConfigError, match="there are 33"):
        load(_file(tmp_path, "".join(map(table.format, range(33)))))


@pytest.mark.parametrize(("text", "ns"), [("12ms", 12_000_000), (" 250 us ", 250_000), ("1.5s", 1_500_000_000),
                                          ("7ns", 7)])
def test_durations(text: str, ns: int) -> None:
    """A number with a unit, in ns."""
    assert parse_duration(text) == ns


@pytest.mark.parametrize("text", ["", "12", "ms", "-1ms", "1e3ms", "1 m", "nan s", "12msx"])
def test_no_durations(text: str) -> None:
    """Everything else is refused."""
    with pytest.raises(ValueError, match=re.escape(text) or None):
        parse_duration(text)


def test_shares_in_percent_are_those_that_were_meant() -> None:
    """99.5 % is 0.995 to the last bit, whichever way it is written."""
    assert parse_share("99.5 %") == parse_share("0.995") == parse_share(0.995) == 0.995


def test_every_limit_is_a_boundary_of_the_histogram() -> None:
    """The limits that allocations can be judged by are the catalog's buckets, from 1 µs to 2.5 s, 12 ms among them."""
    assert [bound * 1e9 for bound in LATENCY_BUCKETS] == pytest.approx(LATENCY_BOUNDS_NS, rel=1e-15)
    assert LATENCY_BUCKETS == (1e-6, 1e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.012, 0.025, 0.05, 0.1, 0.25, 0.5,
                               1.0, 2.5)
