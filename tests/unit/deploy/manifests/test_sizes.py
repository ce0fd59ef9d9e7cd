"""Pods of a run, with numbers worked out by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.contracts.errors import ConfigError
from cluster.supervision.placement import ClusterResources, Node, plan
from deploy.config.loading import load
from deploy.manifests.sizes import Pods, sizes
from tests.unit.deploy.manifests.made import GPU, QUICKSTART

LARGEST = Node(cpus=64, gpus=8)
NEEDS = ("reference_logprobs",)


def of(path, *overrides, largest=LARGEST, shares_files=True, needs=NEEDS):
    return sizes(load(path, overrides), needs, largest=largest, shares_files=shares_files)


def test_the_quickstart_has_a_base_of_2_and_a_quarter_and_a_half_cpus_and_workers_of_2():
    made = of(QUICKSTART)
    assert made.base == Pods(cpus=3, gpus=0, most=1)
    assert made.rollout == Pods(cpus=2, gpus=0, most=1)
    assert not made.needs_gpus


def test_a_pod_has_room_for_an_actor_that_asks_for_a_little_more_than_whole_cpus():
    """Seen before: sizes were of a plan, which rounds down. The pod came, and could not hold its actor."""
    assert of(QUICKSTART, "rollout.cpus_per_worker=1.0004").rollout.cpus == 2


def test_as_many_worker_pods_as_the_run_may_grow_to():
    assert of(QUICKSTART, "elastic.max_workers=5").rollout.most == 5
    assert of(QUICKSTART, "rollout.num_workers=7", "elastic.max_workers=5").rollout.most == 7


def test_ranks_go_into_pods_of_the_largest_size_and_services_beside_them():
    # 12 ranks of 1 GPU and 6 CPUs: 8 and 4; two services of a quarter CPU fit beside the 48 CPUs.
    made = of(GPU, "learner.num_ranks=12", "reward.num_services=2", needs=())
    assert made.base == Pods(cpus=49, gpus=8, most=2)
    assert made.rollout == Pods(cpus=6, gpus=1, most=16)


def test_services_beside_full_pods_take_none_with_gpus():
    # 8 ranks have the 64 CPUs of a pod; two services of a quarter CPU have one without GPUs.
    made = of(GPU, "learner.num_ranks=8", "learner.cpus_per_rank=8", "reward.num_services=2")
    assert made.base == Pods(cpus=64, gpus=8, most=1)
    assert made.without_gpus == Pods(cpus=1, gpus=0, most=1)


def test_services_that_fit_beside_ranks_have_no_pods_of_their_own():
    assert of(GPU, "learner.num_ranks=8", "learner.cpus_per_rank=6").without_gpus is None
    assert of(QUICKSTART, "learner.num_ranks=100").without_gpus is None


def test_the_largest_actors_have_their_place_first():
    # Two ranks of 4 CPUs in one pod would leave each service of 6 a pod of its own.
    ranks = ("learner.num_ranks=2", "learner.gpus_per_rank=0", "learner.cpus_per_rank=4")
    services = ("reward.num_services=2", "reward.cpus_per_service=6")
    assert of(GPU, *ranks, *services, largest=Node(cpus=10, gpus=8), needs=()).base == Pods(cpus=10, gpus=0, most=2)


def test_workers_that_share_a_gpu_share_a_pod():
    made = of(GPU, "rollout.gpus_per_worker=0.5", "rollout.cpus_per_worker=3", "elastic.max_workers=5")
    assert made.rollout == Pods(cpus=6, gpus=1, most=3)


def test_workers_that_share_a_gpu_share_a_pod_that_is_no_larger_than_the_largest():
    # Ten share a GPU, of 8 CPUs each: eight of them have the 64 of the largest pod.
    made = of(GPU, "rollout.gpus_per_worker=0.1", "rollout.cpus_per_worker=8", "elastic.max_workers=20")
    assert made.rollout == Pods(cpus=64, gpus=1, most=3)


@pytest.mark.parametrize(("share", "gpus"), [(0.6, 3), (0.5, 2), (0.25, 1)])
def test_a_share_of_a_gpu_does_not_reach_over_two(share, gpus):
    services = ("reward.num_services=3", f"reward.gpus_per_service={share}", "learner.gpus_per_rank=0")
    assert of(GPU, *services, needs=()).base.gpus == gpus


def test_an_actor_beyond_the_largest_pod_is_refused_with_both_sizes():
    with pytest.raises(ConfigError, match=r"rollout_worker-0 asks for 6 CPUs and 16 GPUs, .* has 64 and 8"):
        of(GPU, "rollout.gpus_per_worker=16", "rollout.tensor_parallel_size=16")


def test_a_base_in_two_pods_needs_files_that_both_see():
    with pytest.raises(ConfigError, match=r"learner and services take 2 pods, .*run_claim in the site file"):
        of(GPU, "learner.num_ranks=12", shares_files=False)
    assert not of(GPU, "learner.num_ranks=12", "run_dir=s3://bucket/run", shares_files=False).base_is_on_head


def test_the_learners_pods_have_room_for_a_checkpoint_that_goes_to_a_store():
    made = sizes(load(GPU), (), largest=LARGEST, shares_files=True, upload_gib=92)
    assert made.base.upload_gib == 92 and made.rollout.upload_gib == 0


@given(
    ranks=st.integers(1, 20),
    workers=st.integers(1, 30),
    rank_gpus=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    worker_gpus=st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0, 8.0]),
    cpus=st.sampled_from([0.5, 1.0, 3.0, 6.0]),
    services=st.integers(1, 12),
)
def test_the_run_fits_into_all_its_pods_without_sharing_cpus(ranks, workers, rank_gpus, worker_gpus, cpus, services):
    config = load(
        GPU,
        [
            f"learner.num_ranks={ranks}",
            f"learner.gpus_per_rank={rank_gpus}",
            f"learner.cpus_per_rank={cpus}",
            f"rollout.num_workers={workers}",
            f"rollout.gpus_per_worker={worker_gpus}",
            f"rollout.cpus_per_worker={cpus}",
            f"reward.num_services={services}",
            "elastic.max_workers=null",
            "elastic.spot=pods=rollout",
        ],
    )
    made = sizes(config, NEEDS, largest=LARGEST, shares_files=True)
    base, rollout = made.base, made.rollout
    nodes = [Node(cpus=base.cpus, gpus=base.gpus)] * base.most
    nodes += [Node(cpus=made.without_gpus.cpus)] * made.without_gpus.most if made.without_gpus else []
    nodes += [Node(cpus=rollout.cpus, gpus=rollout.gpus, is_spot=True)] * rollout.most
    placed = plan(config, ClusterResources(nodes=tuple(nodes)), needs=NEEDS)
    assert not placed.is_time_shared and placed.num_missing_workers == 0


def test_workers_beside_ranks_have_no_pods_of_their_own():
    with pytest.raises(
        ConfigError, match=r"rollout\.colocated=true: these manifests give rollout workers their own pods"
    ):
        of(QUICKSTART, "rollout.colocated=true")
