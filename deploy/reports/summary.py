"""summary.json: a run's results, from its metrics, so that the summary of a resumed run covers all drivers."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cluster.contracts.types import mean_of
from cluster.record.run_directory import EVENTS, SUMMARY, RunDirectory
from cluster.sinks.jsonl import read_lines

_NUMBERS = ("time", "time/step_s", "reward/mean", "eval/accuracy", "eval/reward", "tokens/sampled", "tokens/trained")


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Rewards are means over the first and the last five steps, fewer if those would overlap. None: the run has no such number."""

    num_steps: int
    train_seconds: float
    """Sum of the steps' wall-clock seconds, without start-up and evaluations. A step in which a driver died was learned again at the next
    start, and is not in it."""
    reward_first: float | None
    reward_last: float | None
    eval_first: float | None
    """Held-out accuracy before the first step."""
    eval_last: float | None
    """Held-out accuracy of the last evaluation after a step."""
    eval_reward_first: float | None
    """Mean held-out reward, of the same evaluations."""
    eval_reward_last: float | None
    sampled_tokens: int
    """Tokens of the groups that steps consumed; those of dropped groups are not counted."""
    trained_tokens: int
    seconds_to_first_step: float | None
    """From the start of the driver that made the first step to the end of that step, start-up and first evaluation included."""


def summarize(run_dir: RunDirectory) -> Summary:
    """Writes summary.json."""
    summary = summary_of(run_dir)
    run_dir.write_json(SUMMARY, asdict(summary))
    return summary


def summary_of(run_dir: RunDirectory, lines: Sequence[Mapping[str, Any]] | None = None) -> Summary:
    """The results so far. `lines` are those of metrics.jsonl, if they were read already."""
    metrics = {
        line["policy_version"]: {name: line[name] for name in _NUMBERS if line.get(name) is not None}
        for line in (read_lines(run_dir) if lines is None else lines)
    }
    steps = {version: numbers for version, numbers in metrics.items() if version > 0}
    rewards = [numbers["reward/mean"] for numbers in steps.values() if "reward/mean" in numbers]
    window = max(min(5, len(rewards) // 2), 1)
    accuracies, held_out = (
        [numbers[name] for numbers in steps.values() if name in numbers] for name in ("eval/accuracy", "eval/reward")
    )
    launched = [event["started_at"] for event in run_dir.read_json_lines(EVENTS) if "started_at" in event]
    stepped = [numbers["time"] for numbers in steps.values()]
    before = [started_at for started_at in launched if stepped and started_at <= stepped[0]]
    return Summary(
        num_steps=max(steps, default=0),
        train_seconds=sum(numbers.get("time/step_s", 0.0) for numbers in steps.values()),
        reward_first=_mean(rewards[:window]),
        reward_last=_mean(rewards[window:][-window:]),
        eval_first=metrics.get(0, {}).get("eval/accuracy"),
        eval_last=accuracies[-1] if accuracies else None,
        eval_reward_first=metrics.get(0, {}).get("eval/reward"),
        eval_reward_last=held_out[-1] if held_out else None,
        sampled_tokens=int(sum(numbers.get("tokens/sampled", 0.0) for numbers in steps.values())),
        trained_tokens=int(sum(numbers.get("tokens/trained", 0.0) for numbers in steps.values())),
        seconds_to_first_step=stepped[0] - before[-1] if before else None,
    )


def _mean(values: list[float]) -> float | None:
    return mean_of(values) if values else None
