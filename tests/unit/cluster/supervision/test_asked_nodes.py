"""A run planned before its nodes are there, and what it says while it waits."""

import pytest

from cluster.contracts.config import RunConfig
from cluster.contracts.types import ActorKind
from cluster.remote.autoscaler import AutoscalerReport
from cluster.supervision.asked_nodes import plan_asked, what_is_missing
from cluster.supervision.placement import Bundle


def run(**sections) -> RunConfig:
    return RunConfig.model_validate({"model": {"path": "m"}, "prompts": "file", **sections})


def seat(kind: ActorKind, index: int, *, cpus: float, gpus: float = 0.0) -> Bundle:
    return Bundle(kind=kind, index=index, cpus=cpus, gpus=gpus, num_threads=1)


LEARNER = seat(ActorKind.LEARNER, 0, cpus=4, gpus=1)
WORKERS = [seat(ActorKind.ROLLOUT_WORKER, index, cpus=0.5) for index in range(2)]


def said(missing, *, report: AutoscalerReport | None, coming_for_s=None, is_impossible=False, num_nodes=1) -> str:
    return what_is_missing(
        missing,
        num_seats=4,
        num_nodes=num_nodes,
        report=report,
        coming_for_s=coming_for_s or {},
        is_impossible=is_impossible,
    )


def report(coming=None, failed=None) -> AutoscalerReport:
    return AutoscalerReport(
        coming=coming or {}, failed=failed or {}, impossible=frozenset(), impossible_sizes=frozenset()
    )


def test_seats_are_as_large_as_the_run_asks_whatever_is_there():
    asked = {"learner": {"cpus_per_rank": 16, "gpus_per_rank": 8}, "rollout": {"num_workers": 3, "gpus_per_worker": 1}}
    placed = plan_asked(run(**asked), needs={"reference_logprobs"})
    assert [(bundle.name, bundle.cpus, bundle.gpus, bundle.num_threads) for bundle in placed.bundles] == [
        ("learner-0", 16, 8, 16),
        ("rollout_worker-0", 1, 1, 1),
        ("rollout_worker-1", 1, 1, 1),
        ("rollout_worker-2", 1, 1, 1),
        ("reward_service-0", 0.25, 0, 1),
        ("reference_scorer-0", 0.5, 0, 1),
    ]
    assert not placed.is_time_shared and placed.num_missing_workers == 0 and len(placed.groups()) == 1


def test_an_elastic_run_waits_for_its_fewest_workers_and_the_others_join():
    elastic = {"min_workers": 2, "max_workers": 16, "spot": "market=spot"}
    placed = plan_asked(run(rollout={"num_workers": 5}, elastic=elastic), needs=())
    assert len(placed.of(ActorKind.ROLLOUT_WORKER)) == 2 and placed.num_missing_workers == 3
    assert [group.node_labels for group in placed.groups()] == [{"market": "!spot"}, {}, {}]


def test_what_is_missing_is_counted_by_kind_and_size():
    assert said([LEARNER, *WORKERS], report=report({"large": 2}), coming_for_s={"large": 140.4}) == (
        "1 node is there, no room for 3 of 4 seats: 1 learner with 4 CPUs and 1 GPUs, 2 rollout workers with 0.5 CPUs; "
        "the autoscaler brings 2 of 'large' for 140 s"
    )


@pytest.mark.parametrize(
    ("news", "is_impossible", "words"),
    [
        (None, False, "no autoscaler reports, so nodes have to be started by hand"),
        (report(), False, "the autoscaler brings none"),
        (report(failed={"spot": "no quota"}), False, "the autoscaler brings none; 'spot' failed: no quota"),
        (
            report(),
            True,
            "the autoscaler brings none; it has no nodes for these seats, by size, by labels or by its limits",
        ),
    ],
    ids=["by hand", "not yet", "failed", "impossible"],
)
def test_the_autoscalers_part_is_said(news, is_impossible, words):
    assert said(WORKERS, report=news, is_impossible=is_impossible).endswith(f"; {words}")


def test_resources_that_others_hold_are_no_missing_nodes():
    told = "1 node is there, all 4 seats would fit and are not reserved yet, others may hold the resources; "
    assert said([], report=report()).startswith(told)
    assert said([], report=report(), num_nodes=2).startswith("2 nodes are there, all 4 seats would fit")
