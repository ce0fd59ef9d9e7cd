"""The record of learning says of each token what the objective saw, and changes nothing of what is learned."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from cluster.contracts.learned import Learned, LearnedTrajectory, read_learned, written_learned
from learner.algorithms.losses.surrogates import TokenLosses
from learner.algorithms.registry.presets import expand
from learner.learner import Learner
from learner.model.reference import ReferenceModel
from tests.unit.learner.segments import segmented
from tests.unit.learner.trajectories import make_config, make_group, make_overflowing_group, make_unbounded_config

pytestmark = pytest.mark.slow
ALL = {"learned_groups": None}


def _learner(model_path: Path, *, learned_groups: int | None = None, **sections: Any) -> Learner:
    return Learner(make_config(model_path, record={"learned_groups": learned_groups}, **sections))


def _groups(version: int = 0, **columns: Any) -> list[pa.RecordBatch]:
    return [make_group(i, seed=version, version=version, rewards=(1.0, 0.0, 0.5, 0.0), **columns) for i in range(4)]


def _learned(learner: Learner) -> Learned:
    """As a recorder writes it, and a reader finds it."""
    return read_learned(written_learned(learner.learned(), policy_version=learner.version - 1))


def _rows(learned: Learned) -> dict[tuple[int, int], LearnedTrajectory]:
    found = {key: learned.trajectory(ticket_index=key[0], sample_index=key[1]) for key in learned.places}
    return {key: row for key, row in found.items() if row is not None}


def _numbers(learned: Learned, column: str) -> Iterator[float]:
    return (x for row in _rows(learned).values() for x in getattr(row, column) or () if x is not None)


def _mean(learned: Learned, column: str) -> float:
    """Over the tokens with loss of the trajectories that no filter took out."""
    numbers = [
        float(x) for row in _rows(learned).values() if row.advantages for x in getattr(row, column) if x is not None
    ]
    return sum(numbers) / len(numbers)


def test_a_token_that_a_tool_wrote_is_null_and_the_others_are_what_the_starting_model_says(model_path: Path):
    config = make_config(model_path, record=ALL, algorithm={"advantage": "rloo", "policy_loss": "reinforce"})
    learner = Learner(config)
    masks = [[True, False, True], [True, True]]
    group = make_group(
        0, rewards=(1.0, 0.0), lengths=(3, 2), loss_mask=masks, rollout_logprobs=[[-4.0] * 3, [-4.0] * 2]
    )
    reference = ReferenceModel(
        config.model, reference=config.reference, learner=config.learner, sampling=config.sampling
    )
    prompts, completions = (group[f"{name}_token_ids"].to_pylist() for name in ("prompt", "completion"))
    expected = reference.score(prompts, completions)["reference_logprobs"]
    learner.update(group)
    learned = _learned(learner)
    assert learner.last_step() is not None and learner.last_step().num_trained_tokens == 4
    first, second = _rows(learned).values()
    assert learned.policy_version == 0 and list(learned.places) == [(0, 0), (0, 1)]
    assert first.policy_logprobs == [pytest.approx(expected[0][0]), None, pytest.approx(expected[0][2])]
    assert second.policy_logprobs == pytest.approx(expected[1])
    assert (first.advantages, second.advantages) == ([1.0, None, 1.0], [-1.0, -1.0])
    assert (first.weights, second.weights) == ([1.0, None, 1.0], [1.0, 1.0])
    assert first.clipped is None, "this loss has no bounds"
    assert first.proximal_logprobs is None, "ratios compare with the policy that sampled"


@pytest.mark.parametrize(
    "options", [{}, {"learner": {"epochs": 2, "mini_batches": 2}, "algorithm": {"proximal": "recompute"}}]
)
def test_what_is_learned_is_the_same_bit_for_bit_however_much_is_recorded(model_path: Path, options: dict[str, Any]):
    def weights(learned_groups: int | None) -> dict[str, torch.Tensor]:
        learner = _learner(model_path, learned_groups=learned_groups, **options)
        for version in range(3):
            learner.update(*_groups(version))
            list(learner.learned())
        return dict(learner.networks.named_parameters())

    none, some, everything = (weights(number) for number in (0, 2, None))
    for name, weight in none.items():
        assert torch.equal(weight, some[name]) and torch.equal(weight, everything[name])


def test_only_the_first_groups_of_a_step_are_recorded(model_path: Path):
    tickets = {}
    for number in (0, 2, None):
        learner = _learner(model_path, learned_groups=number, learner={"mini_batches": 4})
        assert list(learner.learned()) == [], "before the first step"
        learner.update(*_groups())
        tickets[number] = [ticket for ticket, _ in _learned(learner).places]
    assert tickets == {0: [], 2: [0] * 4 + [1] * 4, None: [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4}


def test_a_trajectory_whose_reward_failed_is_not_in_the_record(model_path: Path):
    learner = _learner(model_path)
    reasons = ("stop", "stop", "stop", "aborted")
    metrics = learner.update(make_group(0, rewards=(1.0, None, 0.0, 0.0), finish_reason=reasons)).metrics
    assert list(_learned(learner).places) == [(0, 0), (0, 2)]
    assert (metrics["learner/failed_rewards"], metrics["learner/aborted"]) == (1.0, 1.0)


def test_layouts_and_micro_batches_record_the_same(model_path: Path):
    found: list[dict[tuple[int, int], LearnedTrajectory]] = []
    algorithm = {"proximal": "recompute", "corrections": ["decoupled"], "entropy_coefficient": 0.01}
    for max_tokens, packing in ((16384, "auto"), (30, "auto"), (30, "padded")):
        learner = _learner(
            model_path,
            algorithm=algorithm,
            learner={"max_tokens_per_micro_batch": max_tokens, "packing": packing, "mini_batches": 2},
        )
        learner.update(*_groups())
        found.append(_rows(_learned(learner)))
    first, *others = found
    for other in others:
        assert list(other) == list(first)
        for key, row in first.items():
            assert (row.advantages, row.clipped) == (other[key].advantages, other[key].clipped)
            for name in ("policy_logprobs", "proximal_logprobs", "weights", "entropies"):
                assert_close(getattr(other[key], name), getattr(row, name), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "algorithm",
    [
        {},
        {"preset": "dapo"},
        {"preset": "gspo"},
        {"preset": "cispo"},
        {"preset": "decoupled_ppo"},
        {"advantage": "gae", "value": {}, "proximal": "recompute"},
        {"corrections": ["decoupled"], "proximal": "approximate"},
        {"filters": [{"name": "high_entropy_tokens", "share": 0.5}], "proximal": "recompute"},
    ],
    ids=str,
)
def test_means_of_the_rows_are_the_metrics_of_the_step(model_path: Path, algorithm: dict[str, Any]):
    """The third step makes four updates, of tokens that the policy before sampled and of rewards of which one group's are equal."""
    learner = _learner(
        model_path,
        algorithm=expand(algorithm),
        learner={"mini_batches": 4},
        optimizer={"learning_rate": 3e-3},
        buffer={"max_off_policy_steps": 2},
    )
    for version in range(3):
        groups = _groups(version)
        groups[1] = make_group(1, seed=version, version=version, rewards=(1.0, 1.0))
        metrics = learner.update(*groups).metrics
    learned = _learned(learner)
    assert metrics["learner/updates"] + metrics["learner/empty_updates"] == 4.0
    for column, metric in (
        ("policy_logprobs", "policy_logprob_mean"),
        ("advantages", "advantage_mean"),
        ("entropies", "entropy_mean"),
        ("clipped", "clip_fraction"),
    ):
        has_numbers = any(getattr(row, column) for row in _rows(learned).values())
        assert has_numbers == (f"learner/{metric}" in metrics), column
        if has_numbers:
            assert _mean(learned, column) == pytest.approx(metrics[f"learner/{metric}"], rel=1e-5, abs=1e-7), column
    num_trained = metrics["learner/tokens"] * (1 - metrics["learner/filtered_tokens"])
    expected = metrics["learner/correction_weight_mean"] * num_trained
    assert sum(_numbers(learned, "weights")) == pytest.approx(expected, rel=1e-5)
    kept = sum(row.advantages is not None for row in _rows(learned).values())
    assert kept == metrics["learner/trajectories"] - metrics["learner/trajectories_filtered"]


