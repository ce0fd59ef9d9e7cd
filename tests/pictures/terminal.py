"""docs/terminal.svg: a run in the terminal, drawn by what draws runs. `python -m tests.pictures.terminal` draws it anew."""

import io
import math
import time
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme

from cluster.sinks.console import Drawn, Standing

FILE = Path("docs/terminal.svg")
_WIDTH, _HEIGHT = 100, 30
_STEPS, _DONE, _SECONDS = 80, 40, 2.0
_BEGAN = time.mktime((2026, 11, 24, 11, 6, 30, 0, 0, 0))
"""The same hour in any time zone."""
_NUMBERS = {
    "learner/kl_reference_k3_mean": 0.0123,
    "learner/entropy_mean": 0.635,
    "speed/sampling_tokens_per_s": 3412.0,
    "speed/learning_tokens_per_s": 6001.0,
    "staleness/max": 1.0,
    "buffer/learner_wait_s": 0.3,
    "time/step_s": 1.8,
    "rollout/num_workers": 2.0,
    "rollout/num_wanted": 2.0,
}
_DIED = (
    "rollout-1 died in 'generate': its process ended without a word: it was killed from outside (kill -9, or the system when memory "
    "ran out), or it crashed (a segmentation fault)"
)
_THEME = TerminalTheme(
    (30, 34, 42), (220, 223, 228),
    [(40, 44, 52), (224, 108, 117), (152, 195, 121), (229, 192, 123), (97, 175, 239), (198, 120, 221), (86, 182, 194), (220, 223, 228)],
    [(110, 118, 135)] * 8,
)  # fmt: skip
_SVG = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" role="img" aria-label="A run in the terminal" \
xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: {char_height}px; \
line-height: {line_height}px; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal"><rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""
"""Rich's own has fonts of another server, which a page of documentation must not ask for."""


def example() -> Standing:
    """A run of two workers, half done, one of which died just now."""
    clock = [_BEGAN]
    standing = Standing(title="runs/quickstart", num_steps=_STEPS, max_off_policy_steps=2, now=lambda: clock[0])
    standing.event({"kind": "launched", "time": _BEGAN})
    for version in range(_DONE + 1):
        reward = 0.79 - 0.4 * math.exp(-version / 15) - 0.01 * math.sin(version)
        evaluated = {"eval/reward": reward + 0.02} if version % 10 == 0 else {}
        rewarded = {**_NUMBERS, "reward/mean": reward} if version else {}
        standing.step(version, {**rewarded, **evaluated}, at=_BEGAN + _SECONDS * version)
    clock[0] = _BEGAN + _SECONDS * _DONE + 1
    standing.event({"kind": "checkpoint", "time": clock[0] - 1, "policy_version": _DONE})
    died = {"kind": "failure", "time": clock[0], "actor": "rollout-1", "reason": _DIED, "decision": "restart"}
    standing.event(died)
    doing = {"rollout-0": "sampling", "rollout-1": "starting"}
    actors = [{"actor": actor, "phase": phase, "since": clock[0]} for actor, phase in doing.items()]
    standing.status({"time": clock[0], "actors": actors})
    clock[0] += 1
    return standing


def svg() -> str:
    console = Console(
        file=io.StringIO(),
        record=True,
        width=_WIDTH,
        height=_HEIGHT,
        force_terminal=True,
        color_system="standard",
        highlight=False,
        markup=False,
        emoji=False,
        legacy_windows=False,
    )
    console.print(Drawn(example()))
    return console.export_svg(title="treadwheel train", theme=_THEME, code_format=_SVG, unique_id="treadwheel")


if __name__ == "__main__":
    FILE.write_text(svg(), encoding="utf-8")
