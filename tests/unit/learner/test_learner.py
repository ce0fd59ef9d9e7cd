"""The learner as its callers see it, with a tiny model."""

import asyncio
import json
import weakref
from concurrent.futures import Future, wait
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoTokenizer

from cluster.contracts.config import RunConfig
from cluster.contracts.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    FailureKind,
    LostError,
    NumericsError,
    WorkerError,
)
from cluster.contracts.schema import with_columns
from cluster.contracts.types import RankGroup
from cluster.record.storage import Storage
from cluster.weights.delta import LoadedCopy
from cluster.weights.manifest import Canary, WeightManifest, unpack
from cluster.weights.process_group import Incoming, Receiver
from learner import learner as learner_module
from learner import memory
from learner.checkpoint import saving
from learner.checkpoint.model_folder import ModelFolder
from learner.checkpoint.places import Place
from learner.checkpoint.reading import checkpoints, verify
from learner.checkpoint.targets import FolderTarget
from learner.learner import Learner
from learner.model.packing import lay_out
from learner.model.reference import ReferenceModel
from tests.models import make_tiny_model, make_tiny_reward_model
from tests.unit.learner.disk import largest_file
from tests.unit.learner.trajectories import make_config, make_group, make_overflowing_group, make_unbounded_config

pytestmark = pytest.mark.slow


def _groups(learner: Learner, **columns: Any) -> list[pa.RecordBatch]:
    return [make_group(i, seed=learner.version, version=learner.version, **columns) for i in range(4)]


def _reference(config: RunConfig) -> ReferenceModel:
    return ReferenceModel(config.model, reference=config.reference, learner=config.learner, sampling=config.sampling)


def _weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in learner.policy.named_parameters()}


def _all_weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in learner.networks.named_parameters()}


def test_an_update_raises_the_log_probs_of_what_was_rewarded(model_path: Path):
    # REINFORCE's gradient, so that random trajectories are not clipped away.
    learner = Learner(make_config(model_path, algorithm={"policy_loss": "reinforce"}))
    group = make_group(0, rewards=(1.0, 0.0))
    reports = [learner.update(group).metrics for _ in range(3)]
    positive = [r["learner/policy_logprob_positive_mean"] for r in reports]
    negative = [r["learner/policy_logprob_negative_mean"] for r in reports]
    assert positive[0] < positive[1] < positive[2] and negative[0] > negative[1] > negative[2]
    last = learner.last_step()
    assert last is not None and last.policy_version == learner.version == 3


def test_a_column_of_the_prompts_weighs_what_they_teach(model_path: Path):
    weighted = {"policy_loss": "reinforce", "advantage_shaping": [{"name": "column_weights", "column": "difficulty"}]}
    learner = Learner(make_config(model_path, algorithm=weighted))
    norms = [
        learner.update(make_group(0, version=version, info=[f'{{"difficulty": {weight}}}'] * 3)).metrics[
            "learner/gradient_norm"
        ]
        for version, weight in enumerate((0, 2.5))
    ]
    assert norms[0] == 0 and norms[1] > 0


def test_a_mixture_learns_with_the_experts_that_were_recorded(tmp_path: Path):
    """All passes of a step follow them, so that the first update's ratio is 1; adapters' reference, another model, chooses for itself."""
    path = make_tiny_model(tmp_path, architecture="qwen3_moe")
    mathematics = {"proximal": "recompute", "kl": {"loss": {"estimator": "k3", "coefficient": 0.1}}}
    lora = {"rank": 2, "target_modules": ["q_proj", "v_proj"]}
    found: dict[bool, dict[str, float]] = {}
    for replays in (False, True):
        learner = Learner(
            make_config(
                path,
                algorithm=mathematics | ({"router_aux_loss_coefficient": 0.5} if replays else {}),
                rollout={"routing_replay": replays},
                learner={"lora": lora, "mini_batches": 2},
            )
        )
        groups = [
            make_group(i, rewards=(1.0, 0.0), lengths=(5, 5), routed_experts=(bytes([6, 7] * 2 * 9), None))
            for i in range(2)
        ]
        found[replays] = dict(learner.update(*groups).metrics)
    free, replayed = found[False], found[True]
    assert replayed["updates/ratio_min/1"] == replayed["updates/ratio_max/1"] == 1.0
    assert replayed["learner/policy_logprob_mean"] != free["learner/policy_logprob_mean"]
    assert replayed["learner/reference_logprob_mean"] == free["learner/reference_logprob_mean"]
    assert replayed["learner/without_experts"] == 2.0
    # Two of eight experts, drawn blindly: the router chooses both in 1 of 28 positions, and one of them in 12.
    assert 0.5 < replayed["learner/routing_differs"] < 0.95
    terms = ("learner/policy_loss", "learner/kl_loss", "learner/router_aux_loss")
    assert replayed["learner/loss"] == pytest.approx(sum(replayed[term] for term in terms))
    # All choices are of experts 6 and 7: 0.5 · 8 · (P₆ + P₇).
    assert 0 < replayed["learner/router_aux_loss"] < 4
    assert not {"learner/without_experts", "learner/routing_differs"} & free.keys()


