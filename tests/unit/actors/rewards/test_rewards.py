import inspect
import re

import pytest
from sympy import Rational

from actors.gym import DATASETS
from actors.prompts.reasoning_gym import ReasoningGymPrompts
from actors.rewards.exact_match import exact_match
from actors.rewards.math_verify import math_verify
from actors.rewards.reasoning_gym import FORMULAS, LISTS, reasoning_gym
from actors.rewards.regex import regex
from cluster.contracts.errors import ConfigError, DataError

SUM = {"answer": "17", "metadata": {}, "task": "chain_sum", "task_config": {}}


def said(judge, completion, columns, **params):
    return judge(prompt="?", completion=completion, columns=columns, **params)


def test_exact_match_looks_at_case_unless_told_otherwise():
    assert said(exact_match, "Paris", {"answer": "paris"}) == 0.0
    assert said(exact_match, "Paris", {"answer": "paris"}, ignore_case=True) == 1.0


def test_exact_match_takes_a_number_as_written():
    assert said(exact_match, "42", {"answer": 42}) == 1.0


def test_a_pattern_alone_rewards_the_format():
    assert said(regex, "<think>\n</think>", {}, pattern="<think>.*</think>") == 1.0
    assert said(regex, "<think>", {}, pattern="<think>.*</think>") == 0.0


def test_a_pattern_with_a_column_judges_the_last_match():
    pattern = r"#### (-?\d+)"
    assert said(regex, "#### 7, no: #### 8", {"answer": "8"}, pattern=pattern, column="answer") == 1.0
    assert said(regex, "#### 8, no: #### 7", {"answer": "8"}, pattern=pattern, column="answer") == 0.0


@pytest.mark.parametrize("pattern", [r"[^\n]*$", r"(\d*)\s*$"])
def test_a_match_of_nothing_behind_the_last_one_is_no_match(pattern):
    assert said(regex, "so\n42", {"answer": "42"}, pattern=pattern, column="answer") == 1.0


def test_a_group_that_took_no_part_in_the_match_is_no_answer():
    assert said(regex, "none", {"answer": "8"}, pattern=r"(\d)?none", column="answer") == 0.0


def test_a_broken_pattern_is_a_config_error():
    with pytest.raises(ConfigError, match=r"reward.judge.pattern='\(' is not a regular expression"):
        said(regex, "x", {}, pattern="(")


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("so \\boxed{\\frac{1}{2}}", "0.5"),
        ("the answer is 42", "42"),
        ("$x^2 - 1$", "(x-1)(x+1)"),
        ("-17", "-17"),
        ("$\\frac12$", "$1/2$"),
    ],
)
def test_math_verify_sees_through_notation(completion, answer):
    assert said(math_verify, completion, {"answer": answer}) == 1.0


@pytest.mark.parametrize("completion", [r"\boxed{10^{-5}}", r"\boxed{0.00001}", r"\boxed{1e-05}"])
def test_math_verify_reads_a_small_number_of_a_column_as_the_number(completion):
    assert said(math_verify, completion, {"answer": 1e-05}) == 1.0


def test_math_verify_warns_nobody_of_deadlines_that_are_off_by_intention(monkeypatch, caplog):
    for part in ("parser", "grader"):
        monkeypatch.setattr(f"math_verify.{part}.TIMEOUT_WARNING_SHOWN", False)
    said(math_verify, "2", {"answer": "2"})
    assert caplog.records == []


def test_math_verify_blames_a_bad_answer_on_the_data():
    with pytest.raises(DataError, match="not a mathematical expression"):
        said(math_verify, "1", {"answer": ""})


def test_reasoning_gym_gives_part_of_the_reward_for_the_answer_amid_text():
    assert said(reasoning_gym, "17", SUM) == 1.0
    assert said(reasoning_gym, "it is 17", SUM) == pytest.approx(2 / 8)


def test_an_answer_that_a_verifier_cannot_read_earns_nothing_and_a_broken_prompt_is_an_error():
    """The verifier of `prime_factorization` makes a number of each factor."""
    columns = {"answer": "2 × 3", "metadata": {"number": 6}, "task": "prime_factorization", "task_config": {}}
    assert [said(reasoning_gym, text, columns) for text in ("2 × 3", "The factors are 2 and 3")] == [1.0, 0.0]
    with pytest.raises(ValueError, match="two times three"):
        said(reasoning_gym, "2 x 3", columns | {"answer": "two times three"})


def test_the_tasks_whose_verifiers_evaluate_an_answer_are_known():
    sources = {name: inspect.getsource(task.score_answer) for name, (task, _) in DATASETS.items()}
    evaluated = {
        name for name, source in sources.items() if re.search(r"\b(eval|exec|parse_expr|sympify)\(answer", source)
    }
    assert evaluated == LISTS | FORMULAS


@pytest.mark.slow
@pytest.mark.parametrize("task", sorted(LISTS | FORMULAS))
def test_an_answer_is_read_and_never_run(task, tmp_path, monkeypatch):
    prompt = ReasoningGymPrompts(task=task, size=1)[0]
    monkeypatch.chdir(tmp_path)
    program = "__import__('os').system('touch ran')"
    spelled = "+".join(f"chr({ord(letter)})" for letter in program)
    commented, renamed = spelled.replace("chr", "chr#sin\n"), spelled.replace("chr", "csch")
    quoted = "+".join(f"Rational.__doc__[{Rational.__doc__.index(letter)}]" for letter in program)
    escaped = '"' + "".join(f"\\x{ord(letter):x}" for letter in program) + '"'
    for answer in (
        program,
        f"[{program}]",
        f"exec({spelled})",
        f"(exec)({spelled})",
        f"(exec#\n({spelled}))",
        f"(exec#sin\n({commented}))",
        f'sin("{program}")',
        escaped,
        f"sin({escaped})",
        f"sin({quoted})",
        f"[sin := exec, sin({escaped})]",
        f"[sin({escaped}) for sin in [exec]]",
        f"[sin({renamed}) for sin in [exec] for csch in [chr]]",
    ):
        said(reasoning_gym, answer, prompt.columns)
        assert not (tmp_path / "ran").exists(), answer
    assert said(reasoning_gym, prompt.columns["answer"], prompt.columns) == 1.0


@pytest.mark.parametrize("formula", ["(9**9)**(9**9)", "factorial(factorial(20))"])
def test_a_formula_that_would_never_end_to_be_computed_earns_what_no_answer_does(monkeypatch, formula):
    columns = {"answer": "17", "metadata": {}, "task": "countdown", "task_config": {}}
    judged: list[str | None] = []
    monkeypatch.setattr(
        "reasoning_gym.games.countdown.CountdownDataset.score_answer", lambda *given: judged.append(given[1]) or 0.0
    )
    said(reasoning_gym, formula, columns)
    said(reasoning_gym, "(9 + 8)**2 * factorial(5)", columns)
    said(reasoning_gym, formula, columns | {"task": "chain_sum"})
    assert judged == [None, "(9 + 8)**2 * factorial(5)"]


def test_reasoning_gym_judges_the_last_answer_tag_when_told_to():
    assert said(reasoning_gym, "<answer>3</answer> <answer>17</answer>", SUM, answer_tag="answer") == 1.0
    assert said(reasoning_gym, "17", SUM, answer_tag="answer") == 0.0
