"""report.html in a real browser: from a file, without a network, on a desk, on a telephone, and on paper."""

import pytest
from playwright.sync_api import Page

from cluster.record.run_directory import RunDirectory
from deploy.config.loading import resolved_yaml, validated
from deploy.reports.report import write
from tests.integration.browser import chromium, screenshot
from tests.unit.cluster.contracts.rows import row
from tests.unit.deploy.viewer.run_files import event, step, write_run, write_trajectories

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
HOSTILE = "</pre><script>document.title='taken'</script><img src=http://evil.example/x>" + "W" * 300
FAILED = {"actor": "rollout-1", "failure": "death", "reason": HOSTILE, "decision": "restart"}
SETTINGS = {
    "model": {"path": "an/extraordinarily-long-name-of-a-model-that-nobody-can-break-in-two-anywhere"},
    "prompts": "file",
    "num_steps": 60,
}


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> str:
    """Of a run with everything in it: long names, a judge that failed, a worker that died, a driver that began again."""
    folder = write_run(
        tmp_path_factory.mktemp("report") / "run",
        steps=[_step(version) for version in range(61)],
        events=[
            event("failure", 1003.0, **FAILED),
            event("launched", 1030.0),
            event("resumed", 1031.0, recorded_steps=30),
        ],
        passport={"mathematics": {"seed": 0}, "versions": {"torch": "2.13.0"}},
    )
    (folder / "run.yaml").write_text(resolved_yaml(validated(SETTINGS)))
    for number in (1, 60):
        write_trajectories(folder, number, [row(sample_index=at, completion_text=HOSTILE) for at in range(2)])
    return f"file://{write(RunDirectory(str(folder)))}"


def test_a_report_is_whole_without_a_network_and_fits_a_desk_and_a_telephone(report):
    with chromium() as browser:
        for width, scheme in ((1280, "light"), (390, "dark")):
            said: list[str] = []
            context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True)  # pyright: ignore
            page = context.new_page()
            page.on("console", lambda message, said=said: said.append(message.text))
            page.on("pageerror", lambda error, said=said: said.append(str(error)))
            page.on("request", lambda request, said=said: said.append(request.url))
            page.goto(report)
            assert said == [report], "one file, and not a word"
            assert page.title() == "run · treadwheel"
            page.get_by_text("The whole configuration").click()
            screenshot(page, f"report-{width}")
            assert _overflow(page) <= 0
            assert page.locator("svg.drawn").count() == 5
            assert page.locator("svg.drawn circle").count() == 8, "four evaluations of reward and of accuracy"
            assert _color(page, "light") != _color(page, "dark")
            context.close()


def _overflow(page: Page) -> int:
    return page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")


def _color(page: Page, scheme: str) -> str:
    """Of the first line, as drawn in this scheme: the policy of the page lets its style sheet in."""
    page.emulate_media(color_scheme=scheme)  # pyright: ignore[reportArgumentType]
    return page.locator("svg.drawn path.line").first.evaluate("each => getComputedStyle(each).stroke")


def _step(version: int) -> dict:
    numbers = {"reward__mean": version / 60, "learner__entropy_mean": 1.0, "staleness__max": 1.0, "time__step_s": 2.0}
    held_out = {"eval__reward": 0.5, "eval__reward_stderr": 0.1, "eval__accuracy": 0.5, "eval__num_prompts": 64.0}
    return step(version, **(numbers if version else {}), **(held_out if version % 20 == 0 else {}))
