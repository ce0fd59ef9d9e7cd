"""Settings that contradict each other are refused together, with the way out."""

import math
import re

import pytest
from pydantic import ValidationError

from cluster.contracts.config import RunConfig
from cluster.record.resume_rules import differing


def configured(**sections) -> RunConfig:
    return RunConfig.model_validate({"model": {"path": "none"}, "prompts": "none", **sections})


def test_dropping_stragglers_without_later_groups_is_refused():
    with pytest.raises(ValidationError, match="where only the groups of one step start and no later group can"):
        configured(buffer={"max_head_of_line_s": 5})
    assert configured(buffer={"max_head_of_line_s": 5, "max_off_policy_steps": 1}).buffer.max_head_of_line_s == 5


def test_parts_without_a_weight_are_refused_unless_an_environment_rewards():
    measured = {"parts": {"tidy": {"judge": "none", "weight": 0}}}
    with pytest.raises(ValidationError, match=r"reward\.parts: every part has weight 0"):
        configured(reward=measured)
    configured(reward=measured, environment="guess")


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"rollout": {"extra_trajectories": 2}}, "rollout.extra_trajectories=2 with deterministic=true"),
        (
            {"buffer": {"max_head_of_line_s": 5, "max_off_policy_steps": 1}},
            "buffer.max_head_of_line_s=5 with deterministic=true",
        ),
    ],
)
def test_a_deterministic_run_refuses_what_timing_would_decide(sections, named):
    with pytest.raises(ValidationError, match=named):
        configured(deterministic=True, **sections)
    configured(deterministic=False, **sections)


@pytest.mark.parametrize(
    "sections",
    [{"deterministic": True}, {"rollout": {"routing_replay": True}}],
    ids=["deterministic", "routing replay"],
)
def test_layers_are_not_compiled_where_their_rounding_or_their_routers_would_be_others(sections):
    with pytest.raises(ValidationError, match=r"learner\.compile=true with .*=true: .* set one of them to false"):
        configured(learner={"compile": True}, **sections)
    configured(learner={"compile": False}, **sections)


def test_a_selection_needs_candidates_and_does_not_depend_on_timing():
    with pytest.raises(ValidationError, match=r"algorithm\.selection='spread' has nothing to choose from"):
        configured(algorithm={"selection": "spread"})
    chosen = {"algorithm": {"selection": "spread"}, "rollout": {"extra_trajectories": 2}}
    assert configured(deterministic=True, **chosen).judged_per_group == 8 + 2
    assert configured(rollout=chosen["rollout"]).judged_per_group == 8, "two are aborted"


def test_recorded_groups_are_not_chosen_from():
    chosen = {"algorithm": {"selection": "spread"}, "rollout": {"extra_trajectories": 2}}
    with pytest.raises(ValidationError, match=r"algorithm\.selection='spread' with recorded='runs/one': "):
        configured(recorded="runs/one", **chosen)


def test_a_critics_warmup_leaves_steps_to_the_policy():
    configured(num_steps=3, algorithm={"value": {"warmup_steps": 2}})
    with pytest.raises(ValidationError, match=r"value\.warmup_steps=3 with num_steps=3: the policy would never train"):
        configured(num_steps=3, algorithm={"value": {"warmup_steps": 3}})


@pytest.mark.parametrize(
    ("sections", "beside"),
    [
        ({}, False),
        ({"buffer": {"max_off_policy_steps": 1}}, True),
        ({"buffer": {"max_off_policy_steps": 1}, "deterministic": True}, False),
        ({"buffer": {"max_off_policy_steps": 1}, "weights": {"transport": "collective"}}, True),
        ({"buffer": {"max_off_policy_steps": 1}, "weights": {"transport": "collective", "backend": "nccl"}}, False),
        ({"buffer": {"max_off_policy_steps": 1}, "weights": {"backend": "nccl"}}, True),
    ],
)
def test_weights_travel_beside_the_next_step_where_its_groups_may_be_older(sections, beside):
    assert configured(**sections).broadcasts_beside_learning is beside


def test_a_deterministic_run_names_both_at_once():
    both = {"rollout": {"extra_trajectories": 2}, "buffer": {"max_head_of_line_s": 5, "max_off_policy_steps": 1}}
    with pytest.raises(ValidationError, match=r"rollout\.extra_trajectories=2 .*; buffer\.max_head_of_line_s=5 "):
        configured(deterministic=True, **both)


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"seed": 2**63}, r"seed\n  Input should be less than 9223372036854775808"),
        ({"optimizer": {"betas": [0.9, 1.0]}}, r"optimizer\.betas\.1\n  Input should be less than 1"),
        ({"optimizer": {"betas": [-0.1, 0.9]}}, r"optimizer\.betas\.0\n  Input should be greater than or equal to 0"),
    ],
)
def test_numbers_that_torch_refuses_are_refused(sections, named):
    with pytest.raises(ValidationError, match=named):
        configured(**sections)


