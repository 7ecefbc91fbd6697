"""What each alert must and must not say anything about, as series of one sample every 30 s."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

STEP_S = 30
WHO = 'job="kvobs", instance="a:1"'
MANY = 80  # samples: 40 minutes, more than any wait and window but those of burn rates
Values = Sequence[float | None]
Series = dict[str, Values]


def flat(value: float, count: int = MANY) -> list[float | None]:
    return [value] * count


def ramp(start: float, step: float, count: int = MANY) -> list[float | None]:
    return [start + step * index for index in range(count)]


def born(after: int, *values: float, count: int = MANY) -> list[float | None]:
    """No sample at first; then these values, the last one to the end."""
    return ([None] * after + [*values] + [values[-1]] * count)[:count]


def family(name: str, labels: str, values: Values) -> Series:
    return {f"{name}{{{labels}{', ' if labels else ''}{WHO}}}": values}


@dataclass(frozen=True)
class Case:
    """An alert's firing series; the nearest ones that must be silent; and those of a restarted process.

    ``labels`` are those of the firing alert besides job, instance and severity. ``told`` is what the young series may
    say: an event that was seen happen is none the less true for having been seen a minute ago.
    """

    alert: str
    firing: Series
    near: Series
    restart: Series = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    severity: str = "ticket"
    young: int = 2  # samples
    told: bool = False


def alive(count: int = MANY) -> Series:
    """What every process that is scraped has."""
    return family("up", "", flat(1, count)) | family("kvobs_self_drain_duration_seconds_total", "", ramp(3, 0.1, count))


def case(alert: str, name: str, labels: str, firing: Values, near: Values, restart: Values = (), told: bool = False,
         severity: str = "ticket", young: int = 2) -> Case:
    """A case of one series, whose labels are the alert's."""
    pairs = dict(part.replace('"', "").split("=") for part in labels.split(", ") if part)
    return Case(alert, family(name, labels, firing), family(name, labels, near),
                family(name, labels, restart) if restart else {}, pairs, severity, young, told)


POOL = 'model="m", device="cuda:0", cache="c"'
POOL_LABELS = {"model": "m", "device": "cuda:0", "cache": "c"}
DEVICE = 'device="cuda:0"'


def pool(free: Values, used: Values) -> Series:
    """A pool of blocks; ``pinned`` are neither left nor in use."""
    return (family("kvobs_kv_blocks", f'{POOL}, state="free"', free)
            | family("kvobs_kv_blocks", f'{POOL}, state="used"', used)
            | family("kvobs_kv_blocks", f'{POOL}, state="pinned"', [None if x is None else 1.0 for x in free]))


def filling(total: float, left: float, per_step: float, noise: float = 0.0) -> Series:
    """A pool that fills to have ``left`` blocks at the end, up and down by ``noise``."""
    free = [left + per_step * (MANY - 1 - index) + noise * (1 if index % 2 else -1) for index in range(MANY)]
    return pool(free, [total - value for value in free])


def device(**parts: Values) -> Series:
    return {key: values for part, values in parts.items()
            for key, values in family("kvobs_device_memory_bytes", f'{DEVICE}, part="{part}"', values).items()}


def filled(left: float, per_step: float) -> Series:
    """A device of 1,000 bytes whose free memory falls, with 20 of torch's unused."""
    free = ramp(left + per_step * (MANY - 1), -per_step)
    return (device(free=free, torch=[1000 - 50 - value for value in free if value is not None], context=flat(50),
                   others=flat(0), unexplained=flat(0))
            | family("kvobs_allocator_usage_bytes", f'{DEVICE}, state="unused"', flat(20)))


def storms(preempted: float, ended: float | None) -> Series:
    turns = {} if ended is None else family("kvobs_turns_total", 'model="m", outcome="ok"', ramp(0, ended))
    return turns | family("kvobs_kv_preemptions_total", POOL, ramp(0, preempted))


