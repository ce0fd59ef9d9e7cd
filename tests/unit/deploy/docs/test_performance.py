"""docs/performance.md names metrics and settings as they are."""

import re
from pathlib import Path

import pytest

PAGE = Path("docs/performance.md").read_text(encoding="utf-8")
SECTIONS = "buffer|cluster|elastic|learner|model|reward|rollout|sampling|weights"
METRICS = sorted(
    set(
        re.findall(
            r"[`\"]((?:time|buffer|rollout|engine|cost|weights|learner|staleness|mismatch)/[a-z_<>/]+)[`\"]", PAGE
        )
    )
)
SETTINGS = sorted(set(re.findall(rf"`((?:{SECTIONS})\.[a-z_.]+)", PAGE)))


def test_there_are_some():
    assert len(METRICS) > 20 and len(SETTINGS) > 20


@pytest.mark.parametrize("name", METRICS)
def test_a_metric_is_one_of_the_pages(name):
    assert f"`{name}`" in Path("docs/metrics.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_is_one_of_the_pages(name):
    section, _, setting = name.rpartition(".")
    pages = re.split(r"^## ", Path("docs/configuration.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    (page,) = (page for page in pages if page.startswith(f"`{section}`\n"))
    # A section of its own, such as learner.lora, is a heading.
    assert f"| `{setting}` |" in page or any(each.startswith(f"`{name}`\n") for each in pages)