MATHS = {"sources": {"maths": {"name": "file", "path": "a.jsonl", "weight": 2}}}
PARTS = {"parts": {"right": {"judge": "exact_match"}}}


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"prompts": {"name": "file", **MATHS}}, "name='file' with sources"),
        ({"prompts": {"name": "mixture", **MATHS, "dedupe": True}}, "name='mixture' with sources"),
        ({"prompts": {"name": None, **MATHS, "dedupe": True}}, r"prompts\.dedupe\n  Extra inputs are not permitted"),
        ({"prompts": MATHS | {"params": {"dedupe": True}}}, "with sources"),
        (
            {"prompts": {"name": "file", "difficulty": 0.3}},
            r"difficulty=0\.3 must be a mapping; write difficulty: {target: 0\.5}",
        ),
        ({"prompts": {"sources": {"maths": {"name": "file", "weight": math.inf}}}}, "should be a finite number"),
        ({"prompts": {}}, "no prompt source; write"),
        ({"prompts": MATHS, "reward": PARTS | {"by_source": {"chat": ["right"]}}}, "no entry for the source 'maths'"),
        (
            {"prompts": MATHS, "reward": PARTS | {"by_source": {"maths": ["right"], "chat": ["right"]}}},
            r"reward\.by_source\.chat: no source has this name; there are: maths",
        ),
        ({"reward": {"source_column": "kind"}}, "source_column='kind' has no effect without"),
        (
            {"evaluation": {"prompts": {"name": "file", "difficulty": {"target": 0.5}}}},
            r"prompts\.difficulty acts in training only",
        ),
        ({"prompts": {"name": "file", "on_long_prompt": "drop"}}, "has no effect without max_prompt_tokens"),
        ({"evaluation": {"prompts": MATHS}}, r"prompts\.sources\.maths\.weight=2 acts in training only"),
    ],
)
def test_sources_have_names_that_the_reward_knows(sections, named):
    with pytest.raises(ValidationError, match=named):
        configured(**sections)


@pytest.mark.parametrize(
    "written",
    [
        "chat",
        {"name": "file", "path": "a"},
        MATHS,
        MATHS | {"deduplicate": True, "difficulty": {"target": 0.25}},
        {"name": "reasoning_gym", "difficulty": 3},
    ],
)
def test_prompts_are_written_out_as_they_were_written(written):
    prompts = configured(prompts=written).prompts
    assert type(prompts).model_validate(prompts.model_dump(mode="json")) == prompts
    assert prompts.model_dump(exclude_defaults=True) == written


def test_a_difficulty_of_null_is_none():
    prompts = configured(prompts={"name": "file", "difficulty": None}).prompts
    assert prompts.difficulty is None and not prompts.params


def test_a_resumed_run_may_evaluate_other_prompts_and_not_train_on_them():
    theirs = {"prompts": MATHS, "evaluation": {"prompts": {"name": "file", "path": "a", "deduplicate": False}}}
    ours = {"prompts": MATHS, "evaluation": {"prompts": {"name": "file", "path": "b", "deduplicate": True}}}
    assert differing(theirs, ours) == {}
    other = {"prompts": {"sources": {"maths": {"name": "file", "path": "a.jsonl", "weight": 3}}}}
    assert differing({"prompts": MATHS}, other) == {"prompts.sources.maths.weight": (2, 3)}


@pytest.mark.parametrize(
    "spot", ["spot", "=spot", "market=", "a=b=c", "market=!spot", "-a=b", "a b=c", "x" * 64 + "=y"]
)
def test_a_mark_of_spot_nodes_that_is_no_label_is_refused(spot):
    with pytest.raises(ValidationError, match=r"is not a label; write key=value, such as ray\.io/market-type=spot"):
        configured(elastic={"spot": spot})


def test_nodes_that_stay_are_those_without_the_label_of_spot_nodes():
    assert configured(elastic={"spot": "ray.io/market-type=spot"}).elastic.off_spot == {"ray.io/market-type": "!spot"}
    assert configured().elastic.off_spot == {}


def test_a_node_with_the_label_is_a_spot_node_and_none_is_one_without_the_setting():
    elastic = configured(elastic={"spot": "ray.io/market-type=spot"}).elastic
    assert elastic.is_spot({"ray.io/market-type": "spot", "zone": "a"})
    assert not elastic.is_spot({"ray.io/market-type": "on-demand"}) and not elastic.is_spot({})
    assert not configured().elastic.is_spot({"": ""})


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ({"prefix_caching": False}, "routing_replay=true needs prefix_caching=true"),
        ({"enforce_eager": False}, "routing_replay=true needs enforce_eager=true on CPUs"),
    ],
)
def test_routing_is_replayed_where_the_engine_returns_experts(rollout, message):
    configured(rollout={"routing_replay": True, "enforce_eager": False, "gpus_per_worker": 1.0})
    with pytest.raises(ValidationError, match=message):
        configured(rollout={"routing_replay": True, **rollout})


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"learner": {"sequence_parallel_size": 4, "num_ranks": 6}},
            "sequence_parallel_size=4 does not divide num_ranks=6; use a divisor, or raise num_ranks",
        ),
        (
            {"learner": {"sequence_parallel_size": 2, "num_ranks": 2, "packing": "padded"}},
            "sequence_parallel_size=2 splits packed rows, and packing='padded' makes none; use packing=auto",
        ),
        (
            {"learner": {"sequence_parallel_size": 2, "num_ranks": 2}, "model": {"path": "none", "attention": "eager"}},
            "learner.sequence_parallel_size=2 needs the attention of packed rows, and model.attention='eager' is another",
        ),
        (
            {
                "learner": {"sequence_parallel_size": 2, "num_ranks": 10},
                "buffer": {"groups_per_step": 1, "trajectories_per_group": 4},
            },
            "learner.num_ranks=10 in groups of learner.sequence_parallel_size=2 is more than the 4 trajectories of an update",
        ),
    ],
)
def test_ranks_share_passes_in_whole_groups_and_of_packed_rows(sections, message):
    with pytest.raises(ValidationError, match=message):
        configured(**sections)


