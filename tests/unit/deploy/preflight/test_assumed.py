"""Runs on hardware that is not here, of models of which only config.json is."""

import logging

import pytest
from typer.testing import CliRunner

from cluster.contracts.errors import ConfigError
from deploy.cli import app
from deploy.config.loading import validated
from deploy.preflight import check_assumed
from deploy.preflight.hardware import parse
from tests.model_shapes import write

ON_GPUS = ("learner.gpus_per_rank=1", "rollout.gpus_per_worker=1", "model.max_context=4096")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write("Qwen/Qwen2.5-0.5B-Instruct", tmp_path_factory.mktemp("shape"))


def _rows(model, hardware, *overrides):
    config = validated({"model": {"path": str(model)}, "prompts": "file", "algorithm": {"preset": "dapo"}}, overrides)
    return {(section, name): value for section, name, value in check_assumed(config, parse([hardware])).rows}


def _refusal(model, hardware, *overrides):
    with pytest.raises(ConfigError) as refused:
        _rows(model, hardware, *overrides)
    return str(refused.value)


def test_actors_are_shown_on_their_gpus_and_idle_ones_by_name(model):
    rows = _rows(model, "gpus=2x80GB,nodes=2", *ON_GPUS, "rollout.num_workers=2")
    assert (
        rows["placement", "node 0, GPU 0"] == "learner-0" and rows["placement", "node 0, GPU 1"] == "rollout_worker-0"
    )
    assert rows["placement", "node 1, GPU 0"] == "rollout_worker-1" and rows["placement", "node 1, GPU 1"] == "idle"
    assert rows["placement", "node 0, CPUs only"] == "reward_service-0"
    assert rows["placement", "one way to fit"].startswith("Ray spreads the rollout workers over the nodes")
    assert ("placement", "one way to fit") not in _rows(model, "gpus=2x80GB", *ON_GPUS)


def test_a_hub_out_of_reach_is_not_told_at_each_retry(model):
    hub = logging.getLogger("huggingface_hub")
    hub.setLevel(logging.WARNING)
    _rows(model, "gpus=2x80GB", *ON_GPUS)
    assert not hub.isEnabledFor(logging.WARNING)


def test_more_gpus_than_there_are_is_placements_problem(model):
    message = _refusal(model, "gpus=2x80GB", *ON_GPUS, "rollout.num_workers=2")
    assert "3 GPUs asked for, the cluster has 2" in message and "use fewer ranks or workers" in message


def test_a_rank_that_does_not_fit_on_its_gpu_is_refused_with_what_it_is_made_of(model):
    message = _refusal(model, "gpus=2x8GB", *ON_GPUS)
    assert "needs about" in message and "on each learner rank (weights 2.8," in message
    assert "6.5 GiB are free" in message, "8 GB are 7.5 GiB, of which a context takes one"


def test_an_engine_without_room_for_one_whole_sequence_is_refused(model):
    message = _refusal(model, "gpus=1x10GB", "rollout.gpus_per_worker=1", "rollout.gpu_memory_utilization=0.4")
    assert message.startswith("rollout.gpu_memory_utilization=0.4 of a GPU is 3.7 GiB; weights 0.9 and passes")
    assert "a sequence may have 32,768" in message and "raise it, raise rollout.tensor_parallel_size" in message


def test_a_gpu_is_shared_only_as_far_as_its_memory_goes(model):
    shared = ("learner.gpus_per_rank=0.5", "rollout.gpus_per_worker=0.5", "model.max_context=4096")
    fits = (*shared, "rollout.gpu_memory_utilization=0.4", "learner.activation_checkpointing=true")
    assert _rows(model, "gpus=1x80GB", *fits)["placement", "node 0, GPU 0"] == "learner-0, rollout_worker-0"
    message = _refusal(model, "gpus=1x80GB", *shared, "rollout.gpu_memory_utilization=0.9")
    assert message.startswith("GPU 0 of node 0: learner-0") and "lower rollout.gpu_memory_utilization" in message


def test_a_scorer_beside_an_engine_counts_too(model):
    scored = ("algorithm.kl.loss={coefficient: 0.1}", "reference.gpus=0.5", "rollout.gpus_per_worker=0.5")
    message = _refusal(model, "gpus=1x40GB", *scored, "rollout.gpu_memory_utilization=0.95", "model.max_context=4096")
    assert "reference_scorer-0" in message and "rollout_worker-0 35.4" in message


