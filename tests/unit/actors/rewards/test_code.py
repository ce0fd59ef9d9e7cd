import json
import time
from unittest.mock import Mock

import pytest

from actors.reward_service.judgement import find_judge, judge_now
from actors.sandbox.host_process import HostProcess
from actors.sandbox.judging import program_of, same_output, same_value
from cluster.contracts.errors import WorkerError
from cluster.contracts.plugins import Plugin
from cluster.contracts.types import RewardStatus

DOUBLES = {"cases": [{"input": "1\n", "output": "2"}, {"input": "2\n", "output": "4\n"}]}


def judged(name, program, columns, **params):
    return judged_text(name, f"So:\n```python\n{program}\n```\nDone.", columns, **params)


def judged_text(name, completion, columns, **params):
    judge = find_judge(Plugin(name=name, params=params))
    (reward,) = judge_now(judge, {"prompt": "?", "completion": completion, "columns": columns})
    return reward


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        ("```python\na\n```\nor\n```py\nb\n```", "b\n"),
        ("```cpp\na\n```\ntext\n```python\nb\n```", "b\n"),
        ("```python\na\n```\n```cpp\nb\n```", "a\n"),
        ("```\na\n```", "a\n"),
        ("```\na\n```\n```\nb\n```", "b\n"),
        ("```python\na\n```\nIt prints:\n```\n5\n```", "a\n"),
        ('```python title="a.py"\na\n```\n```\n5\n```', "a\n"),
        ("```print(1)```\n```python\na\n```", "a\n"),
        ("```python\ns = 'a\x0cb\u2028c'\r\n```\r\n", "s = 'a\x0cb\u2028c'\n"),
        ("1. Twice:\n   ```python\n   if a:\n       b\n   ```\n", "if a:\n    b\n"),
        ("````python\na\n````", "a\n"),
        ('````python\nd = """\n```\n"""\n`````', 'd = """\n```\n"""\n'),
        ("```python\na\n````\n```python\nb\n``", "a\n"),
        ("```python\na\n``` b\n```", "a\n``` b\n"),
        ("<answer>\n```python\na\n```</answer></final> \nDone.", "a\n"),
        ("```python\ndef f():\n    return 1```\nIt prints:\n```\n1\n```", "def f():\n    return 1\n"),
        ("1. So:\n   ```python\n   a\n   b```", "a\nb\n"),
        ("```python\na = `b` ```\n```", "a = `b` ```\n"),
        ("```python\na</answer>", None),
        ("````python\na\n```", None),
        ("```python\na", None),
        ("a", None),
    ],
)
def test_the_program_is_the_last_closed_block_of_the_language_or_else_the_last_unmarked_one(completion, program):
    assert program_of(completion) == program


def test_outputs_are_compared_word_by_word_and_numbers_within_the_tolerance():
    assert same_output("1 2\n 3", "1\n2 3\n", tolerance=None)
    assert not same_output("1 2", "1 2 3", tolerance=None)
    assert not same_output("0.3000001", "0.3", tolerance=None)
    assert same_output("0.3000001 yes", "0.3 yes", tolerance=1e-6)
    assert not same_output("nan", "0.3", tolerance=1e-6)


def test_a_long_number_that_a_letter_ends_is_read_once():
    """Each of its digits began the rest anew: 100,000 took minutes."""
    began = time.process_time()
    assert not same_output("1" * 100_000 + "x", "1", tolerance=1e-6)
    assert time.process_time() - began < 5.0


@pytest.mark.parametrize(("said", "expected"), [("٣", "3"), ("1_000", "1000"), ("infinity", "inf"), ("1e999", "1e400")])
def test_a_tolerance_makes_no_number_of_a_word_that_is_none(said, expected):
    assert not same_output(said, expected, tolerance=1e-6)


def test_with_a_tolerance_equal_values_are_equal_whatever_their_size():
    assert same_value(10**400, 10**400, tolerance=1e-6)
    assert not same_value(10**400, 10**400 + 1, tolerance=1e-6)
    assert same_value(float("inf"), float("inf"), tolerance=1e-6)


def test_values_are_compared_as_json_knows_them():
    assert same_value(({1: (2, 3.0000001)},), [{"1": [2, 3]}], tolerance=1e-6)
    assert not same_value([1, 2], [1], tolerance=None)
    assert not same_value({10**5000: 1}, {"1": 1}, tolerance=None), "a key of more digits than Python writes"


