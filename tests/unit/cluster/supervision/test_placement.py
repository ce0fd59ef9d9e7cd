from collections.abc import Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.contracts.config import ElasticConfig, RunConfig
from cluster.contracts.errors import ConfigError
from cluster.contracts.types import ActorKind
from cluster.supervision import placement
from cluster.supervision.placement import (
    ClusterResources,
    Node,
    PlacementPlan,
    first_fit,
    needs_reference,
    plan_learning,
)
from cluster.supervision.placement import plan as plan_with


def run(**sections) -> RunConfig:
    return RunConfig.model_validate({"model": {"path": "m"}, "prompts": "file", **sections})


def cluster(*nodes: tuple[float, float]) -> ClusterResources:
    return ClusterResources(nodes=tuple(Node(cpus=cpus, gpus=gpus) for cpus, gpus in nodes))


def plan(config: RunConfig, available: ClusterResources, *, needs: Collection[str] = ()) -> PlacementPlan:
    return plan_with(config, available, needs=needs)


LAPTOP = cluster((2, 0))


def test_a_large_cluster_gives_what_is_asked():
    placed = plan(run(rollout={"num_workers": 3, "cpus_per_worker": 2}), cluster((16, 0)))
    assert [bundle.cpus for bundle in placed.of(ActorKind.ROLLOUT_WORKER)] == [2, 2, 2]
    assert not placed.is_time_shared and not placed.spreads_workers


@pytest.mark.parametrize(("asked", "given"), [(2.01, 2.01), (0.0625, 0.0625), (2 / 3, 0.6666)])
def test_a_share_that_is_given_in_full_is_what_was_asked_to_rays_four_digits(asked, given):
    """Seen before: 2.01 CPUs became 2.009, and the plan said that actors share CPUs."""
    placed = plan(run(rollout={"cpus_per_worker": asked}), cluster((16, 0)))
    assert placed.of(ActorKind.ROLLOUT_WORKER)[0].cpus == given and not placed.is_time_shared


def test_two_cores_are_shared_in_turns_with_all_their_threads():
    both = {"learner": {"cpus_per_rank": 2}, "rollout": {"cpus_per_worker": 2}}
    placed = plan(run(**both), LAPTOP)
    assert placed.is_time_shared
    assert sum(bundle.cpus for bundle in placed.bundles) <= 2
    assert placed.of(ActorKind.LEARNER)[0].num_threads == placed.of(ActorKind.ROLLOUT_WORKER)[0].num_threads == 2


def test_sampling_beside_learning_shares_two_cores_too():
    """Seen before: refused, "4 CPUs asked for". Shares of 2 + 2 + 0.25 on 2 CPUs are 2/4.25 of what was asked."""
    both = {"learner": {"cpus_per_rank": 2}, "rollout": {"cpus_per_worker": 2}, "buffer": {"max_off_policy_steps": 2}}
    placed = plan(run(**both), LAPTOP)
    assert placed.is_time_shared
    assert [bundle.cpus for bundle in placed.bundles] == [0.941, 0.941, 0.117]
    assert placed.of(ActorKind.LEARNER)[0].num_threads == placed.of(ActorKind.ROLLOUT_WORKER)[0].num_threads == 2


def test_many_workers_share_two_cores():
    placed = plan(run(rollout={"num_workers": 9}), LAPTOP)
    assert placed.is_time_shared and len(placed.of(ActorKind.ROLLOUT_WORKER)) == 9


def test_nobody_computes_with_more_threads_than_its_node_has_cores():
    asked = {"cpus_per_rank": 64}
    assert plan(run(learner=asked), LAPTOP).of(ActorKind.LEARNER)[0].num_threads == 2
    assert plan(run(learner={**asked, "num_threads": 3}), LAPTOP).of(ActorKind.LEARNER)[0].num_threads == 3


