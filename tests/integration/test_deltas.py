"""Weights that travel as what changed: a real vLLM computes the same, a run is the same bit for bit, and a worker or a learner may die."""

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.weights.delta import PublishedCopy
from cluster.weights.manifest import WeightManifest
from cluster.weights.process_group import Sender
from tests.integration.commands import Background
from tests.integration.engines import (
    PROBE,
    Reference,
    end,
    kept_by,
    largest_error,
    mean_error,
    published,
    start_engine,
    start_worker,
)
from tests.integration.faults import (
    Run,
    assert_equal_bit_for_bit,
    stand_still_in_mid_broadcast,
    until,
    write_endless_run,
    write_run,
)
from tests.models import make_tiny_model

pytestmark = pytest.mark.engine

SMALL_STEPS = 1e-5
"""A learning rate at which most values of a bfloat16 model round to the bits that they had."""


@pytest.mark.parametrize(
    ("architecture", "tied"),
    [
        ("qwen3", True),
        ("qwen3_moe", True),
        ("llama", False),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (("qwen3", False), ("llama", True), ("qwen3_moe", False))
        ),
    ],
)
async def test_an_engine_computes_with_changes_what_it_computes_with_the_whole(tmp_path, architecture, tied):
    path = make_tiny_model(tmp_path, tied=tied, architecture=architecture, dtype="bfloat16")
    reference, copy = Reference(path, dtype=torch.bfloat16), PublishedCopy()
    worker, other = start_worker(path, dtype="bfloat16", deltas=True), start_engine(path, dtype="bfloat16")

    def publish(version: int) -> tuple[WeightManifest, list[Any]]:
        manifest, *buckets = published(reference, version=version)
        *parts, whole = copy.compared([*buckets, WeightManifest.model_validate(manifest)])
        assert isinstance(whole, WeightManifest)
        return whole, parts

    manifest, buckets = publish(0)
    await worker.load(manifest.model_dump(), *buckets)
    for version in range(1, 4):
        move_a_hundredth(reference, seed=version)
        manifest, parts = publish(version)
        assert manifest.delta is not None and 0.005 < manifest.delta.changed_share < 0.015
        proof = await worker.load_changes(manifest.model_dump(), *parts[len(manifest.bucket_digests) :])
        assert (proof.policy_version, proof.digest) == (version, manifest.digest)
    other.load(reference.named_parameters())
    probe = manifest.canary.token_ids
    assert await worker._wait_for(worker._engine.probe(probe)) == other.prompt_logprobs(probe)
    worker.stop()


@pytest.mark.parametrize("num_processes", [1, 2])
def test_each_process_of_an_engine_adds_what_a_group_brings_to_a_copy_of_its_own(tmp_path, monkeypatch, num_processes):
    if num_processes > 1:
        monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "|".join(map(str, range(num_processes))))
    path = make_tiny_model(tmp_path)
    engine, reference = start_engine(path, tensor_parallel_size=num_processes), Reference(path)
    sender, copy = Sender("127.0.0.1", device=torch.device("cpu")), PublishedCopy()
    for version in range(3):
        incoming = kept_by(sender, reference, version=version, name="g", num_receivers=num_processes, copy=copy)
        assert (incoming.group.base_digest is None) is (version == 0)
        with ThreadPoolExecutor(1) as thread:
            sending = thread.submit(sender.send, incoming.group)
            engine.load(incoming)
            sending.result()
        assert largest_error(engine.prompt_logprobs(PROBE), reference.logprobs(PROBE)) < 1e-4
        move_a_hundredth(reference, seed=version)
        assert mean_error(engine.prompt_logprobs(PROBE), reference.logprobs(PROBE)) > 1e-3
    sender.close()
    end(engine)