def test_micro_batches_and_layouts_change_nothing(model_path: Path):
    results = []
    for max_tokens, packing in ((16384, "auto"), (30, "auto"), (30, "padded")):
        learner = Learner(
            make_config(model_path, learner={"max_tokens_per_micro_batch": max_tokens, "packing": packing})
        )
        results.append((learner.update(*_groups(learner)).metrics, _weights(learner)))
    metrics, weights = results[0]
    for other_metrics, other_weights in results[1:]:
        for name in (n for n in metrics if n.startswith("learner/") and n != "learner/micro_batches"):
            assert_close(other_metrics[name], metrics[name], rtol=1e-4, atol=1e-5)
        for name, tensor in weights.items():
            assert_close(other_weights[name], tensor, rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("algorithm", [{"entropy_coefficient": 0.1}, {"proximal": "recompute"}])
def test_a_pass_is_laid_out_once_when_it_is_come_to(
    model_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: dict[str, Any]
):
    """On a GPU that is beside the pass before it. A first look, where there is one, makes the passes of the updates."""
    learner = Learner(
        make_config(model_path, algorithm=algorithm, learner={"max_tokens_per_micro_batch": 20, "mini_batches": 2})
    )
    laid_out, passes = list[Any](), list[int]()

    def watched(rows: Any, places: Any, **more: Any) -> Any:
        laid_out.append(places)
        return lay_out(rows, places, **more)

    monkeypatch.setattr("learner.forward_backward.lay_out", watched)
    learner.networks.register_forward_hook(lambda *_: passes.append(len(laid_out)))
    num_passes = int(learner.update(*_groups(learner)).metrics["learner/micro_batches"])
    assert num_passes > 2
    assert passes == [*range(1, num_passes + 1), *[num_passes] * (num_passes if "proximal" in algorithm else 0)]


@pytest.mark.parametrize("sampling", [{"temperature": 0.7}, {"top_k": 20, "top_p": 0.8, "min_p": 0.01}])
def test_rollouts_of_the_same_weights_have_no_mismatch_and_a_ratio_of_one(model_path: Path, sampling: dict[str, Any]):
    config = make_config(model_path, sampling=sampling)
    learner, group = Learner(config), make_group(0)
    scored = _reference(config).score(group["prompt_token_ids"].to_pylist(), group["completion_token_ids"].to_pylist())[
        "reference_logprobs"
    ]
    metrics = learner.update(make_group(0, rollout_logprobs=scored)).metrics
    assert metrics["mismatch/max_abs_nats"] < 1e-5 and metrics["mismatch/off_policy_steps"] == 0.0
    assert metrics["learner/ratio_mean"] == pytest.approx(1.0, abs=1e-5)


def test_a_mismatch_is_told_with_its_mean_its_largest_and_the_steps_that_are_in_it(model_path: Path):
    config = make_config(model_path, optimizer={"learning_rate": 1e-9})
    learner, group = Learner(config), make_group(0, rewards=(1.0, 0.0), lengths=(3, 1))
    tokens = (group[name].to_pylist() for name in ("prompt_token_ids", "completion_token_ids"))
    long, short = _reference(config).score(*tokens)["reference_logprobs"]
    shifted = with_columns(group, rollout_logprobs=[long, [short[0] + 0.5]])
    for version in (0, 1):
        metrics = learner.update(shifted).metrics
        found = [metrics[f"mismatch/{name}"] for name in ("mean_abs_nats", "max_abs_nats", "off_policy_steps")]
        assert found == pytest.approx([0.5 / 4, 0.5, version], abs=1e-4)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_published_weights_give_the_canary(tmp_path: Path, tied: bool, dtype: str):
    # The canary is of the full softmax at temperature 1, whatever the run samples from.
    sampling = {"temperature": 0.7, "top_k": 3}
    model = make_tiny_model(tmp_path, tied=tied, max_context=16)
    learner = Learner(make_config(model, dtype=dtype, sampling=sampling))
    learner.update(*_groups(learner))
    *buckets, last = learner.publish()
    manifest = WeightManifest.model_validate(last)
    assert len(manifest.canary.token_ids) == 16, "more than the model has positions"
    names = {entry.name for entry in manifest.tensors}
    assert manifest.policy_version == 1 and ("lm_head.weight" in names) is not tied
    served = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=getattr(torch, dtype))
    missing, unexpected = served.load_state_dict(dict(unpack(manifest, buckets)), strict=False)
    assert not unexpected and missing == (["lm_head.weight"] if tied else [])
    ids = torch.tensor([manifest.canary.token_ids])
    logprobs = served(ids).logits[0].float().log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
    error = (logprobs - torch.tensor(manifest.canary.logprobs)).abs().mean()
    assert error < (1e-4 if dtype == "float32" else 0.1)


def test_a_small_step_of_a_bfloat16_model_is_published_with_what_changed_and_a_restarted_learner_publishes_the_whole(
    tmp_path: Path,
):
    model = make_tiny_model(tmp_path, dtype="bfloat16")
    settings = {"dtype": "bfloat16", "optimizer": {"learning_rate": 1e-6}}
    plain, learner = (
        Learner(make_config(model, **settings)),
        Learner(make_config(model, **settings, weights={"deltas": True})),
    )
    *buckets, first = learner.publish()
    assert first["delta"] is None
    worker = LoadedCopy()
    worker.take_whole(WeightManifest.model_validate(first), buckets)
    for each in (plain, learner):
        each.update(*_groups(each))
    *whole, expected = plain.publish()
    *parts, last = learner.publish()
    manifest = WeightManifest.model_validate(last)
    assert last["digest"] == expected["digest"] != first["digest"] and manifest.delta is not None
    assert 0.0 < manifest.delta.changed_share < 0.1 and len(parts) == 2 * len(whole)
    worker.take_changes(manifest, parts[len(whole) :])
    assert all(map(np.array_equal, worker.buckets, whole))
    _, packed = learner.pack()
    base = {"base_version": 1, "base_digest": last["digest"]}
    assert packed.delta == {**base, "changed_share": 0.0, "sizes_bytes": (0,) * len(whole)}, "the same once more"
    *_, anew = Learner(make_config(model, **settings, weights={"deltas": True})).publish()
    assert anew["delta"] is None


