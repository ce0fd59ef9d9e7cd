"""Adapters alone reach a real vLLM, attested, and samples under them have the learner's log-probs; both exports load elsewhere.

On a GPU learner and engine share it.
"""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from cluster.contracts.config import RunConfig
from cluster.contracts.errors import WeightsError
from cluster.contracts.sampling_config import SamplingConfig
from cluster.contracts.types import Prompt, Ticket
from cluster.weights.manifest import WeightManifest, packing, unpack
from deploy.cluster_up import factories
from tests.integration.engines import place
from tests.models import make_tiny_model

pytestmark = [pytest.mark.engine]


@pytest.fixture(scope="module")
def config(device, tmp_path_factory) -> RunConfig:
    # On GPUs vLLM's kernels for adapters multiply bfloat16.
    gpus, dtype = (0.5, "bfloat16") if device.type == "cuda" else (0.0, "float32")
    return RunConfig.model_validate(
        {
            "model": {"path": str(make_tiny_model(tmp_path_factory.mktemp("model"))), "dtype": dtype},
            "prompts": "none",
            "sampling": {"max_tokens": 8},
            "learner": {"lora": {"rank": 4, "publish": "adapter"}, "num_threads": 1, "gpus_per_rank": gpus},
            "rollout": place(),
        }
    )


@pytest.fixture(scope="module")
def learner(config, tmp_path_factory):
    run_dir = str(tmp_path_factory.mktemp("run"))
    return factories.learner_rank(config=config, num_threads=1, rank=0, run_dir=run_dir, rendezvous="")


@pytest.fixture(scope="module")
def worker(config):
    worker = factories.rollout_worker(config=config, num_threads=1, name="rollout-0", run_id="run")
    yield worker
    worker.stop()


async def load(worker, learner):
    *buckets, manifest = learner.publish()
    return await worker.load(manifest, *buckets)


def move(learner, *, seed: int) -> None:
    """An optimizer step's stand-in: other adapter weights, one version on."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in learner.policy.causal_lm.named_parameters():
        if ".lora_" in name:
            parameter.data.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    learner.version += 1


async def test_an_adapter_is_small_and_attested_at_every_version(learner, worker, device):
    for seed in range(3):
        move(learner, seed=seed)
        *buckets, manifest = learner.publish()
        assert manifest["adapter"] is not None
        assert manifest["total_bytes"] < sum(p.nbytes for p in learner.policy.parameters()) / 4
        proof = await worker.load(manifest, *buckets)
        assert proof.policy_version == learner.version and proof.distinguishable
        assert proof.canary_max_error < (1e-3 if device.type == "cpu" else 0.5)


async def test_an_older_adapter_under_a_new_name_is_refused(learner, worker):
    move(learner, seed=10)
    *buckets, old = learner.publish()
    move(learner, seed=11)
    *_, new = learner.publish()
    with pytest.raises(WeightsError):
        await worker.load({**old, "canary": new["canary"]}, *buckets)
    await load(worker, learner)


async def test_a_part_of_an_adapter_that_vllm_would_leave_out_is_refused(learner, worker):
    move(learner, seed=12)
    *buckets, manifest = learner.publish()
    known = WeightManifest.model_validate(manifest)
    named = [(name.replace(".layers.1.", ".layers.7."), tensor) for name, tensor in unpack(known, buckets)]
    *buckets, renamed = packing(
        named, policy_version=1, bucket_bytes=2**20, canary=lambda: known.canary, adapter=known.adapter
    )
    with pytest.raises(
        WeightsError, match=r"no place for \d+ parts of the adapter, the first of them model\.layers\.7\."
    ):
        await worker.load(renamed.model_dump(), *buckets)
    await load(worker, learner)


async def test_samples_under_the_adapter_have_the_learners_logprobs(learner, worker, device):
    move(learner, seed=20)
    await load(worker, learner)
    ticket = Ticket(
        index=0,
        prompt=Prompt(prompt_id="p", text="12+30="),
        num_trajectories=4,
        seed=1,
        policy_version=learner.version,
        sampling=SamplingConfig(max_tokens=8),
    )
    (batch,) = [batch async for batch in worker.generate([ticket])]
    merged = AutoModelForCausalLM.from_pretrained(export(learner) / "model").requires_grad_(False)
    for row in batch.to_pylist():
        tokens = torch.tensor([row["prompt_token_ids"] + row["completion_token_ids"]])
        logprobs = merged(tokens).logits[0].float().log_softmax(-1)
        first = len(row["prompt_token_ids"])
        own = [float(logprobs[at - 1, tokens[0, at]]) for at in range(first, tokens.shape[1])]
        assert row["rollout_logprobs"] == pytest.approx(own, abs=1e-4 if device.type == "cpu" else 0.2)


async def test_adapters_are_replaced_and_attested_beside_requests_that_go_on(learner, worker):
    move(learner, seed=30)
    await load(worker, learner)
    first, sampling = learner.version, asyncio.create_task(sampled(worker, version=learner.version))
    while not sampling.done():
        move(learner, seed=31 + learner.version)
        assert (await load(worker, learner)).policy_version == learner.version
    rows = await sampling
    assert [len(row["completion_token_ids"]) for row in rows] == [200] * 4
    assert all(first + 1 in row["policy_versions"] for row in rows), "an adapter came while they were sampled"


async def sampled(worker, *, version: int) -> list[dict[str, Any]]:
    ticket = Ticket(
        index=0,
        prompt=Prompt(prompt_id="p", text="12+30="),
        num_trajectories=4,
        seed=1,
        policy_version=version,
        sampling=SamplingConfig(max_tokens=200, ignore_eos=True),
    )
    return [row async for batch in worker.generate([ticket]) for row in batch.to_pylist()]


def test_the_exported_adapter_on_the_base_model_is_the_merged_model(learner, config, device):
    folder = export(learner)
    base = AutoModelForCausalLM.from_pretrained(config.model.path)
    tokens = torch.arange(5, 25)[None]
    adapted = PeftModel.from_pretrained(base, folder / "adapter")(tokens).logits
    merged = AutoModelForCausalLM.from_pretrained(folder / "model")(tokens).logits
    # In bfloat16 the sum is rounded.
    tolerance = 1e-4 if device.type == "cpu" else 0.1
    torch.testing.assert_close(adapted.float(), merged.float(), atol=tolerance, rtol=tolerance)


def export(learner):
    folder = Path(learner._config.model.path).parent / f"step-{learner.version:06d}"
    if not folder.exists():
        learner.save(str(folder), {})
        learner.finish_saving()
    return folder
