"""Lines for logs, CI and `ray job submit`: one for each step, and one for each event that people should see."""

import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TextIO

from cluster.sinks.console.standing import Pace
from cluster.sinks.console.words import Weight, printed, stage, told

_SHOWN = (
    ("reward", "reward/mean", "{:.3f}"),
    ("KL to reference", "learner/kl_reference_k3_mean", "{:.4f}"),
    ("KL to old policy", "learner/kl_old_k3_mean", "{:.4f}"),
    ("sampling", "speed/sampling_tokens_per_s", "{:,.0f} tok/s"),
    ("learning", "speed/learning_tokens_per_s", "{:,.0f} tok/s"),
    ("staleness", "staleness/max", "{:.0f}"),
    ("eval", "eval/reward", "{:.3f}"),
    ("succeed", "eval/accuracy", "{:.3f}"),
)
"""Label, metric and format."""


def line_of(metrics: Mapping[str, float]) -> str:
    """The numbers of a step: `reward 0.612  KL to reference 0.0031  sampling 3,412 tok/s`. Of two KLs, only that to the reference. The
    share that succeeds is left out where rewards of 0 and 1 make it the mean reward."""
    shown = {label: form.format(metrics[name]) for label, name, form in _SHOWN if name in metrics}
    if "KL to reference" in shown:
        shown.pop("KL to old policy", None)
    if shown.get("succeed") == shown.get("eval"):
        shown.pop("succeed", None)
    return "  ".join(f"{label} {value}" for label, value in shown.items())


class PlainLines:
    """Steps, messages and warnings."""

    def __init__(self, num_steps: int, *, stream: TextIO, now: Callable[[], float] = time.time) -> None:
        self._num_steps = num_steps
        self._stream = stream
        self._now = now
        self._pace = Pace()
        self._is_starting = num_steps > 0  # an evaluation prints only its scores

    def step(self, version: int, metrics: Mapping[str, float], *, at: float | None = None) -> None:
        """`at`: when the step was made, in Unix seconds; None is now."""
        self._is_starting = False
        self._pace.step(version, self._now() if at is None else at, is_sampled="time/step_s" in metrics)
        left = self._pace.seconds_left(self._num_steps)
        ending = "" if left is None else f"  left {timedelta(seconds=round(left))}"
        _write_line(f"step {version}/{self._num_steps}  {line_of(metrics)}{ending}", self._stream)

    def event(self, record: Mapping[str, Any]) -> None:
        """Why a run failed is not printed here: the command prints it last."""
        for line in printed(record):
            _write_line(line, self._stream)
        sentence = told(record)
        if self._is_starting and "message" not in record and (waits_for := stage(record)):
            _write_line(f"starting: {waits_for}", self._stream)
        if sentence and record["kind"] != "failed" and ("message" in record or sentence.weight > Weight.NOTE):
            _write_line(f"{sentence.kind}: {sentence.words}", self._stream)

    def close(self) -> None: ...


class Warnings:
    """`--quiet`: only warnings."""

    def __init__(self, *, stream: TextIO) -> None:
        self._stream = stream

    def step(self, version: int, metrics: Mapping[str, float]) -> None: ...

    def event(self, record: Mapping[str, Any]) -> None:
        sentence = told(record)
        if sentence and record["kind"] != "failed" and sentence.weight > Weight.NOTE:
            _write_line(f"{sentence.kind}: {sentence.words}", self._stream)

    def close(self) -> None: ...


def _write_line(line: str, stream: TextIO) -> None:
    """A character that the stream cannot encode becomes a question mark: prompts and errors may contain any."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    print(line.encode(encoding, errors="replace").decode(encoding), file=stream, flush=True)
