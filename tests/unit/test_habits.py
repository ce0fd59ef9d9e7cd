"""What a public forge reads names what is there, and the version stands everywhere the same."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
HOOKS = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*_*.yml"))


def test_the_version_is_one():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    newest = re.search(r"^## (\d\S*) - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] == citation["version"] == VERSION
    assert newest[2] == citation["date-released"]


def test_images_are_of_this_version():
    texts = [file.read_text() for folder in ("deploy", "docs") for file in (ROOT / folder).rglob("*") if _is_text(file)]
    assert {found for text in texts for found in re.findall(r"treadwheel:(\d+\.\d+\.\d+)-[cg]pu", text)} == {VERSION}


def test_a_citation_has_what_the_format_wants():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    assert citation.keys() >= {"message", "title", "authors"}
    assert [author["name"] for author in citation["authors"]] == ["The treadwheel authors"]


def test_the_forges_workflow_calls_what_is_there():
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    (job,) = workflow["jobs"].values()
    calls = [each["run"] for each in job["strategy"]["matrix"]["include"]]
    assert calls == [".ci/run", "make site"]
    assert (ROOT / ".ci/run").stat().st_mode & 0o100
    assert "site" in _targets()
    (cache,) = [step["with"] for step in job["steps"] if step.get("uses", "").startswith("actions/cache@")]
    hashed = re.findall(r"'([^']+)'", cache["key"])
    assert hashed and [file for file in hashed if not (ROOT / file).is_file()] == []


def test_hooks_call_what_make_check_calls():
    (recipe,) = re.findall(r"^check:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    commands = [line.strip().removeprefix("@").replace("$(BIN)", ".venv/bin") for line in recipe.splitlines()]
    assert [hook["entry"] for hook in HOOKS] == commands


@pytest.mark.parametrize("file", FORMS, ids=lambda file: file.stem)
def test_an_issue_form_asks_under_labels_and_requires_something(file):
    form = yaml.safe_load(file.read_text())
    assert form.keys() >= {"name", "description", "body"}
    assert [field for field in form["body"] if not field["attributes"]["label"]] == []
    assert [field for field in form["body"] if field.get("validations", {}).get("required")]


def test_make_help_names_every_target_and_contributing_says_the_same():
    said = subprocess.run(
        ["make", "--no-print-directory", "help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert {line.split()[1] for line in said.splitlines()} == set(_targets())
    assert said in (ROOT / "CONTRIBUTING.md").read_text(), "put the words of `make help` into CONTRIBUTING.md"


def test_hidden_folders_are_committed():
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    hidden = [".ci/run", ".github/workflows/ci.yml", ".github/pull_request_template.md", ".pre-commit-config.yaml"]
    assert set(hidden) <= set(files)


def _targets() -> list[str]:
    (phony,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return phony.split()


def _is_text(file: Path) -> bool:
    return file.suffix in (".md", ".yaml") or file.name == "Dockerfile"