@torch.no_grad()
def move_a_hundredth(reference: Reference, *, seed: int) -> None:
    """Of every matrix, so far that the bits change."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in reference.model.parameters():
        moves = torch.rand(parameter.shape, generator=generator) < 0.01
        parameter += (moves * 0.1).to(parameter.dtype)


@pytest.mark.acceptance
@pytest.mark.ray
@pytest.mark.timeout(1800)
def test_a_run_is_the_same_bit_for_bit_whether_its_weights_travel_whole_or_as_what_changed(tmp_path):
    model = make_tiny_model(tmp_path / "model", dtype="bfloat16")
    settings = {"num_steps": 6, "model__dtype": "bfloat16", "optimizer__learning_rate": SMALL_STEPS}
    whole = Run(tmp_path / "whole").to_end(write_run(tmp_path, model, **settings))
    changes = Run(tmp_path / "changes").to_end(write_run(tmp_path, model, **settings, weights={"deltas": True}))
    assert_equal_bit_for_bit(whole, changes, steps=range(1, 7), checkpoint=6)
    for step in range(1, 7):
        sent, all_sent = changes.metrics()[step], whole.metrics()[step]
        assert sent["weights/size_bytes"] == all_sent["weights/size_bytes"] == all_sent["weights/sent_bytes"]
        assert sent["weights/sent_bytes"] <= 0.5 * sent["weights/size_bytes"]
        assert 0.0 < sent["weights/changed_share"] < 0.2 and "weights/changed_share" not in all_sent
    assert changes.problems() == ()


@pytest.mark.ray
@pytest.mark.timeout(1800)
def test_a_worker_that_dies_while_changes_travel_joins_between_two_deltas_and_a_restarted_learner_begins_with_the_whole(
    tmp_path,
):
    """Over groups. Through the object store a joiner takes the whole from there, and no sender has to know of it."""
    with _two_workers(tmp_path) as (run, driver):
        stand_still_in_mid_broadcast(run, "rollout-1", while_newer="rollout-0", process=driver)
        assert run.strike("rollout-1")
        until(lambda: run.has_recovered("rollout-1"), process=driver)
        joined = run.num_steps()
        until(lambda: _sent_to_both(run, after=joined), process=driver)
        struck = run.num_steps()
        assert run.strike("learner-0")
        until(lambda: run.has_recovered("learner-0"), process=driver)
        restarted = run.num_steps()
        until(lambda: _sent_to_both(run, after=restarted), process=driver)
        driver.press_ctrl_c()
        assert driver.exit_code() == 130, driver.output
    assert [event["actor"] for event in run.events("failure")] == ["rollout-1", "learner-0"], (
        "they cost themselves alone"
    )
    whole = [each["policy_version"] for each in run.whole_steps() if "weights/changed_share" not in each]
    assert whole and min(whole) > struck, (
        "the restarted learner had nothing to compare with, and every other broadcast had"
    )
    assert "rollout-1" in {event["actor"] for event in run.events("attested")}, "it caught up"
    sent = [(event["policy_version"], event["num_workers"]) for event in run.events("broadcast")]
    assert sent[-1][1] == 2 and sorted(sent) == sent
    assert run.problems() == ()


@contextlib.contextmanager
def _two_workers(folder: Path) -> Iterator[tuple[Run, Background]]:
    """A run without end and its driver, from when changes have gone to both workers."""
    file = write_endless_run(
        folder,
        make_tiny_model(folder / "model", dtype="bfloat16"),
        model__dtype="bfloat16",
        optimizer__learning_rate=SMALL_STEPS,
        weights={"deltas": True, "transport": "collective"},
        rollout__num_workers=2,
        rollout__cpus_per_worker=0.4,
        supervision={"heartbeat_s": 1, "hang_s": 600},
    )
    run = Run(folder / "run")
    with run.start(file) as driver:
        until(lambda: _sent_to_both(run, after=1) and {"rollout-0", "rollout-1"} <= run.samplers(), process=driver)
        yield run, driver


def _sent_to_both(run: Run, *, after: int) -> bool:
    """Whether a broadcast of a later step brought both workers what changed, and not the whole to one of them."""
    both = {event["policy_version"] for event in run.events("broadcast") if event["num_workers"] == 2}
    return any(
        step > after and step in both and 0 < numbers["weights/sent_bytes"] < numbers["weights/size_bytes"]
        for step, numbers in run.metrics().items()
        if "weights/changed_share" in numbers
    )