def test_a_trajectory_that_a_filter_took_out_has_log_probs_and_no_part_in_the_loss(model_path: Path):
    learner = _learner(model_path, algorithm={"filters": ["zero_variance"]})
    learner.update(make_group(0, rewards=(1.0, 0.0)), make_group(1, rewards=(1.0, 1.0)))
    rows = _rows(_learned(learner))
    for sample in (0, 1):
        assert rows[0, sample].advantages is not None and rows[0, sample].weights is not None
        assert (rows[1, sample].advantages, rows[1, sample].weights, rows[1, sample].clipped) == (None, None, None)
        assert all(x is not None and x < 0 for x in rows[1, sample].policy_logprobs)


def test_where_no_one_knows_the_policy_that_sampled_the_start_of_the_step_is_what_ratios_compare_with(model_path: Path):
    learner = _learner(model_path, algorithm={"policy_loss": "reinforce"})
    learner.update(make_group(0, rollout_logprobs=[None] * 3))
    for row in _rows(_learned(learner)).values():
        assert row.proximal_logprobs == pytest.approx(row.policy_logprobs)


def test_each_trajectory_is_as_its_first_update_found_it(model_path: Path):
    """The first mini-batch meets the policy that began the step, the second one a policy that has moved; a second epoch changes nothing."""
    algorithm = {"proximal": "recompute"}
    once, twice = (
        _learner(
            model_path,
            algorithm=algorithm,
            learner={"mini_batches": 2, "epochs": epochs},
            optimizer={"learning_rate": 1e-2},
        )
        for epochs in (1, 2)
    )
    for learner in (once, twice):
        learner.update(*_groups())
    rows = _rows(_learned(once))
    assert rows == _rows(_learned(twice))
    moved = {key[0] for key, row in rows.items() if row.policy_logprobs != row.proximal_logprobs}
    assert len(moved) == 2, "of the four groups, those of the second mini-batch"


