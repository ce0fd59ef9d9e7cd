"""Numbers of a run as curves: which belong together, and few enough points to draw. Pure functions."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

MOST_POINTS = 800
"""Of one line: more than a screen has columns for."""
Point = tuple[int, float]

PANELS: tuple[dict[str, Any], ...] = (
    {
        "title": "Reward",
        "lines": (("reward/mean", "sampled"), ("buffer/candidate_reward", "before selection")),
        "points": (("eval/reward", "held out"), ("eval/accuracy", "held-out accuracy")),
    },
    {
        "title": "KL",
        "unit": "nats",
        "lines": (
            ("learner/kl_reference_k3_mean", "to the reference"),
            ("learner/kl_rollout_k3_mean", "to the rollout policy"),
            ("learner/kl_old_k3_mean", "of the update"),
        ),
    },
    {"title": "Entropy", "unit": "nats a token", "lines": (("learner/entropy_mean", "policy"),)},
    {
        "title": "Mismatch of engine and learner",
        "unit": "nats, absolute",
        "lines": (("mismatch/mean_abs_nats", "mean"), ("mismatch/max_abs_nats", "largest")),
        "bound": ("mismatch", "alarm_nats", "alarm"),
        "is_log": True,
    },
    {
        "title": "Staleness",
        "unit": "versions",
        "lines": (("staleness/mean", "mean"), ("staleness/max", "largest")),
        "bound": ("buffer", "max_off_policy_steps", "bound"),
    },
    {
        "title": "Throughput",
        "unit": "tokens/s",
        "lines": (("speed/sampling_tokens_per_s", "sampling"), ("speed/learning_tokens_per_s", "learning")),
    },
    {
        "title": "Where a step's time went",
        "unit": "s",
        "lines": (
            ("time/step_s", "step"),
            ("time/learning_s", "learning"),
            ("buffer/learner_wait_s", "waiting for groups"),
            ("time/broadcast_s", "weights"),
        ),
    },
    {
        "title": "Gradient norm",
        "lines": (("learner/gradient_norm", "mean"), ("learner/gradient_norm_max", "largest update")),
    },
    {
        "title": "Completions",
        "unit": "tokens",
        "lines": (("tokens/completion_mean", "mean length"),),
    },
    {
        "title": "Rollout workers",
        "lines": (
            ("rollout/num_workers", "serving"),
            ("rollout/num_wanted", "wanted"),
            ("rollout/num_coming", "coming"),
        ),
    },
)


def panels(steps: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Those of `PANELS` that have a number, with points [step, value]. An evaluation has points and no line: between two of them
    nothing was measured."""
    found: list[dict[str, Any]] = []
    for panel in PANELS:
        kinds = (("line", panel["lines"]), ("points", panel.get("points", ())))
        wanted = [(name, label, kind) for kind, names in kinds for name, label in names]
        lines = [
            {"name": name, "label": label, "kind": kind, "points": points}
            for name, label, kind in wanted
            if (points := thinned(values(steps, name)))
        ]
        if lines:
            shown = {"title": panel["title"], "unit": panel.get("unit", ""), "is_log": panel.get("is_log", False)}
            names = [name for name, _, _ in wanted]
            found.append({**shown, "lines": lines, "wanted": names, "bound": _bound(panel.get("bound"), config)})
    return found


def values(steps: Sequence[Mapping[str, Any]], name: str) -> list[Point]:
    """Step and value where there is one; a number that was not finite is None in its line, and no point."""
    return [(step["policy_version"], step[name]) for step in steps if step.get(name) is not None]


def thinned(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """At most `most` points, in order: of each stretch its smallest and its largest, so that no spike is lost; and the last."""
    if len(points) <= most:
        return list(points)
    return [*_extremes(points[:-1], most // 2), points[-1]]


def _extremes(points: Sequence[Point], num_stretches: int) -> Iterator[Point]:
    length = math.ceil(len(points) / max(num_stretches - 1, 1))
    for start in range(0, len(points), length):
        stretch = points[start : start + length]
        smallest, largest = min(stretch, key=_value), max(stretch, key=_value)
        yield from sorted({smallest, largest})


def _value(point: Point) -> float:
    return point[1]


def _bound(where: tuple[str, str, str] | None, config: Mapping[str, Any]) -> dict[str, Any] | None:
    if where is None:
        return None
    section, setting, label = where
    value = (config.get(section) or {}).get(setting)
    return None if value is None else {"value": value, "label": f"{label} {value:g}"}
