"""`python -m tests.pictures [RUN ...]`: makes these runs, two to five minutes each, keeps their numbers, and draws all pictures."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.pictures.drawing import draw
from tests.pictures.numbers import keep, kept
from tests.pictures.runs import COMMON, PICTURES, QUICKSTART, RUNS


def main(names: Sequence[str]) -> None:
    for name in names:
        keep(name, _made(name), _metrics(name))
    for name, run in RUNS.items():
        others = {other: kept(other) for other in run.compared}
        draw(kept(name), others, shown=run.shown, file=PICTURES / f"{name}.svg")


def _made(name: str) -> list[Mapping[str, Any]]:
    """The steps of a new run in build/pictures, or those of a run that is there."""
    run_dir = Path("build/pictures") / name
    command = ("-m", "deploy.cli", "train", QUICKSTART, f"run_dir={run_dir}", *COMMON, *RUNS[name].settings)
    subprocess.run((sys.executable, *command), check=True)
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def _metrics(name: str) -> list[str]:
    """Those of its own picture, and of the pictures that it stands behind."""
    drawn = [RUNS[name], *(run for run in RUNS.values() if name in run.compared)]
    return sorted({metric for run in drawn for metric in run.shown})


if __name__ == "__main__":
    main(sys.argv[1:])