def test_a_share_of_the_cases_earns_it_or_nothing():
    halves = judged("code_stdin", "n = int(input())\nprint(2 * n if n == 1 else 0)", DOUBLES, score="share")
    assert halves.value == 0.5 and halves.components["wrong"] == 1.0
    assert judged("code_stdin", "print(2)", DOUBLES).value == 0.0
    assert judged("code_stdin", "print(2 * int(input()))", DOUBLES).value == 1.0


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("1/0", "crashed"),
        ("while True: pass", "out_of_time"),
        ("a = bytearray(8 << 30)", "out_of_memory"),
        ("print(0)", "wrong"),
    ],
)
def test_why_a_program_fails_is_a_component_and_it_earns_nothing(program, reason):
    reward = judged("code_stdin", program, DOUBLES, sandbox={"time_s": 0.5} if reason == "out_of_time" else {})
    assert reward.value == 0.0
    assert {name: value for name, value in reward.components.items() if value} == {reason: 1.0}


@pytest.mark.parametrize(
    ("completion", "value"),
    [
        ("<think>{x}</think>{y}", 1.0),
        ("<think>\n```python\n</think>{y}", 1.0),
        ("<think>{y}</think>I give up.", 0.0),
        ("<think>{y}", 0.0),
    ],
)
def test_a_program_of_the_reasoning_is_no_answer(completion, value):
    programs = {"x": "\n```python\nx\n```\n", "y": "\n```python\nprint(2 * int(input()))\n```\n"}
    assert judged_text("code_stdin", completion.format(**programs), DOUBLES).value == value


def test_a_completion_without_a_program_earns_nothing_and_says_so():
    reward = judged_text("code_stdin", "print(2)", DOUBLES)
    assert (reward.value, reward.components["no_program"]) == (0.0, 1.0)


def test_cases_that_the_time_for_all_does_not_reach_are_out_of_time_and_no_failure(monkeypatch):
    """One that it reaches takes 0.1 s or more."""
    ran = Mock(side_effect=HostProcess.exchange)
    monkeypatch.setattr(HostProcess, "exchange", lambda *given, **more: ran(*given, **more))
    cases = {"cases": {"inputs": ["a"] * 50, "outputs": ["a"] * 50}}
    reward = judged("code_stdin", "while True: pass", cases, score="share", sandbox={"time_s": 0.1, "total_s": 0.5})
    assert (reward.value, reward.components["out_of_time"], reward.status) == (0.0, 1.0, RewardStatus.OK)
    assert ran.call_count <= 1 + 6, "with the sandbox's own first program"


def test_an_expected_output_may_be_longer_than_the_limit():
    cases = {"cases": [{"input": "", "output": "a" * 5000}]}
    assert judged("code_stdin", "print('a' * 5000)", cases, sandbox={"output_bytes": 1000}).value == 1.0


def test_a_function_is_called_with_each_case():
    cases = {"fn_name": "add", "cases": json.dumps({"inputs": [[1, 2], [[3], [4]]], "outputs": [3, [3, 4]]})}
    assert judged("code_function", "def add(a, b): return a + b", cases).value == 1.0
    assert judged("code_function", "def add(a, b): return a * b", cases, score="share").value == 0.0
    solution = "class Solution:\n    def add(self, a, b): return a + b"
    assert judged("code_function", solution, cases, function="Solution().add").value == 1.0


def test_outputs_that_are_all_wrapped_in_lists_as_in_apps_may_be_returned_bare():
    wrapped = {"fn_name": "f", "cases": {"inputs": [[2], [3]], "outputs": [[[0, 1]], [[0, 1, 2]]]}}
    assert judged("code_function", "def f(n): return list(range(n))", wrapped).value == 1.0
    assert judged("code_function", "def f(n): return [list(range(n))]", wrapped).value == 1.0
    assert judged("code_function", "def f(n): return [0]", wrapped, score="share").value == 0.0
    mixed = {"fn_name": "f", "cases": {"inputs": [[1], [2]], "outputs": [[0], [0, 1]]}}
    program = "def f(n): return list(range(n)) if n > 1 else 0"
    assert judged("code_function", program, mixed, score="share").value == 0.5


def test_a_named_tuple_is_a_list_of_its_values():
    program = "from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef f(x): return P(x, [x])"
    cases = {"cases": [{"input": [1], "output": [1, [1]]}]}
    assert judged("code_function", program, cases, function="f").value == 1.0


@pytest.mark.parametrize(("program", "value"), [("x = 1", 0.0), ("def max(a, b): return 2", 1.0), ("max = min", 0.0)])
def test_a_function_of_pythons_own_name_is_the_programs(program, value):
    """`max` answered for a program that has none."""
    cases = {"fn_name": "max", "cases": [{"input": [1, 2], "output": 2}]}
    assert judged("code_function", program, cases).value == value


