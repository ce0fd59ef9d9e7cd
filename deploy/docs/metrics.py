"""docs/metrics.md: every metric's name and meaning."""

from collections.abc import Iterator

from cluster.metrics import METRICS
from deploy.docs import cell, filled, rows
from learner.algorithms.objective.statistics import DERIVED, OF_THE_LEARNER, QUANTITIES, reported_name


def metrics() -> str:
    """Every metric name: the cluster's, and the learner's."""
    return filled(
        "metrics", cluster=rows((f"`{name}`", text) for name, text in METRICS.items()), learner=rows(_learner())
    )


def _learner() -> Iterator[tuple[str, str]]:
    for name, (kinds, meaning) in QUANTITIES.items():
        yield ", ".join(f"`learner/{reported_name(name, kind)}`" for kind in kinds), cell(meaning)
    for name, meaning in {**DERIVED, **OF_THE_LEARNER}.items():
        yield f"`learner/{name}`", cell(meaning)
