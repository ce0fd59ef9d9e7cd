"""`make bench`: runs the modules of this folder that have `rows()`, writes build/bench.json, prints a table.

A row: name, value, unit, baseline, baseline_value, ratio, aim (`>= 0.85`, of the ratio where there is one, else of the value).
A benchmark that cannot run here says why in a row of its own instead of a value. Exit code 1 when an aim is missed.
"""

import argparse
import importlib
import json
import operator
import pkgutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

COLUMNS = ("name", "value", "unit", "baseline", "baseline_value", "ratio", "aim")
OUT = Path("build/bench.json")
_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="make bench")
    parser.add_argument("--only", help="name of one module")
    only = parser.parse_args().only
    rows: list[dict[str, Any]] = []
    for name, run in benchmarks(only):
        print(f"{name} ...", file=sys.stderr, flush=True)
        rows += [dict.fromkeys(COLUMNS) | row for row in run()]
    if not rows:
        print(
            f"no benchmark is called {only!r}; there are: {', '.join(name for name, _ in benchmarks(None))}",
            file=sys.stderr,
        )
        return 2
    write(rows, keep_others=only is not None)
    Console(width=160).print(table(rows))
    return int(any(meets_aim(row) is False for row in rows))


def benchmarks(only: str | None) -> Iterator[tuple[str, Callable[[], list[dict[str, Any]]]]]:
    """Modules by name. `only` names a module."""
    package = importlib.import_module("tests.benchmarks")
    for info in pkgutil.iter_modules(package.__path__):
        if info.name.startswith("_") or only not in (None, info.name):
            continue
        module = importlib.import_module(f"tests.benchmarks.{info.name}")
        if hasattr(module, "rows"):
            yield info.name, module.rows


def write(rows: list[dict[str, Any]], *, keep_others: bool) -> None:
    """Replaces build/bench.json, or with `keep_others` only the rows of the same names."""
    OUT.parent.mkdir(exist_ok=True)
    names = {row["name"] for row in rows}
    before = json.loads(OUT.read_text()) if keep_others and OUT.exists() else []
    kept = [row for row in before if row["name"] not in names]
    OUT.write_text(json.dumps([*kept, *rows], indent=1) + "\n")


def table(rows: list[dict[str, Any]]) -> Table:
    shown = Table(box=None)
    for column in (*COLUMNS, ""):
        shown.add_column(column, justify="right" if "value" in column or column == "ratio" else "left")
    for row in rows:
        verdict = {True: "[green]met[/]", False: "[red]missed[/]", None: ""}[meets_aim(row)]
        shown.add_row(*(_cell(row[column]) for column in COLUMNS), verdict)
    return shown


def meets_aim(row: dict[str, Any]) -> bool | None:
    """None where there is no aim, or no number."""
    measured = row["ratio"] if row["ratio"] is not None else row["value"]
    if row["aim"] is None or not isinstance(measured, int | float):
        return None
    comparison, _, bound = row["aim"].partition(" ")
    return _COMPARISONS[comparison](measured, float(bound.split()[0]))


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)


if __name__ == "__main__":
    sys.exit(main())
