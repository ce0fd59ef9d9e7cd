"""What the packages import is declared: an installation that lacks it would fail at the first use."""

import ast
import functools
import itertools
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import grimp
from packaging.requirements import Requirement

from deploy.manifests.site import OLDEST
from tests.syntax_trees import tree

ROOT = Path(__file__).parents[2]
PACKAGES = ("treadwheel", "cluster", "actors", "learner", "deploy")
STARTERS = ROOT / "deploy/starters"
"""Written for users, and copied."""
EXTRAS = {"triton", "vllm"}
"""Installed for the machine at hand (deploy/install.sh); triton comes with torch for GPUs."""
OPTIONAL = {"gymnasium": "gym", "httpx2": "mcp", "mcp": "mcp"}
"""By the extra that brings them: imported by the one variant that needs them."""
INSTALLED_FIRST = {"torch", "treadwheel"}
"""By the installer, which names their versions itself."""
DEVELOPMENT = {"grafana_foundation_sdk": "deploy.monitoring"}
"""Of the extra `dev`: all that imports it, directly or not, lies in this package, which a developer runs by `python -m`."""

LOADED_BY_IT = {"mkdocs": "deploy.docs.site_hooks"}
"""Of the extra `dev`, with mkdocs-material: it loads the module by its path, and nothing of ours imports that."""


@functools.cache
def imported() -> dict[str, set[str]]:
    """Top-level module -> our modules that import it."""
    found: dict[str, set[str]] = {}
    files = (file for package in PACKAGES for file in (ROOT / package).rglob("*.py") if STARTERS not in file.parents)
    for file in files:
        ours = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        for node in ast.walk(tree(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = [name.name for name in node.names]
            else:
                names = [node.module] if isinstance(node, ast.ImportFrom) and node.module and node.level == 0 else []
            for name in names:
                found.setdefault(name.partition(".")[0], set()).add(ours)
    return found


def test_every_import_of_the_packages_is_declared():
    declared, distributions = _declared("dependencies"), packages_distributions()
    known = {*sys.stdlib_module_names, *PACKAGES, *EXTRAS, *OPTIONAL, *DEVELOPMENT, *LOADED_BY_IT}
    undeclared = {
        module: importers
        for module, importers in imported().items()
        if module not in known and not declared & {_normal(name) for name in distributions.get(module, ())}
    }
    assert undeclared == {}


def test_what_a_variant_alone_needs_is_an_extra_that_tests_have_too():
    (development,) = (each for each in _listed("optional-dependencies", "dev") if each.startswith("treadwheel["))
    for module, extra in OPTIONAL.items():
        assert len(imported()[module]) == 1
        assert _normal(module) in _declared("optional-dependencies", extra)
        assert extra in re.split(r"[\[\],]", development)


def test_what_only_a_developer_has_nothing_that_runs_imports():
    graph = grimp.build_graph("deploy", cache_dir=None)
    for module, package in DEVELOPMENT.items():
        assert _normal(module) in _declared("optional-dependencies", "dev")
        importers = imported()[module]
        reached = importers.union(*(graph.find_downstream_modules(each) for each in importers))
        assert {each for each in reached if not each.startswith(f"{package}.")} == set()
        assert f"{package}.__main__" in reached
    for module, ours in LOADED_BY_IT.items():
        assert imported()[module] == {ours}
        assert not graph.find_downstream_modules(ours)


def test_every_dependency_has_a_version_that_was_tested_and_is_allowed():
    lines = (ROOT / "deploy/constraints-cpu.txt").read_text(encoding="utf-8").splitlines()
    pinned = [line.partition("==") for line in lines if not line.startswith("#")]
    tested = {_normal(name): version for name, _, version in pinned}
    extras = [_listed("optional-dependencies", extra) for extra in ("cpu", "serve", "dev")]
    for requirement in map(Requirement, itertools.chain(_listed("dependencies"), *extras)):
        is_wanted = requirement.marker is None or requirement.marker.evaluate()
        if is_wanted and requirement.name not in INSTALLED_FIRST:
            assert tested[_normal(requirement.name)] in requirement.specifier, requirement


def test_the_oldest_ray_of_a_manifest_is_the_oldest_that_is_allowed():
    (ray,) = (each for each in map(Requirement, _listed("dependencies")) if each.name == "ray")
    major, minor = OLDEST
    assert f"{major}.{minor}.0" in ray.specifier
    assert f"{major}.{minor - 1}.99" not in ray.specifier


def _declared(*table: str) -> set[str]:
    return {_normal(re.split(r"[\[<>=!~; ]", each)[0]) for each in _listed(*table)}


def _listed(*table: str) -> list[str]:
    found = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for name in table:
        found = found[name]
    return found


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