async def test_packed_weights_are_the_published_ones_and_reach_a_group_while_the_rank_learns(model_path: Path):
    learner = Learner(make_config(model_path))
    *buckets, published = learner.publish()
    described, packed = learner.pack()
    manifest = WeightManifest.model_validate(described)
    assert described == published and packed.digest == manifest.digest
    assert (packed.backend, packed.receivers_per_worker) == ("gloo", 1)
    group = RankGroup(
        name="g",
        size=2,
        sender=packed.sender,
        address=packed.address,
        backend="gloo",
        timeout_s=240.0,
        lasts=False,
        digest=packed.digest,
    )
    incoming = Incoming(group=group, first_rank=1, manifest=manifest)
    learner.update(*_groups(learner))  # in place: what was packed must not change with it
    receiving = asyncio.to_thread(lambda: dict(Receiver().tensors(incoming, place=0, device=torch.device("cpu"))))
    received, _ = await asyncio.gather(receiving, learner.send(group))
    wanted = dict(unpack(manifest, buckets))
    assert received.keys() == wanted.keys() and all(torch.equal(received[name], wanted[name]) for name in wanted)
    restarted = Learner(make_config(model_path))
    await restarted.give_up(group)
    with pytest.raises(LostError, match="is gone"):
        await restarted.send(group)
    learner.close()


def test_a_resumed_learner_still_says_what_the_starting_files_compute(model_path: Path, tmp_path: Path):
    config = make_config(model_path, checkpoint={"asynchronous": False})
    learner = Learner(config, probe_token_ids=[0, 5, 6, 7])
    first = _canary(learner)
    learner.update(*_groups(learner))
    learner.save(str(tmp_path / "step-000001"), {})
    resumed = Learner(config, probe_token_ids=[0, 5, 6, 7])
    resumed.restore(str(tmp_path / "step-000001"))
    now = _canary(resumed)
    assert first.token_ids == now.token_ids == (0, 5, 6, 7)
    assert now.starting_logprobs == first.starting_logprobs == first.logprobs
    assert now.logprobs == _canary(learner).logprobs != first.logprobs
    assert now.starting_files == first.starting_files is not None


def _canary(learner: Learner) -> Canary:
    *_, manifest = learner.publish()
    return WeightManifest.model_validate(manifest).canary


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_restored_learner_goes_on_bit_for_bit(model_path: Path, tmp_path: Path, dtype: str, asynchronous: bool):
    config = make_config(
        model_path,
        dtype=dtype,
        checkpoint={"asynchronous": asynchronous},
        algorithm={
            "reward_shaping": [{"name": "running_norm", "part": "helpful"}, "running_norm"],
            "kl": {"loss": {"coefficient": 0.1, "adaptive": {"target": 0.5, "horizon": 100}}},
            "streaming": {"group_size": 5},
        },
        reward={"parts": {"helpful": {"judge": "exact_match", "weight": 0.5}, "right": {"judge": "exact_match"}}},
        optimizer={"learning_rate": 1e-3, "schedule": "cosine", "warmup_steps": 2},
    )

    def components(group: int, version: int) -> list[list[tuple[str, float]]]:
        """The last group's source has no part `helpful`."""
        return [[("right", 0.5)] if group == 3 else [("helpful", 0.5 * row * (version + 1))] for row in range(3)]

    def step(learner: Learner) -> dict[str, float]:
        lengths = [pa.compute.list_value_length(g["completion_token_ids"]).to_pylist() for g in _groups(learner)]
        groups = [
            make_group(
                i,
                seed=learner.version,
                version=learner.version,
                reference_logprobs=[[-4.0] * n for n in lengths[i]],
                reward_components=components(i, learner.version),
            )
            for i in range(4)
        ]
        metrics = learner.update(*groups).metrics
        return {name: value for name, value in metrics.items() if not name.startswith(("time/", "speed/"))}

    learner = Learner(config)
    for _ in range(2):
        step(learner)
    assert learner.objective.state_dict()["moments"]["reward_shaping[0]"]["count"] == 18
    saved, is_learned = _weights(learner), Event()
    learner._saver._thread.submit(is_learned.wait, 60)  # writing in the background begins after two more steps
    learner.save(str(tmp_path / "step-000002"), {"policy_version": 2, "metric": 0.5})
    expected = [step(learner) for _ in range(2)]
    resumed = Learner(config)
    is_learned.set()
    learner.finish_saving()
    for name, tensor in load_file(tmp_path / "step-000002" / "model" / "model.safetensors").items():
        assert torch.equal(saved[f"causal_lm.{name}"], tensor)
    assert resumed.restore_latest(str(tmp_path)) == {"policy_version": 2, "metric": 0.5}
    assert resumed.version == 2 and resumed.last_step() is None
    assert [step(resumed) for _ in range(2)] == expected
    for name, tensor in _weights(learner).items():
        assert torch.equal(_weights(resumed)[name], tensor)


def test_the_entropy_is_measured_every_so_many_steps_and_changes_nothing(model_path: Path):
    found, weights = {}, {}
    for every in (2, None):
        learner = Learner(make_config(model_path, algorithm={"monitor": {"entropy": every}}))
        reports = [learner.update(*_groups(learner)).metrics for _ in range(3)]
        found[every] = ["learner/entropy_mean" in report for report in reports]
        weights[every] = _weights(learner)
    assert found == {2: [True, False, True], None: [False, False, False]}
    for name, tensor in weights[2].items():
        assert torch.equal(tensor, weights[None][name])


def test_the_kl_to_the_reference_may_be_measured_without_a_penalty(model_path: Path):
    algorithm = {"monitor": {"reference_kl": 2}, "policy_loss": "reinforce"}
    learner = Learner(make_config(model_path, learner={"lora": {"rank": 4}}, algorithm=algorithm))
    reports = [learner.update(*_groups(learner)).metrics for _ in range(3)]
    assert reports[0]["learner/kl_reference_k3_mean"] == 0.0 < reports[2]["learner/kl_reference_k3_mean"]
    assert "learner/kl_reference_k3_mean" not in reports[1] and "learner/kl_loss" not in reports[2]


