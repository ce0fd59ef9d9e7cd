"""docs/metrics.md: every metric's name and meaning."""

from cluster.metrics import METRICS
from deploy.docs import NOTE, cell
from learner.algorithms.objective.statistics import DERIVED, OF_THE_LEARNER, QUANTITIES, reported_name


def metrics() -> str:
    """Every metric name: the cluster's, and the learner's."""
    lines = [
        "# Metrics",
        NOTE,
        "",
        "One line a step in `metrics.jsonl`, under the same names in TensorBoard and, with underscores and",
    ]
    lines += [
        "`ray_treadwheel_` in front, in Prometheus.",
        "",
        "## Of the cluster",
        "",
        "| name | meaning |",
        "|---|---|",
    ]
    lines += [f"| `{name}` | {meaning} |" for name, meaning in METRICS.items()]
    lines += [
        "",
        "## Of the learner",
        "",
        "Of a step of several updates, what is of the trajectories alone (rewards, advantages, lengths, counts) is counted once, and all",
        "else is merged over the updates that were made, a loss as their mean. The mismatch is that of the policy that begins the step.",
        "",
        "| name | meaning |",
        "|---|---|",
    ]
    for name, (kinds, meaning) in QUANTITIES.items():
        shown = ", ".join(f"`learner/{reported_name(name, kind)}`" for kind in kinds)
        lines.append(f"| {shown} | {cell(meaning)} |")
    lines += [f"| `learner/{name}` | {cell(meaning)} |" for name, meaning in {**DERIVED, **OF_THE_LEARNER}.items()]
    return "\n".join(lines) + "\n"