MEMORY = (
    # 0.02 of the pool is lost per step and 0.4 is left: 10 minutes; 0.62 is left: 15.5 minutes.
    Case("KvobsKvPoolExhaustionForecast", filling(1000, 400, 20), filling(1000, 620, 20), filling(1000, 400, 0),
         labels=POOL_LABELS, young=26),
    Case("KvobsDeviceMemoryExhaustionForecast", filled(160, 10), filled(330, 10), filled(160, 0),
         labels={"device": "cuda:0"}, severity="page", young=26),
    Case("KvobsPreemptionStorm", storms(1.2, 4.0), storms(1.2, 5.0),
         family("kvobs_kv_preemptions_total", POOL, [*flat(9000, 40), *flat(3, 40)]), labels={"model": "m"}),
    case("KvobsBlockAllocationFailures", "kvobs_kv_block_failures_total", POOL, ramp(0, 1),
         [*ramp(0, 1, 62), *flat(61, 18)], [*flat(500, 40), *flat(0, 40)]),
    case("KvobsAllocatorRetries", "kvobs_allocator_retries_total", DEVICE, ramp(0, 1),
         [*ramp(0, 1, 50), *flat(49, 30)], [*flat(500, 40), *flat(0, 40)]),
    case("KvobsOutOfMemory", "kvobs_out_of_memory_total", 'model="m"', born(70, 1), born(50, 1),
         [*flat(5, 70), *flat(0, 10)], told=True, severity="page"),
    case("KvobsAllocatorOutOfMemory", "kvobs_allocator_out_of_memory_total", DEVICE, [*flat(4, 70), *flat(5, 10)],
         flat(5), [*flat(5, 70), *flat(0, 10)], told=True),
    Case("KvobsUnexplainedMemory",
         device(free=flat(400), torch=flat(490), context=flat(50), others=flat(0), unexplained=flat(60)),
         device(free=flat(410), torch=flat(500), context=flat(50), others=flat(0), unexplained=flat(40)),
         device(free=flat(400), torch=flat(490), unexplained=flat(110)),  # the others are not known
         labels={"device": "cuda:0"}),
    case("KvobsUnexplainedBlocks", "kvobs_kv_unexplained", POOL, flat(1), [*flat(1, 75), *flat(0, 5)]),
)

_BREAKER = 'scope="cuda:0", mode="act"'


def opened(times: int, extra: str) -> Series:
    labels = f'{_BREAKER}, level="1", phase="open"{extra}'
    return family("kvobs_breaker_transitions_total", labels, born(30, *range(1, times + 1)))


def orders(refused: Values, done: Values) -> Series:
    who = 'actuator="transformers", kind="empty_cache"'
    return (family("kvobs_breaker_actions_total", f'{who}, outcome="refused"', refused)
            | family("kvobs_breaker_actions_total", f'{who}, outcome="done"', done))


def budget(left: float, events: float) -> Series:
    """An objective of 99.5 % whose process judged ``events``."""
    return (family("kvobs_slo_budget_ratio", 'objective="o"', flat(left))
            | family("kvobs_slo_target_ratio", 'objective="o"', flat(0.995))
            | family("kvobs_slo_events_total", 'objective="o"', ramp(0, events / (MANY - 1))))


def level(value: float, transitions: Values) -> Series:
    return (family("kvobs_breaker_level", _BREAKER, flat(value))
            | family("kvobs_breaker_transitions_total", f'{_BREAKER}, level="2", phase="half-open"', transitions))


SERVICE = (
    Case("KvobsErrorBudgetExhausted", budget(-0.5, 240), budget(-19, 195), labels={"objective": "o"}),
    Case("KvobsBreakerFlapping", opened(6, ""), opened(5, ""),
         family("kvobs_breaker_transitions_total", f'{_BREAKER}, level="1", phase="open"',
                [*flat(50, 70), *flat(1, 10)]),
         labels={"scope": "cuda:0", "mode": "act", "level": "1"}, told=True, young=12),
    Case("KvobsBreakerHeld", level(2, flat(3)), level(2, [*flat(3, 70), *flat(4, 10)]),
         level(0, [*flat(3, 70), *flat(0, 10)]),
         labels={"scope": "cuda:0"}, severity="info"),
    Case("KvobsBreakerActionsRefused", orders(born(60, 1, 2, 3), born(60, 1, 2)),
         orders(born(60, 1, 2, 3), born(60, 1, 2, 3)),
         orders([*flat(900, 70), *flat(0, 10)], [*flat(5, 70), *flat(0, 10)]),
         labels={"actuator": "transformers", "kind": "empty_cache"}, told=True),
    case("KvobsBreakerActionsLate", "kvobs_breaker_late_total", 'actuator="transformers", kind="offload"',
         born(60, 1, 2, 3), born(60, 1, 2), [*flat(9, 70), *flat(2, 10)], told=True),
)

TELEMETRY = (
    case("KvobsTelemetryDropped", "kvobs_self_events_dropped_total", 'stage="queue"', ramp(0, 2),
         [*ramp(0, 2, 60), *flat(118, 20)], [*flat(500, 40), *flat(0, 40)]),
    case("KvobsObservationPaused", "kvobs_self_throttle", "", flat(2), flat(1), severity="info"),
    case("KvobsHookDetached", "kvobs_self_hook_failures_total", 'source="vllm"', flat(1), flat(0),
         [*flat(1, 40), *flat(0, 40)]),
    case("KvobsLabelOverflow", "kvobs_self_series_overflow_total", 'metric="kvobs.kv.usage"', born(60, 1, 2, 3),
         born(40, 1, 2, 3), [*flat(7, 40), *flat(0, 40)], told=True),
    case("KvobsEngineUnreachable", "kvobs_engine_up", 'target="e:1"', flat(0), [*flat(0, 75), *flat(1, 5)]),
)
CASES = (*MEMORY, *SERVICE, *TELEMETRY)