def test_nodes_without_an_actor_are_one_row(model):
    rows = _rows(model, "gpus=2x80GB,nodes=1000", *ON_GPUS)
    assert rows["placement", "nodes 1-999"] == "idle"
    assert ("memory", "node 0") in rows and ("memory", "node 1") not in rows


def test_actors_are_seated_in_the_order_of_the_plan(model):
    # Workers first would leave no node with six CPUs for the second rank; beside spot nodes ranks come first.
    ranks = ("learner.num_ranks=2", "learner.cpus_per_rank=6", "reward.cpus_per_service=0.01")
    workers = ("rollout.num_workers=2", "rollout.cpus_per_worker=3.99", "rollout.gpus_per_worker=1")
    elastic = ("elastic.spot=market=spot", "elastic.max_workers=2")
    rows = _rows(model, "gpus=2x80GB,nodes=2,cpus=10", *ranks, *workers, *elastic, "model.max_context=4096")
    assert rows["placement", "node 0, GPU 0"] == "rollout_worker-0"
    assert rows["placement", "node 1, GPU 0"] == "rollout_worker-1"


@pytest.mark.parametrize(
    ("scorer", "field"),
    [
        (("algorithm.kl.loss={coefficient: 0.1}", "reference={path: LARGE, gpus: 1}"), "reference"),
        (("reward={judge: {name: reward_model, model: liked}, models: {liked: {path: LARGE, gpus: 1}}}",), "reward.models.liked"),
    ],
)  # fmt: skip
def test_a_scorer_that_is_too_large_for_its_own_gpu_is_refused(model, tmp_path, scorer, field):
    large = str(write("meta-llama/Llama-3.3-70B-Instruct", tmp_path))
    message = _refusal(model, "gpus=3x80GB", *ON_GPUS, *(each.replace("LARGE", large) for each in scorer))
    assert message.startswith(f"{field}: weights and a pass take about 1")
    assert "a GPU has 74.5" in message and f"lower {field}.max_tokens_per_micro_batch, or take a smaller" in message


def test_without_a_gpu_placement_alone_says_so(model):
    message = _refusal(model, "nodes=1", *ON_GPUS)
    assert "2 GPUs asked for, the cluster has 0" in message and "problems" not in message


def test_an_only_rank_with_adapters_is_largest_while_it_loads_the_model_in_float32(model):
    adapters = (*ON_GPUS, "learner.lora={rank: 8}", "learner.max_tokens_per_micro_batch=1024", "model.max_context=1024")
    small = (
        *adapters,
        "sampling.max_tokens=512",
        "learner.activation_checkpointing=true",
        "learner.head_chunk_tokens=64",
    )
    rows = _rows(model, "gpus=2x80GB", *small)
    assert rows["memory", "learner rank"].startswith("1.8 GiB while it loads, then 1.")
    message = _refusal(model, "gpus=2x2.5GB", *small, "rollout.gpus_per_worker=0")
    assert "needs about 1.8 GiB on the only learner rank while it loads" in message
    assert "raise learner.num_ranks" in message and "activation_checkpointing" not in message


def test_a_nodes_memory_holds_copies_of_checkpoints_and_weights(model):
    message = _refusal(model, "gpus=2x80GB,memory=8GB", *ON_GPUS)
    # 494 million parameters: 14 bytes each in the copy, twice 2 in what is published and in the version before.
    assert message.startswith("node 0: its 3 actors take about 8.3 of 7.5 GiB")
    # A save that training waits for takes state and model through the host's memory, too.
    assert _refusal(model, "gpus=2x80GB,memory=8GB", *ON_GPUS, "checkpoint.asynchronous=false") == message
    _rows(model, "gpus=2x80GB,memory=9GB", *ON_GPUS)


def test_weights_that_go_through_groups_are_in_the_first_ranks_memory_once_and_nowhere_else(model):
    # 494,032,768 parameters: 14 bytes each in the copy for a checkpoint, and 2 in the version that is kept.
    on_one = _rows(model, "gpus=2x80GB", *ON_GPUS, "weights.transport=collective")
    assert on_one["memory", "node 0"] == f"{16 * 494_032_768 / 2**30:.1f} GiB" == "7.4 GiB"
    on_two = _rows(model, "gpus=1x80GB,nodes=2", *ON_GPUS, "weights.transport=collective")
    assert (on_two["memory", "node 0"], on_two["memory", "node 1"]) == ("7.4 GiB", "0.0 GiB")