@pytest.mark.parametrize("warms_up", [False, True])
def test_a_step_reports_the_kl_coefficient_that_it_learned_with(model_path: Path, warms_up: bool):
    adaptive = {"target": 6.0, "horizon": 24}
    algorithm = {"kl": {"loss": {"coefficient": 0.5, "estimator": "k3", "adaptive": adaptive}}}
    critic = {"advantage": "gae", "value": {"warmup_steps": 1}} if warms_up else {}
    learner = Learner(make_config(model_path, learner={"lora": {"rank": 4}}, algorithm=algorithm | critic))
    found = [learner.update(*_groups(learner)).metrics["learner/kl_loss_coefficient"] for _ in range(2 + warms_up)]
    # The adapters start at the reference: a KL of 0 lowers it by a fifth times 12 trajectories of 24, but not while the policy waits.
    assert found == pytest.approx([*[0.5] * warms_up, 0.5, 0.45])


def test_a_reference_of_its_own_is_never_taken_for_the_base_under_adapters(model_path: Path):
    """Groups that it did not score have no KL to it; the base, with the adapters off, is another model."""
    sections: dict[str, Any] = {"learner": {"lora": {"rank": 4}}, "algorithm": {"monitor": {"reference_kl": 1}}}
    learner = Learner(make_config(model_path, reference={"path": str(model_path)}, **sections))
    assert "learner/kl_reference_k3_mean" not in learner.update(*_groups(learner)).metrics


def test_a_step_of_which_the_reference_scored_a_part_measures_that_part(model_path: Path):
    """A dropped group moves those behind it forward, into a step that they were not meant for."""
    groups = [make_group(i, rewards=(1.0, 0.0), lengths=lengths) for i, lengths in enumerate([(5, 4), (3, 2)])]
    scored = with_columns(groups[1], reference_logprobs=[[-1.0] * 3, [-1.0] * 2])
    learner, plain = (Learner(make_config(model_path, algorithm={"monitor": {"reference_kl": n}})) for n in (2, None))
    assert learner.update(groups[0], scored).metrics["learner/reference_logprob_mean"] == -1.0
    plain.update(*groups)
    for name, tensor in _weights(learner).items():
        assert torch.equal(tensor, _weights(plain)[name])


def test_an_exported_folder_is_one_that_transformers_loads(model_path: Path, tmp_path: Path):
    learner = Learner(make_config(model_path, dtype="bfloat16"))
    learner.update(*_groups(learner))
    learner.export(str(tmp_path / "export"), {})
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert loaded.dtype == torch.bfloat16
    for name, tensor in loaded.named_parameters():
        assert torch.equal(tensor, learner.policy.causal_lm.get_parameter(name))
    assert AutoTokenizer.from_pretrained(tmp_path / "export")("1+1").input_ids


def test_nothing_is_exported_into_a_folder_that_is_there_and_nothing_stays_of_an_export_that_failed(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    learner = Learner(make_config(model_path))
    (tmp_path / "model").mkdir()
    with pytest.raises(CheckpointError, match=r"model exists; export into another folder"):
        learner.export(str(tmp_path / "model"), {})
    monkeypatch.setattr(ModelFolder, "write", _refused)
    with pytest.raises(ValueError, match="generation_config"):
        learner.export(str(tmp_path / "other"), {})
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_the_newest_and_the_best_of_each_way_to_rate_are_kept(model_path: Path, tmp_path: Path):
    learner = Learner(make_config(model_path, checkpoint={"asynchronous": False, "keep_last": 1, "keep_best": True}))
    ratings = [(1.0, "accuracy"), (5.0, "reward"), (0.5, "accuracy"), (None, "")]
    for step, (metric, rated_by) in enumerate(ratings, start=1):
        learner.save(str(tmp_path / f"step-{step:06d}"), {"metric": metric, "rated_by": rated_by})
    assert [place.name[-1] for place in checkpoints(Storage(str(tmp_path)))] == ["1", "2", "4"]


def test_nothing_to_restore_is_none(model_path: Path, tmp_path: Path):
    assert Learner(make_config(model_path)).restore_latest(str(tmp_path)) is None


def test_a_checkpoint_of_another_model_is_foreign(model_path: Path, tmp_path: Path):
    other = make_tiny_model(tmp_path / "other", hidden_size=32)
    directory = str(tmp_path / "checkpoints" / "step-000000")
    Learner(make_config(other, checkpoint={"asynchronous": False})).save(directory, {})
    with pytest.raises(CheckpointError, match="step-000000 is foreign"):
        Learner(make_config(model_path)).restore(directory)


def test_a_flipped_bit_in_the_state_is_refused_and_the_checkpoint_before_offered(model_path: Path, tmp_path: Path):
    learner = Learner(make_config(model_path, checkpoint={"asynchronous": False}))
    for step in (1, 2):
        learner.save(str(tmp_path / f"step-{step:06d}"), {})
    state = tmp_path / "step-000002" / "state-00000-of-00001.safetensors"
    content = bytearray(state.read_bytes())
    content[-3] ^= 1
    state.write_bytes(content)
    with pytest.raises(
        CheckpointError, match=r"step-000002 was altered: state-.* has another digest.*it is .*step-000001"
    ):
        learner.restore_latest(str(tmp_path))
    assert learner.restore(str(tmp_path / "step-000001")) == {}


def test_a_gradient_that_is_not_finite_skips_the_step_and_saves_the_trajectories(model_path: Path, tmp_path: Path):
    learner = Learner(make_unbounded_config(model_path, max_skipped=1), run_dir=str(tmp_path))
    before = _weights(learner)
    bad = make_overflowing_group(0)
    stats = learner.update(bad)
    assert stats.metrics["learner/skipped"] == 1.0 and stats.policy_version == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in _weights(learner).items())
    saved = pa.ipc.open_file(tmp_path / "quarantine" / "version-000000-update-1-rank-0.arrow").read_all()
    assert saved["group_id"].to_pylist() == ["00000000"] * 2
    with pytest.raises(NumericsError, match="2 updates in a row"):
        learner.update(bad)


