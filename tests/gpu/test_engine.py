"""An engine takes weights by every transport, attested, eager and compiled with CUDA graphs, and samples from them."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch

from actors.rollout.worker import RolloutWorker
from cluster.contracts.errors import WeightsError
from cluster.contracts.types import Attestation, Prompt
from cluster.weights.process_group import Sender
from tests.integration.engines import Reference, kept_by, mean_error, published, start_worker, ticket
from tests.models import make_tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

NOISE = {"float32": 1e-3, "bfloat16": 0.2, "8 bits": 0.5}
"""Nats, mean over a text: the most by which an engine and a learner of these types may differ (`cluster.weights.attestation`)."""
SCHEMES = ("fp8_per_tensor", "fp8_per_channel", "fp8_per_block", "int8_per_channel")


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    worker: RolloutWorker
    reference: Reference
    noise: float
    """Nats, at most."""
    versions: Iterator[int]

    def next_version(self) -> int:
        """Of weights that differ by far more than noise."""
        version = next(self.versions)
        self.reference.perturb(seed=version, scale=0.1)
        return version

    async def receive(self, sender: Sender, *, name: str, backend: str = "gloo") -> Attestation:
        """The next version, by a group of that name."""
        incoming = kept_by(sender, self.reference, version=self.next_version(), name=name, backend=backend)
        with ThreadPoolExecutor(1) as thread:
            sending = thread.submit(sender.send, incoming.group)
            proof = await self.worker.receive(incoming.manifest.model_dump(), incoming.group, incoming.first_rank)
            sending.result()
        return proof

    def check(self, proof: Attestation) -> None:
        assert proof.distinguishable and proof.canary_mean_error <= proof.tolerance
        assert proof.noise_floor < self.noise


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("float32", True, None), id="cpu, float32, eager"),
        pytest.param(("float32", True, None), id="cuda, float32, eager", marks=pytest.mark.gpu),
        pytest.param(("bfloat16", False, None), id="cuda, bfloat16, graphs", marks=pytest.mark.gpu),
        *(
            pytest.param(("bfloat16", False, each), id=f"cuda, {each}, graphs", marks=pytest.mark.gpu)
            for each in SCHEMES
        ),
    ],
)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    dtype, is_eager, scheme = request.param
    # Blocks of FP8 are of 128 rows and columns.
    size = 128 if scheme == "fp8_per_block" else 64
    path = make_tiny_model(tmp_path_factory.mktemp("model"), dtype=dtype, tied=True, hidden_size=size)
    worker = start_worker(path, dtype=dtype, enforce_eager=is_eager, quantization=scheme)
    reference, noise = Reference(path, dtype=getattr(torch, dtype)), NOISE["8 bits" if scheme else dtype]
    yield Served(worker=worker, reference=reference, noise=noise, versions=iter(range(1, 1000)))
    worker.stop()


async def test_weights_through_the_object_store_are_attested(served: Served):
    for _ in range(3):
        version = served.next_version()
        proof = await served.worker.load(*published(served.reference, version=version))
        served.check(proof)
        assert proof.policy_version == version


async def test_weights_through_a_group_over_gloo_are_attested(served: Served):
    sender = Sender("127.0.0.1", device=torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    for _ in range(2):
        served.check(await served.receive(sender, name="over gloo"))
    sender.close()


@pytest.mark.gpu(count=2)
async def test_weights_through_a_group_over_nccl_are_attested(served: Served):
    """The engine has the first GPU, the sender the second."""
    sender = Sender("127.0.0.1", device=torch.device("cuda", 1))
    for _ in range(2):
        served.check(await served.receive(sender, name="over NCCL", backend="nccl"))
    sender.close()


async def test_weights_of_another_version_are_not_attested(served: Served):
    """What is proven above can fail."""
    manifest, *buckets = published(served.reference, version=served.next_version())
    later, *_ = published(served.reference, version=served.next_version())
    with pytest.raises(WeightsError, match="does not compute policy version"):
        await served.worker.load(manifest | {"canary": later["canary"]}, *buckets)


async def test_sampled_tokens_have_the_log_probs_of_the_newest_weights(served: Served):
    """A token a step, which a compiled engine takes through its graphs."""
    prompt = Prompt(prompt_id="p", text="12+34=56, 78+9=")
    for _ in range(2):
        await served.worker.load(*published(served.reference, version=served.next_version()))
        (batch,) = [batch async for batch in served.worker.generate([ticket(0, prompt, max_tokens=24)])]
        for row in batch.to_pylist():
            expected = served.reference.logprobs([*row["prompt_token_ids"], *row["completion_token_ids"]])
            found = row["rollout_logprobs"]
            assert mean_error(found, expected[-len(found) :]) < served.noise
