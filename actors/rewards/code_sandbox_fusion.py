"""Reward for programs that pass tests, in any language of a SandboxFusion server (bytedance/SandboxFusion, `POST /run_code`)."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import NonNegativeFloat

from actors.http import Endpoint, HttpClient
from actors.sandbox.judging import PYTHON, Score, program_of, reward_of, same_output, texts_of
from actors.sandbox.sandbox import Verdict
from cluster.contracts.errors import DataError, WorkerError

_MIB = 1024**2
_MARKS: Mapping[str, Sequence[str]] = {
    "bash": ("sh", "shell"),
    "cpp": ("c++", "cc", "cxx"),
    "csharp": ("c#", "cs"),
    "cuda": ("cu", "cpp", "c++"),
    "D_ut": ("d",),
    "go": ("golang",),
    "go_test": ("go", "golang"),
    "jest": ("typescript", "ts", "javascript", "js"),
    "julia": ("jl",),
    "junit": ("java",),
    "kotlin_script": ("kotlin", "kt", "kts"),
    "lean": ("lean4",),
    "nodejs": ("javascript", "js", "node"),
    "perl": ("pl",),
    "pytest": PYTHON,
    "python": PYTHON,
    "python_gpu": PYTHON,
    "racket": ("rkt",),
    "ruby": ("rb",),
    "rust": ("rs",),
    "typescript": ("ts", "tsx"),
    "verilog": ("systemverilog", "sv", "v"),
}
"""Names at a fence for the server's languages, besides the language's own."""


class SandboxFusion:
    """As `code_stdin`, on the server at `url`. The program's output is compared with each case's `output` here, outside the server.
    Its fence may have each usual name of the language, such as `js` for `nodejs`.

    The server gets the program and each case's input, never an expected output. An error of the server or of its sandbox is a failed
    reward. After `total_s` by the server's clock, the remaining cases count as out of time. `url` takes all forms of `remote`'s `endpoint`.
    """

    def __init__(
        self,
        *,
        url: Endpoint,
        language: str = "python",
        column: str = "cases",
        score: Score = "all",
        tolerance: NonNegativeFloat | None = None,
        time_s: float = 4.0,
        total_s: float = 20.0,
        memory_bytes: int = 1024**3,
    ) -> None:
        self._client = HttpClient(url, field="url")
        self._language, self._column, self._tolerance = language, column, tolerance
        self._marks = (language.lower(), *_MARKS.get(language, ()))
        self._score: Score = score
        self._time_s, self._total_s = time_s, total_s
        self._limits = {"compile_timeout": time_s, "run_timeout": time_s, "memory_limit_MB": memory_bytes // _MIB}

    async def __call__(
        self,
        *,
        prompt: str,
        completion: str,
        columns: Mapping[str, Any],
        finish_reason: str = "",
        messages: Sequence[Mapping[str, Any]] = (),
    ) -> dict[str, float]:
        cases = texts_of(columns, self._column)
        program = program_of(
            completion, prompt=prompt, finish_reason=finish_reason, messages=messages, marks=self._marks
        )
        if program is None:
            return reward_of(None, score=self._score)
        request = {"code": program, "language": self._language, **self._limits}
        verdicts: list[Verdict] = []
        spent_s = 0.0
        for given, expected in cases:
            verdict, printed = Verdict.OUT_OF_TIME, ""
            if spent_s < self._total_s:
                result = await self._run(request | {"stdin": given})
                verdict, printed = _verdict(result), result.get("stdout") or ""
                spent_s += self._time_s if verdict is Verdict.OUT_OF_TIME else result.get("execution_time") or 0.0
            if verdict is Verdict.OK and not same_output(printed, expected, tolerance=self._tolerance):
                verdict = Verdict.WRONG
            verdicts.append(verdict)
            if self._score == "all" and verdict is not Verdict.OK:
                break
        return reward_of(verdicts, score=self._score)

    async def _run(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The server's result of running the program, or of compiling it if that failed.

        Raises WorkerError for an answer without such a result, and UnavailableError during an outage.
        """
        try:
            answer = await self._client.post("/run_code", request)
            result = answer.get("run_result") or answer.get("compile_result")
            if answer["status"] in ("Success", "Failed") and result["status"] in ("Finished", "TimeLimitExceeded"):
                return result
            why = f"/run_code: {answer['status']}: {str(answer.get('message'))[:300]}"
        except (DataError, AttributeError, KeyError, TypeError) as error:
            why = f"/run_code: {type(error).__name__}: {error}"
        raise WorkerError(f"sandbox_failed: {why}", stage="sandbox")


def _verdict(result: Mapping[str, Any]) -> Verdict:
    if result["status"] == "TimeLimitExceeded":
        return Verdict.OUT_OF_TIME
    if result.get("return_code") == 0:
        return Verdict.OK
    return Verdict.OUT_OF_MEMORY if "MemoryError" in (result.get("stderr") or "") else Verdict.CRASHED


code_sandbox_fusion = SandboxFusion