def test_a_step_without_room_on_its_gpu_is_tried_again_and_names_the_settings(model_path: Path, monkeypatch):
    learner = Learner(make_config(model_path))

    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(learner._updater, "make", full)
    settings = (
        "max_tokens_per_micro_batch, set learner.activation_checkpointing, or raise learner.num_ranks: CUDA out of"
    )
    with pytest.raises(WorkerError, match=f"^learner-0: the GPU's memory is full; lower learner.{settings}") as caught:
        learner.update(make_group(0))
    assert caught.value.kind is FailureKind.ERROR
    assert caught.value.details is not None and "self._updater.make(" in caught.value.details


def test_a_step_is_skipped_even_where_its_trajectories_cannot_be_saved(model_path: Path, tmp_path: Path):
    (tmp_path / "quarantine").write_text("a file in the folder's place")
    learner = Learner(make_unbounded_config(model_path, max_skipped=1), run_dir=str(tmp_path))
    bad = make_overflowing_group(0)
    assert learner.update(bad).metrics["learner/skipped"] == 1.0
    with pytest.raises(NumericsError, match="were not saved"):
        learner.update(bad)


def test_an_update_that_is_not_finite_does_not_count_as_empty_where_a_correction_compares_with_it(model_path: Path):
    algorithm = {"proximal": "recompute", "corrections": ["icepop"]}
    learner = Learner(make_config(model_path, algorithm=algorithm))
    next(iter(learner.policy.causal_lm.parameters())).data.fill_(torch.nan)
    metrics = learner.update(make_group(0)).metrics
    assert (metrics["learner/skipped"], metrics["learner/empty_updates"]) == (1.0, 0.0)


def test_bad_trajectories_change_nothing(model_path: Path):
    learner = Learner(make_config(model_path))
    before = _weights(learner)
    with pytest.raises(DataError):
        learner.update(make_group(0, rewards=(None, None)))
    with pytest.raises(DataError, match="token 128 is outside the learner's vocabulary of 128"):
        learner.update(make_group(0, rewards=(1.0,), lengths=(1,), completion_token_ids=[[128]]))
    assert learner.version == 0 and all(torch.equal(t, before[n]) for n, t in _weights(learner).items())


def test_a_critic_learns_its_returns(model_path: Path):
    algorithm = {"advantage": "gae", "value": {"learning_rate": 1e-2, "coefficient": 1.0}}
    learner = Learner(make_config(model_path, algorithm=algorithm))
    group = make_group(0, rewards=(1.0, 1.0))
    values = [learner.update(group).metrics["learner/value_mean"] for _ in range(12)]
    assert values[0] == 0.0 and abs(values[-1] - 1.0) < 0.5


@pytest.mark.parametrize("backbone", ["own", "shared"])
def test_a_critic_of_normalised_returns_learns_large_ones(model_path: Path, backbone: str):
    value = {"backbone": backbone, "learning_rate": 1e-2, "coefficient": 1.0, "normalise_returns": True}
    learner = Learner(make_config(model_path, algorithm={"advantage": "gae", "value": value}))
    group = make_group(0, rewards=(5000.0, 6000.0))
    reports = [learner.update(group).metrics for _ in range(20)]
    assert ("learner/critic_gradient_norm" in reports[0]) is (backbone == "own")
    values = [report["learner/value_mean"] for report in reports]
    assert abs(values[0]) < 1e-2 and abs(values[-1] - 5500.0) < 1100.0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backbone", ["own", "shared"])
def test_the_policy_does_not_move_by_a_bit_while_its_critic_warms_up(model_path: Path, backbone: str, dtype: str):
    value = {"backbone": backbone, "learning_rate": 1e-2, "warmup_steps": 2}
    learner = Learner(
        make_config(
            model_path,
            dtype=dtype,
            algorithm={"advantage": "gae", "value": value},
            optimizer={"learning_rate": 1e-3, "warmup_steps": 2, "weight_decay": 0.5},
        )
    )
    policy, networks = _weights(learner), _all_weights(learner)
    reports = [learner.update(*_groups(learner)).metrics for _ in range(2)]
    assert all(torch.equal(tensor, policy[name]) for name, tensor in _weights(learner).items())
    moved = {name for name, tensor in _all_weights(learner).items() if not torch.equal(tensor, networks[name])}
    assert moved and all(name.startswith("critic.") for name in moved)
    assert ("critic.backbone.layers.0.mlp.up_proj.weight" in moved) == (backbone == "own")
    assert not [key for key in learner.optimizer.state() if "/policy." in key]
    canary = _canary(learner)
    assert learner.version == 2 and canary.logprobs == canary.starting_logprobs
    reports += [learner.update(*_groups(learner)).metrics for _ in range(2)]
    assert (reports[0]["learner/gradient_norm"] == 0.0) is (backbone == "own")
    # The policy's own warm-up begins where the critic's ends.
    assert [report["learner/learning_rate"] for report in reports] == [0.0, 0.0, 5e-4, 1e-3]
    assert not any(torch.equal(tensor, policy[name]) for name, tensor in _weights(learner).items() if tensor.ndim > 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_that_is_resumed_while_its_critic_warms_up_goes_on_bit_for_bit(
    model_path: Path, tmp_path: Path, dtype: str
):
    value = {"learning_rate": 1e-2, "warmup_steps": 2, "normalise_returns": True}
    config = make_config(model_path, dtype=dtype, algorithm={"advantage": "gae", "value": value})
    learner, resumed = Learner(config), Learner(config)
    learner.update(*_groups(learner))
    learner.save(str(tmp_path / "step-000001"), {})
    learner.finish_saving()
    resumed.restore(str(tmp_path / "step-000001"))
    for one in (learner, resumed):
        for _ in range(2):
            one.update(*_groups(one))
    assert learner.objective.state_dict() == resumed.objective.state_dict()
    expected = _all_weights(learner)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in _all_weights(resumed).items())


