"""A real vLLM is attested against a real learner with default settings, whatever the model; one that serves old weights in part is not.

Every model of `CASES` has one learner and one engine, which all tests share.
"""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from actors.chat.formatter import ChatFormatter
from actors.rollout.vllm_engine import VllmEngine
from actors.rollout.worker import RolloutWorker
from cluster.contracts.config import RunConfig, SamplingConfig
from cluster.contracts.errors import WeightsError
from cluster.contracts.schema import with_columns
from cluster.contracts.types import Attestation, Prompt, Ticket
from cluster.weights.attestation import Attestor
from cluster.weights.manifest import WeightManifest, unpack
from deploy.cluster_up import factories
from deploy.cluster_up.probe import probe_token_ids
from learner.assemble import assemble
from learner.learner import Learner
from learner.model.policy import score
from tests.integration.engines import end, mean_error, start_engine
from tests.models import make_tiny_model
from tests.packed import pack

pytestmark = pytest.mark.engine

CASES = {
    "llama-float32-with-bos": {"architecture": "llama", "tied": False, "adds_bos": True},
    "llama-bfloat16": {"architecture": "llama", "dtype": "bfloat16"},
    "qwen3-float32": {"architecture": "qwen3"},
    "qwen3-bfloat16-untied": {"architecture": "qwen3", "dtype": "bfloat16", "tied": False},
    "qwen3_moe-float32": {"architecture": "qwen3_moe"},
    "qwen3_moe-bfloat16-untied": {"architecture": "qwen3_moe", "dtype": "bfloat16", "tied": False},
    # A sliding window shorter than the probe, and the vocabulary of the real one.
    "gemma3-float32": {"architecture": "gemma3", "adds_bos": True},
    "gemma3-bfloat16-with-bos-262k": {
        "architecture": "gemma3",
        "dtype": "bfloat16",
        "adds_bos": True,
        "vocab_size": 262_144,
        "hidden_size": 32,
    },
}


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A learner, and a worker that loads what it publishes."""

    learner: Learner
    worker: RolloutWorker
    engine: VllmEngine
    dtype: str
    num_probe_tokens: int

    @property
    def noise(self) -> float:
        """Nats, at most. In bfloat16 rounding flips a few experts of a mixture, a probe's among them."""
        is_mixture = self.learner.policy.routing is not None
        return (0.2 if is_mixture else 0.05) if self.dtype == "bfloat16" else 5e-6

    async def load(self, published: list[Any]) -> Attestation:
        *buckets, manifest = published
        return await self.worker.load(manifest, *buckets)

    def step(self, *, size: float) -> list[Any]:
        """What is published after every weight has moved by a share `size` of its tensor's spread."""
        generator = torch.Generator().manual_seed(self.learner.version)
        with torch.no_grad():
            for parameter in self.learner.policy.causal_lm.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(size * parameter.std(correction=0) * noise)
        self.learner.version += 1
        return list(self.learner.publish())


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES.keys())
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("run")
    dtype = request.param.get("dtype", "float32")
    is_mixture = request.param["architecture"] == "qwen3_moe"
    path = make_tiny_model(folder / "model", **request.param)
    questions = [{"prompt": f"What is {number} + {number + 7}?"} for number in range(10)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
    config = RunConfig.model_validate(
        {
            "model": {"path": str(path), "dtype": dtype},
            "prompts": {"name": "file", "path": str(folder / "prompts.jsonl")},
            "learner": {"num_threads": 1},
            "rollout": {"routing_replay": is_mixture},
        }
    )
    probe = probe_token_ids(config)
    learner = factories.learner_rank(
        config=config, num_threads=1, rank=0, run_dir=str(folder), rendezvous="", probe_token_ids=probe
    )
    engines: list[VllmEngine] = []

    def make_engine() -> VllmEngine:
        engines.append(start_engine(path, dtype=dtype, routing_replay=is_mixture))
        return engines[0]

    worker = RolloutWorker(
        name="w0",
        run_id="run",
        make_engine=make_engine,
        formatter=ChatFormatter.load(config.model),
        attestor=Attestor.from_config(config.weights, config.model, worker="w0"),
    )
    yield Pair(learner=learner, worker=worker, engine=engines[0], dtype=dtype, num_probe_tokens=len(probe))
    worker.stop()
    end(engines[0])


def half_old(old: list[Any], new: list[Any], *, part: str) -> list[Any]:
    """`new` with those tensors of `old` whose name begins with `part`: whole bytes, and a digest that is theirs."""
    manifest, before = WeightManifest.model_validate(new[-1]), WeightManifest.model_validate(old[-1])
    tensors = dict(unpack(manifest, new[:-1]))
    stale = {name: tensor for name, tensor in unpack(before, old[:-1]) if name.startswith(part)}
    assert stale
    mixed, buckets = pack(
        (tensors | stale).items(),
        policy_version=manifest.policy_version,
        bucket_bytes=2**20,
        canary=manifest.canary,
    )
    return [*buckets, mixed.model_dump()]


async def test_weights_are_attested_with_default_settings_from_the_first_version_on(pair: Pair):
    """On the old code a real bfloat16 model was refused at version 0: random tokens, and a tolerance that was guessed."""
    first = await pair.load(list(pair.learner.publish()))
    assert not first.distinguishable, "version 0 is what the engine started from"
    assert first.canary_mean_error == first.noise_floor <= pair.noise
    for _ in range(2):
        proof = await pair.load(pair.step(size=0.1))
        assert proof.distinguishable and proof.noise_floor == first.noise_floor


async def test_the_learner_computes_with_the_experts_that_the_engine_chose(pair: Pair):
    """Rounding flips some choices in bfloat16, and they are most of what engine and learner differ by; in float32 it flips none here."""
    await pair.load(pair.step(size=0.0))
    prompt = Prompt(prompt_id="p", messages=[{"role": "user", "content": "What is 7 + 14?"}])
    asked = Ticket(
        index=0, prompt=prompt, num_trajectories=32, seed=0, policy_version=pair.learner.version,
        sampling=SamplingConfig(max_tokens=48),
    )  # fmt: skip
    (group,) = [batch async for batch in pair.worker.generate([asked])]
    policy = pair.learner.policy
    if policy.routing is None:
        assert group["routed_experts"].null_count == 32
        return
    judged = with_columns(group, reward=[0.0] * 32, reward_status=["ok"] * 32)
    options = {"current_version": pair.learner.version, "vocabulary_size": pair.learner.vocabulary_size}
    errors: list[float] = []
    for routing in (None, policy.routing):
        batch = assemble([judged], **options, routing=routing)
        found = score(lambda b: policy(b).logprobs_C, batch.rows, layout=policy.layout, max_tokens=10**6)
        sampled = [each.as_py() for each in group["rollout_logprobs"]]
        errors.append(mean_error(torch.cat(found).tolist(), [each for row in sampled for each in row]))
    free, replayed = errors
    assert replayed < free if pair.dtype == "bfloat16" else replayed < 1e-4
    report = pair.learner.update(judged).metrics
    assert report["learner/without_experts"] == 0
    assert report["mismatch/mean_abs_nats"] == pytest.approx(replayed, rel=0.05, abs=1e-5)
    assert (0.0 < report["learner/routing_differs"] < 0.2) is (pair.dtype == "bfloat16")


def test_the_probe_is_longer_than_a_sliding_window(pair: Pair):
    config = pair.learner.policy.causal_lm.config
    assert (getattr(config, "sliding_window", None) or 0) < pair.num_probe_tokens


@pytest.fixture
def sees_parts(pair: Pair) -> None:
    if pair.noise > 0.05:
        pytest.skip("how many experts flip depends on the processor: too much noise to see one part that is old")


@pytest.mark.usefixtures("sees_parts")
async def test_a_layer_that_stayed_old_is_caught(pair: Pair):
    old = pair.step(size=0.1)
    await pair.load(old)
    with pytest.raises(WeightsError, match="the engine still serves other weights in part"):
        await pair.load(half_old(old, pair.step(size=0.1), part="model.layers.1."))


@pytest.mark.usefixtures("sees_parts")
async def test_a_head_that_stayed_old_is_caught(pair: Pair):
    old = pair.step(size=0.1)
    await pair.load(old)
    new = pair.step(size=0.1)
    if pair.learner.policy.causal_lm.config.tie_word_embeddings:
        if not _keeps_a_copy_of_its_head(pair.engine):
            pytest.skip(
                "vLLM has no kernel of its own for this type on this processor: the head is the embedding itself"
            )
        pair.engine._repair_tied_head = False
    else:
        new = half_old(old, new, part="lm_head.")
    with pytest.raises(WeightsError, match="most likely an old vocabulary head"):
        await pair.load(new)
    pair.engine._repair_tied_head = True
    await pair.load(pair.step(size=0.0))


def _keeps_a_copy_of_its_head(engine: VllmEngine) -> bool:
    """Which it computes with, whatever weights it is given: a processor with AVX2 alone makes one in float32 only."""

    def answers_the_same(worker: Any) -> bool:
        head = worker.model_runner.get_model().lm_head
        x = torch.ones(1, head.weight.shape[1], dtype=head.weight.dtype)
        return torch.equal(
            head.cpu_linear(x, head.weight, None), head.cpu_linear(x, torch.zeros_like(head.weight), None)
        )

    (found,) = engine._engine.collective_rpc(answers_the_same)
    return found


async def test_a_small_step_is_told_apart_or_said_to_be_indistinguishable(pair: Pair):
    """In float32 a step of a thousandth shows; the rounding of bfloat16 hides it, and the attestation says so."""
    old = pair.step(size=0.1)
    await pair.load(old)
    new = pair.step(size=0.001)
    proof = await pair.load(new)
    assert proof.distinguishable is (pair.dtype == "float32")
    await pair.load([*old[:-1], {**old[-1], "policy_version": pair.learner.version}])
    stale = half_old(old, new, part="")
    if proof.distinguishable:
        with pytest.raises(WeightsError, match="does not compute policy version"):
            await pair.load(stale)
    else:
        assert not (await pair.load(stale)).distinguishable


def test_an_engine_that_ignores_a_sliding_window_is_refused(tmp_path: Path):
    path = make_tiny_model(tmp_path / "learner", architecture="gemma3")
    model = {"path": str(path), "dtype": "float32"}
    *_, manifest = Learner(RunConfig.model_validate({"model": model, "prompts": "none"})).publish()
    canary = WeightManifest.model_validate(manifest).canary
    ignoring = shutil.copytree(path, tmp_path / "engine")
    config = json.loads((ignoring / "config.json").read_text())
    (ignoring / "config.json").write_text(json.dumps(config | {"sliding_window": config["max_position_embeddings"]}))
    engine = start_engine(ignoring)
    with pytest.raises(WeightsError, match="does not compute what the learner computes with the same files"):
        Attestor(worker="w0", dtype="float32").start(canary, engine.prompt_logprobs(canary.token_ids))
    end(engine)


def test_a_float32_head_lowers_the_noise_of_a_bfloat16_model(tmp_path: Path):
    """A share that all logits of a position have in common changes no probability, but bfloat16 rounds its sum with the rest."""
    path = make_tiny_model(tmp_path, dtype="bfloat16", tied=False)
    weights = load_file(path / "model.safetensors")
    weights["lm_head.weight"][:, 0] = 16.0
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    *_, manifest = Learner(RunConfig.model_validate({"model": {"path": str(path)}, "prompts": "none"})).publish()
    canary = WeightManifest.model_validate(manifest).canary
    errors = {}
    for head_dtype in ("model", "float32"):
        engine = start_engine(path, dtype="bfloat16", head_dtype=head_dtype)
        errors[head_dtype] = mean_error(engine.prompt_logprobs(canary.token_ids), canary.logprobs)
        end(engine)
    assert errors["float32"] < 0.8 * errors["model"]
