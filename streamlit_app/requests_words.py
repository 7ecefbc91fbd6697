"""The page Requests in figures, sentences and tables. Pure."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Iterable, Mapping

from kvobs.catalog import BY_NAME
from kvobs.model import Preemption, RequestRow, RequestStates
from kvobs.store import Stored
from streamlit_app import units
from streamlit_app.data import SECOND_NS, Figure
from streamlit_app.requests_data import Growth, Requests, moment

# Why requests wait, of several and of one; the reasons are those of ``RequestRow``.
REASONS = {
    "blocks": "the pool has too few blocks", "slots": "as many requests run as may",
    "tokens": "the token budget of the step is spent", "turn": "others come first",
    "grammar": "the grammar is being compiled", "remote_kv": "the KV comes from elsewhere and is not here yet",
    "stream": "more input is still to come", "paused": "the engine is paused",
    "step": "a step runs, and the engine takes new requests in after it",
    "": "the engine does not tell why"}
CAUSES = {"blocks": "the pool had no block left", "reset": "the prefix cache was reset",
          "forced": "the engine retracts without need, as in its own tests"}
PHASES = {"queued": "queued", "prefill": "prefill", "decode": "decode", "preempted": "preempted, waits"}

TOLD_S = 3.0  # an engine tells of its requests every two seconds
SILENT_S = 5.0  # an engine with open requests tells of them every two seconds
LABEL = 18  # characters of a request's name where there is little room


def names(requests: Iterable[str]) -> dict[str, str]:
    """Each request's label, all different."""
    seen: Counter[str] = Counter()
    told = {}
    for request in requests:
        name = short(request)
        seen[name] += 1
        told[request] = name if seen[name] == 1 else f"{name} ({seen[name]})"
    return told


def short(request: str) -> str:
    """A request's name where there is little room: its beginning and its end."""
    words = " ".join(request.split())
    return words if len(words) <= LABEL else f"{words[:8]}…{words[1 - (LABEL - 8):]}"


def reason_of(reason: str, slots: int) -> str:
    """Why a request waits, in words; a reason that is not known here is shown as it is."""
    told = REASONS.get(reason, reason)
    return f"{told} ({slots:,})" if reason == "slots" else told


def waiting(states: RequestStates) -> list[str]:
    """A sentence for each reason for which requests wait, the most frequent first."""
    numbers: dict[tuple[str, str], int] = {}
    for state, reason, number in states.counts:
        if state != "running" and number:
            numbers[state, reason] = numbers.get((state, reason), 0) + number
    return [f"{number:,} {'waits' if number == 1 else 'wait'}{' after a preemption' if state == 'preempted' else ''}: "
            f"{reason_of(reason, states.slots)}."
            for (state, reason), number in sorted(numbers.items(), key=lambda one: (-one[1], one[0]))]


def none_waits(found: Requests) -> str:
    """That no request waits, as long as that is new; what is old says only what was."""
    if found.states is None:
        return ""
    age_s = _age(found, found.states.wall_ns)
    if found.running and age_s <= TOLD_S:
        return f"No request waits, as the engine told {units.seconds(age_s)} ago."
    return f"No request waited when the engine told last, {units.seconds(age_s)} ago."


def of_state(states: RequestStates, state: str) -> int:
    """How many requests are in a state."""
    return sum(number for name, _, number in states.counts if name == state)


def next_one(states: RequestStates) -> str:
    """What would become of the request that is admitted next; empty where none waits."""
    if not states.next_request:
        return ""
    needs = ("" if states.next_needs is None else f" It needs {states.next_needs:,} "
             f"{'block' if states.next_needs == 1 else 'blocks'} beyond its cached prefix.")
    return f"{units.plain(states.next_sentence)}{needs}"


def figures(found: Requests, range_name: str) -> list[Figure]:
    """The strip: states now, and the growth of counters within the range; what is not told is absent."""
    return [*_states(found), *_blocks(found), *_counts(found, range_name)]


def _help(metric: str, more: str = "") -> str:
    row = BY_NAME[metric]
    return f"{row.meaning} Metric {metric}, {row.nature}. Formula: {row.formula}.{more}"


def _figure(key: str, label: str, text: str | None, raw: str, age_s: float | None, told: str) -> Figure:
    if text is None:
        return Figure(f"requests-{key}", label, "absent", raw, None, told)
    return Figure(f"requests-{key}", label, text, raw, age_s, told)


def _age(found: Requests, wall_ns: int) -> float:
    return max(found.now_ns - wall_ns, 0) / SECOND_NS


def _states(found: Requests) -> list[Figure]:
    states = found.states
    described = _help("kvobs.requests")
    if states is None:
        return [_figure(state, state.capitalize(), None, "not told here", None, described)
                for state in ("running", "waiting", "preempted")]
    age, slots = _age(found, states.wall_ns), f"of {states.record.slots:,} slots"
    return [_figure(state, state.capitalize(), units.count(of_state(states.record, state)), raw, age, described)
            for state, raw in (("running", slots), ("waiting", "requests"), ("preempted", "requests"))]


