"""`make test-gpu` where there is no GPU: it proves nothing, and says so."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from _pytest.mark.expression import Expression  # what `-k` is read by

from tests.gpu.__main__ import PLACES, main
from tests.syntax_trees import tree

ROOT = Path(__file__).parents[3]


def test_without_a_gpu_it_ends_with_one_line_and_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main() == 1
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    assert said.out == "" and line.startswith("make test-gpu: torch sees no GPU here, so nothing was proven")


@pytest.fixture(scope="module")
def skipped() -> str:
    """What pytest says of all tests for GPUs."""
    command = [sys.executable, "-m", "pytest", "-v", "-m", "gpu", "-p", "no:cacheprovider", *PLACES]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.slow
def test_without_a_gpu_all_its_tests_are_found_and_skipped_for_one_reason(skipped: str):
    *_, last = skipped.splitlines()
    assert re.fullmatch(r"=+ \d+ skipped, \d+ deselected(, \d+ warnings?)? in .* =+", last), last
    reasons = {line.partition(": ")[2] for line in skipped.splitlines() if line.startswith("SKIPPED")}
    assert reasons == {"needs a GPU, and torch sees none"}
    for place in PLACES:
        assert re.search(rf"^SKIPPED \[\d+\] {place}", skipped, re.MULTILINE), f"{place} has no such test"


@pytest.mark.slow
def test_the_page_names_tests_that_are_there(skipped: str):
    names = re.findall(r"^(tests/\S+::.*) SKIPPED", skipped, re.MULTILINE)
    chosen = re.findall(r"`-k ([^`]+)`", (ROOT / "docs/gpus.md").read_text(encoding="utf-8"))
    assert len(chosen) > 10
    for text in chosen:
        wanted = Expression.compile(text.strip('"'))
        assert any(wanted.evaluate(lambda word, at=name, **_: word in at) for name in names), text


def test_all_tests_for_gpus_are_in_its_places():
    files = [file for file in (ROOT / "tests").rglob("test_*.py") if _has_some(file)]
    assert files and [file for file in files if not str(file.relative_to(ROOT)).startswith(PLACES)] == []


def _has_some(file: Path) -> bool:
    """With the mark, or the fixture that brings it."""
    nodes = [*ast.walk(tree(file.read_text(encoding="utf-8")))]
    functions = (node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    asked = {name.arg for each in functions if each.name.startswith("test_") for name in each.args.args}
    marks = (node for node in nodes if isinstance(node, ast.Attribute) and node.attr == "gpu")
    return "device" in asked or any(ast.unparse(node) == "pytest.mark.gpu" for node in marks)
