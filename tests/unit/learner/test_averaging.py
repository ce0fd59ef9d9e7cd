"""PPO-EWMA's proximal policy: an average of the policy's weights, kept beside them, swapped in for a look, and saved."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from cluster.contracts.errors import CheckpointError
from learner.averaging import WeightAverage
from learner.learner import Learner
from tests.unit.learner.trajectories import make_config, make_group

pytestmark = pytest.mark.slow

EWMA: dict[str, Any] = {"proximal": "ewma", "proximal_decay": 0.5}
DTYPES = ("float32", "bfloat16")


def _groups(version: int, **columns: Any) -> list[pa.RecordBatch]:
    return [make_group(i, seed=version, version=version, **columns) for i in range(4)]


def _learner(model_path: Path, *, algorithm: dict[str, Any] = EWMA, dtype: str = "float32", **learner: Any) -> Learner:
    optimizer = {"learning_rate": 1e-2}
    checkpoint = {"asynchronous": False}
    return Learner(
        make_config(
            model_path, dtype=dtype, algorithm=algorithm, optimizer=optimizer, learner=learner, checkpoint=checkpoint
        )
    )


def _weights(learner: Learner) -> dict[str, torch.Tensor]:
    """Float32 ones, and those that the model computes with."""
    own = {f"model/{name}": p.detach().clone() for name, p in learner.networks.named_parameters()}
    return own | {name: p.detach().clone() for name, p in learner.optimizer.masters().items()}


def _averages(learner: Learner) -> dict[str, torch.Tensor]:
    found = learner.optimizer.state().items()
    return {name.removeprefix("average/"): x.clone() for name, x in found if name.startswith("average/")}


def _are_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# The average


def test_the_average_weighs_the_newest_one_and_each_one_before_it_by_a_decay_more():
    weight = torch.zeros(1)
    average = WeightAverage({"w": weight}, decay=0.5)
    found = []
    for value in (3.0, 9.0):
        weight.fill_(value)
        average.update()
        found.append(average.averages["w"].item())
    # (3 + 0/2) / 1.5, then (9 + 3/2 + 0/4) / 1.75
    assert found == pytest.approx([2.0, 6.0])


def test_its_centre_of_mass_is_as_many_updates_old_as_the_decay_says():
    weight = torch.zeros(1, dtype=torch.float64)
    average = WeightAverage({"w": weight}, decay=0.889)
    for number in range(1, 301):
        weight.fill_(float(number))
        average.update()
    assert 300 - average.averages["w"].item() == pytest.approx(0.889 / 0.111, abs=1e-9)


def test_a_decay_of_0_is_the_weights_and_weights_that_stay_are_their_own_average():
    weight, still = torch.randn(100), torch.randn(100)
    none, long = WeightAverage({"w": weight}, decay=0.0), WeightAverage({"w": still}, decay=0.9)
    for _ in range(5):
        weight.normal_()
        none.update()
        long.update()
        assert torch.equal(none.averages["w"], weight) and torch.equal(long.averages["w"], still)


# In a learner


def test_the_third_step_clips_around_the_average_that_two_steps_made(model_path: Path):
    learner, seen = _learner(model_path), []
    for version in range(2):
        seen.append(_weights(learner))
        learner.update(*_groups(version))
    policy = _weights(learner)
    expected, averages = {}, _averages(learner)
    for name in averages:
        expected[name] = (policy[name] + 0.5 * seen[1][name] + 0.25 * seen[0][name]) / 1.75
        assert_close(averages[name], expected[name])
    groups = _groups(2)
    old, now = (_logprobs(model_path, weights, groups) for weights in (expected, policy))
    metrics = learner.update(*groups).metrics
    assert metrics["learner/ratio_mean"] == pytest.approx((now - old).exp().mean().item(), abs=1e-4)
    assert metrics["learner/ratio_max"] == pytest.approx((now - old).exp().max().item(), abs=1e-3)
    assert abs(metrics["learner/ratio_max"] - 1) > 0.01


@torch.no_grad()
def _logprobs(model_path: Path, weights: dict[str, torch.Tensor], groups: list[pa.RecordBatch]) -> torch.Tensor:
    """Of all completion tokens, by transformers alone."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    parameters = dict(model.named_parameters())
    for name, weight in weights.items():
        if name.startswith("policy."):
            parameters[name.removeprefix("policy.causal_lm.")].copy_(weight)
    found = []
    for row in (row for group in groups for row in group.to_pylist()):
        ids = torch.tensor(row["prompt_token_ids"] + row["completion_token_ids"])
        logprobs = model(ids[None]).logits[0].log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
        found.append(logprobs[-len(row["completion_token_ids"]) :])
    return torch.cat(found)


