"""Rewards for programs that pass tests. Programs run in a sandbox (`actors.sandbox`). A wrong, crashing or slow program earns 0. Only a
failure of the sandbox, or of the prompt's cases or tests, is a failed reward. The program is the completion's last fenced Python block.

The components say why a program failed: no_program, wrong, crashed, out_of_time, out_of_memory.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import NonNegativeFloat

from actors.sandbox.judging import (
    Score,
    cases_of,
    each_in_time,
    json_of,
    program_of,
    reward_of,
    same_output,
    same_value,
    texts_of,
)
from actors.sandbox.roles import PROGRAM
from actors.sandbox.sandbox import Sandbox, SandboxConfig, Verdict
from actors.sandbox.used_names import look_at, unseen_comparison
from cluster.contracts.errors import DataError


def code_stdin(
    *,
    prompt: str,
    completion: str,
    columns: Mapping[str, Any],
    finish_reason: str = "",
    messages: Sequence[Mapping[str, Any]] = (),
    column: str = "cases",
    score: Score = "all",
    tolerance: NonNegativeFloat | None = None,
    sandbox: SandboxConfig | None = None,
) -> dict[str, float]:
    """Runs the program as a script on each case's `input`, and compares its output with the case's `output`, word by word.

    The column holds a list of `{input, output}`, or `{inputs, outputs}`. `score` is `all` or `share`, the share of passed cases. Numbers
    may differ by `tolerance`, absolutely or relatively. Cases after `sandbox.total_s` count as out of time. `sandbox` may set level
    (`auto`, `landlock`, `bwrap`, `none`), time_s, total_s, memory_bytes, output_bytes, and imports, the packages that programs may use.
    Raises DataError if the prompt has no such cases.
    """
    cases = texts_of(columns, column)
    program = program_of(completion, prompt=prompt, finish_reason=finish_reason, messages=messages)
    if program is None:
        return reward_of(None, score=score)

    box = _sandbox(sandbox or SandboxConfig())

    def judge(case: tuple[str, str], *, wall_s: float) -> Verdict:
        given, expected = case
        # An expected output may be longer than the configured limit.
        ran = box.run(program, stdin=given, wall_s=wall_s, output_bytes=2 * len(expected.encode()))
        if ran.verdict is Verdict.OK and not same_output(ran.stdout, expected, tolerance=tolerance):
            return Verdict.WRONG
        return ran.verdict

    return reward_of(each_in_time(cases, judge, score=score, total_s=box.config.total_s), score=score)


def code_function(
    *,
    prompt: str,
    completion: str,
    columns: Mapping[str, Any],
    finish_reason: str = "",
    messages: Sequence[Mapping[str, Any]] = (),
    function: str | None = None,
    column: str = "cases",
    score: Score = "all",
    tolerance: NonNegativeFloat | None = None,
    sandbox: SandboxConfig | None = None,
) -> dict[str, float]:
    """Calls the program's function with each case's `input`, a list of arguments, and compares the result with `output`.

    `function` is its name, or `Solution().name`. None takes the prompt's column `fn_name`. The program never sees the expected outputs:
    it returns plain values, which are compared outside. If all outputs are lists of one element, as APPS wraps them, the element alone is
    right too. Raises DataError if the prompt has no such cases, or no function name.
    """
    cases = cases_of(columns, column)
    name = function or columns.get("fn_name")
    if not isinstance(name, str):
        raise DataError("the prompt has no column 'fn_name'; name the function with reward.judge.function")
    if not all(isinstance(given, list) for given, _ in cases):
        raise DataError(f"an input in the column {column!r} is not a list; it must hold the arguments of one call")
    if (program := program_of(completion, prompt=prompt, finish_reason=finish_reason, messages=messages)) is None:
        return reward_of(None, score=score)
    questions = [f"{PROGRAM}.{name}(*{list(given)!r})" for given, _ in cases]
    # As above. Encoded for the pipe, an empty list is six times as long as in the data set.
    expected_bytes = len(json.dumps([expected for _, expected in cases], default=str))
    answers = _sandbox(sandbox or SandboxConfig()).ask(program, questions, output_bytes=8 * expected_bytes)
    are_wrapped = all(isinstance(expected, list) and len(expected) == 1 for _, expected in cases)

    def is_right(said: Any, expected: Any) -> bool:
        right = [expected, *expected] if are_wrapped else [expected]
        return any(same_value(said, each, tolerance=tolerance) for each in right)

    verdicts = [
        Verdict.WRONG if answer.verdict is Verdict.OK and not is_right(answer.value, expected) else answer.verdict
        for answer, (_, expected) in zip(answers, cases, strict=True)
    ]
    return reward_of(verdicts, score=score)


def code_asserts(
    *,
    prompt: str,
    completion: str,
    columns: Mapping[str, Any],
    finish_reason: str = "",
    messages: Sequence[Mapping[str, Any]] = (),
    column: str = "tests",
    entry_point: str | None = None,
    score: Score = "all",
    sandbox: SandboxConfig | None = None,
) -> dict[str, float]:
    """Runs tests that raise unless they pass: a list of statements such as `assert f(2) == 4`, or one text.

    `entry_point` names the column with the function's name, for tests that define `check(candidate)`, such as HumanEval's. The tests run
    confined in a second process, to which the program's process returns plain values. Tests can use instances, functions and iterators of
    the program, and catch its exceptions, but these equal nothing, are ordered and added only with one another, and a `with` of theirs
    swallows no error. Arguments are copies of plain values, or objects of the program; a lambda cannot be passed. If a function returns
    None, its in-place changes to a list, dict, set or deque are copied back to the tests. A name that the tests neither import nor define,
    and that is not a Python builtin, is the program's: so tests that use np.allclose or Counter must import them. If the tests use one
    builtin and no other name of the program, and the program defines that name, it is the program's, as in `assert sum(10, 15) == 6`.

    Raises DataError for a prompt without tests, for tests that do not compile, that compare without `assert`, that have no `assert` or the
    like where they run, that import modules which the sandbox lacks, that need an event loop or the program's output, or that use nothing
    of the program, such as functions that are never called, and for tests that pass a lambda or another value that is not plain to the
    program.
    """
    tests = json_of(columns, column)
    tests = [tests] if isinstance(tests, str) else tests
    if not isinstance(tests, list) or not tests or not all(isinstance(test, str) for test in tests):
        raise DataError(
            f"the column {column!r} is neither a text nor a list of texts; give each prompt at least one test"
        )
    if entry_point is not None:
        tests = [f"{test}\ncheck({json_of(columns, entry_point)})" for test in tests]
    box = _sandbox(sandbox or SandboxConfig())
    _require_fit_tests(tuple(tests), column=column, box=box)
    if (program := program_of(completion, prompt=prompt, finish_reason=finish_reason, messages=messages)) is None:
        return reward_of(None, score=score)
    answers = box.ask(program, tests)
    return reward_of([answer.verdict for answer in answers], score=score)


def _require_fit_tests(tests: tuple[str, ...], *, column: str, box: Sandbox) -> None:
    """Raises DataError for tests that cannot judge a program."""
    for test in tests:
        try:
            compile(test, "<test>", "exec")
        except SyntaxError as error:
            raise DataError(f"a test in the column {column!r} does not compile: {error}") from None
        if unseen := unseen_comparison(test):
            raise DataError(f"a test in the column {column!r} compares in vain, {unseen!r}: begin it with assert")
    look = look_at(tests)
    if look.asserted_tuple:
        raise DataError(
            f"a test in the column {column!r} asserts a tuple, which always holds, {look.asserted_tuple!r:.200}: remove its brackets"
        )
    if not look.use_program:
        raise DataError(
            f"the tests in the column {column!r} use nothing of the program, so they cannot judge it: call the functions that the tests "
            "define, outside of `if __name__ == '__main__'`, and import none of the program's; if they define check(candidate), name the "
            "column with the function's name in reward.judge.entry_point"
        )
    if not look.can_fail:
        raise DataError(
            f"the tests in the column {column!r} cannot fail, so they cannot judge a program: compare with assert where the tests run, and "
            "catch neither its error nor the result of a unittest runner"
        )
    if look.unmet_need:
        raise DataError(f"the tests in the column {column!r} need {look.unmet_need}")
    if lacks := box.lacks(look.imported):
        raise DataError(
            f"the tests in the column {column!r} import {', '.join(lacks)}, and the sandbox lacks it: name packages in "
            "reward.judge.sandbox.imports, as in [numpy]; nothing of the program needs an import"
        )


_sandbox = functools.cache(Sandbox)
