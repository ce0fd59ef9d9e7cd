"""Asynchronous runs: the bound as the tokens themselves show it, completions that cross updates, long tails, and their replay."""

import numpy as np
import pyarrow as pa
import pytest

from cluster.contracts.learned import read_learned
from cluster.contracts.types import sample_seed
from tests.integration.faults import Run, assert_equal_bit_for_bit, undisturbed_run, write_run
from tests.models import make_tiny_model

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1800)]
STEPS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def asynchronous(folder, model, *, bound: int, **settings) -> Run:
    """Completions take several steps: short steps of two groups, up to 160 tokens each."""
    file = write_run(
        folder,
        model,
        num_steps=STEPS,
        deterministic=False,
        sampling__max_tokens=160,
        buffer={"groups_per_step": 2, "trajectories_per_group": 2, "max_off_policy_steps": bound},
        **settings,
    )
    return Run(folder / "run").to_end(file)


@pytest.fixture(scope="module")
def bound_2(tmp_path_factory, model) -> Run:
    """Groups of the first two out of four, and no patience at all with stragglers."""
    return asynchronous(
        tmp_path_factory.mktemp("bound-2"),
        model,
        bound=2,
        buffer__max_head_of_line_s=0.001,
        rollout__num_workers=2,
        rollout__extra_trajectories=2,
    )


@pytest.fixture(scope="module")
def bound_1(tmp_path_factory, model) -> Run:
    mismatch = {"alarm_nats": 1e-9}  # float32 rounding passes it: each step raises the alarm
    folder = tmp_path_factory.mktemp("bound-1")
    return asynchronous(folder, model, bound=1, rollout__on_update="abort_and_resume", mismatch=mismatch)


def off_policy_steps(run: Run) -> dict[int, list[list[int]]]:
    """Of every token of every completion: step -> completion -> learner version minus the version that sampled it."""
    return {
        step: [[step - 1 - version for version in versions] for versions in table["policy_versions"].to_pylist()]
        for step, table in run.trajectories().items()
    }


@pytest.mark.parametrize("bound", [1, 2])
def test_no_token_is_older_than_the_bound(bound, request):
    run = request.getfixturevalue(f"bound_{bound}")
    found = [age for completions in off_policy_steps(run).values() for ages in completions for age in ages]
    assert min(found) == 0 and max(found) <= bound
    assert max(found) > 0, "nothing overlapped: this run proves nothing"
    assert run.problems() == ()
    assert max(numbers["staleness/max"] for numbers in run.metrics().values()) <= bound


@pytest.mark.parametrize("bound", [1, 2])
def test_completions_go_on_under_new_weights_and_their_tokens_say_so(bound, request):
    run = request.getfixturevalue(f"bound_{bound}")
    completions = [
        versions for table in run.trajectories().values() for versions in table["policy_versions"].to_pylist()
    ]
    assert any(len(set(versions)) > 1 for versions in completions)
    assert all(versions == sorted(versions) for versions in completions)


def test_log_probs_of_both_sides_agree_where_requests_are_resumed_under_new_weights(bound_1):
    # What `abort_and_resume` buys: with `continue` later tokens see keys and values that the old weights made.
    steps = [numbers for numbers in bound_1.metrics().values() if numbers.get("mismatch/off_policy_steps") == 0]
    assert steps and max(numbers["mismatch/mean_abs_nats"] for numbers in steps) < 1e-4


def test_groups_are_made_of_the_first_to_end_under_their_own_seeds(bound_2):
    chosen = set()
    for table in bound_2.trajectories().values():
        rows = table.select(["ticket_index", "sample_index", "seed"]).to_pylist()
        assert len(rows) == 4
        for first, second in (rows[:2], rows[2:]):
            assert first["ticket_index"] == second["ticket_index"] and first["sample_index"] < second["sample_index"]
        for row in rows:
            group_seed = sample_seed(bound_2.config().seed, row["ticket_index"])
            assert row["seed"] == sample_seed(group_seed, row["sample_index"])
            chosen.add(row["sample_index"])
    assert chosen == {0, 1, 2, 3}, "not always the same two"
    assert sum(numbers["rollout/num_aborted"] for numbers in bound_2.metrics().values()) >= STEPS * 2 * 2


