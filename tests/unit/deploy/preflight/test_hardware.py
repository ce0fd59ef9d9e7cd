"""Hardware by its name, and who shares its GPUs."""

from dataclasses import replace

import pytest

from cluster.contracts.errors import ConfigError
from cluster.contracts.types import ActorKind
from cluster.supervision.placement import Bundle
from deploy.preflight.hardware import Hardware, parse, seat


def _bundle(name: str, *, gpus: float) -> Bundle:
    kind, _, index = name.rpartition("-")
    return Bundle(kind=ActorKind(kind), index=int(index), cpus=1, gpus=gpus, num_threads=1)


def _gpus(gpus: int, **shares: float) -> dict[str, tuple[int, ...]]:
    """Bundles by kind and number, learner_0, on one node."""
    bundles = [_bundle("-".join(name.rsplit("_", 1)), gpus=share) for name, share in shares.items()]
    hardware = parse([f"gpus={gpus}x80GB"])
    return seat(bundles, hardware, hardware.resources(asked_cpus=100), staying_first=False).gpus_of


def test_what_is_not_said_is_one_node_whose_cpus_and_memory_are_not_judged():
    assert parse(["gpus=8x80GB"]) == Hardware(
        num_nodes=1, gpus=8, gpu_bytes=80_000_000_000, cpus=None, memory_bytes=None
    )


def test_parts_may_stand_together_or_apart():
    whole = Hardware(num_nodes=2, gpus=8, gpu_bytes=141_000_000_000, cpus=96, memory_bytes=2_000_000_000_000)
    assert parse(["gpus=8x141GB,nodes=2,cpus=96,memory=2TB"]) == whole
    assert parse(["gpus=8x141gb", "nodes=2, cpus=96", "memory=2TB"]) == whole


def test_binary_units_are_powers_of_two():
    assert parse(["gpus=1x80GiB"]).gpu_bytes == 80 * 2**30
    assert parse(["gpus=1x81920MiB"]).gpu_bytes == 80 * 2**30, "as nvidia-smi says it"


@pytest.mark.parametrize("text", ["", "gpus=8", "gpus=8x80", "gpus=x80GB", "gpu=8x80GB", "nodes=two", "memory=2"])
def test_anything_else_is_refused_with_the_form(text):
    with pytest.raises(ConfigError, match=r"^--assume .*write gpus=8x80GB"):
        parse([text])


def test_a_part_that_is_there_twice_is_refused():
    with pytest.raises(ConfigError, match="'nodes=3': nodes is given twice"):
        parse(["nodes=2", "nodes=3"])


@pytest.mark.parametrize("text", ["nodes=0", "cpus=0", "memory=0GB", "gpus=8x0GB"])
def test_nothing_of_a_part_is_refused(text):
    with pytest.raises(ConfigError, match="nothing runs on 0 nodes, CPUs or bytes"):
        parse([text])


def test_whole_gpus_belong_to_one_actor():
    assert _gpus(4, learner_0=1, rollout_worker_0=2, rollout_worker_1=1) == {
        "rollout_worker-0": (0, 1),
        "learner-0": (2,),
        "rollout_worker-1": (3,),
    }


def test_fractions_fill_a_gpu_before_they_take_another():
    assert _gpus(2, rollout_worker_0=1, learner_0=0.5, reference_scorer_0=0.5) == {
        "rollout_worker-0": (0,),
        "learner-0": (1,),
        "reference_scorer-0": (1,),
    }


def test_of_two_gpus_with_room_the_fuller_one_is_filled():
    # The first three leave 0.4 and 0.05.
    shares = {"learner_0": 0.6, "rollout_worker_0": 0.5, "rollout_worker_1": 0.45, "reference_scorer_0": 0.05}
    found = _gpus(2, **shares)
    assert found["learner-0"] == (0,) and found["rollout_worker-0"] == found["rollout_worker-1"] == (1,)
    assert found["reference_scorer-0"] == (1,)


def test_three_thirds_are_one_gpu():
    third = 1 / 3
    assert set(_gpus(1, learner_0=third, rollout_worker_0=third, rollout_worker_1=third).values()) == {(0,)}


def test_fractions_that_reach_over_two_gpus_are_refused():
    with pytest.raises(ConfigError, match=r"rollout_worker-1 asks for 0.6 GPUs, .* fractions that add up to 1"):
        _gpus(2, learner_0=0.6, rollout_worker_0=0.6, rollout_worker_1=0.6)


def test_a_party_has_one_gpu_and_another_actor_what_it_leaves():
    bundles = [_bundle(name, gpus=0.4) for name in ("learner-0", "learner-1", "rollout_worker-0", "rollout_worker-1")]
    together = [replace(bundle, party=bundle.index) for bundle in bundles]
    hardware = parse(["gpus=2x80GB"])
    seats = seat(
        [*together, _bundle("reference_scorer-0", gpus=0.2)],
        hardware,
        hardware.resources(asked_cpus=100),
        staying_first=False,
    )
    assert seats.gpus_of == {
        **{"learner-0": (0,), "rollout_worker-0": (0,), "learner-1": (1,), "rollout_worker-1": (1,)},
        "reference_scorer-0": (0,),
    }
    with pytest.raises(ConfigError, match=r"learner-1 and rollout_worker-1 asks for 0\.8 GPUs"):
        roomy = parse(["gpus=3x80GB"]).resources(asked_cpus=9)
        seat([*together, _bundle("reference_scorer-0", gpus=0.9)], hardware, roomy, staying_first=False)
