"""docs/benchmarks.md is what docs/benchmarks.json says."""

import re
from collections import Counter

from tests.benchmarks import _page, _record

PAGES = ("docs/performance.md", "docs/scale.md", "tests/benchmarks/_page.md")
KINDS = ("asynchrony, ", "fleet of ", "gemm-", "peer-", "rewards, ", "shared-", "whole run, ")
"""Beginnings of names of rows."""
RECORDED = _record.read(_record.RECORD)
ROW = {
    "benchmark": "sandbox",
    "name": "runs",
    "value": 1234.5,
    "unit": "programs/s",
    "baseline": "bare",
    "baseline_value": 617.25,
    "ratio": 2.0,
    "aim": ">= 1.0",
    "met": True,
    "date": "2026-11-25",
    "load": 0.4,
    "machine": "a machine",
}


def lines(*rows):
    return _page.page(list(rows)).splitlines()


def test_the_page_is_made_from_the_record():
    assert _page.PAGE.read_text(encoding="utf-8") == _page.page(RECORDED), "run `make docs`, and look at what changed"


def test_rows_that_pages_name_are_in_the_record():
    """Sentences point to a row in place of its figure, which the next record would leave behind."""
    recorded = {re.sub(r"\d+", "<n>", row["name"]) for row in RECORDED}
    texts = [(_record.ROOT / page).read_text(encoding="utf-8") for page in PAGES]
    words = " ".join(" ".join(texts).split())
    named = {re.sub(r"\d+", "<n>", name) for kind in KINDS for name in re.findall(rf"`({kind}[^`]*)`", words)}
    assert len(named) > 5 and named - recorded == set()


def test_the_record_has_what_a_row_has_and_no_name_twice():
    assert [row for row in RECORDED if row.keys() != ROW.keys()] == []
    assert [row for row in RECORDED if row["met"] is not _record.meets_aim(row)] == []
    assert [name for name, count in Counter(row["name"] for row in RECORDED).items() if count > 1] == []


def test_a_row_is_a_line_below_what_its_benchmark_says_of_itself():
    found = lines(ROW)
    place = found.index("## `sandbox`")
    assert found[place + 2].startswith("Programs a second that the sandbox runs")
    assert found[place + 4] == "2026-11-25: a machine."
    assert "| `runs` | 1,234 programs/s | 617; bare | 2.00 | >= 1.0: met | 0.400 |" in found


def test_no_cell_is_empty():
    bare = ROW | {"baseline": None, "baseline_value": None, "ratio": None, "aim": None, "met": None}
    assert "| `runs` | 1,234 programs/s | — | — | — | 0.400 |" in lines(bare)
    cells = [cell for line in lines(ROW, bare, *RECORDED) if line.startswith("|") for cell in line.split("|")[1:-1]]
    assert cells and all(cell.strip() for cell in cells)


def test_what_was_not_measured_is_in_the_list():
    found = lines(
        ROW, ROW | {"name": "b", "baseline_value": None, "ratio": None}, ROW | {"name": "c", "value": "no GPU"}
    )
    missing = [line for line in found[found.index("## Not measured yet") :] if line.startswith("* ")]
    assert "* `b` of `sandbox`: its baseline could not be measured (bare)" in missing
    assert "* `c` of `sandbox`: no GPU" in missing
    assert [name for name in _record.NAMES if any(line.startswith(f"* `{name}`: ") for line in missing)] == [
        name for name in _record.NAMES if name != "sandbox"
    ]