def _blocks(found: Requests) -> list[Figure]:
    pool, work = found.pool, found.work
    told = _help("kvobs.kv.blocks")
    values: Mapping[str, int | None] = {
        "used": pool.record.used if pool else None, "cached": pool.record.cached if pool else None,
        "free": pool.record.free if pool else None, "pinned": work.record.pinned if work else None}
    age = _age(found, moment(found.process, pool.record.t_ns, pool.wall_ns)) if pool else None
    unit = pool.record.block_bytes if pool else 0
    shown = [_figure(name, f"Blocks {name}", None if value is None else units.count(value),
                     "not told here" if value is None else units.size(value * unit) if unit else "blocks", age, told)
             for name, value in values.items()]
    tokens, size = (work.record.tail_tokens, work.record.tail_bytes) if work else (None, None)
    tail = "not told here" if tokens is None else "bytes not told" if size is None else units.size(size)
    return [*shown, _figure("tail", "Tail waste", None if tokens is None else f"{units.count(tokens)} tokens", tail,
                            age, _help("kvobs.kv.tail"))]


def _counts(found: Requests, range_name: str) -> list[Figure]:
    pool, work = found.blocks_growth, found.work_growth

    def grew(key: str, label: str, metric: str, growth: Growth | None, field: str, raw: str, more: str = "") -> Figure:
        told = f"{_help(metric)} {since(growth, range_name)}{more}" if growth else _help(metric)
        return _figure(key, label, None if growth is None else units.count(growth.grown[field]),
                       raw if growth else "not told here", None, told)

    waited = f"{work.grown['failures_waiting']:,} of waiting requests" if work else f"in {range_name}"
    lost = f"{work.grown['dropped']:,} more dropped" if work else ""
    return [grew("preemptions", f"Preemptions, {range_name}", "kvobs.kv.preemptions", pool, "preemptions",
                 "requests that lost their blocks"),
            grew("evictions", f"Evictions, {range_name}", "kvobs.kv.block.evictions", work, "evictions", lost),
            grew("failures", f"Refusals, {range_name}", "kvobs.kv.block.failures", pool, "failures", waited),
            _hits(found, range_name), _recomputed(found, range_name)]


def _hits(found: Requests, range_name: str) -> Figure:
    growth, label = found.work_growth, f"Prefix hits, {range_name}"
    told = _help("kvobs.prefix.hit")
    if growth is None:
        return _figure("hits", label, None, "not told here", None, told)
    asked, hit = growth.grown["queried_tokens"], growth.grown["hit_tokens"]
    again, found_again = growth.grown["resumed_queried_tokens"], growth.grown["resumed_hit_tokens"]
    told += (f" {since(growth, range_name)} Requests that came back after a preemption are not in this share: they had "
             f"{found_again:,} of {again:,} tokens.")
    if not asked:
        return _figure("hits", label, None, "no request was admitted", None, told)
    return _figure("hits", label, units.share(hit / asked), f"{hit:,} of {asked:,} tokens", None, told)


def _recomputed(found: Requests, range_name: str) -> Figure:
    growth, label, told = found.work_growth, f"Recomputed, {range_name}", _help("kvobs.kv.recomputed")
    if growth is None:
        return _figure("recomputed", label, None, "not told here", None, told)
    preempted, evicted = growth.grown["recomputed_preempted_tokens"], growth.grown["recomputed_evicted_tokens"]
    told += (f" {since(growth, range_name)} After preemptions {preempted:,}, because blocks were evicted at least "
             f"{evicted:,}.")
    tax = (f"{units.share((preempted + evicted) / found.computed)} of {found.computed:,} computed" if found.computed
           else "tokens; how many were computed in all is not told")
    return _figure("recomputed", label, units.count(preempted + evicted), tax, None, told)


def since(growth: Growth, range_name: str) -> str:
    """What a growth covers."""
    when = datetime.datetime.fromtimestamp(growth.from_ns / SECOND_NS, datetime.UTC).strftime("%H:%M:%S")
    return (f"Counted since {when} UTC, for the store lost what was before." if growth.partial
            else f"Counted over the last {range_name}, since {when} UTC.")


def open_rows(states: Stored[RequestStates], now_ns: int | None = None) -> list[dict[str, object]]:
    """The open requests as a table: those that run, those that lost their blocks, those that wait.

    How long they have been so is until ``now_ns``, or, where the process has ended, until it told of them.
    """
    at, label = states.wall_ns if now_ns is None else now_ns, names(row.request for row in states.record.rows)
    order = {"running": 0, "preempted": 1, "waiting": 2}
    rows = sorted(states.record.rows, key=lambda row: (order.get(row.state, 3), -row.blocks))
    return [_open_row(row, states.record.slots, label[row.request], at) for row in rows]


