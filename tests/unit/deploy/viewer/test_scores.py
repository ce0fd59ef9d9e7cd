"""How a step's values are spread, read once, and never more than a page may."""

import pytest

from deploy.viewer import scores
from deploy.viewer.dots import Axis
from deploy.viewer.scores import REWARD, chosen, picture, scores_of
from tests.unit.deploy.viewer.recorded import group, opened, record


@pytest.fixture
def run(tmp_path):
    """A step of two groups: rewards 0, 1, one that failed, and 0.5 with a component."""
    record(
        tmp_path,
        [group(0, 0.0, 1.0, None), group(1, 0.5, reward_components=[("style", -2.0), ("none", None), ("reward", 7.0)])],
    )
    return opened(tmp_path)


def test_a_component_has_the_values_of_the_trajectories_that_have_it(run):
    told = scores_of(run, 1)
    assert set(told) == {REWARD, "style"}
    assert (told[REWARD].values, told[REWARD].num, told[REWARD].num_without) == ((0.0, 0.5, 1.0), 3, 1)
    assert (told[REWARD].smallest, told[REWARD].largest) == ((0, 0), (0, 1))
    assert (told["style"].num, told["style"].num_without, told["style"].smallest) == (1, 3, (1, 0))


def test_a_step_is_read_once(run, monkeypatch):
    first = scores_of(run, 1)
    monkeypatch.setattr(scores, "open_step", None)
    assert scores_of(run, 1) is first


def test_many_values_are_thinned_with_both_ends(tmp_path):
    record(tmp_path, [group(0, *(float(at) for at in range(1000)))])
    told = scores_of(opened(tmp_path), 1)[REWARD]
    assert (len(told.values), told.values[0], told.values[-1], told.mean) == (400, 0.0, 999.0, 499.5)


def test_a_page_reads_few_steps_of_many_and_fewer_where_they_are_large():
    steps = list(range(1, 10_001))
    assert len(chosen(steps, num_trajectories=100)) == 40
    assert len(chosen(steps, num_trajectories=100, most=8)) == 8
    assert chosen(steps, num_trajectories=20_000) == [1, 10_000]
    assert chosen([3, 4], num_trajectories=100) == [3, 4]
    assert chosen([3, 4], num_trajectories=0) == [3, 4], "the newest step cannot be read"


def test_a_picture_has_a_column_a_step_and_shares_in_their_place(run):
    (column,) = picture({1: scores_of(run, 1)[REWARD]}, Axis(low=0.0, high=1.0))
    assert (column["left"], column["width"], column["mean_at"]) == (0.0, 100.0, 50.0)
    assert [(cell["top"], cell["share"]) for cell in column["cells"]] == [
        (93.75, 0.3333),
        (43.75, 0.3333),
        (0.0, 0.3333),
    ]
