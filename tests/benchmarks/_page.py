"""`python -m tests.benchmarks._page`: docs/benchmarks.md from docs/benchmarks.json, the benchmarks' own docstrings and the prose beside."""

import ast
from typing import Any

from deploy.docs import cell
from deploy.docs import rows as table_rows
from tests.benchmarks._record import FOLDER, NAMES, RECORD, ROOT, read, shown

PAGE = ROOT / "docs" / "benchmarks.md"
_NOTE = "<!-- Made by `make docs` from docs/benchmarks.json and tests/benchmarks: edit there. -->"
_NONE = "—"
_PARAGRAPH = "\n\n"
_HEAD = (("row", "measured", "against", "ratio", "aim", "load"), ("---",) * 6)


def write() -> None:
    PAGE.write_text(page(read(RECORD)), encoding="utf-8")


def page(rows: list[dict[str, Any]]) -> str:
    """Benchmarks that have rows with numbers as tables, all others in one list."""
    sections: list[str] = []
    missing: list[str] = []
    for name in NAMES:
        of_name = [row for row in rows if row["benchmark"] == name]
        if found := [row for row in of_name if _why_not(row) is None]:
            sections.append(_section(name, found))
        else:
            missing.append(f"* `{name}`: {' '.join(_prose(name).partition(_PARAGRAPH)[0].split())}")
        missing += [f"* `{row['name']}` of `{name}`: {why}" for row in of_name if (why := _why_not(row))]
    parts = {"note": _NOTE, "measured": _PARAGRAPH.join(sections), "not_measured": "\n".join(missing) or "Nothing."}
    text = (FOLDER / "_page.md").read_text(encoding="utf-8")
    for name, part in parts.items():
        text = text.replace(f"{{{name}}}", part)
    return text


def _section(name: str, rows: list[dict[str, Any]]) -> str:
    runs = sorted({f"{row['date']}: {row['machine']}." for row in rows})
    return _PARAGRAPH.join([f"## `{name}`", _prose(name), *runs, table_rows([*_HEAD, *map(_cells, rows)])])


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    baseline, ratio, aim = row["baseline"], row["ratio"], row["aim"]
    return (
        f"`{cell(row['name'])}`",
        cell(f"{shown(row['value'])} {row['unit']}"),
        _NONE if baseline is None else cell(f"{shown(row['baseline_value'])}; {baseline}"),
        _NONE if ratio is None else shown(ratio),
        _NONE if aim is None else f"{aim}: {'met' if row['met'] else 'missed'}",
        shown(row["load"]),
    )


def _why_not(row: dict[str, Any]) -> str | None:
    """Why a number is missing; None where none is."""
    if isinstance(row["value"], str):
        return row["value"]
    if row["baseline"] is not None and row["baseline_value"] is None:
        return f"its baseline could not be measured ({row['baseline']})"
    return None


def _prose(name: str) -> str:
    """The module's docstring. Importing the module would take seconds."""
    return ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8"))) or ""


if __name__ == "__main__":
    write()