def _open_row(row: RequestRow, slots: int, name: str, at_ns: int) -> dict[str, object]:
    why = "-" if row.state == "running" else reason_of(row.reason, slots)
    since, arrived = ("not known" if when is None else units.seconds(max(at_ns - when, 0) / SECOND_NS)
                      for when in (row.since_ns, row.arrived_ns))
    detail = row.phase if row.state == "running" else row.reason
    return {"request": name, "session": row.session or "-", "state": ", ".join(filter(None, (row.state, detail))),
            "for": since, "blocks": row.blocks, "prompt": row.prompt_tokens,
            "cached": row.cached_tokens, "computed": row.computed_tokens, "new": row.new_tokens,
            "lost": row.preemptions, "open for": arrived, "priority": row.priority,
            "whole id": row.request, "waits because": why}


def preemption_rows(found: Iterable[Stored[Preemption]]) -> list[dict[str, object]]:
    """Preemptions as a table, in the order that they come in."""
    found = list(found)
    label = names(dict.fromkeys(name for one in found for name in (one.record.request, wanted(one.record))))
    return [{"when (UTC)": clock(one.wall_ns), "victim": label[one.record.request],
             "session": one.record.session or "-", "for whom": label[wanted(one.record)],
             "tokens lost": one.record.tokens_lost, "blocks": one.record.blocks,
             "cause": CAUSES.get(one.record.cause, one.record.cause), "victim's whole id": one.record.request,
             "whole id of whom": wanted(one.record), "held then": holders(one.record)} for one in found]


def preempted(found: Requests) -> int:
    """How many preemptions there were within the range, by the pool's counter where it has one."""
    growth = found.blocks_growth
    return max(growth.grown["preemptions"] if growth else 0, len(found.preemptions))


def clock(wall_ns: int) -> str:
    """A time of the day in UTC, to the millisecond."""
    return datetime.datetime.fromtimestamp(wall_ns // 1_000_000 / 1e3, datetime.UTC).strftime("%H:%M:%S.%f")[:-3]


def wanted(lost: Preemption) -> str:
    """Who wanted the blocks that a victim lost."""
    if not lost.wanted_by:
        return "-"
    return "itself" if lost.wanted_by == lost.request else lost.wanted_by


def holders(lost: Preemption, most: int = 4) -> str:
    """Who held most blocks when a request was preempted."""
    named = [f"{request} {blocks:,}" for request, blocks in lost.holders[:most]]
    more = len(lost.holders) - len(named)
    return ", ".join(named) + (f" and {more:,} more" if more else "") or "-"


def sound(found: Requests) -> str:
    """What is wrong with the pool's account; empty where it adds up."""
    missing = found.work.record.unexplained if found.work else 0
    if not missing:
        return ""
    return (f"The pool's account does not add up: {abs(missing):,} "
            f"{'blocks are in no state' if missing > 0 else 'blocks are in more than one state'}.")


def busy(found: Requests) -> bool:
    """Whether requests were open in the engine when it told of them last."""
    return found.states is not None and any(number for _, _, number in found.states.record.counts)


def worry(found: Requests) -> str:
    """That requests are open and their engine has not told of them for long; empty otherwise."""
    if found.states is None or not found.running or not busy(found):
        return ""
    age_s = _age(found, found.states.wall_ns)
    if age_s <= SILENT_S:
        return ""
    return (f"The engine's last word on its requests is {units.seconds(age_s)} old, although some are open in it: it "
            "is paused, stuck in a step, or no longer seen. What is below is as of then.")


def telling(found: Requests) -> str:
    """What it means that an engine without requests tells nothing new; empty otherwise."""
    if found.told_s <= TOLD_S or not found.running or busy(found):
        return ""
    return f"Idle: no request has moved in the engine for {units.seconds(found.told_s)}."


def account(found: Requests) -> list[str]:
    """What the bars of the pool cannot say themselves: two moments, blocks that are shared, requests left out.

    A pool tells of its blocks more often than of its requests, so the two words are seldom of one moment.
    """
    if found.pool is None or found.states is None:
        return []
    used, held = found.pool.record.used, sum(row.blocks for row in found.states.record.rows)
    if held == used:
        return []
    later = (found.pool.record.t_ns - found.states.record.t_ns) / SECOND_NS
    sentences = [] if not later else [
        f"The requests' word is {units.seconds(abs(later))} {'older' if later > 0 else 'newer'} than the pool's."]
    sentences.append(f"The listed requests held {held:,} blocks together, and {used:,} are in use.")
    if held > used:
        sentences.append("Requests share the blocks of a common prefix, so each is drawn with its share of those in "
                         "use.")
    return [" ".join(sentences)]


def drawn(found: Requests) -> list[str]:
    """How to read the timeline, and what it leaves out."""
    line = found.timeline
    if not line.phases:
        return []
    sentences = ["Thin bars wait, thick ones compute; pale ones are not over. A diamond is a preemption."]
    if line.left_out:
        sentences.append(f"The {len(line.requests):,} requests that were active last, since {clock(line.begin_ns)[:8]} "
                         f"UTC; {line.left_out:,} more were active since then.")
    if found.states is not None and found.states.record.more:
        sentences.append(f"{found.states.record.more:,} open requests are not told of one by one.")
    return sentences