def test_a_group_of_ranks_that_share_passes_needs_one_trajectory():
    learner = {"sequence_parallel_size": 2, "num_ranks": 8}
    config = configured(learner=learner, buffer={"groups_per_step": 1, "trajectories_per_group": 4})
    assert config.learner.data_parallel_size == 4


def test_experts_are_balanced_where_they_are_recorded():
    balancing = {"algorithm": {"router_aux_loss_coefficient": 0.01}}
    configured(**balancing, rollout={"routing_replay": True})
    with pytest.raises(
        ValidationError, match=r"router_aux_loss_coefficient=0\.01 needs the experts that the engine chose"
    ):
        configured(**balancing)


def test_more_biased_tokens_than_vllm_takes_on_a_gpu_are_refused_there():
    """Each engine would end at its first step, and its prompts would be blamed."""
    biased = {"logit_bias": dict.fromkeys(range(1025), -100)}
    configured(sampling=biased)
    configured(sampling={"logit_bias": dict.fromkeys(range(1024), -100)}, rollout={"gpus_per_worker": 1})
    with pytest.raises(ValidationError, match=r"sampling\.logit_bias has 1,025 tokens, and vLLM takes 1,024 on a GPU"):
        configured(sampling=biased, rollout={"gpus_per_worker": 1})


COLOCATED = {"colocated": True, "gpus_per_worker": 0.5}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"buffer": {"max_off_policy_steps": 1}},
            "rollout.colocated=true with buffer.max_off_policy_steps=1: workers would sample while the learner learns; set it to 0, or "
            "leave rollout.colocated out",
        ),
        ({"elastic": {"max_workers": 2}}, "rollout.colocated=true with elastic.max_workers=2: workers stay beside"),
        ({"elastic": {"spot": "a=b"}}, "rollout.colocated=true with elastic.spot=a=b: workers stay beside"),
        (
            {"elastic": {"wait_for_nodes_s": 5}},
            "rollout.colocated=true with elastic.wait_for_nodes_s=5.0: workers stay",
        ),
        (
            {"learner": {"num_ranks": 2, "gpus_per_rank": 0.5}},
            "rollout.colocated=true with rollout.num_workers=1 and learner.num_ranks=2: a worker is beside each rank; use the same number",
        ),
        (
            {"rollout": {**COLOCATED, "tensor_parallel_size": 2}},
            "rollout.colocated=true with rollout.tensor_parallel_size=2: an engine shares the GPU of one rank; set it to 1",
        ),
        (
            {"learner": {"gpus_per_rank": 0.6}},
            "rollout.colocated=true with learner.gpus_per_rank=0.6 and rollout.gpus_per_worker=0.5: both are parts of one GPU; use 0.5 and",
        ),
        ({"learner": {}}, "learner.gpus_per_rank=0 and rollout.gpus_per_worker=0.5: both are parts of one GPU"),
    ],
)
def test_turns_on_the_same_gpus_are_of_a_synchronous_run_with_a_worker_beside_each_rank(sections, message):
    fine = {"learner": {"gpus_per_rank": 0.5}, "rollout": COLOCATED}
    assert configured(**fine).keeps_its_workers
    with pytest.raises(ValidationError, match=re.escape(message)):
        configured(**fine | sections)


def test_without_gpus_the_turns_are_taken_all_the_same():
    assert configured(rollout={"colocated": True, "num_workers": 2}, learner={"num_ranks": 2}).keeps_its_workers
    assert not configured().keeps_its_workers and configured(deterministic=True).keeps_its_workers


def test_a_group_whose_episodes_wait_for_one_another_has_time_for_them_all():
    def extra_s(num_samples: int = 1, **limits: int) -> float:
        evaluation = {"num_samples": num_samples, "temperature": 1.0}
        episodes = {"timeout_s": 10, "cleanup_s": 1, **limits}
        buffer = {"trajectories_per_group": 8}
        run = configured(environment="guess", episodes=episodes, buffer=buffer, evaluation=evaluation)
        return run.group_deadline_s - run.rollout.timeout_s

    # Three tries, each of 8 / 4 rounds, or of as many as there are episodes.
    assert extra_s() == 3 * 2 * 11
    assert extra_s(max_concurrent=1) == 3 * 8 * 11
    assert extra_s(num_samples=32) == 3 * 8 * 11, "a held-out prompt's episodes are a group too"
