"""What the pages for people show as a run file is one, and what they show as a site file."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from cluster.contracts.plugins import ENVIRONMENTS, PROMPTS, REWARDS, resolve
from deploy.config.loading import validated
from deploy.config.yaml_text import parse
from deploy.manifests import site

PAGES = [Path("README.md"), *sorted(Path("docs").glob("*.md"))]
OTHERS = ("# rubric.yaml", "# site.yaml")
"""First lines of YAML that is not a run file. Tests of rubrics read the first."""


def snippets(kinds: Callable[[str], bool]) -> list[ParameterSet]:
    """YAML of the pages whose first line `kinds` takes."""
    return [
        pytest.param(found[1], id=f"{page.name}:{number}")
        for page in PAGES
        for number, found in enumerate(re.finditer(r"^```yaml\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL))
        if kinds(found[1].partition("\n")[0])
    ]


@pytest.mark.parametrize("text", snippets(lambda first: first not in OTHERS))
def test_a_run_file_in_the_documentation_names_settings_and_parameters_that_are_there(text):
    values = {"model": {"path": "m"}, "prompts": {"name": "file", "path": "p.jsonl"}} | parse(text, source="the page")
    config = validated(values, source="the page")
    for setting, judge in config.reward.judges().items():
        if ":" not in judge.name and "function" not in judge.params:  # else it is the reader's own
            resolve(judge, home=REWARDS, field=setting)
    for environment in config.named_environments.values():
        if ":" not in environment.name:
            resolve(environment, home=ENVIRONMENTS, field="environment")
    for source in config.prompts.sources.values() or [config.prompts]:
        resolve(source, home=PROMPTS, field="prompts")


@pytest.mark.parametrize("text", snippets("# site.yaml".__eq__))
def test_a_site_file_in_the_documentation_is_one(tmp_path, text):
    (tmp_path / "site.yaml").write_text(text)
    assert site.load(str(tmp_path / "site.yaml")) != site.Site()
