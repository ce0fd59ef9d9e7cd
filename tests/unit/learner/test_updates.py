"""Steps of several updates: how trajectories are dealt to them, when they stop, and what a learner reports of them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
import torch
from pydantic import ValidationError

from cluster.contracts.errors import NumericsError
from learner.distributed import Ranks
from learner.forward_backward import MiniBatch
from learner.guard import NonFiniteGuard
from learner.learner import Learner
from learner.updates import split
from tests.unit.learner.trajectories import make_config, make_group, make_overflowing_group, make_unbounded_config

pytestmark = pytest.mark.slow

SIX_GROUPS_OF_TWO = [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]


def _groups(version: int, **columns: Any) -> list[pa.RecordBatch]:
    return [make_group(i, seed=version, version=version, rewards=(1.0, 0.0, 0.5, 0.0), **columns) for i in range(8)]


def _weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in learner.policy.named_parameters()}


def _learner(
    model_path: Path, *, algorithm: dict[str, Any] | None = None, rate: float = 1e-3, **settings: Any
) -> Learner:
    sections = {"algorithm": algorithm or {"proximal": "recompute"}, "optimizer": {"learning_rate": rate}}
    return Learner(make_config(model_path, learner=settings, buffer={"max_off_policy_steps": 2}, **sections))


# How trajectories are dealt


def _split(groups: list[int], *, seed: int = 0, version: int = 0, **learner: Any) -> list[list[list[int]]]:
    config = make_config(Path("none"), learner=learner, seed=seed)
    return split(groups, config, policy_version=version)


def test_every_epoch_trains_on_every_trajectory_once():
    epochs = _split(SIX_GROUPS_OF_TWO, epochs=3, mini_batches=4)
    assert [sorted(row for rows in epoch for row in rows) for epoch in epochs] == [list(range(12))] * 3
    assert [sorted(len(rows) for rows in epoch) for epoch in epochs] == [[2, 2, 4, 4]] * 3


def test_groups_stay_whole_and_trajectories_do_not():
    groups = _split(SIX_GROUPS_OF_TWO, mini_batches=3)
    assert all(row ^ 1 in rows for rows in groups[0] for row in rows)
    (trajectories,) = _split(SIX_GROUPS_OF_TWO, mini_batches=3, split_by="trajectories")
    assert [len(rows) for rows in trajectories] == [4, 4, 4]
    assert any(row ^ 1 not in rows for rows in trajectories for row in rows)


def test_the_split_follows_from_seed_version_and_epoch():
    def dealt(seed: int, version: int) -> list[list[list[int]]]:
        return _split(SIX_GROUPS_OF_TWO, seed=seed, version=version, epochs=2, mini_batches=6)

    assert dealt(0, 5) == dealt(0, 5)
    assert len({str(epoch) for epoch in (*dealt(0, 5), *dealt(0, 6), *dealt(1, 5))}) == 6


def test_a_single_mini_batch_is_the_batch_in_its_order():
    assert _split([0, 0, 1], seed=3, version=1, epochs=2) == [[[0, 1, 2]]] * 2


def test_fewer_groups_than_mini_batches_make_fewer_updates():
    (epoch,) = _split([0, 0, 7], mini_batches=4)
    assert sorted(epoch) == [[0, 1], [2]]


# What configuration refuses


@pytest.mark.parametrize(
    ("learner", "message"),
    [
        ({"stop_at_kl": 0.1}, "stop_at_kl=0.1 stops nothing where a step makes one update"),
        ({"split_by": "trajectories"}, "split_by='trajectories' splits nothing with mini_batches=1"),
        ({"mini_batches": 3}, "learner.mini_batches=3 is more than the 2 groups of a step; use fewer"),
        ({"mini_batches": 9, "split_by": "trajectories"}, "learner.mini_batches=9 is more than the 8 trajectories"),
        ({"mini_batches": 2, "num_ranks": 5}, "learner.num_ranks=5 is more than the 4 trajectories of an update"),
    ],
)
def test_what_cannot_act_is_refused(model_path: Path, learner: dict[str, Any], message: str):
    with pytest.raises(ValidationError, match=message):
        make_config(model_path, learner=learner, buffer={"groups_per_step": 2, "trajectories_per_group": 4})


# What a learner does


def test_clip_ranges_act_from_the_second_update_on(model_path: Path):
    learner = _learner(model_path, rate=1e-2, epochs=2, mini_batches=4)
    metrics = learner.update(*_groups(0)).metrics
    clipped = [metrics[f"updates/clip_fraction/{number}"] for number in range(1, 9)]
    assert clipped[0] == 0.0 and metrics["updates/ratio_max/1"] == 1.0 and min(clipped[-2:]) > 0.0
    assert metrics["learner/clip_fraction"] > 0.0 and metrics["learner/updates"] == 8.0
    assert learner.version == 1


def test_a_step_that_measures_entropies_computes_them_in_its_first_look_too(model_path: Path):
    """Else the fused head of a GPU gives one pass its log-probs, the tiled head the other, and the first ratio is not 1."""
    algorithm = {"proximal": "recompute", "monitor": {"entropy": 2}}
    learner = _learner(model_path, algorithm=algorithm, mini_batches=2)
    asked: list[bool] = []
    learner.networks.register_forward_pre_hook(
        lambda _, args, kwargs: asked.append(kwargs["entropies"]), with_kwargs=True
    )
    for version in range(2):
        learner.update(*_groups(version))
    # Of each step two passes of the first look, and two of its updates.
    assert asked == [True] * 4 + [False] * 4


def test_under_one_update_no_ratio_moves(model_path: Path):
    metrics = _learner(model_path, rate=1e-2).update(*_groups(0)).metrics
    assert metrics["learner/clip_fraction"] == 0.0 and metrics["learner/ratio_max"] == 1.0
    assert not [name for name in metrics if name.startswith("updates/")]


def test_the_value_clip_acts_from_the_second_update_on(model_path: Path):
    algorithm = {
        "advantage": "gae",
        "proximal": "recompute",
        "value": {"learning_rate": 1e-2, "loss": {"name": "value_clip", "clip_range": 1e-3}},
    }
    metrics = _learner(model_path, algorithm=algorithm, mini_batches=4, epochs=2).update(*_groups(0)).metrics
    assert metrics["updates/value_clip_fraction/1"] == 0.0 and metrics["updates/value_clip_fraction/8"] > 0.0


def test_a_critic_that_warms_up_makes_every_update(model_path: Path):
    algorithm = {"advantage": "gae", "value": {"warmup_steps": 1}}
    learner = _learner(model_path, algorithm=algorithm, epochs=3, stop_at_kl=1e-9)
    metrics = [learner.update(*_groups(0)).metrics for _ in range(2)]
    assert [report["learner/updates"] for report in metrics] == [3.0, 1.0]
    assert [report["learner/stopped_at_kl"] for report in metrics] == [0.0, 1.0]


@pytest.mark.parametrize("preset", ["gspo", "decoupled_ppo"])
def test_presets_with_a_policy_that_begins_the_step_clip(model_path: Path, preset: str):
    from learner.algorithms.registry.presets import expand

    metrics = (
        _learner(model_path, algorithm=expand({"preset": preset}), rate=1e-2, mini_batches=4)
        .update(*_groups(0))
        .metrics
    )
    assert metrics["updates/clip_fraction/1"] == 0.0 < metrics["updates/clip_fraction/4"]


def test_batch_quantities_are_counted_once_however_many_epochs(model_path: Path):
    once = _learner(model_path).update(*_groups(0)).metrics
    several = _learner(model_path, epochs=3, mini_batches=2).update(*_groups(0)).metrics
    for name in ("groups", "trajectories", "tokens", "reward_mean", "reward_std", "advantage_std"):
        assert several[f"learner/{name}"] == once[f"learner/{name}"], name
    # Of the whole batch before the first update: later ones move the policy away by themselves.
    for name in ("mismatch/mean_abs_nats", "mismatch/max_abs_nats", "mismatch/off_policy_steps"):
        assert several[name] == pytest.approx(once[name], rel=1e-5), name


def test_the_loss_of_a_step_is_the_mean_of_its_updates(model_path: Path):
    metrics = _learner(model_path, epochs=2, mini_batches=2).update(*_groups(0)).metrics
    losses = [metrics[f"updates/loss/{number}"] for number in range(1, 5)]
    norms = [metrics[f"updates/gradient_norm/{number}"] for number in range(1, 5)]
    assert metrics["learner/loss"] == pytest.approx(sum(losses) / 4)
    assert metrics["learner/gradient_norm"] == pytest.approx(sum(norms) / 4)
    assert metrics["learner/gradient_norm_max"] == max(norms)


def test_a_step_stops_at_a_kl(model_path: Path):
    metrics = _learner(model_path, rate=1e-2, epochs=4, mini_batches=2, stop_at_kl=1e-3).update(*_groups(0)).metrics
    made = int(metrics["learner/updates"])
    assert metrics["learner/stopped_at_kl"] == 1.0 and 1 <= made < 8
    # The update that found it was not made.
    assert metrics[f"updates/kl_old_k3_mean/{made + 1}"] > 1e-3 and f"updates/loss/{made + 2}" not in metrics


def test_the_learning_rate_follows_the_kl_and_a_checkpoint_keeps_it(model_path: Path, tmp_path: Path):
    rates = {}
    for target_kl in (1e-9, 1e9):
        config = make_config(
            model_path,
            optimizer={"learning_rate": 1e-3, "target_kl": target_kl},
            learner={"mini_batches": 2},
            algorithm={"proximal": "recompute"},
            checkpoint={"asynchronous": False},
        )
        learner, resumed = Learner(config), Learner(config)
        found = [learner.update(*_groups(0)).metrics["learner/learning_rate"]]
        learner.save(str(tmp_path / f"{target_kl}" / "step-000001"), {})
        resumed.restore(str(tmp_path / f"{target_kl}" / "step-000001"))
        found += [each.update(*_groups(1)).metrics["learner/learning_rate"] for each in (learner, resumed)]
        rates[target_kl] = found
    assert rates[1e-9] == pytest.approx([1e-3, 1e-3 / 1.5, 1e-3 / 1.5])
    assert rates[1e9] == pytest.approx([1e-3, 1.5e-3, 1.5e-3])


def test_a_step_of_one_update_leaves_the_learning_rate_alone(model_path: Path):
    config = make_config(
        model_path,
        optimizer={"learning_rate": 1e-3, "target_kl": 1e9},
        learner={"mini_batches": 2},
        algorithm={"proximal": "recompute"},
    )
    learner = Learner(config)
    metrics = learner.update(_groups(0)[0]).metrics
    # Rewards that failed left one group of eight: nothing had moved the policy when its only update measured it.
    assert metrics["learner/updates"] == 1.0 and metrics["learner/kl_old_k3_mean"] == 0.0
    assert learner.update(*_groups(1)).metrics["learner/learning_rate"] == pytest.approx(1e-3)


def test_a_target_kl_is_refused_where_nothing_moves_before_the_update(model_path: Path):
    with pytest.raises(
        ValidationError, match=r"optimizer.target_kl=0.02 measures nothing where a step makes one update"
    ):
        make_config(model_path, optimizer={"target_kl": 0.02})


@pytest.mark.parametrize(
    "algorithm", [{"proximal": "rollout"}, {"proximal": "approximate"}, {"policy_loss": "reinforce"}]
)
def test_a_step_stops_by_its_own_updates_however_far_the_rollout_policy_is(model_path: Path, algorithm: dict[str, Any]):
    for rate, num_made in ((1e-9, 4), (1e-2, 1)):
        learner = _learner(model_path, algorithm=algorithm, rate=rate, epochs=4, stop_at_kl=1e-4)
        metrics = learner.update(*_groups(0)).metrics
        assert metrics["updates/kl_step_k3_mean/1"] == 0.0 and metrics["updates/kl_old_k3_mean/1"] > 1e-4
        assert metrics["learner/updates"] == num_made


def test_an_update_that_is_not_finite_is_skipped_alone(model_path: Path, tmp_path: Path):
    config = make_config(
        model_path,
        learner={
            "mini_batches": 4,
            "max_non_finite_updates": 1,
            "max_tokens_per_micro_batch": 6,
            "packing": "padded",
        },
        algorithm={"policy_loss": "importance_sampling"},
    )
    learner = Learner(config, run_dir=str(tmp_path))
    groups = [make_group(i, rewards=(1.0, 0.0), max_length=1) for i in range(4)]
    # exp(policy - rollout) overflows where the rollout claims a log-prob of -1e5. Each trajectory is a micro-batch.
    groups[2] = make_group(2, rewards=(1.0, 0.0), max_length=1, rollout_logprobs=([-1.0], [-1e5]))
    before = _weights(learner)
    metrics = learner.update(*groups).metrics
    assert metrics["learner/skipped"] == 1.0 and metrics["learner/updates"] == 3.0
    assert any(not torch.equal(tensor, before[name]) for name, tensor in _weights(learner).items())
    assert torch.isfinite(torch.tensor(metrics["learner/loss"]))
    (saved,) = (tmp_path / "quarantine").iterdir()
    number = next(n for n in range(1, 5) if metrics[f"updates/skipped/{n}"])
    assert saved.name == f"version-000000-update-{number}-rank-0.arrow"
    assert pa.ipc.open_file(saved).read_all()["rollout_logprobs"].to_pylist() == [[-1e5]]


def test_a_loss_that_is_not_finite_makes_no_update_though_its_gradient_is_0():
    alone = Ranks(rank=0, size=1, device=torch.device("cpu"), mesh=None)
    guard = NonFiniteGuard(max_in_a_row=1, ranks=alone, folder=None)
    update = MiniBatch(rows=[0], micro_batches=[SimpleNamespace(rows=[0])])
    for loss, num_in_a_row in ((1.0, 0), (float("inf"), 1), (1.0, 0)):
        losses = torch.tensor([loss])
        is_made = guard.admits(None, update, losses=losses, gradient_norms={"policy": torch.zeros(())}, place=(0, 1))
        assert (is_made, guard.num_in_a_row) == (num_in_a_row == 0, num_in_a_row)


def test_updates_that_are_not_finite_are_counted_in_a_row_over_steps(model_path: Path):
    learner = Learner(make_unbounded_config(model_path, max_skipped=2, mini_batches=2), run_dir="s3://bucket/run")
    bad = [make_overflowing_group(i) for i in range(2)]
    assert learner.update(*bad).metrics["learner/skipped_in_a_row"] == 2.0
    with pytest.raises(NumericsError, match=r"3 updates in a row.*were not saved \(no local run directory\)"):
        learner.update(*bad)


def test_updates_that_are_not_finite_are_counted_in_a_row_over_a_resume(model_path: Path, tmp_path: Path):
    config = make_unbounded_config(model_path, max_skipped=2, mini_batches=2)
    learner, resumed = Learner(config), Learner(config)
    bad = [make_overflowing_group(i) for i in range(2)]
    learner.update(*bad)
    learner.save(str(tmp_path / "step-000001"), {})
    resumed.restore(str(tmp_path / "step-000001"))
    with pytest.raises(NumericsError, match="3 updates in a row"):
        resumed.update(*bad)


def test_a_mini_batch_whose_trajectories_were_all_filtered_makes_no_update(model_path: Path):
    groups = [make_group(i, rewards=(1.0, 1.0) if i else (1.0, 0.0)) for i in range(3)]
    algorithm = {"filters": ["zero_variance"], "proximal": "recompute"}
    metrics = _learner(model_path, algorithm=algorithm, mini_batches=3).update(*groups).metrics
    assert metrics["learner/updates"] == 1.0 and metrics["learner/skipped"] == 0.0
    assert metrics["learner/groups"] == 3.0 and metrics["learner/empty_updates"] == 2.0


def test_an_update_whose_every_token_was_dropped_by_a_correction_is_not_made(model_path: Path):
    """Else weight decay, and the momentum of the update before it, would move the weights."""
    correction = {"name": "sequence_mask", "low": 0.2, "high": 5.0}
    decayed = {"learning_rate": 1e-2, "weight_decay": 0.1}
    algorithm = {"proximal": "recompute", "corrections": [correction]}
    learner = Learner(make_config(model_path, algorithm=algorithm, optimizer=decayed))
    assert learner.update(*_groups(0)).metrics["learner/empty_updates"] == 0.0
    before = _weights(learner)
    far = [
        make_group(i, version=1, rewards=(1.0, 0.0), lengths=(2, 2), rollout_logprobs=[[-40.0] * 2] * 2) for i in (0, 1)
    ]
    metrics = learner.update(*far).metrics
    assert metrics["learner/correction_dropped"] == 1.0 and metrics["learner/updates"] == 0.0
    assert metrics["learner/empty_updates"] == 1.0 and metrics["learner/skipped"] == 0.0 and learner.version == 2
    for name, tensor in _weights(learner).items():
        assert torch.equal(tensor, before[name])


@pytest.mark.parametrize(
    "also",
    [
        {"entropy_coefficient": 0.1},
        {"kl": {"rollout": {"coefficient": 0.1, "estimator": "k3"}}},
        {"advantage": "gae", "value": {}},
    ],
)
def test_a_mini_batch_without_policy_gradient_is_an_update_of_the_other_losses(model_path: Path, also: dict[str, Any]):
    algorithm = {"filters": [{"name": "high_entropy_tokens", "share": 0.0}], "proximal": "recompute", **also}
    metrics = _learner(model_path, algorithm=algorithm, mini_batches=2).update(*_groups(0)).metrics
    assert metrics["learner/updates"] == 2.0


def test_a_step_that_fails_between_its_updates_leaves_no_step_to_save(model_path: Path):
    learner = Learner(make_unbounded_config(model_path, max_skipped=0, mini_batches=2))
    assert learner.update(*_groups(0)) == learner.last_step()
    with pytest.raises(NumericsError):
        learner.update(make_group(0), make_overflowing_group(1))
    assert learner.last_step() is None


def test_a_resumed_learner_makes_the_same_updates(model_path: Path, tmp_path: Path):
    config = make_config(
        model_path,
        learner={"epochs": 2, "mini_batches": 2, "split_by": "trajectories"},
        algorithm={"proximal": "recompute", "advantage": "gae", "value": {"loss": {"name": "value_clip"}}},
        checkpoint={"asynchronous": False},
    )
    whole, resumed = Learner(config), Learner(config)
    whole.update(*_groups(0))
    whole.save(str(tmp_path / "step-000001"), {})
    resumed.restore(str(tmp_path / "step-000001"))
    expected, got = (learner.update(*_groups(1)).metrics for learner in (whole, resumed))
    timeless = [name for name in expected if not name.startswith(("time/", "speed/"))]
    assert {name: got[name] for name in timeless} == {name: expected[name] for name in timeless}
    for name, tensor in _weights(whole).items():
        assert torch.equal(_weights(resumed)[name], tensor)


def test_micro_batches_and_layouts_change_no_update(model_path: Path):
    results = []
    for max_tokens, packing in ((16384, "auto"), (30, "auto"), (30, "padded")):
        learner = _learner(model_path, epochs=2, mini_batches=2, max_tokens_per_micro_batch=max_tokens, packing=packing)
        learner.update(*_groups(0))
        results.append(_weights(learner))
    for other in results[1:]:
        for name, tensor in results[0].items():
            torch.testing.assert_close(other[name], tensor, rtol=1e-3, atol=5e-5)


def test_the_passes_of_every_epoch_are_counted(model_path: Path):
    learner = _learner(model_path, epochs=3, mini_batches=2)
    stats = learner.update(*(make_group(i, lengths=(2, 3, 4)) for i in range(2)))
    assert stats.metrics["learner/micro_batches"] == 6.0
    # Three epochs of two groups: 3 · 5 tokens of prompts and 2 + 3 + 4 of completions.
    assert stats.metrics["speed/learning_tokens_per_s"] * stats.seconds == pytest.approx(3 * 2 * 24)
