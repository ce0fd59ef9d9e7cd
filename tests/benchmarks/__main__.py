"""`make bench`: runs the modules of this folder that have `rows()`, writes build/bench.json, prints a table.

A row: name, value, unit, baseline, baseline_value, ratio, aim (`>= 0.85`, of the ratio where there is one, else of the value).
`--record` writes the rows into docs/benchmarks.json too, and makes docs/benchmarks.md anew. Exit code 1 when an aim is missed, or nothing
could be measured.
"""

import argparse
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.benchmarks import _page, _record

Rows = Callable[[], Iterable[dict[str, Any]]]


def main() -> int:
    parser = argparse.ArgumentParser(prog="make bench")
    parser.add_argument("--only", action="append", help="name of a module; several are named one by one")
    parser.add_argument("--record", action="store_true", help="for docs/benchmarks.md, too")
    given = parser.parse_args()
    if unknown := [name for name in given.only or () if name not in _record.NAMES]:
        print(f"no benchmark is called {unknown[0]!r}; there are: {', '.join(_record.NAMES)}", file=sys.stderr)
        return 2
    rows: list[dict[str, Any]] = []
    for name, run in benchmarks(given.only or _record.NAMES):
        print(f"{name} ...", file=sys.stderr, flush=True)
        found: list[dict[str, Any]] = []
        for row in _record.measured(name, run):
            found.append(row)
            # At once: later rows may fail, or be cut off, after half an hour.
            _record.write(_record.NEWEST, found)
        if given.record:
            _record.write(_record.RECORD, found)
        rows += found
    if given.record:
        _page.write()
    Console(width=160).print(table(rows))
    return int(not rows or any(row["met"] is False for row in rows))


def benchmarks(names: Iterable[str]) -> Iterator[tuple[str, Rows]]:
    """Their functions by name."""
    for name in names:
        yield name, importlib.import_module(f"tests.benchmarks.{name}").rows


def table(rows: list[dict[str, Any]]) -> Table:
    shown = Table(box=None)
    for column in (*_record.COLUMNS, ""):
        shown.add_column(column, justify="right" if "value" in column or column == "ratio" else "left")
    for row in rows:
        verdict = {True: "[green]met[/]", False: "[red]missed[/]", None: ""}[row["met"]]
        cells = ("" if row[column] is None else _record.shown(row[column]) for column in _record.COLUMNS)
        shown.add_row(*cells, verdict)
    return shown


if __name__ == "__main__":
    sys.exit(main())
