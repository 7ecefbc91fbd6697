"""Precision and recall of decisions, against a second implementation that looks at every half second."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvobs import model
from kvobs.breaker.simulator import hindsight
from kvobs.store import Point

HALF = 500_000_000  # nanoseconds
END, HORIZON = 400, 60  # seconds
SCOPES = ("a", "b")
NEXT = {"closed": ("open",), "open": ("half-open", "closed"), "half-open": ("open", "closed")}


@st.composite
def pasts(draw: st.DrawFn) -> tuple[list[model.Decided], list[int]]:
    """Decisions of two scopes at odd half seconds, and errors at whole seconds."""
    at = draw(st.lists(st.integers(0, END - 1), unique=True, max_size=12))
    phases = {(scope, level): "closed" for scope in SCOPES for level in (1, 2, 3)}
    made = []
    for second in sorted(at):
        scope, level = draw(st.sampled_from(sorted(phases)))
        before = phases[scope, level]
        after = phases[scope, level] = draw(st.sampled_from(NEXT[before]))
        made.append(model.Decided((2 * second + 1) * HALF, scope, "mine", "observe", level, before, after, "Why.", (),
                                  (), 1))
    return made, sorted(draw(st.sets(st.integers(1, END - 1), max_size=8)))


def by_looking(made: list[model.Decided], errors: list[int]) -> tuple[int, int, int, int]:
    """Opened, followed, troubles, foreseen: which levels are engaged is found anew for every half second."""
    def engaged(half: int) -> bool:
        last = {(one.scope, one.level): one.after for one in made if one.t_ns <= half * HALF}
        return any(after != "closed" for after in last.values())

    opened = [one.t_ns // HALF for one in made if (one.before, one.after) == ("closed", "open")]
    followed = [half for half in opened if any(half < 2 * second <= half + 2 * HORIZON for second in errors)]
    first = [second for number, second in enumerate(errors)
             if not number or second - errors[number - 1] > HORIZON]
    foreseen = [second for second in first if any(map(engaged, range(2 * (second - HORIZON), 2 * second)))]
    return len(opened), len(followed), len(first), len(foreseen)


@settings(deadline=None, max_examples=150)
@given(pasts())
def test_hindsight_counts_what_looking_at_every_half_second_counts(past: tuple[list[model.Decided], list[int]]) -> None:
    """Openings, those that an error followed, troubles, and those that were foreseen are the same by both ways."""
    made, errors = past
    told = [Point("p", 2 * second * HALF, {"device": "a"}, float(sum(at <= second for at in errors)), None, None, None)
            for second in range(END)]
    found = hindsight("p", made, [one.t_ns for one in made], {"kvobs.out_of_memory": told}, HORIZON)
    assert (found.opened, found.followed, len(found.troubles), found.foreseen) == by_looking(made, errors)
