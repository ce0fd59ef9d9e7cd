"""Long tails and slow scorers in real runs: what is cut, what is given up, and what waits."""

import pytest

from cluster.contracts.types import sample_seed
from tests.integration.faults import Run, write_run
from tests.models import make_tiny_model

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def cut(tmp_path_factory, model) -> Run:
    """Groups of two out of four, and no patience at all with stragglers."""
    folder = tmp_path_factory.mktemp("cut")
    file = write_run(
        folder,
        model,
        num_steps=12,
        deterministic=False,
        sampling__max_tokens=160,
        buffer={
            "groups_per_step": 2,
            "trajectories_per_group": 2,
            "max_off_policy_steps": 2,
            "max_head_of_line_s": 0.001,
        },
        rollout__num_workers=2,
        rollout__extra_trajectories=2,
    )
    return Run(folder / "run").to_end(file)


def test_groups_are_made_of_the_first_to_end_under_their_own_seeds(cut):
    chosen = set()
    for table in cut.trajectories().values():
        rows = table.select(["ticket_index", "sample_index", "seed"]).to_pylist()
        assert len(rows) == 4
        for first, second in (rows[:2], rows[2:]):
            assert first["ticket_index"] == second["ticket_index"] and first["sample_index"] < second["sample_index"]
        for row in rows:
            group_seed = sample_seed(cut.config().seed, row["ticket_index"])
            assert row["seed"] == sample_seed(group_seed, row["sample_index"])
            chosen.add(row["sample_index"])
    assert chosen == {0, 1, 2, 3}, "not always the same two"
    assert sum(numbers["rollout/num_cut"] for numbers in cut.metrics().values()) >= 12 * 2 * 2


def test_cut_groups_are_never_trained_on_and_the_run_is_as_exact_as_any(cut):
    dropped = {int(event["group_id"]) for event in cut.events("drop") if event["reason"] == "cut"}
    assert dropped, "nothing was cut: this run proves nothing"
    assert sum(numbers["buffer/num_cut"] for numbers in cut.metrics().values()) == len(dropped)
    consumed = [index for groups in cut.groups() for index in groups]
    assert consumed == sorted(set(consumed) - dropped)
    assert cut.problems() == () and cut.events("failure") == []
    assert max(numbers["staleness/max"] for numbers in cut.metrics().values()) <= 2
    assert cut.replay().endswith(": equal\n")


def test_a_slow_reward_slows_sampling_and_nothing_piles_up(tmp_path, model):
    """The staleness bound allows eight groups at a time, the bytes not even one: then only the next step's two may be there."""
    file = write_run(
        tmp_path,
        model,
        num_steps=8,
        deterministic=False,
        reward={"judge": {"name": "tests.integration.judges:slow_while", "file": str(tmp_path)}},
        buffer={"groups_per_step": 2, "trajectories_per_group": 2, "max_off_policy_steps": 3, "max_size_bytes": 1},
    )
    run = Run(tmp_path / "run").to_end(file)
    waiting = [numbers["buffer/num_ready"] + numbers["buffer/num_under_way"] for numbers in run.metrics().values()]
    assert len(waiting) == 8 and max(waiting) == 2, "six would wait if nothing held them back"
    assert run.problems() == ()