def test_nobody_computes_with_more_threads_than_the_nodes_have_where_it_may_be():
    """Seen before: ranks with GPUs had the 64 threads of the large node without any, and those that stay the 16 of a spot node."""
    asked = {"learner": {"cpus_per_rank": 64, "gpus_per_rank": 1}, "rollout": {"cpus_per_worker": 64}}
    placed = plan(run(**asked), cluster((8, 1), (64, 0)))
    threads = [placed.of(kind)[0].num_threads for kind in (ActorKind.LEARNER, ActorKind.ROLLOUT_WORKER)]
    assert threads == [8, 64]
    staying = plan(
        run(elastic={"spot": "market=spot"}, learner={"cpus_per_rank": 64}), spot_cluster((4, False), (16, True))
    )
    assert staying.of(ActorKind.LEARNER)[0].num_threads == 4


def test_the_processes_of_an_engine_share_its_threads_and_have_one_each_at_least():
    def threads(**rollout: float) -> int:
        return plan(run(rollout=rollout), cluster((64, 0))).of(ActorKind.ROLLOUT_WORKER)[0].num_threads

    assert threads(tensor_parallel_size=2, cpus_per_worker=6) == 3
    assert threads(tensor_parallel_size=4, cpus_per_worker=6) == 1
    assert threads(tensor_parallel_size=4, cpus_per_worker=1) == 1
    assert threads(tensor_parallel_size=2, cpus_per_worker=1, num_threads=8) == 4


def test_more_actors_than_can_have_any_share_are_refused_by_name():
    with pytest.raises(ConfigError, match=r"rollout.num_workers=999: no way to place 1001 actors"):
        plan(run(rollout={"num_workers": 999}), LAPTOP)


def test_gpus_that_are_not_there_are_refused_by_name():
    with pytest.raises(ConfigError, match=r"learner.gpus_per_rank=1 x 1: 1 GPUs asked for, the cluster has 0"):
        plan(run(learner={"gpus_per_rank": 1}), LAPTOP)


def test_gpus_spread_over_nodes_do_not_add_up_for_one_actor():
    with pytest.raises(ConfigError, match=r"rollout.gpus_per_worker=2: no way to place"):
        plan(run(rollout={"gpus_per_worker": 2}), cluster((8, 1), (8, 1)))


def test_ranks_are_packed_first_and_workers_spread_over_nodes_after_them():
    """One group of all seats would scatter the ranks, which exchange in every layer."""
    placed = plan(run(learner={"num_ranks": 2}, rollout={"num_workers": 2}), cluster((4, 0), (4, 0)))
    names = [bundle.name for bundle in placed.bundles]
    assert [([names[seat] for seat in group.seats], group.strategy) for group in placed.groups()] == [
        (["learner-0", "learner-1", "reward_service-0"], "PACK"),
        (["rollout_worker-0", "rollout_worker-1"], "SPREAD"),
    ]
    assert [group.node_labels for group in placed.groups()] == [{}, {}]


def test_one_worker_or_one_node_is_packed_with_all_others():
    for workers, nodes in ((1, cluster((4, 0), (4, 0))), (2, cluster((8, 0)))):
        (group,) = plan(run(rollout={"num_workers": workers}), nodes).groups()
        assert (len(group.seats), group.strategy) == (2 + workers, "PACK")


def test_workers_that_ranks_might_leave_no_room_are_placed_together_with_them():
    """A rank of 4 CPUs beside two workers of 1 GPU and 4 CPUs: on the node with the GPUs it takes the place of a worker. And four ranks
    on one of two nodes with 8 GPUs leave 6 for one worker only; two on each leave them for both."""
    asked = {"learner": {"cpus_per_rank": 4}, "reward": {"cpus_per_service": 0.1}}
    workers = {"num_workers": 2, "gpus_per_worker": 1, "cpus_per_worker": 4}
    config = run(**asked, rollout=workers)
    assert not plan(config, cluster((5, 0), (9, 2))).spreads_workers
    assert plan(config, cluster((5, 0), (13, 2))).spreads_workers
    large = run(learner={"num_ranks": 4, "gpus_per_rank": 1}, rollout={"num_workers": 2, "gpus_per_worker": 6})
    assert not plan(large, cluster((16, 8), (16, 8))).spreads_workers


@pytest.mark.parametrize("needs", [{"reference_logprobs"}, {"values", "reference_logprobs"}])
def test_the_reference_scorer_is_there_when_the_objective_asks_for_it(needs):
    assert plan(run(), LAPTOP, needs=needs).of(ActorKind.REFERENCE_SCORER)
    assert not plan(run(), LAPTOP, needs={"values"}).of(ActorKind.REFERENCE_SCORER)


