"""What held-out rewards come to, by hand."""

import math
import sys

import pytest

from cluster.scores import pass_at_k, scores, standard_error
from tests.fakes import group_summary


def found(*rewards, sources=None, words=None, success_at=1.0, num_samples=1):
    summaries = [group_summary(index, num_trajectories=len(each), rewards=each) for index, each in enumerate(rewards)]
    return scores(summaries, success_at=success_at, num_samples=num_samples, sources=sources or {}, words=words or {})


def test_a_success_is_a_reward_at_the_threshold_whatever_the_scale():
    rewards = ((70.0,), (80.0,), (81.0,), (None,))
    assert found(*rewards, success_at=80.0)["eval/accuracy"] == pytest.approx(2 / 3)
    assert found(*rewards)["eval/accuracy"] == 1.0


@pytest.mark.parametrize("reward", [math.fsum((0.7, 0.29, 0.01)), math.fsum([0.16666667] * 6)])
def test_a_reward_whose_parts_add_up_to_the_threshold_reaches_it(reward):
    """Seen before: in floating point they are a bit less, and no perfect completion was a success."""
    assert reward != 1.0 and found((reward,), (0.9999,))["eval/accuracy"] == 0.5


def test_nothing_is_no_success_where_anything_is():
    assert found((0.0,), (1e-9,), success_at=1e-9)["eval/accuracy"] == 0.5


def test_pass_at_k_is_one_minus_the_draws_without_a_success():
    """Of 4 samples 1 is right: 2 draws miss it in C(3,2) of C(4,2) ways."""
    assert [pass_at_k(4, 1, k) for k in (1, 2, 4)] == [1 / 4, 1 / 2, 1.0]
    assert pass_at_k(4, 0, 4) == 0.0


def test_pass_at_k_is_reported_for_1_the_powers_of_2_and_the_number_of_samples():
    told = found((1.0, 0.0, 0.0, 0.0, 0.0, 0.0), (0.0,) * 6, num_samples=6)
    assert {name: value for name, value in told.items() if "pass" in name and "stderr" not in name} == pytest.approx(
        {"eval/pass_at_1": 1 / 12, "eval/pass_at_2": 1 / 6, "eval/pass_at_4": 1 / 3, "eval/pass_at_6": 1 / 2}
    )
    assert told["eval/pass_at_6_stderr"] == pytest.approx(math.sqrt(0.5) / math.sqrt(2))
    assert not any("pass" in name for name in found((1.0,)))


def test_a_prompt_with_too_few_known_rewards_is_not_asked_for_its_pass_at_k():
    told = found((1.0, None), (0.0, 0.0), num_samples=2)
    assert told["eval/pass_at_1"] == 0.5 and told["eval/pass_at_2"] == 0.0


def test_the_standard_error_is_over_prompts_not_over_completions():
    """Prompt means 1 and 0: deviation sqrt(1/2), over sqrt(2) prompts. Four independent values would give 0.29."""
    assert standard_error([[1.0, 1.0], [0.0, 0.0]]) == pytest.approx(0.5)
    assert found((1.0, 1.0), (0.0, 0.0))["eval/reward_stderr"] == pytest.approx(0.5)


def test_rows_of_the_same_words_are_one_prompt():
    """Seen before: an error of 0.29, as of four prompts, where each of two stands in two rows."""
    words = {f"{index:08d}": each for index, each in enumerate(("2+2?", "2+3?", "2+2?", "2+3?"))}
    told = found((1.0, 1.0), (0.0, 0.0), (1.0, 1.0), (0.0, 0.0), words=words, num_samples=2)
    errors = {name: value for name, value in told.items() if name.endswith("_stderr")}
    assert len(errors) == 4 and errors == pytest.approx(dict.fromkeys(errors, 0.5))
    assert told["eval/reward"] == told["eval/pass_at_2"] == 0.5


def test_a_prompt_that_lost_a_sample_weighs_by_those_it_kept():
    """Mean 2/3, residuals (2/3, -2/3): sqrt(2 * 8/9) / 3."""
    assert standard_error([[1.0, 1.0], [0.0], []]) == pytest.approx(math.sqrt(2 * 8 / 9) / 3)


def test_rewards_whose_square_is_no_number_have_a_standard_error():
    """Seen before: the evaluation ended the run with an OverflowError. Means 1e200 and 0: half of it, as for 1 and 0."""
    told = found((1e200, 1e200), (0.0, 0.0))
    assert (told["eval/reward"], told["eval/reward_stderr"]) == (5e199, pytest.approx(5e199))


def test_the_largest_rewards_have_a_mean():
    """Seen before: an infinite one, which no checkpoint is rated by."""
    told = found((sys.float_info.max, sys.float_info.max), (sys.float_info.max, sys.float_info.max))
    assert (told["eval/reward"], told["eval/reward_stderr"]) == (sys.float_info.max, 0.0)


def test_one_prompt_has_no_standard_error():
    assert math.isnan(found((1.0, 0.0))["eval/accuracy_stderr"])


def test_each_source_has_its_own_means():
    sources = {f"{index:08d}": name for index, name in enumerate(("algebra", "algebra", "geometry"))}
    told = found((1.0,), (0.0,), (3.0,), (9.0,), sources=sources)
    assert told["eval/reward/algebra"] == 0.5 and told["eval/accuracy/algebra"] == 0.5
    assert told["eval/reward/geometry"] == 3.0 and told["eval/reward"] == 13 / 4
