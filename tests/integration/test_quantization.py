"""Engines of 8 bits on CPUs: weights are rounded anew at every broadcast and attested, the mismatch is as large as rounding makes it, and a
run learns from what they sample."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.rollout.worker import RolloutWorker
from cluster.contracts.errors import ConfigError, WeightsError
from cluster.contracts.types import Prompt
from cluster.record.run_directory import SUMMARY
from tests.integration.commands import QUICKSTART
from tests.integration.engines import Reference, mean_error, published, start_engine, start_worker, ticket
from tests.integration.faults import Run
from tests.models import make_tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

NOISE = {"int8_per_channel": (0.03, 0.15), "fp8_per_channel": (0.12, 0.45)}
"""Nats, mean over the probe of a random model, which finds it unlikely. Plain bfloat16 has 0.014 there, so a scheme that rounds nothing
shows, too."""
PROMPT = Prompt(prompt_id="p", text="12+34=56, 78+9=")


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    worker: RolloutWorker
    reference: Reference
    scheme: str
    versions: Iterator[int]

    def next_version(self) -> list[Any]:
        """Of weights that differ by far more than rounding."""
        version = next(self.versions)
        self.reference.perturb(seed=version, scale=0.1)
        return published(self.reference, version=version)


@pytest.fixture(scope="module", params=NOISE)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path = make_tiny_model(tmp_path_factory.mktemp("model"), dtype="bfloat16")
    worker = start_worker(path, dtype="bfloat16", quantization=request.param)
    reference = Reference(path, dtype=torch.bfloat16)
    yield Served(worker=worker, reference=reference, scheme=request.param, versions=iter(range(1, 1000)))
    worker.stop()


@pytest.fixture
def _rounds_alone(served: Served) -> None:
    if served.scheme == "int8_per_channel" and not torch.cpu._is_vnni_supported():
        pytest.skip(
            "without VNNI the products of 8 bits overflow on their way: the mismatch is ten times that of rounding"
        )


@pytest.mark.usefixtures("_rounds_alone")
async def test_every_version_is_rounded_anew_and_attested(served: Served):
    least, most = NOISE[served.scheme]
    for _ in range(4):
        proof = await served.worker.load(*served.next_version())
        assert proof.distinguishable
        assert least < proof.noise_floor < most and least < proof.canary_mean_error < most


async def test_weights_of_another_version_are_not_attested(served: Served):
    await served.worker.load(*served.next_version())
    manifest, *buckets = served.next_version()
    later, *_ = served.next_version()
    with pytest.raises(WeightsError, match="does not compute policy version"):
        await served.worker.load(manifest | {"canary": later["canary"]}, *buckets)


@pytest.mark.usefixtures("_rounds_alone")
async def test_sampled_tokens_are_off_by_the_same_rounding(served: Served):
    await served.worker.load(*served.next_version())
    (batch,) = [batch async for batch in served.worker.generate([ticket(0, PROMPT, max_tokens=48)])]
    errors: list[float] = []
    for row in batch.to_pylist():
        expected = served.reference.logprobs([*row["prompt_token_ids"], *row["completion_token_ids"]])
        errors.append(mean_error(row["rollout_logprobs"], expected[-len(row["rollout_logprobs"]) :]))
    least, most = NOISE[served.scheme]
    assert 0.8 * least < sum(errors) / len(errors) < most


def test_an_engine_without_a_kernel_for_its_scheme_does_not_start(tmp_path: Path):
    """Past preflight, as on a cluster that runs already."""
    path = make_tiny_model(tmp_path, dtype="float32")
    with pytest.raises(ConfigError, match=r"(?s)vLLM cannot serve model\.path=.*float32 is not supported"):
        start_engine(path, dtype="float32", quantization="int8_per_channel")


@pytest.mark.ray
@pytest.mark.acceptance
@pytest.mark.skipif(
    not torch.cpu._is_vnni_supported(),
    reason="without VNNI the products of 8 bits overflow: what is learned of them varies",
)
def test_a_run_learns_from_what_an_engine_of_8_bits_samples(tmp_path):
    settings = ("model.dtype=bfloat16", "rollout.quantization=int8_per_channel", "algorithm={advantage: grpo}")
    run = Run(tmp_path / "run").to_end(Path(QUICKSTART), *settings, "num_steps=8", "metrics.sinks=[jsonl]")
    summary = json.loads(run.directory.read_text(SUMMARY))
    assert summary["eval_last"] >= summary["eval_first"] + 0.1
    steps = list(run.metrics().values())
    assert len(steps) == 8
    assert all(0.002 < step["mismatch/mean_abs_nats"] < 0.05 for step in steps)
    assert [event["quantization"] for event in run.events("quantized_sampling")] == ["int8_per_channel"]