@pytest.mark.parametrize("backbone", ["own", "shared"])
def test_activation_checkpointing_changes_nothing(model_path: Path, backbone: str):
    algorithm = {
        "advantage": "gae",
        "value": {"backbone": backbone},
        "proximal": "recompute",
        "entropy_coefficient": 0.01,
    }
    learners = [
        Learner(make_config(model_path, algorithm=algorithm, learner={"activation_checkpointing": checkpointing}))
        for checkpointing in (False, True)
    ]
    for learner in learners:
        learner.update(*_groups(learner))
    for name, tensor in _weights(learners[0]).items():
        assert_close(_weights(learners[1])[name], tensor)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lora_trains_adapters_alone_and_publishes_them_merged(model_path: Path, dtype: str):
    algorithm = {"policy_loss": "reinforce", "kl": {"loss": {"coefficient": 0.1}}}
    learner = Learner(make_config(model_path, dtype=dtype, learner={"lora": {"rank": 4}}, algorithm=algorithm))
    before = {name: p.detach().clone() for name, p in learner.policy.named_parameters()}
    assert {weight.dtype for weight in before.values()} == {getattr(torch, dtype)}
    reports = [learner.update(*_groups(learner)).metrics for _ in range(2)]
    # Nobody scored the reference: it is the policy without adapters.
    assert reports[0]["learner/kl_reference_k3_mean"] == 0.0 < reports[1]["learner/kl_reference_k3_mean"]
    moved = {n for n, p in learner.policy.named_parameters() if not torch.equal(p, before[n])}
    assert moved and all(".lora_" in name for name in moved)
    *buckets, last = learner.publish()
    manifest = WeightManifest.model_validate(last)
    served = AutoModelForCausalLM.from_pretrained(model_path, dtype=getattr(torch, dtype))
    _, unexpected = served.load_state_dict(dict(unpack(manifest, buckets)), strict=False)
    assert not unexpected
    ids = torch.tensor([manifest.canary.token_ids])
    logprobs = served(ids).logits[0].float().log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
    assert (logprobs - torch.tensor(manifest.canary.logprobs)).abs().mean() < (1e-4 if dtype == "float32" else 0.1)


def test_adapters_are_foreign_on_other_weights_than_they_were_trained_on(tmp_path: Path):
    """A branch of the hub moved, or a folder was written anew: shapes and settings are the same."""
    path = make_tiny_model(tmp_path / "model")
    config = make_config(path, learner={"lora": {"rank": 2}}, checkpoint={"asynchronous": False})
    directory = str(tmp_path / "step-000000")
    Learner(config).save(directory, {})
    Learner(config).restore(directory)
    file = path / "model.safetensors"
    save_file({name: tensor + 1 for name, tensor in load_file(file).items()}, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="step-000000 is foreign: its adapters were trained on other weights"):
        Learner(config).restore(directory)


def test_a_critics_adapters_are_foreign_on_other_weights_than_value_path_had(tmp_path: Path):
    """Its base weights are in no checkpoint, as those of the policy."""
    critic = make_tiny_reward_model(tmp_path / "critic")
    config = make_config(
        make_tiny_model(tmp_path / "model"),
        learner={"lora": {"rank": 2}},
        checkpoint={"asynchronous": False},
        algorithm={"advantage": "gae", "value": {"path": str(critic)}},
    )
    directory = str(tmp_path / "step-000000")
    learner = Learner(config)
    learner.save(directory, {})
    Learner(config).restore(directory)
    make_tiny_reward_model(critic, seed=9)
    with pytest.raises(CheckpointError, match=r"on other weights than algorithm\.value\.path has now"):
        Learner(config).restore(directory)


def test_lora_on_the_vocabulary_head_is_refused(tmp_path: Path):
    model = make_tiny_model(tmp_path, tied=False)
    with pytest.raises(ConfigError, match="names the vocabulary head"):
        Learner(make_config(model, learner={"lora": {"target_modules": ["lm_head"]}}))


def test_lora_on_anything_but_a_linear_layer_is_refused(model_path: Path):
    with pytest.raises(ConfigError, match="embed_tokens, a Embedding; only linear layers"):
        Learner(make_config(model_path, learner={"lora": {"target_modules": ["embed_tokens"]}}))


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_full_disk_loses_one_save_and_no_training(model_path: Path, tmp_path: Path, asynchronous: bool):
    learner = Learner(make_config(model_path, checkpoint={"asynchronous": asynchronous}))
    learner.save(str(tmp_path / "step-000000"), {})
    learner.finish_saving()
    learner.update(*_groups(learner))
    with pytest.raises(CheckpointError, match=r"step-000001 was not saved: .*the last good one stands"):
        with largest_file(1000):
            learner.save(str(tmp_path / "step-000001"), {})
            if asynchronous:  # the disk is full until it is written
                wait([learner._saver._writing])
        # What failed beside the training is said by the next save, which is made all the same.
        learner.save(str(tmp_path / "step-000002"), {})
    learner.finish_saving()
    assert learner.update(*_groups(learner)).policy_version == 2
    found = checkpoints(Storage(str(tmp_path)))
    assert [path.name for path in found] == ["step-000000", *(["step-000002"] if asynchronous else [])]
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]
    for path in found:
        verify(path)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_version_that_is_saved_is_not_written_over_when_it_is_asked_for_again(
    model_path: Path, tmp_path: Path, asynchronous: bool
):
    """Seen before: Ctrl-C in a save replaced the finished folder by two renames, and a kill between them left none."""
    learner = Learner(make_config(model_path, checkpoint={"asynchronous": asynchronous}))
    place = tmp_path / "step-000001"
    learner.update(*_groups(learner))
    for metric in (None, 0.5, None):  # it is evaluated after its first save, and asked for without that
        learner.save(str(place), {"metric": metric})
    learner.finish_saving()
    folder = place.stat().st_ino
    learner.save(str(place), {"metric": 0.5})
    learner.finish_saving()
    assert verify(Place.of(place)).metric == 0.5 and place.stat().st_ino == folder
    learner.update(*_groups(learner))
    learner.save(str(place), {})
    learner.finish_saving()
    assert verify(Place.of(place)).policy_version == 2
    learner.restore(str(place))
    learner.save(str(place), {"after": "a restore"})  # steps may have been learned again, and otherwise
    learner.finish_saving()
    assert verify(Place.of(place)).extra == {"after": "a restore"}