def test_an_adapter_switched_off_is_the_reference_unless_another_model_or_more_than_log_probs_is_asked_for():
    assert not needs_reference(run(learner={"lora": {}}), needs={"reference_logprobs"})
    assert needs_reference(run(learner={"lora": {}}, reference={"path": "other"}), needs={"reference_logprobs"})
    of_other_tokens = run(learner={"lora": {}}, algorithm={"distillation": {}})
    assert needs_reference(of_other_tokens, needs={"reference_logprobs"})


def test_an_elastic_run_starts_with_what_is_there():
    """A learner's CPU, a quarter for the reward service and 2 for the reward model leave room for 3 workers of 7 CPUs."""
    asked = {"rollout": {"num_workers": 8}, "elastic": {"min_workers": 1, "max_workers": 16}}
    reward = {"judge": {"name": "reward_model", "model": "kind"}, "models": {"kind": {"path": "x", "cpus": 2}}}
    placed = plan(run(**asked, reward=reward, buffer={"max_off_policy_steps": 1}), cluster((7, 0)))
    assert len(placed.of(ActorKind.ROLLOUT_WORKER)) == 3
    assert placed.num_missing_workers == 5 and not placed.is_time_shared


@pytest.mark.parametrize(
    ("cpus", "of_rank", "of_worker", "of_service", "num_workers"), [(4, 1.0, 0.4, 0.2, 7), (3, 0.5, 0.6, 0.1, 4)]
)
def test_shares_that_fill_a_cluster_to_the_last_tenth_are_given_in_full(
    cpus, of_rank, of_worker, of_service, num_workers
):
    """Seen before: 0.5 + 4 x 0.6 + 0.1 CPUs are a hair more than 3 in binary, and all had less than they asked."""
    config = run(
        learner={"cpus_per_rank": of_rank},
        rollout={"num_workers": 8, "cpus_per_worker": of_worker},
        reward={"cpus_per_service": of_service},
        elastic={"min_workers": 1, "max_workers": 8},
        buffer={"max_off_policy_steps": 1},
    )
    placed = plan(config, cluster((cpus, 0)))
    assert [bundle.cpus for bundle in placed.bundles] == [of_rank, *[of_worker] * num_workers, of_service]
    assert not placed.is_time_shared


RUNS = st.builds(
    lambda ranks, workers, cpus, gpus, lag: run(
        learner={"num_ranks": ranks, "cpus_per_rank": cpus, "gpus_per_rank": gpus},
        rollout={"num_workers": workers, "cpus_per_worker": cpus, "gpus_per_worker": gpus},
        buffer={"max_off_policy_steps": lag},
    ),
    st.integers(1, 4),
    st.integers(1, 12),
    st.sampled_from([0.5, 1.0, 2.0, 4.0]),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.integers(0, 2),
)
CLUSTERS = st.lists(
    st.tuples(st.sampled_from([1.0, 2.0, 8.0, 64.0]), st.sampled_from([0.0, 1.0, 8.0])), min_size=1, max_size=6
)


@given(config=RUNS, nodes=CLUSTERS, needs=st.sampled_from([(), ("reference_logprobs",)]))
def test_a_plan_fits_the_cluster_or_is_refused(config, nodes, needs):
    available = cluster(*nodes)
    try:
        placed = plan(config, available, needs=needs)
    except ConfigError as error:
        assert "; " in str(error)  # the way out
        return
    assert sum(bundle.cpus for bundle in placed.bundles) <= available.cpus
    assert sum(bundle.gpus for bundle in placed.bundles) <= available.gpus
    assert all(0 < bundle.cpus <= max(node.cpus for node in available.nodes) for bundle in placed.bundles)
    assert len(placed.of(ActorKind.LEARNER)) == config.learner.num_ranks
    assert len(placed.of(ActorKind.ROLLOUT_WORKER)) == config.rollout.num_workers
    assert len(placed.of(ActorKind.REFERENCE_SCORER)) == len(needs)
    assert len({bundle.name for bundle in placed.bundles}) == len(placed.bundles)
    assert sorted(seat for group in placed.groups() for seat in group.seats) == [*range(len(placed.bundles))]