def test_an_only_rank_loads_its_model_through_the_nodes_memory(model):
    adapter = (*ON_GPUS, "learner.lora={rank: 8, publish: adapter}")
    rows = _rows(model, "gpus=2x80GB", *adapter)
    assert rows["memory", "node 0"] == "1.8 GiB", "4 bytes a parameter"


def test_a_run_without_gpus_is_judged_by_the_nodes_memory(model):
    assert "of its memory" in _refusal(model, "nodes=1,cpus=8,memory=4GB")
    assert ("memory", "engine, each GPU") not in _rows(model, "nodes=1,cpus=8,memory=64GB")


def test_all_problems_are_named_at_once(model):
    message = _refusal(model, "gpus=1x8GB", *ON_GPUS, "weights.transport=smoke")
    assert message.startswith("3 problems\n") and "smoke" in message and "2 GPUs asked for" in message


def test_fewer_cpus_than_asked_for_are_shared_as_in_a_run(model):
    rows = _rows(model, "gpus=2x80GB,cpus=1", *ON_GPUS)
    assert rows["placement", "note"] == "fewer CPUs than asked for: actors share them"


def test_the_command_prints_the_plan_or_ends_with_the_code_of_a_configuration_that_cannot_work(model):
    run = ["check", "deploy/runs/quickstart.yaml", f"model.path={model}"]
    shown = CliRunner().invoke(app, [*run, "--assume", "nodes=1", "--assume", "memory=64GB"])
    assert shown.exit_code == 0 and "learner-0" in shown.output
    refused = CliRunner().invoke(app, [*run, "--assume", "memory=1GB"])
    assert refused.exit_code == 2 and "treadwheel: " in refused.output
    both = CliRunner().invoke(app, [*run, "--assume", "memory=1GB", "--address", "auto"])
    assert both.exit_code == 2 and "leave one out" in both.output


def test_actors_that_take_turns_need_the_memory_of_the_larger_one_and_what_the_other_cannot_give_back(model):
    """80 GB are 74.5 GiB, of which an engine takes 0.9 or 67.1; a context of the rank's is 1 more. Beside each other they do not fit."""
    shared = ("learner.gpus_per_rank=0.5", "rollout.gpus_per_worker=0.5", "model.max_context=4096")
    full = (*shared, "rollout.gpu_memory_utilization=0.9", "learner.activation_checkpointing=true")
    assert "learner-0" in _refusal(model, "gpus=1x80GB", *full)
    rows = _rows(model, "gpus=1x80GB", *full, "rollout.colocated=true")
    assert rows["placement", "node 0, GPU 0"] == "learner-0, rollout_worker-0"
    assert rows["memory", "fullest GPU"] == "68.1 of 74.5 GiB: learner-0, rollout_worker-0"


def test_a_scorer_counts_in_everyones_turn(model):
    shared = (
        "learner.gpus_per_rank=0.4",
        "rollout.gpus_per_worker=0.4",
        "reference.gpus=0.2",
        "model.max_context=4096",
    )
    scored = (*shared, "algorithm.kl.loss={coefficient: 0.1}", "learner.activation_checkpointing=true")
    message = _refusal(model, "gpus=1x80GB", *scored, "rollout.colocated=true", "rollout.gpu_memory_utilization=0.95")
    assert "reference_scorer-0" in message and "rollout_worker-0 70.8" in message


def test_resting_ranks_keep_weights_and_moments_in_the_hosts_memory_and_sleeping_engines_theirs(model):
    """Half a billion parameters in bfloat16: 0.9 GiB, with float32 masters 2.8, two moments 3.7, and the engine's 0.9 again."""
    shared = ("learner.gpus_per_rank=0.5", "rollout.gpus_per_worker=0.5", "rollout.gpu_memory_utilization=0.4")
    more = ("model.max_context=4096", "learner.activation_checkpointing=true")
    apart, turns = (
        float(
            _rows(model, "gpus=1x80GB", *shared, *more, f"rollout.colocated={colocated}")["memory", "node 0"].split()[0]
        )
        for colocated in ("false", "true")
    )
    assert turns - apart == pytest.approx(2.8 + 3.7 + 0.9, abs=0.2)
