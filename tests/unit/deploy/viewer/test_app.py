"""The viewer starts at once: nothing that trains or samples is imported for it."""

import json
import math
import re
import subprocess
import sys

from starlette.testclient import TestClient

from deploy.viewer import page
from deploy.viewer.app import create_app
from deploy.viewer.export import export
from tests.unit.cluster.contracts.rows import row
from tests.unit.deploy.viewer.recorded import group, record
from tests.unit.deploy.viewer.run_files import event, step, write_run, write_trajectories

_HEAVY = ("ray", "torch", "vllm", "transformers", "matplotlib")
_CODE = f"""
import sys
from deploy.viewer import app, page
page.routes()
print(*[name for name in {_HEAVY} if name in sys.modules])
"""


def test_all_pages_come_without_ray_torch_and_vllm():
    told = subprocess.run([sys.executable, "-c", _CODE], capture_output=True, text=True, check=True)
    assert told.stdout.split() == []


def test_half_a_character_of_a_prompt_or_of_an_error_breaks_no_page(tmp_path):
    folder = write_run(tmp_path / "run", events=[event("failed", 1001.0, reason="no city \ud83d")])
    info = json.dumps({"messages": [{"role": "user", "content": "half \ud83d"}], "b": "\udc00"})
    write_trajectories(folder, 1, [row(info=info)])
    browser = TestClient(create_app([str(folder)]), base_url="http://localhost")
    for path in (
        "",
        "index.json",
        "step/1",
        "step/1.json",
        "step/1/group/7",
        "step/1/group/7.json",
        "step/1/group/7/0.json",
    ):
        assert browser.get(f"/run/run/{path}").status_code == 200, path
    assert browser.get("/run/run/step/1/group/7.json").json()["prompt"]["columns"] == {"b": "?"}
    export(str(folder), step=1, file=str(tmp_path / "step.html"))
    assert "half ?" in (tmp_path / "step.html").read_text()


def test_rewards_whose_sum_overflows_break_no_page(tmp_path):
    folder = write_run(tmp_path / "run", steps=[step(1, reward__mean=0.5)])
    record(folder, [group(0, 1e308, 1e308)])
    browser = TestClient(create_app([str(folder)]), base_url="http://localhost", raise_server_exceptions=False)
    for path in ("step/1", "step/1.json", "step/1/group/0", "step/1/group/0.json", "rewards", "rewards.json"):
        assert browser.get(f"/run/run/{path}").status_code == 200, path
    assert browser.get("/run/run/step/1.json").json()["rows"][0]["mean"] is None


def test_a_template_has_no_script_and_no_style_of_its_own():
    """The policy would refuse them, and a page would be broken without a word."""
    templates = list((page.HERE / "templates").glob("*.html"))
    assert templates
    for template in templates:
        text = template.read_text()
        assert "style=" not in text and "<style" not in text, template.name
        assert not re.search(r"\son\w+=", text), template.name
        for script in text.split("<script")[1:]:
            tag = script.partition(">")[0]
            assert "src=" in tag or 'type="application/json"' in tag, template.name


def test_a_script_asks_nobody_else_and_makes_no_html_of_text():
    scripts = list((page.HERE / "static").glob("*.js"))
    assert scripts
    for script in scripts:
        text = script.read_text()
        for refused in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "https://"):
            assert refused not in text, f"{script.name}: {refused}"


def test_a_number_has_four_digits_that_count_and_no_power_of_ten():
    assert [page.number(value) for value in (12.3456, 9999.4, 9999.6, 12345.6, math.inf, None)] == [
        "12.35",
        "9,999",
        "10,000",
        "12,346",
        "inf",
        "–",
    ]