@pytest.mark.parametrize("asynchronous", [True, False])
def test_an_error_of_any_kind_in_a_save_is_told_to_all_ranks_and_the_next_save_is_made(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
):
    learner = Learner(make_config(model_path, checkpoint={"asynchronous": asynchronous}))
    told, closed = list[str](), list[FolderTarget]()
    monkeypatch.setattr(FolderTarget, "close", lambda target: closed.append(target))
    first_of = learner._saver._first_of
    monkeypatch.setattr(learner._saver, "_first_of", lambda own: told.append(own) or first_of(own))
    with (
        monkeypatch.context() as patched,
        pytest.raises(CheckpointError, match=r"step-000001 was not saved: ValueError"),
    ):
        patched.setattr(ModelFolder, "write", _refused)
        learner.save(str(tmp_path / "step-000001"), {})
        learner.finish_saving()
    assert "ValueError" in told[-1], "the others wait for this rank"
    learner.save(str(tmp_path / "step-000002"), {})
    learner.finish_saving()
    assert len(closed) == 2, "where there is an object store, a target has temporary files until then"
    assert [place.name for place in checkpoints(Storage(str(tmp_path)))] == ["step-000002"]


def _refused(*args: Any, **_: Any) -> None:
    raise ValueError("generation_config")


def test_a_save_after_ranks_that_lost_each_other_is_not_begun(model_path: Path, tmp_path: Path):
    """The others do not come to it: it would wait for them, and nobody would hear why."""
    learner = Learner(make_config(model_path))
    learner._saver._writing = Future()
    learner._saver._writing.set_exception(RuntimeError("Connection closed by peer"))
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        learner.save(str(tmp_path / "step-000001"), {})
    learner.finish_saving()
    assert list(tmp_path.iterdir()) == []


def test_a_rank_on_a_machine_of_its_own_keeps_nothing_of_a_save_that_failed(model_path: Path, tmp_path: Path):
    """Seen in review: where machines do not share run_dir, each save left all of the rank's state on its disk."""
    learner = Learner(make_config(model_path, checkpoint={"asynchronous": False}))
    first_says = iter(["save-id", "", "", "", "", "{}", "the machines do not share run_dir"])
    learner._saver._ranks = SimpleNamespace(rank=1, size=2)
    learner._saver._beside = SimpleNamespace(texts=lambda own: [next(first_says), own])
    with pytest.raises(CheckpointError, match="the machines do not share run_dir"):
        learner.save(str(tmp_path / "step-000001"), {})
    assert list(first_says) == [] and list(tmp_path.iterdir()) == []


def test_a_rank_that_lost_contact_in_a_save_leaves_the_files_of_all_ranks(model_path: Path, tmp_path: Path):
    def texts(own: str) -> list[str]:
        if not first_says:
            raise RuntimeError("Connection closed by peer")
        return [first_says.pop(0), own]

    learner = Learner(make_config(model_path, checkpoint={"asynchronous": False}))
    first_says = ["save-id", "", "", "", "", "{}"]
    learner._saver._ranks = SimpleNamespace(rank=1, size=2)
    learner._saver._beside = SimpleNamespace(texts=texts)
    (aside := tmp_path / ".step-000001.save-id.saving").mkdir()  # the first rank's
    with pytest.raises(RuntimeError, match="closed by peer"):
        learner.save(str(tmp_path / "step-000001"), {})
    assert [file.name for file in aside.iterdir()] == ["state-00001-of-00002.safetensors"]


