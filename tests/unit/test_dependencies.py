"""What the packages import is declared: an installation that lacks it would fail at the first use."""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("cluster", "actors", "learner", "deploy")
EXTRAS = {"vllm"}
"""Installed for the machine at hand (deploy/install.sh)."""


def imported() -> dict[str, Path]:
    """Top-level module -> a file that imports it."""
    found: dict[str, Path] = {}
    for file in (file for package in PACKAGES for file in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {name.name.partition(".")[0]: file for name in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                found[node.module.partition(".")[0]] = file
    return found


def test_every_import_of_the_packages_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = {_normal(re.split(r"[\[<>=!~; ]", each)[0]) for each in project["dependencies"]}
    distributions = packages_distributions()
    known = {*sys.stdlib_module_names, *PACKAGES, *EXTRAS}
    undeclared = {
        module: str(file.relative_to(ROOT))
        for module, file in imported().items()
        if module not in known and not declared & {_normal(name) for name in distributions.get(module, ())}
    }
    assert undeclared == {}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