def marks_where_rewards_are_high(policy_logprobs_BT: Tensor, *, advantages_BT: Tensor) -> TokenLosses:
    """It has bounds for some mini-batches, and none for others."""
    losses_BT = -policy_logprobs_BT * advantages_BT
    return TokenLosses(losses_BT, clipped_high_BT=advantages_BT > 0 if bool((advantages_BT > 5).any()) else None)


@pytest.mark.parametrize("high", [0, 1])
def test_a_column_that_some_updates_lack_is_null_for_their_trajectories(model_path: Path, high: int):
    algorithm = {"policy_loss": f"{__name__}:marks_where_rewards_are_high", "advantage": "raw_reward"}
    learner = _learner(model_path, learner={"mini_batches": 2}, algorithm=algorithm)
    learner.update(*(make_group(i, rewards=(9.0 if i == high else 1.0, -1.0), lengths=(2, 1)) for i in range(2)))
    clipped = {key: row.clipped for key, row in _rows(_learned(learner)).items()}
    assert clipped == {(high, 0): [True, True], (high, 1): [False], (1 - high, 0): None, (1 - high, 1): None}


def test_a_trajectory_that_no_update_came_to_is_not_in_the_record(model_path: Path):
    learner = _learner(model_path, learner={"mini_batches": 4, "stop_at_kl": 1e-9}, algorithm={"proximal": "recompute"})
    metrics = learner.update(*_groups()).metrics
    assert metrics["learner/stopped_at_kl"] == 1.0 and metrics["learner/updates"] == 1.0
    assert len(_learned(learner).places) == 8, (
        "of the update that was made, and of the one that found how far it had gone"
    )


def test_an_update_that_was_not_finite_is_in_the_record(model_path: Path):
    config = make_unbounded_config(model_path, max_skipped=2)
    learner = Learner(config.model_copy(update={"record": config.record.model_copy(update=ALL)}))
    assert learner.update(make_overflowing_group(0)).metrics["learner/skipped"] == 1.0
    assert list(_learned(learner).places) == [(0, 0), (0, 1)]


def test_a_step_after_a_restore_has_a_record_of_its_own(model_path: Path, tmp_path: Path):
    learner = _learner(model_path, checkpoint={"asynchronous": False})
    learner.update(*_groups())
    learner.save(str(tmp_path / "step-000001"), {})
    learner.restore(str(tmp_path / "step-000001"))
    assert list(learner.learned()) == []


def test_an_episode_of_several_segments_has_one_row_as_long_as_all_of_them(model_path: Path):
    learner = _learner(model_path)
    learner.update(segmented((1.0, [2, 3]), (0.0, [4]), (0.5, [1, 1, 1])))
    lengths = {key: len(row.policy_logprobs) for key, row in _rows(_learned(learner)).items()}
    assert lengths == {(0, 0): 5, (0, 1): 4, (0, 2): 3}
    assert learner.last_step() is not None and learner.last_step().metrics["learner/trajectories"] == 3