def test_a_run_that_samples_nothing_asks_for_neither_workers_nor_judges():
    config = run(rollout={"num_workers": 9, "gpus_per_worker": 1}, learner={"cpus_per_rank": 1.5})
    with pytest.raises(ConfigError, match="9 GPUs asked for"):
        plan(config, LAPTOP)
    placed = plan_learning(config, LAPTOP, needs={"reference_logprobs"})
    assert [(bundle.name, bundle.cpus) for bundle in placed.bundles] == [
        ("learner-0", 1.5),
        ("reference_scorer-0", 0.5),
    ]
    assert not placed.is_time_shared and placed.num_missing_workers == 0
    with pytest.raises(ConfigError, match=r"^learner.gpus_per_rank=2 x 1: 2 GPUs asked for, the cluster has 0"):
        plan_learning(run(rollout={"gpus_per_worker": 1}, learner={"gpus_per_rank": 2}), LAPTOP, needs=())


def test_each_judge_server_has_a_seat_unless_nothing_is_judged():
    servers = {"a": {"path": "x", "num_servers": 2, "cpus": 1.5, "gpus": 0.5}, "b": {"path": "y", "num_threads": 3}}
    config = run(reward={"servers": servers, "judge": "my_rewards:judge"})
    placed = plan(config, cluster((16, 1))).of(ActorKind.JUDGE_SERVER)
    assert [(bundle.cpus, bundle.gpus, bundle.num_threads) for bundle in placed] == [(1.5, 0.5, 2)] * 2 + [
        (1.0, 0.0, 3)
    ]
    with pytest.raises(ConfigError, match=r"^reward.servers.a.gpus=0.5 x 2: 1 GPUs asked for, the cluster has 0"):
        plan(config, cluster((16, 0)))
    assert not plan_learning(config, LAPTOP, needs=()).of(ActorKind.JUDGE_SERVER)


def test_each_reward_service_has_a_seat_and_its_gpus_are_asked_for_by_name():
    config = run(reward={"num_services": 2, "cpus_per_service": 1.5, "gpus_per_service": 0.5})
    placed = plan(config, cluster((16, 1))).of(ActorKind.REWARD_SERVICE)
    assert [(bundle.index, bundle.cpus, bundle.gpus) for bundle in placed] == [(0, 1.5, 0.5), (1, 1.5, 0.5)]
    assert [bundle.num_threads for bundle in placed] == [1, 1], "its judges are processes of their own"
    with pytest.raises(ConfigError, match=r"reward.gpus_per_service=0.5 x 2: 1 GPUs asked for, the cluster has 0"):
        plan(config, cluster((16, 0)))


def spot_cluster(*nodes: tuple[float, bool]) -> ClusterResources:
    return ClusterResources(nodes=tuple(Node(cpus=cpus, is_spot=is_spot) for cpus, is_spot in nodes))


def test_where_nodes_may_be_taken_away_what_stays_is_reserved_before_the_workers():
    """Ray gives out the seats of one group by their size: two workers of 1 CPU took the place of a learner of half a CPU, and the group
    waited for ever."""
    config = run(
        elastic={"spot": "market=spot"},
        learner={"cpus_per_rank": 0.5},
        reward={"cpus_per_service": 0.5},
        rollout={"num_workers": 2},
    )
    placed = plan(config, spot_cluster((1, False), (2, True)))
    assert [bundle.name for bundle in placed.bundles] == [
        "learner-0",
        "rollout_worker-0",
        "rollout_worker-1",
        "reward_service-0",
    ]
    staying, *workers = placed.groups()
    assert (staying.seats, staying.strategy, staying.node_labels) == ((0, 3), "PACK", {"market": "!spot"})
    assert [(group.seats, group.node_labels, group.resources) for group in workers] == [
        ((1,), {}, [{"CPU": 1.0}]),
        ((2,), {}, [{"CPU": 1.0}]),
    ]
    assert staying.resources == [{"CPU": 0.5}] * 2
    assert not placed.is_time_shared