def test_decimals_and_fractions_are_numbers_and_a_signaling_one_is_wrong_and_no_failure():
    cases = {"cases": [{"input": ["0.1"], "output": 0.1}]}
    for kind in ("decimal.Decimal", "fractions.Fraction"):
        program = f"import {kind.partition('.')[0]}\ndef f(x): return {kind}(x)"
        assert judged("code_function", program, cases, function="f", tolerance=1e-9).value == 1.0
    reward = judged("code_function", "import decimal\ndef f(x): return decimal.Decimal('sNaN')", cases, function="f")
    assert (reward.value, reward.status) == (0.0, RewardStatus.OK)


def test_what_the_data_set_expects_of_a_function_is_not_too_long():
    long = {"cases": [{"input": [100_000], "output": list(range(100_000))}] * 2}
    assert judged("code_function", "def f(n): return list(range(n))", long, function="f").value == 1.0
    nested = {"cases": [{"input": [500], "output": [[]] * 500}]}
    limits = {"output_bytes": 1000}
    assert judged("code_function", "def f(n): return [[]] * n", nested, function="f", sandbox=limits).value == 1.0


@pytest.mark.parametrize(
    "case", [{"input": "", "output": ["a"]}, {"input": ["a"], "output": 1}, {"input": "", "output": None}]
)
def test_what_a_script_reads_and_prints_is_a_text_or_a_number(case):
    reward = judged("code_stdin", "print('a')", {"cases": [case]})
    assert reward.status is RewardStatus.ERROR and "must be a text or a number" in reward.message
    assert judged("code_stdin", "print(2 * int(input()))", {"cases": [{"input": 1, "output": 2}]}).value == 1.0


def test_one_text_of_inputs_is_no_list_of_its_characters():
    reward = judged("code_stdin", "print(2 * int(input()))", {"cases": {"inputs": "21", "outputs": "42"}})
    assert reward.status is RewardStatus.ERROR and "nor {inputs, outputs}" in reward.message


def test_arguments_may_be_infinite_and_must_be_a_list():
    cases = {"cases": [{"input": [float("inf")], "output": True}]}
    assert judged("code_function", "def f(x): return x > 9", cases, function="f").value == 1.0
    reward = judged("code_function", "def f(x): return x", {"cases": [{"input": {"x": 1}, "output": 1}]}, function="f")
    assert reward.status is RewardStatus.ERROR and "is not a list" in reward.message


def test_tests_of_two_data_sets_are_read():
    listed = {"tests": ["assert f(2) == 4", "assert f(3) == 9"]}
    assert judged("code_asserts", "def f(x): return x * x", listed).value == 1.0
    assert judged("code_asserts", "def f(x): return 2 * x", listed, score="share").value == 0.5
    checked = {"tests": "def check(candidate):\n    assert candidate(2) == 4\n", "entry_point": "f"}
    assert judged("code_asserts", "def f(x): return x * x", checked, entry_point="entry_point").value == 1.0
    assert judged("code_asserts", "def f(x): return x", checked, entry_point="entry_point").value == 0.0


@pytest.mark.parametrize(
    "test", ["assert all(map(lambda x: f(x) == x, [1]))", "for got, want in zip(map(f, [1]), [1]): assert got == want"]
)
def test_a_program_does_not_end_the_loop_of_its_test(test: str):
    for ends in ("StopIteration", "StopAsyncIteration", "GeneratorExit"):
        assert judged("code_asserts", f"def f(x): raise {ends}", {"tests": [test]}).value == 0.0
    assert judged("code_asserts", "def f(x): return x", {"tests": [test]}).value == 1.0


def test_tests_that_do_not_compile_are_an_error_of_the_data():
    reward = judged("code_asserts", "def f(x): return x", {"tests": ["assert f(2"]})
    assert reward.status is RewardStatus.ERROR and "does not compile" in reward.message


def test_a_comparison_that_nothing_looks_at_is_an_error_of_the_data():
    """It gave every program 1 that has an `f`."""
    reward = judged("code_asserts", "def f(x): return x", {"tests": ["f(2) == 4"]})
    assert reward.status is RewardStatus.ERROR
    assert "compares in vain, 'f(2) == 4': begin it with assert" in reward.message