def test_a_decay_of_0_is_recompute_to_the_bit(model_path: Path):
    found = []
    for algorithm in ({"proximal": "recompute"}, EWMA | {"proximal_decay": 0.0}):
        learner = _learner(model_path, algorithm=algorithm | {"corrections": ["decoupled"]}, epochs=2, mini_batches=2)
        metrics = [learner.update(*_groups(version)).metrics for version in range(2)][-1]
        # A pass of the averaged policy says nothing of the mismatch: it is then of the first mini-batch alone.
        other = ("time/", "speed/", "mismatch/", "learner/mismatch")
        found.append(({name: x for name, x in metrics.items() if not name.startswith(other)}, _weights(learner)))
    assert found[0][0] == found[1][0] and found[0][0]["learner/clip_fraction"] > 0
    assert _are_equal(found[0][1], found[1][1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("learner", [{}, {"lora": {"rank": 2}}])
def test_the_weights_are_back_to_the_bit_after_the_average_was_in_their_place(
    model_path: Path, dtype: str, learner: dict[str, Any]
):
    made = _learner(model_path, dtype=dtype, **learner)
    made.update(*_groups(0))
    weights, averages = _weights(made), _averages(made)
    trained = {name for name in made.optimizer.masters() if name.startswith("policy.")}
    assert averages.keys() == trained and all(average.dtype == torch.float32 for average in averages.values())
    for failure in (None, RuntimeError):
        try:
            with made.optimizer.averaged():
                swapped = _weights(made)
                assert _are_equal({name: swapped[name] for name in averages}, averages)
                assert not _are_equal(swapped, weights)
                if failure is not None:
                    raise failure
        except RuntimeError:
            assert failure is not None
        assert _are_equal(_weights(made), weights) and _are_equal(_averages(made), averages)


def test_a_look_that_fails_leaves_the_policy_as_it_was(model_path: Path, monkeypatch: pytest.MonkeyPatch):
    learner = _learner(model_path)
    learner.update(*_groups(0))
    weights = _weights(learner)

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="out of memory"):
        patched.setattr(learner.networks, "forward", fail)
        learner.update(*_groups(1))
    assert _are_equal(_weights(learner), weights)


def test_an_update_that_was_skipped_does_not_move_the_average(model_path: Path):
    learner = _learner(model_path, algorithm=EWMA | {"corrections": ["decoupled"]})
    learner.update(*_groups(0))
    state, averages = learner.optimizer.state_dict(), _averages(learner)
    # π_old/μ overflows where the rollout claims a log-prob of -1e5.
    claimed = {"rollout_logprobs": ([-1e5], [-1e5]), "rewards": (1.0, 0.0), "max_length": 1}
    assert learner.update(*_groups(1, **claimed)).metrics["learner/skipped"] == 1.0
    assert learner.optimizer.state_dict() == state and _are_equal(_averages(learner), averages)


@pytest.mark.parametrize("backbone", ["own", "shared"])
def test_the_average_is_the_policy_while_the_critic_warms_up_and_never_has_the_critic(model_path: Path, backbone: str):
    value = {"warmup_steps": 1, "backbone": backbone, "learning_rate": 1e-2}
    learner = _learner(model_path, algorithm=EWMA | {"advantage": "gae", "value": value})
    moved = []
    for version in range(2):
        metrics = learner.update(*_groups(version)).metrics
        assert metrics["learner/ratio_max"] == metrics["learner/ratio_min"] == 1.0
        weights, averages = _weights(learner), _averages(learner)
        assert not [name for name in averages if name.startswith("critic.")]
        moved.append(not _are_equal(averages, {name: weights[name] for name in averages}))
    assert moved == [False, True]
    # One update of the policy counts, not two.
    assert learner.optimizer.state_dict()["average_total"] == 1.5


def test_old_values_and_entropies_are_of_the_policy_that_begins_the_step(model_path: Path):
    algorithm = {"advantage": "gae", "value": {"learning_rate": 1e-2}, "filters": ["high_entropy_tokens"]}
    found = []
    for proximal in ({"proximal": "recompute"}, EWMA):
        learner = _learner(model_path, algorithm={"corrections": ["decoupled"]} | algorithm | proximal)
        for version in range(2):
            metrics = learner.update(*_groups(version)).metrics
        found.append(metrics)
    # The first step is one and the same, and so is what the second begins with; only its ratios are not.
    for name in ("value_error_mean", "value_mean", "filtered_tokens", "advantage_mean", "entropy_mean"):
        assert found[0][f"learner/{name}"] == found[1][f"learner/{name}"], name
    assert found[0]["learner/ratio_max"] == 1.0 != found[1]["learner/ratio_max"]


# In a checkpoint


@pytest.mark.parametrize(("dtype", "options"), [("float32", {}), ("bfloat16", {}), ("float32", {"lora": {"rank": 2}})])
def test_a_resumed_learner_clips_around_the_same_average(
    model_path: Path, tmp_path: Path, dtype: str, options: dict[str, Any]
):
    settings = {"dtype": dtype, "mini_batches": 2, **options}
    whole, resumed = _learner(model_path, **settings), _learner(model_path, **settings)
    whole.update(*_groups(0))
    whole.save(str(tmp_path / "step-000001"), {})
    resumed.restore(str(tmp_path / "step-000001"))
    assert _are_equal(_averages(resumed), _averages(whole))
    expected, got = (learner.update(*_groups(1)).metrics for learner in (whole, resumed))
    timeless = [name for name in expected if not name.startswith(("time/", "speed/"))]
    assert {name: got[name] for name in timeless} == {name: expected[name] for name in timeless}
    assert _are_equal(_weights(resumed), _weights(whole)) and _are_equal(_averages(resumed), _averages(whole))
    assert resumed.optimizer.state_dict() == whole.optimizer.state_dict()


def test_a_checkpoint_without_an_average_is_refused(model_path: Path, tmp_path: Path):
    _learner(model_path, algorithm={"proximal": "recompute"}, mini_batches=2).save(str(tmp_path / "step-000000"), {})
    with pytest.raises(CheckpointError, match=r"no averaged policy, which algorithm\.proximal='ewma' clips around"):
        _learner(model_path).restore(str(tmp_path / "step-000000"))
