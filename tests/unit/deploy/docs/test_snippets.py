"""What the pages for people show as a run file is one."""

import re
from pathlib import Path

import pytest

from cluster.contracts.plugins import PROMPTS, REWARDS, resolve
from deploy.config.loading import validated
from deploy.config.yaml_text import parse

PAGES = [Path("README.md"), *sorted(Path("docs").glob("*.md"))]
SNIPPETS = [
    pytest.param(found[1], id=f"{page.name}:{number}")
    for page in PAGES
    for number, found in enumerate(re.finditer(r"^```yaml\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL))
    if not found[1].startswith("# rubric.yaml")  # tests of rubrics read that one
]


@pytest.mark.parametrize("text", SNIPPETS)
def test_a_run_file_in_the_documentation_names_settings_and_parameters_that_are_there(text):
    values = {"model": {"path": "m"}, "prompts": {"name": "file", "path": "p.jsonl"}} | parse(text, source="the page")
    config = validated(values, source="the page")
    for setting, judge in config.reward.judges().items():
        if ":" not in judge.name and "function" not in judge.params:  # else it is the reader's own
            resolve(judge, home=REWARDS, field=setting)
    for source in config.prompts.sources.values() or [config.prompts]:
        resolve(source, home=PROMPTS, field="prompts")