def test_a_learner_that_has_room_on_spot_nodes_alone_is_refused():
    config = run(elastic={"spot": "market=spot"})
    with pytest.raises(
        ConfigError, match=r"no way to place 3 actors .*\(8 CPUs and 0 GPUs on spot\).*nodes that are not"
    ):
        plan(config, spot_cluster((8, True)))
    assert plan_learning(config, spot_cluster((8, True), (1, False)), needs=()).groups()[0].seats == (0,)


@given(config=RUNS, nodes=st.lists(st.tuples(st.sampled_from([1.0, 2.0, 8.0]), st.booleans()), min_size=1, max_size=6))
def test_every_seat_is_in_one_group_and_the_workers_alone_are_in_one_that_may_be_on_spot_nodes(config, nodes):
    told_apart = config.model_copy(update={"elastic": ElasticConfig(spot="market=spot")})
    try:
        placed = plan(told_apart, spot_cluster(*nodes))
    except ConfigError:
        return
    groups = placed.groups()
    assert sorted(seat for group in groups for seat in group.seats) == [*range(len(placed.bundles))]
    on_spot = {placed.bundles[seat].kind for group in groups for seat in group.seats if not group.node_labels}
    assert on_spot == {ActorKind.ROLLOUT_WORKER}
    steady = sum(cpus for cpus, is_spot in nodes if not is_spot)
    assert sum(bundle["CPU"] for bundle in groups[0].resources) <= steady


def test_each_worker_has_the_bundle_of_the_rank_whose_gpu_it_shares():
    """Two actors of half a GPU in two bundles may be on two GPUs; in one bundle of a GPU they are on that one."""
    placed = plan(
        run(
            learner={"num_ranks": 2, "gpus_per_rank": 0.5},
            rollout={"num_workers": 2, "gpus_per_worker": 0.5, "colocated": True},
        ),
        cluster((4, 2), (4, 2)),
    )
    names = [bundle.name for bundle in placed.bundles]
    (group,) = placed.groups()
    assert [names[seat] for seat in group.seats] == [
        *("learner-0", "learner-1", "rollout_worker-0", "rollout_worker-1", "reward_service-0")
    ]
    assert group.places == (0, 1, 0, 1, 2) and group.strategy == "PACK"
    assert group.resources == [{"CPU": 2.0, "GPU": 1.0}, {"CPU": 2.0, "GPU": 1.0}, {"CPU": 0.25}]


def test_a_rank_and_its_worker_are_never_on_two_nodes():
    """Apart, two halves would fit on two nodes with half a GPU left each."""
    config = run(
        learner={"gpus_per_rank": 0.5},
        rollout={"gpus_per_worker": 0.5, "colocated": True},
        reward={"gpus_per_service": 0.5, "num_services": 2},
    )
    placed = plan(config, cluster((4, 1), (4, 1)))
    assert placed.groups()[0].places == (0, 0, 1, 2)
    with pytest.raises(ConfigError, match="no way to place 4 actors"):
        plan(config, cluster((4, 0.5), (4, 0.5), (4, 0.5), (4, 0.5)))


def test_parts_of_a_gpu_add_up_as_ray_counts_them():
    config = run(learner={"gpus_per_rank": 0.1}, rollout={"gpus_per_worker": 0.2, "colocated": True})
    assert plan(config, cluster((4, 1))).groups()[0].resources[0]["GPU"] == 0.3


@pytest.mark.parametrize("colocated", [False, True])
def test_tenths_that_add_up_to_a_gpu_fit_on_it(colocated):
    """Seen before: refused. In binary 1 − 0.4 − 0.4 is less than 0.2."""
    config = run(
        learner={"gpus_per_rank": 0.4},
        rollout={"gpus_per_worker": 0.4, "colocated": colocated},
        reference={"gpus": 0.2},
        algorithm={"kl": {"loss": {"coefficient": 0.1}}},
    )
    assert len(plan(config, cluster((8, 1)), needs=["reference_logprobs"]).bundles) == 4


