"""Curves for the viewer: which metrics share a panel, and thinned points. Pure functions."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

MOST_POINTS = 800
"""Most points of one line: more than a panel has columns of pixels."""
_LARGEST = 1e300
"""A value beyond it is no point: means and axes would overflow."""
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
    {"title": "Completions", "unit": "tokens", "lines": (("tokens/completion_mean", "mean length"),)},
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
    """Those of `PANELS` that have a number, with points [step, value]. Evaluations are points without a line: nothing was measured between
    them."""
    found: list[dict[str, Any]] = []
    for panel in PANELS:
        kinds = (("line", panel["lines"]), ("points", panel.get("points", ())))
        wanted = [(name, label, kind) for kind, names in kinds for name, label in names]
        made = [line(steps, name, label=label, kind=kind) for name, label, kind in wanted]
        if lines := [each for each in made if each["points"]]:
            names, bound = [name for name, _, _ in wanted], _bound(panel.get("bound"), config)
            shown = _shown(panel["title"], panel.get("unit", ""), lines, is_log=panel.get("is_log", False))
            found.append({**shown, "wanted": names, "bound": bound})
    return found


def panel(
    steps: Sequence[Mapping[str, Any]], title: str, unit: str, is_log: bool, names: Sequence[tuple[str, str]]
) -> dict[str, Any] | None:
    """A panel of lines only; None if no metric has a number."""
    lines = [each for name, label in names if (each := line(steps, name, label=label, kind="line"))["points"]]
    return _shown(title, unit, lines, is_log=is_log) if lines else None


def values(steps: Sequence[Mapping[str, Any]], name: str) -> list[Point]:
    """(step, value) of the steps that have one. A number that was not finite is None in metrics.jsonl, and no point."""
    found = ((step["policy_version"], step.get(name)) for step in steps)
    return [(step, value) for step, value in found if value is not None and abs(value) <= _LARGEST]


def thinned(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """At most `most` points, in order: the smallest and the largest of each stretch, so that no spike is lost, and the last point."""
    if len(points) <= most:
        return list(points)
    return [*_extremes(points[:-1], most // 2), points[-1]]


_COMPARED = (
    ("Reward, sampled", "", "reward/mean", "line"),
    ("Held-out accuracy", "", "eval/accuracy", "points"),
    ("KL to the reference", "nats", "learner/kl_reference_k3_mean", "line"),
    ("Entropy", "nats a token", "learner/entropy_mean", "line"),
    ("Mismatch of engine and learner", "nats, mean", "mismatch/mean_abs_nats", "line"),
    ("Staleness", "versions, largest", "staleness/max", "line"),
    ("Sampling", "tokens/s", "speed/sampling_tokens_per_s", "line"),
    ("A step", "s", "time/step_s", "line"),
    ("Completions", "tokens, mean", "tokens/completion_mean", "line"),
    ("Gradient norm", "", "learner/gradient_norm", "line"),
)


def compared(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """One panel per metric with one line per run. A run has the same colour, 1 to 6, in all panels."""
    found: list[dict[str, Any]] = []
    for title, unit, metric, kind in _COMPARED:
        lines = [
            {**made, "name": name, "color": color}
            for color, (name, steps) in enumerate(runs.items(), start=1)
            if (made := line(steps, metric, label=name, kind=kind))["points"]
        ]
        if lines:
            found.append(_shown(title, unit, lines))
    return found


def _shown(title: str, unit: str, lines: list[dict[str, Any]], *, is_log: bool = False) -> dict[str, Any]:
    return {"title": title, "unit": unit, "is_log": is_log, "lines": lines, "wanted": [], "bound": None}


def spark(points: Sequence[Point]) -> str:
    """The `d` of an SVG path through the points, in a box of 100 by 24; empty for fewer than two points."""
    if len(points) < 2:
        return ""
    shown = thinned(points, 100)
    low, high = min(map(_value, shown)), max(map(_value, shown))
    first, last = shown[0][0], shown[-1][0]
    places = (
        f"{(step - first) / (last - first) * 100:.1f} {2 + 20 * (1 - (value - low) / ((high - low) or 1)):.1f}"
        for step, value in shown
    )
    return "M" + "L".join(places)


SHOWN_OF_A_RUN = (
    "policy_version",
    "time",
    "time/step_s",
    "reward/mean",
    "eval/reward",
    "eval/accuracy",
    "speed/sampling_tokens_per_s",
    "speed/learning_tokens_per_s",
    "staleness/max",
)
"""The metrics that `facts` reads."""


def facts(steps: Sequence[Mapping[str, Any]], config: Mapping[str, Any], *, state: str) -> dict[str, Any]:
    """Numbers of a run at a glance; None: the run has no such number."""
    done = steps[-1]["policy_version"] if steps else 0
    recent = [seconds for _, seconds in values(steps[-20:], "time/step_s")]
    step_s = sum(recent) / len(recent) if recent else None
    wanted = config.get("num_steps")
    return {
        "step": done,
        "num_steps": wanted,
        "model": (config.get("model") or {}).get("path"),
        "reward": latest(steps, "reward/mean"),
        "held_out_reward": latest(steps, "eval/reward"),
        "held_out_accuracy": latest(steps, "eval/accuracy"),
        "step_s": step_s,
        "left_s": step_s * (wanted - done) if step_s and wanted and state == "running" else None,
        "sampling": latest(steps, "speed/sampling_tokens_per_s"),
        "learning": latest(steps, "speed/learning_tokens_per_s"),
        "staleness": latest(steps, "staleness/max"),
        "bound": (config.get("buffer") or {}).get("max_off_policy_steps"),
        "last_step_at": latest(steps, "time"),
    }


def latest(steps: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """The last value of a metric, which need not be the last step's; None: there is none."""
    return next((step[name] for step in reversed(steps) if step.get(name) is not None), None)