def test_dropped_stragglers_are_never_trained_on(bound_2):
    dropped = {int(event["group_id"]) for event in bound_2.events("drop") if event["reason"] == "straggler"}
    assert dropped, "no group was dropped: this run proves nothing"
    assert sum(numbers.get("buffer/dropped_straggler", 0.0) for numbers in bound_2.metrics().values()) == len(dropped)
    consumed = [index for groups in bound_2.groups() for index in groups]
    assert consumed == sorted(set(consumed) - dropped)
    assert bound_2.events("failure") == []


@pytest.mark.parametrize("bound", [1, 2])
def test_the_steps_metrics_are_means_over_the_tokens_of_the_record_of_learning(bound, request):
    run, keys = request.getfixturevalue(f"bound_{bound}"), ["ticket_index", "sample_index"]
    assert list(run.learned()) == list(range(1, STEPS + 1))
    for step, learned in run.learned().items():
        trajectories, metrics = (
            run.trajectories()[step].sort_by([(name, "ascending") for name in keys]),
            run.metrics()[step],
        )
        assert learned.select(keys).to_pylist() == trajectories.select(keys).to_pylist()
        policy, rollout, ages = (
            np.array([x for row in table[name].to_pylist() for x in row])
            for table, name in (
                (learned, "policy_logprobs"),
                (trajectories, "rollout_logprobs"),
                (trajectories, "policy_versions"),
            )
        )
        newest = ages == ages.max()
        assert np.abs(policy - rollout)[newest].mean() == pytest.approx(metrics["mismatch/mean_abs_nats"], rel=1e-4)
        for column, metric in (
            ("clipped", "clip_fraction"),
            ("entropies", "entropy_mean"),
            ("advantages", "advantage_mean"),
        ):
            numbers = [x for row in learned[column].to_pylist() for x in row or ()]
            assert bool(numbers) == (f"learner/{metric}" in metrics)
            if numbers:
                assert np.mean(numbers) == pytest.approx(metrics[f"learner/{metric}"], rel=1e-4, abs=1e-6), (
                    step,
                    column,
                )


def test_a_replay_makes_the_record_of_learning_of_a_step_again_value_for_value(bound_2, tmp_path):
    """From the checkpoint of step 9: it learns steps 10 and 11, and leaves the run as it is."""
    before = {path: path.stat().st_mtime_ns for path in bound_2.path.rglob("*") if path.is_file()}
    said = bound_2.replay("--learned", 11, "--out", tmp_path / "again.arrow")
    assert (
        said == f"step 11 learned again, weights {bound_2.weights()[11]}: equal; its record is {tmp_path}/again.arrow\n"
    )
    again = read_learned((tmp_path / "again.arrow").read_bytes())
    assert again.policy_version == 10
    assert pa.Table.from_batches([again.rows]).equals(bound_2.learned()[11])
    assert {path: path.stat().st_mtime_ns for path in bound_2.path.rglob("*") if path.is_file()} == before


def test_a_mismatch_beyond_the_alarm_is_an_event_of_its_step(bound_1):
    measured = {step for step, numbers in bound_1.metrics().items() if "mismatch/mean_abs_nats" in numbers}
    assert {event["policy_version"] for event in bound_1.events("mismatch_alarm")} == measured != set()


@pytest.mark.acceptance
@pytest.mark.exhaustive
def test_a_bound_of_zero_equals_the_deterministic_loop_bit_for_bit(tmp_path_factory):
    """Without a reference: groups that come together are scored together, and how that rounds is up to their times."""
    file, _ = undisturbed_run(tmp_path_factory)
    folder, settings = tmp_path_factory.mktemp("bound-0"), ("num_steps=6", "algorithm.kl.loss=null")
    in_turn = Run(folder / "deterministic").to_end(file, *settings)
    run = Run(folder / "run").to_end(file, *settings, "deterministic=false", "rollout.on_update=finish")
    assert_equal_bit_for_bit(in_turn, run, steps=range(1, 7))
    assert {age for ages in off_policy_steps(run).values() for each in ages for age in each} == {0}


def test_every_token_has_its_own_version_and_log_prob(bound_2):
    for table in bound_2.trajectories().values():
        for column in ("policy_versions", "rollout_logprobs"):
            assert _lengths(table[column]) == _lengths(table["completion_token_ids"])


def _lengths(column: pa.ChunkedArray) -> list[int]:
    return [len(each) for each in column.to_pylist()]