def test_shares_of_gpus_are_given_out_in_an_order_in_which_each_finds_one():
    """Ray 2.60 gives bundles out in their order, each to the fullest GPU with room. Seen before: ranks of 0.4 were on one GPU, a worker of
    0.6 on the other, and the run waited for the second one, with room for the sum. Of 0.3 and 0.4 the plan's own order fits alone."""
    two = cluster((16, 2))
    config = run(learner={"num_ranks": 2, "gpus_per_rank": 0.4}, rollout={"num_workers": 2, "gpus_per_worker": 0.6})
    (group,) = plan(config, two).groups()
    assert [place.get("GPU") for place in group.resources] == [0.6, 0.6, 0.4, 0.4, None]
    assert group.places == (2, 3, 0, 1, 4)
    lucky = run(
        learner={"gpus_per_rank": 0.3},
        rollout={"num_workers": 2, "gpus_per_worker": 0.4},
        reward={"num_services": 3, "gpus_per_service": 0.3},
    )
    (group,) = plan(lucky, two).groups()
    assert [place.get("GPU") for place in group.resources] == [0.3, 0.4, 0.4, 0.3, 0.3, 0.3]


def test_shares_of_gpus_that_fit_into_the_sum_alone_are_refused():
    """Seen before: the run waited for `start_s`, and said that others hold the cluster's resources."""
    config = run(learner={"num_ranks": 2, "gpus_per_rank": 0.7}, rollout={"gpus_per_worker": 0.6})
    with pytest.raises(ConfigError, match=r"learner.gpus_per_rank=0.7: no way to place 4 actors"):
        plan(config, cluster((16, 2)))
    with pytest.raises(ConfigError, match=r"learner.gpus_per_rank=0.7: no way to place 2 actors"):
        plan_learning(run(learner={"num_ranks": 2, "gpus_per_rank": 0.7}), cluster((16, 1.5)), needs=())


def test_shares_that_no_gpu_of_several_nodes_has_room_for_are_refused():
    """4 ranks leave 12 of 16 GPUs: for 12 workers of 0.6, 24 of 0.5 or 36 of 0.3, though more would fit into the sum."""
    two = cluster((64, 8), (64, 8))
    for most, share in ((12, 0.6), (24, 0.5), (36, 0.3)):

        def config(num_workers, gpus=share):
            return run(
                learner={"num_ranks": 4, "gpus_per_rank": 1},
                rollout={"num_workers": num_workers, "gpus_per_worker": gpus},
            )

        assert len(plan(config(most), two).of(ActorKind.ROLLOUT_WORKER)) == most
        with pytest.raises(ConfigError):
            plan(config(most + 1), two)
    with pytest.raises(ConfigError, match="no way to place 24 actors on the cluster's 2 nodes"):
        plan(config(19, 0.6), two)


def test_twentieths_that_add_up_to_a_gpu_are_not_too_many():
    """Seen before: refused, "1 GPUs asked for, the cluster has 1". In binary twenty of them are a little more."""
    assert sum([0.05] * 20) > 1
    config = run(
        learner={"gpus_per_rank": 0.05},
        rollout={"gpus_per_worker": 0.05, "num_workers": 9},
        reward={"gpus_per_service": 0.05, "num_services": 10},
    )
    assert len(plan(config, cluster((32, 1))).bundles) == 20


def test_workers_that_have_no_gpu_yet_are_counted_out_before_places_are_looked_for(monkeypatch):
    """Seen before: a common share of CPUs was looked for ninety times for each number of workers, and a start took minutes."""
    num_fits = 0

    def counted(*args, **more):
        nonlocal num_fits
        num_fits += 1
        return first_fit(*args, **more)

    monkeypatch.setattr(placement, "first_fit", counted)
    config = run(
        learner={"gpus_per_rank": 1},
        rollout={"gpus_per_worker": 1, "num_workers": 64},
        elastic={"min_workers": 1, "max_workers": 64},
    )
    placed = plan(config, cluster((192, 8)))
    assert len(placed.of(ActorKind.ROLLOUT_WORKER)) == 7 and placed.num_missing_workers == 57
    assert num_fits == 1


def test_seats_have_places_of_their_own_where_nobody_takes_turns():
    (group,) = plan(run(rollout={"num_workers": 2}), cluster((8, 0))).groups()
    assert group.places == (0, 1, 2, 3) and len(group.resources) == 4