def _extremes(points: Sequence[Point], num_stretches: int) -> Iterator[Point]:
    length = math.ceil(len(points) / max(num_stretches - 1, 1))
    for start in range(0, len(points), length):
        stretch = points[start : start + length]
        smallest, largest = min(stretch, key=_value), max(stretch, key=_value)
        yield from sorted({smallest, largest})


def line(steps: Sequence[Mapping[str, Any]], metric: str, *, label: str, kind: str) -> dict[str, Any]:
    """A metric's points, thinned, and the `mean` of each stretch of the full points. `mean` is None if the points are complete: the page
    computes it. It is empty for a maximum, whose mean has no meaning."""
    points = values(steps, metric)
    mean: list[Point] | None = [] if "max" in metric else None
    if mean is None and len(points) > MOST_POINTS:
        mean = means(points, MOST_POINTS // 4)
    return {
        "name": metric,
        "label": label,
        "kind": kind,
        "points": _short(thinned(points)),
        "mean": mean and _short(mean),
    }


def means(points: Sequence[Point], num_stretches: int) -> list[Point]:
    """(middle step, mean) of each stretch."""
    length = math.ceil(len(points) / num_stretches)
    stretches = [points[start : start + length] for start in range(0, len(points), length)]
    return [(stretch[len(stretch) // 2][0], sum(map(_value, stretch)) / len(stretch)) for stretch in stretches]


def _short(points: Sequence[Point]) -> list[Point]:
    """With six significant digits: a page becomes a third as long."""
    return [(step, float(f"{value:.6g}")) for step, value in points]


def _value(point: Point) -> float:
    return point[1]


def _bound(where: tuple[str, str, str] | None, config: Mapping[str, Any]) -> dict[str, Any] | None:
    if where is None:
        return None
    section, setting, label = where
    value = (config.get(section) or {}).get(setting)
    return None if value is None else {"value": value, "label": f"{label} {value:g}"}