@pytest.mark.parametrize("completion", ["", "```\ndef f(x): return x * x\n```"])
@pytest.mark.parametrize(
    ("tests", "message"),
    [
        ("assert (f(2) == 4, 'wrong')", "asserts a tuple, which always holds, \"assert (f(2) == 4, 'wrong')\""),
        ("def check(f):\n    assert (f(2) == 4,)\n    assert f(3) == 9\ncheck(f)", "asserts a tuple"),
        (["x = f(2)", "print(x == 4)"], "the tests in the column 'tests' cannot fail"),
        (
            "import numpy as np\nassert np.allclose(f(2), 4)",
            "import numpy, and the sandbox lacks it: name packages in ",
        ),
        ("from solution import *\nassert f(2) == 4", "import solution, and the sandbox lacks it"),
        ("import asyncio\nassert asyncio.run(f(2)) == 4", "need an event loop, which the sandbox lacks"),
        (
            "import io\nfrom contextlib import redirect_stdout\nout = io.StringIO()\nwith redirect_stdout(out): f(2)\n"
            "assert out.getvalue() == '4'",
            "need the program's output, which they cannot read: compare it with code_stdin",
        ),
    ],
)
def test_tests_that_all_programs_pass_or_none_are_an_error_of_the_data(tests, message, completion):
    reward = judged_text("code_asserts", completion, {"tests": tests})
    assert reward.status is RewardStatus.ERROR and message in reward.message


def test_tests_may_import_the_packages_that_the_sandbox_has():
    tests = {"tests": "import numpy as np\nassert np.allclose(f(2), [4])"}
    assert judged("code_asserts", "def f(x): return [x * x]", tests, sandbox={"imports": ["numpy"]}).value == 1.0


@pytest.mark.parametrize(
    "tests",
    [
        "def check(candidate):\n    assert candidate(2) == 4\n",
        ["import math", "def test_f():\n    assert f(2) == 4\n"],
        "def test_f():\n    assert f(2) == 4\n\nif __name__ == '__main__':\n    test_f()\n",
    ],
)
@pytest.mark.parametrize("completion", ["", "```\npass\n```", "```\ndef f(x): return x * x\n```"])
def test_tests_that_use_nothing_of_the_program_are_an_error_of_the_data(tests, completion):
    """Every program earned 1 by them, even `pass`."""
    reward = judged_text("code_asserts", completion, {"tests": tests})
    assert reward.status is RewardStatus.ERROR
    assert "the tests in the column 'tests' use nothing of the program" in reward.message
    assert "in reward.judge.entry_point" in reward.message


@pytest.mark.parametrize(
    ("program", "test"),
    [
        ("ANSWER = 42", "assert ANSWER == 42"),
        ("class Stack:\n    size = 0", "assert Stack.size == 0"),
        ("def f(): print('a')", "assert callable(f)"),
        ("def sum(a, b): return 6", "assert sum(10, 15) == 6"),
    ],
)
def test_tests_may_look_at_a_program_without_calling_it(program, test):
    assert judged("code_asserts", program, {"tests": test}).value == 1.0
    assert judged("code_asserts", "pass", {"tests": test}).value == 0.0


@pytest.mark.parametrize(
    "test", ["assert f(lambda x: x, 1) == 1", "class Node: pass\nassert f(Node(), 1) == 1", "assert f(len, 1) == 1"]
)
def test_tests_that_cannot_pass_their_arguments_to_the_program_are_an_error_of_the_data(test):
    """Every program earned 0 by them, the right ones too."""
    reward = judged("code_asserts", "def f(g, x): return x", {"tests": ["assert f(1, 1) == 1", test]}, score="share")
    assert reward.status is RewardStatus.ERROR and "only plain values pass" in reward.message


@pytest.mark.parametrize(
    ("program", "value"),
    [
        ("def f(n): yield from range(n)", 0.0),
        ("class Own:\n    def __getitem__(self, at): return [0, 1, 2][at]\ndef f(n): return Own()", 1.0),
    ],
)
def test_a_test_may_slice_an_object_of_the_program(program, value):
    """A generator, which has no slices, was an error of the data and no wrong answer."""
    reward = judged("code_asserts", program, {"tests": ["assert f(3)[:2] == [0, 1]"]})
    assert (reward.value, reward.status) == (value, RewardStatus.OK)


def test_only_a_sandbox_that_fails_is_a_failed_reward(monkeypatch):
    error = WorkerError("sandbox_failed: no answer", stage="sandbox")
    monkeypatch.setattr(HostProcess, "exchange", Mock(side_effect=error))
    reward = judged("code_stdin", "print(2)", DOUBLES)
    assert (reward.value, reward.status) == (None, RewardStatus.ERROR)
    assert reward.message == "sandbox WorkerError: sandbox_failed: no answer"
