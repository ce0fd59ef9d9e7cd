"""A worker whose engine sleeps gives its GPU's memory back, and serves again what it kept or loads. On a CPU no memory moves."""

from collections.abc import Iterator

import pytest
import torch

from cluster.contracts.types import Prompt, Refusal
from tests.gpu.test_engine import NOISE, Served
from tests.integration.engines import Reference, mean_error, published, start_worker, ticket
from tests.models import make_tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

PROMPT = Prompt(prompt_id="p", text="12+34=56, 78+9=")
FREED_SHARE = 0.5
"""Of what an engine takes of a GPU, at least: contexts and workspaces, a GiB or so, stay."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(True, id="cpu, eager"),
        # One: vLLM's allocator that sleeps serves one engine a process.
        pytest.param(False, id="cuda, graphs", marks=pytest.mark.gpu),
    ],
)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path = make_tiny_model(tmp_path_factory.mktemp("model"), tied=True)
    worker = start_worker(path, enforce_eager=request.param, colocated=True)
    yield Served(worker=worker, reference=Reference(path), noise=NOISE["float32"], versions=iter(range(1, 1000)))
    worker.stop()


async def sampled(served: Served) -> float:
    """Mean difference of the log-probs of sampled tokens from those of the reference's weights."""
    (batch,) = [batch async for batch in served.worker.generate([ticket(0, PROMPT, max_tokens=24)])]
    assert not isinstance(batch, Refusal)
    errors = []
    for row in batch.to_pylist():
        expected = served.reference.logprobs([*row["prompt_token_ids"], *row["completion_token_ids"]])
        errors.append(mean_error(row["rollout_logprobs"], expected[-len(row["rollout_logprobs"]) :]))
    return max(errors)


async def test_an_engine_that_never_loaded_keeps_its_starting_weights_for_the_noise_floor(served: Served):
    await served.worker.sleep(False)
    served.check(await served.worker.load(*published(served.reference, version=served.next_version())))
    assert await sampled(served) < 1e-3


@pytest.mark.parametrize("keeps_weights", [True, False])
async def test_an_engine_gives_its_memory_back_and_serves_again(served: Served, keeps_weights: bool):
    await served.worker.load(*published(served.reference, version=served.next_version()))
    before = free_bytes()
    await served.worker.sleep(keeps_weights)
    if torch.cuda.is_available():
        taken = 0.15 * torch.cuda.get_device_properties(0).total_memory
        assert free_bytes() - before > FREED_SHARE * taken
    if keeps_weights:
        await served.worker.wake()
    else:
        served.check(await served.worker.load(*published(served.reference, version=served.next_version())))
    assert abs(free_bytes() - before) < 256 * 1024**2, "no page is taken twice"
    assert await sampled(served) < 1e-3


async def test_weights_of_a_tied_model_are_new_after_each_sleep(served: Served):
    for _ in range(2):
        await served.worker.sleep(False)
        served.check(await served.worker.load(*published(served.reference, version=served.next_version())))
        assert await sampled(served) < 1e-3


def free_bytes() -> int:
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0