def test_every_rank_restores_the_checkpoint_that_the_first_one_found(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Seen before: one was committed between two ranks' looks, and shards of two versions trained."""
    learner = Learner(make_config(model_path))
    for step in (1, 2):
        learner.save(str(tmp_path / f"step-{step:06d}"), {"policy_version": step})
        learner.finish_saving()
    first = json.dumps(str(tmp_path / "step-000001"))
    learner._ranks = SimpleNamespace(rank=1, texts=lambda own: [first, own])
    assert learner.restore_latest(str(tmp_path)) == {"policy_version": 1}


def test_a_restore_finds_a_checkpoint_whose_replacement_was_killed(model_path: Path, tmp_path: Path):
    learner = Learner(make_config(model_path))
    learner.save(str(tmp_path / "step-000001"), {"policy_version": 1})
    learner.finish_saving()
    (tmp_path / "step-000001").rename(tmp_path / ".step-000001.replaced")
    assert learner.restore_latest(str(tmp_path), 1) is None, "a replay writes nothing into the run that it repeats"
    assert learner.restore_latest(str(tmp_path)) == {"policy_version": 1}


def test_a_copy_that_has_no_room_is_not_made_and_the_save_is_written_at_once(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    learner = Learner(make_config(model_path))
    num_parameters = sum(parameter.numel() for parameter in learner.policy.parameters())
    learner.update(*_groups(learner))
    done: list[str] = []
    monkeypatch.setattr(saving, "return_freed_memory", lambda: done.append("returned"))
    room = 16 * num_parameters  # masters, moments and the model
    monkeypatch.setattr(saving, "free_bytes", lambda device: done.append("counted") or room)
    learner.save(str(tmp_path / "step-000001"), {})
    assert learner._saver._writing is None and done == ["counted", "returned", "counted"]
    verify(Place.of(tmp_path / "step-000001"))


def test_a_single_rank_on_a_cpu_keeps_the_memory_that_steps_free(model_path: Path, monkeypatch: pytest.MonkeyPatch):
    kept: list[bool] = []
    monkeypatch.setattr(learner_module, "keep_freed_memory", lambda: kept.append(True))
    Learner(make_config(model_path))
    assert kept == [True]


def test_memory_of_a_copy_that_is_written_is_returned(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    learner = Learner(make_config(model_path))
    copied: list[weakref.ref[torch.Tensor]] = []
    is_freed: list[bool] = []
    write = learner._saver._write
    noted = lambda snapshot: copied.extend(map(weakref.ref, snapshot.state.values())) or write(snapshot)
    monkeypatch.setattr(learner._saver, "_write", noted)
    monkeypatch.setattr(
        saving, "return_freed_memory", lambda: is_freed.extend(reference() is None for reference in copied)
    )
    learner.save(str(tmp_path / "step-000001"), {})
    learner.finish_saving()
    assert is_freed and all(is_freed)


def test_the_save_after_the_last_step_is_written_at_once(model_path: Path, tmp_path: Path):
    learner = Learner(make_config(model_path, num_steps=1))
    learner.save(str(tmp_path / "step-000000"), {})
    assert learner._saver._writing is not None
    learner.update(*_groups(learner))
    learner.save(str(tmp_path / "step-000001"), {})
    assert learner._saver._writing is None
    verify(Place.of(tmp_path / "step-000001"))


def test_a_learner_that_is_closed_has_written_its_checkpoint(model_path: Path, tmp_path: Path):
    learner = Learner(make_config(model_path))
    learner.save(str(tmp_path / "step-000000"), {})
    saver = learner._saver
    learner.close()
    assert saver._writing is not None and saver._writing.done()
    verify(Place.of(tmp_path / "step-000000"))


def test_a_machine_has_room_for_the_copies_of_all_its_ranks_or_none_is_made(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    learner = Learner(make_config(model_path))
    num_parameters = sum(parameter.numel() for parameter in learner.policy.parameters())
    learner.update(*_groups(learner))
    monkeypatch.setattr(saving, "free_bytes", lambda device: 24 * num_parameters)  # a copy of one rank is 16 bytes each
    beside = learner._saver._beside
    stacked = lambda own: [own, own]
    monkeypatch.setattr(learner._saver, "_beside", SimpleNamespace(texts=beside.texts, stack=stacked))
    learner.save(str(tmp_path / "step-000001"), {})
    assert learner._saver._writing is None
    stacked = lambda own: [own, own + torch.tensor([1, 0, 0])]  # another machine
    monkeypatch.setattr(learner._saver, "_beside", SimpleNamespace(texts=beside.texts, stack=stacked))
    learner.save(str(tmp_path / "step-000002"), {})
    assert learner._saver._writing is not None
    learner.finish_saving()


def test_a_save_in_the_background_holds_the_step_that_it_is_of(model_path: Path, tmp_path: Path):
    """Its thread comes to write after the next step."""
    config = make_config(model_path)
    learner, may_write = Learner(config), Event()
    learner.update(*_groups(learner))
    weights = _weights(learner)
    moments = {name: tensor.clone() for name, tensor in learner.optimizer.state().items()}
    learner._saver._thread.submit(may_write.wait)
    try:
        torch.rand(1)  # a new learner begins before it
        learner.save(str(tmp_path / "step-000001"), {})
        drawn = torch.rand(3)
        learner.update(*_groups(learner))
    finally:  # else the process would wait for the thread without end
        may_write.set()
    learner.finish_saving()
    model = load_file(tmp_path / "step-000001/model/model.safetensors")
    assert model and all(torch.equal(tensor, weights[f"causal_lm.{name}"]) for name, tensor in model.items())
    resumed = Learner(config)
    resumed.restore(str(tmp_path / "step-000001"))
    assert torch.equal(torch.rand(3), drawn)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in _weights(resumed).items())
    assert all(torch.equal(tensor, moments[name]) for name, tensor in resumed.optimizer.state().items())


def test_a_model_that_does_not_fit_is_refused_before_loading(model_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory, "free_bytes", lambda device: 1000)
    with pytest.raises(ConfigError, match=r"needs about .* GiB"):
        Learner(make_config(model_path))


def test_a_missing_model_is_named():
    with pytest.raises(ConfigError, match="no-such-folder"):
        Learner(make_config(Path("/no-such-folder")))


def test_the_reference_scores_as_transformers_does(model_path: Path):
    config = make_config(model_path, sampling={"temperature": 0.5})
    prompts, completions = [[5, 6, 7], [5, 6, 7], [9]], [[10, 11], [12], [13, 14, 15]]
    scored = _reference(config).score(prompts, completions)["reference_logprobs"]
    causal_lm = AutoModelForCausalLM.from_pretrained(model_path)
    for prompt, completion, logprobs in zip(prompts, completions, scored, strict=True):
        ids = torch.tensor(prompt + completion)
        expected = (causal_lm(ids[None]).logits[0] / 0.5).log_softmax(-1)[len(prompt) - 1 : -1]
        assert_close(
            torch.tensor(logprobs), expected.gather(1, ids[len(prompt) :, None])[:, 0].detach(), rtol=1e-4, atol=1e-5
        )


def test_unknown_heads_are_refused(model_path: Path, monkeypatch: pytest.MonkeyPatch):
    from transformers import Qwen3ForCausalLM

    own = Qwen3ForCausalLM.forward

    def doubled(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = own(self, *args, **kwargs)
        output.logits = output.logits * 2
        return output

    monkeypatch.setattr(Qwen3ForCausalLM, "forward", doubled)
    with pytest.raises(ConfigError, match="Qwen3ForCausalLM applies its vocabulary head"):
        Learner(make_config(model_path))
