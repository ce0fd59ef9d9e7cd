"""summary.json: a run's results, from its metrics, so that the summary of a resumed run covers all drivers."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cluster.contracts.types import mean_of
from cluster.record.run_directory import EVENTS, SUMMARY, RunDirectory
from cluster.sinks.jsonl import read_lines
from deploy.reports.costs import total
from deploy.viewer.series import latest


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
    """From the start of the driver that made the first step until that step's metrics are complete: start-up and the evaluations before and
    after the step included."""


def summarize(run_dir: RunDirectory) -> Summary:
    """Writes summary.json."""
    summary = summary_of(run_dir)
    run_dir.write_json(SUMMARY, asdict(summary))
    return summary


def summary_of(run_dir: RunDirectory, lines: Sequence[Mapping[str, Any]] | None = None) -> Summary:
    """The results so far. `lines` are those of metrics.jsonl, if they were read already."""
    lines = read_lines(run_dir) if lines is None else lines
    start = [line for line in lines if line["policy_version"] == 0]
    steps = [line for line in lines if line["policy_version"] > 0]
    rewards = [line["reward/mean"] for line in steps if line.get("reward/mean") is not None]
    window = max(min(5, len(rewards) // 2), 1)
    launched = [event["started_at"] for event in run_dir.read_json_lines(EVENTS) if "started_at" in event]
    before = [started_at for started_at in launched if steps and started_at <= steps[0]["time"]]
    return Summary(
        num_steps=steps[-1]["policy_version"] if steps else 0,
        train_seconds=total(steps, "time/step_s"),
        reward_first=_mean(rewards[:window]),
        reward_last=_mean(rewards[window:][-window:]),
        eval_first=latest(start, "eval/accuracy"),
        eval_last=latest(steps, "eval/accuracy"),
        eval_reward_first=latest(start, "eval/reward"),
        eval_reward_last=latest(steps, "eval/reward"),
        sampled_tokens=int(total(steps, "tokens/sampled")),
        trained_tokens=int(total(steps, "tokens/trained")),
        seconds_to_first_step=steps[0]["time"] - before[-1] if before else None,
    )


def _mean(values: list[float]) -> float | None:
    return mean_of(values) if values else None
