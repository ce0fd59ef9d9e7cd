"""Runs on hardware that is not here, of models of which only config.json is."""

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
    assert rows["placement", "node 0, CPUs alone"] == "reward_service-0"


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
    assert "a sequence may have 32,768" in message and "raise it, or rollout.tensor_parallel_size" in message


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


def test_a_nodes_memory_holds_copies_of_checkpoints_and_weights(model):
    message = _refusal(model, "gpus=2x80GB,memory=7GB", *ON_GPUS)
    # 494 million parameters: 14 bytes each in the copy, 2 in what is published.
    assert message.startswith("node 0: its 3 actors take about 7.4 of 6.5 GiB")
    _rows(model, "gpus=2x80GB,memory=7GB", *ON_GPUS, "checkpoint.asynchronous=false")


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
