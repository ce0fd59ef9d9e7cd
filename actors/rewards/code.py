"""Rewards for programs that pass tests. They run in a sandbox (`actors.sandbox`): what a program does is a verdict, and earns nothing
unless it is right; only a sandbox that fails is a failed reward. The program is the completion's last fenced Python block.

The components tell why a program failed: no_program, wrong, crashed, out_of_time, out_of_memory.
"""

import functools
import json
from collections.abc import Mapping
from typing import Any

from pydantic import NonNegativeFloat

from actors.reasoning import after_reasoning
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
from cluster.contracts.errors import DataError


def code_stdin(
    *,
    prompt: str,
    completion: str,
    columns: Mapping[str, Any],
    finish_reason: str = "",
    column: str = "cases",
    score: Score = "all",
    tolerance: NonNegativeFloat | None = None,
    sandbox: SandboxConfig | None = None,
) -> dict[str, float]:
    """A script that reads its standard input: each case's `output` is compared with what it prints, word by word.

    The column holds a list of `{input, output}`, or `{inputs, outputs}`; `score` is `all` or `share`; numbers may differ by `tolerance`.
    A case that `sandbox.total_s` does not reach is out of time. `sandbox` may set level (`auto`, `landlock`, `bwrap`, `none`), time_s,
    total_s, memory_bytes, output_bytes, and imports: packages that programs may use. Raises DataError when the prompt has no such cases.
    """
    cases = texts_of(columns, column)
    program = program_of(after_reasoning(completion, prompt=prompt, finish_reason=finish_reason))
    if program is None:
        return reward_of(None, score=score)

    box = _sandbox(sandbox)

    def judge(case: tuple[str, str], *, wall_s: float) -> Verdict:
        given, expected = case
        # The limit on outputs is no limit on what the data set expects.
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
    function: str | None = None,
    column: str = "cases",
    score: Score = "all",
    tolerance: NonNegativeFloat | None = None,
    sandbox: SandboxConfig | None = None,
) -> dict[str, float]:
    """A function, called with each case's `input`, a list of arguments; what it returns is compared with `output`.

    `function` is its name, or `Solution().name`; None takes the prompt's column `fn_name`. The program never sees the outputs: it
    answers with plain values, which are compared here. Raises DataError when the prompt has no such cases, or no name.
    """
    cases = cases_of(columns, column)
    name = function or columns.get("fn_name")
    if not isinstance(name, str):
        raise DataError("the prompt has no column 'fn_name'; name the function with reward.judge.function")
    if not all(isinstance(given, list) for given, _ in cases):
        raise DataError(f"an input in the column {column!r} is no list; it must hold the arguments of one call")
    if (program := program_of(after_reasoning(completion, prompt=prompt, finish_reason=finish_reason))) is None:
        return reward_of(None, score=score)
    questions = [f"{PROGRAM}.{name}(*{list(given)!r})" for given, _ in cases]
    # As above; an empty list takes six times as much on its way as it takes in a data set.
    expected_bytes = len(json.dumps([expected for _, expected in cases], default=str))
    answers = _sandbox(sandbox).ask(program, questions, output_bytes=8 * expected_bytes)
    verdicts = [
        Verdict.WRONG
        if answer.verdict is Verdict.OK and not same_value(answer.value, expected, tolerance=tolerance)
        else answer.verdict
        for answer, (_, expected) in zip(answers, cases, strict=True)
    ]
    return reward_of(verdicts, score=score)


def code_asserts(
    *,
    prompt: str,
    completion: str,
    columns: Mapping[str, Any],
    finish_reason: str = "",
    column: str = "tests",
    entry_point: str | None = None,
    score: Score = "all",
    sandbox: SandboxConfig | None = None,
) -> dict[str, float]:
    """Tests that raise unless they pass: a list of statements such as `assert f(2) == 4`, or one text.

    `entry_point` names the column with the function's name, for tests that define `check(candidate)`, as HumanEval's do. The tests run in a
    process of their own, confined as well; the program answers them with plain values from its. Instances, functions and iterators of the
    program can be used there, but equal nothing. A list, dict, set or deque that a function changes in place is changed for the tests where
    it returns None, as Python's own do; what else it is given are copies. A name that the tests neither import nor define, nor is Python's
    own, is the program's, whatever it made of it: tests that compare by np.allclose or Counter must import them. A function that alone is
    named there is the program's even where Python has one, as in `assert sum(10, 15) == 6`. Raises DataError for a prompt without tests,
    and for tests that do not compile.
    """
    tests = json_of(columns, column)
    tests = [tests] if isinstance(tests, str) else tests
    if not isinstance(tests, list) or not tests or not all(isinstance(test, str) for test in tests):
        raise DataError(
            f"the column {column!r} is neither a text nor a list of them; give each prompt at least one test"
        )
    if entry_point is not None:
        tests = [f"{test}\ncheck({json_of(columns, entry_point)})" for test in tests]
    for test in tests:
        try:
            compile(test, "<test>", "exec")
        except SyntaxError as error:
            raise DataError(f"a test in the column {column!r} does not compile: {error}") from None
    if (program := program_of(after_reasoning(completion, prompt=prompt, finish_reason=finish_reason))) is None:
        return reward_of(None, score=score)
    answers = _sandbox(sandbox).ask(program, tests)
    return reward_of([answer.verdict for answer in answers], score=score)


def _sandbox(config: SandboxConfig | None) -> Sandbox:
    return _made((config or SandboxConfig()).model_dump_json())


@functools.cache
def _made(config: str) -> Sandbox:
    return Sandbox(SandboxConfig.model_validate_json(config))
