"""Pages of what a run recorded, in a real browser: steps, rewards, ledger, search; on a disk and in an object store."""

import contextlib
import json
from pathlib import Path

import httpx
import pyarrow as pa
import pytest
from playwright.sync_api import expect

from cluster.record.ledger import NAME
from cluster.record.run_directory import RunDirectory
from tests.integration.browser import NAMELESS, looking, screenshot, viewing
from tests.integration.faults import until
from tests.object_store import s3
from tests.unit.deploy.viewer.recorded import Group, group, record, write_ledger
from tests.unit.deploy.viewer.run_files import append, event, step, write_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>"
PAGES = ("step", "step/2", "rewards", "ledger", "ledger?ticket=3", "search", "search?text=script")


@pytest.fixture
def folder(tmp_path) -> Path:
    """Two steps. Group 3 was dropped; a judge failed in group 4, whose texts are hostile."""
    failures = [{"kind": "KeyError", "message": f"KeyError: {HOSTILE}", "count": 1}]
    events = [
        event("drop", 1001.0, group_id="00000003", prompt_id="p", reason="zero_variance"),
        event("reward_failure", 1001.0, group_id="00000004", prompt_id="p", num_errors=1, failures=failures),
    ]
    lines = [step(at, reward__mean=at / 4, staleness__max=1.0, time__step_s=2.0) for at in (1, 2)]
    folder = write_run(tmp_path / "run", steps=lines, events=events)
    record(folder, *_steps())
    return folder


def _steps() -> list[list[Group]]:
    parts = {"reward_components": [("style", 0.25)]}
    hostile = {"completion_text": f"Well, {HOSTILE}", "prompt_text": HOSTILE, "worker": "rollout-1"}
    return [
        [group(0, 0.0, 1.0, **parts), group(1, 0.25, completion_text="A needle in the hay")],
        [group(2, -1.0, 0.0, 0.5, 0.5, 1.0, **parts), group(4, 0.75, None, **hostile)],
    ]


def test_the_dots_of_a_step_are_the_rewards_of_its_file_at_their_places(browser, folder):
    with pa.ipc.open_file(str(folder / "trajectories/step-000002.arrow")) as reader:
        rows = [row for at in range(reader.num_record_batches) for row in reader.get_batch(at).to_pylist()]
    written = {(row["ticket_index"], row["sample_index"]): row["reward"] for row in rows if row["reward"] is not None}
    with viewing(folder) as (url, _), looking(browser, f"{url}run/run/step/2") as page:
        drawn = page.evaluate(_DRAWN)
        assert {(dot["ticket"], dot["sample"]): dot["reward"] for dot in drawn} == written
        for dot in drawn:
            if dot["reward"] != 0.5:  # two stand beside each other there
                assert dot["part"] == pytest.approx((dot["reward"] + 1) / 2, abs=0.005)
        expect(page.locator("#dropped")).to_have_text("1× zero_variance")
        expect(page.locator("tr[data-ticket='4']")).to_contain_text("1 failed")
        page.keyboard.press("ArrowLeft")
        expect(page).to_have_url(f"{url}run/run/step/1")
        page.locator("tr[data-ticket='0'] circle[data-sample='1']").click()
        expect(page).to_have_url(f"{url}run/run/step/1/group/0/1")
        expect(page.get_by_role("heading", level=1)).to_contain_text("1")


def test_a_curve_leads_to_its_step_and_the_ledger_to_a_groups(browser, folder):
    with viewing(folder) as (url, _), looking(browser, url) as page:
        page.get_by_role("img", name="Reward").focus()
        page.keyboard.press("End")
        page.keyboard.press("Enter")
        expect(page.get_by_role("heading", name="Step 2", exact=True)).to_be_visible()
        page.get_by_role("link", name="Ledger").click()
        expect(page.locator("#verdict")).to_contain_text("Verified")
        page.get_by_label("Which step did this group train?").fill("4")
        page.keyboard.press("Enter")
        expect(page.locator("#answer")).to_contain_text("Group 4 trained step 2.")
        ledger = folder / NAME
        ledger.write_text(ledger.read_text().replace('"groups":[0,1]', '"groups":[1]'))
        until(
            lambda: httpx.get(f"{url}run/run/ledger.json", timeout=120).json()["problem"]
        )  # it is looked at once a second
        page.reload()
        expect(page.locator("#verdict")).to_contain_text("Broken")
        expect(page.locator("#verdict")).to_contain_text("the record before it was altered")


def test_a_page_says_that_there_are_new_steps_and_shows_them_when_it_is_asked(browser, folder):
    with viewing(folder) as (url, _), contextlib.ExitStack() as stack:
        pages = {
            path: stack.enter_context(looking(browser, f"{url}run/run/{path}"))
            for path in ("step", "rewards", "ledger", "search")
        }
        for page in pages.values():
            expect(page.locator("#fresh")).to_be_hidden()
        for number, said in ((3, "1 step is new."), (4, "2 steps are new.")):
            append(folder / "metrics.jsonl", [step(number, reward__mean=0.5)])
            for page in pages.values():
                expect(page.locator("#fresh")).to_contain_text(said)
        for path, page in pages.items():
            screenshot(page, f"fresh-{path}")
            page.get_by_role("button", name="Show").click()
            expect(page.locator("#fresh")).to_be_hidden()
        expect(pages["step"].locator("#steps tbody tr").first).to_contain_text("4")


def test_search_finds_a_text_and_a_range_of_rewards_and_takes_hostile_text_for_text(browser, folder):
    with viewing(folder) as (url, _), looking(browser, f"{url}run/run/search") as page:
        expect(page.locator("#count")).to_have_text("10 found")
        page.get_by_label("Text").fill("NEEDLE")
        page.keyboard.press("Enter")
        expect(page.locator("#found li")).to_have_count(1)
        expect(page.locator("mark")).to_have_text("needle")
        page.get_by_label("Text").fill("")
        page.get_by_label("Reward from").fill("0.5")
        page.get_by_label("Reward to").fill("0.75")
        page.get_by_role("button", name="Search").click()
        expect(page.locator("#count")).to_have_text("3 found")
        assert page.locator("#found li").evaluate_all("found => found.map(one => one.dataset.trajectory)") == [
            "2/2/2",
            "2/2/3",
            "2/4/0",
        ]
        page.goto(f"{url}run/run/search")
        page.get_by_label("Text").fill(HOSTILE)
        page.keyboard.press("Enter")
        expect(page.locator("mark").first).to_have_text(HOSTILE)
        assert page.locator("img[src='x']").count() == 0


def test_every_page_of_the_record_fits_and_names_what_it_has(browser, folder):
    with viewing(folder) as (url, _):
        for width, scheme in ((390, "dark"), (1280, "light")):
            with looking(browser, url, width=width, scheme=scheme) as page:
                for path in PAGES:
                    page.goto(f"{url}run/run/{path}")
                    screenshot(page, f"{path.partition('?')[0].replace('/', '-')}-{width}")
                    wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
                    assert wide <= 0, f"{path} is {wide} px wider than {width}"
                    assert page.evaluate(NAMELESS) == [], path


def test_names_and_messages_of_one_long_word_leave_every_page_as_wide_as_the_window(browser, tmp_path):
    word = "of_one_word_" * 20
    name = f"run_{word}"[:100]
    events = [event("drop", 1001.0, group_id="00000002", reason=word), event("failed", 1002.0, reason=word)]
    folder = write_run(tmp_path / name, steps=[step(1, reward__mean=0.5)], events=events)
    (folder / "run.yaml").write_text(f"model: {{path: {word}}}")
    parts = {"reward_components": [(word, 0.5)]}
    record(folder, [group(0, 0.5, prompt_text=word, **parts), group(1, None, completion_text=word), group(3, 1.0)])
    write_run(tmp_path / f"other_{name}", steps=[step(1, reward__mean=0.5)])
    pages = ["", "step/1", "rewards", "ledger?ticket=2", "search", "step/1/group/0", "step/1/group/0/0"]
    with viewing(tmp_path) as (url, _):
        for width in (390, 1280):
            with looking(browser, url, width=width) as page:
                for path in ("runs", f"compare?run={name}&run=other_{name}", *(f"run/{name}/{each}" for each in pages)):
                    page.goto(f"{url}{path}")
                    wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
                    assert wide <= 0, f"{path.replace(name, 'RUN')} is {wide} px wider than {width}"


def test_of_ten_thousand_steps_an_answer_has_fifty(browser, tmp_path):
    folder = write_run(tmp_path / "run", steps=[step(at, reward__mean=at % 7) for at in range(1, 10_001)])
    write_ledger(folder, num_steps=10_000)
    with viewing(folder) as (url, _), looking(browser, url) as page:
        for path, older in (("step", "9,950"), ("ledger", "9,950")):
            page.goto(f"{url}run/run/{path}")
            expect(page.locator("tbody tr")).to_have_count(50)
            page.get_by_role("link", name="Older").click()
            expect(page.locator("tbody tr").first).to_contain_text(older)
        expect(page.locator("#verdict")).to_contain_text("all 10,000 records are there")
        page.goto(f"{url}run/run/step/5000")
        expect(page.locator("#why")).to_contain_text("not recorded")
        page.goto(f"{url}run/run/rewards")
        expect(page.locator("#panels svg path").first).to_be_visible()


def test_a_run_in_an_object_store_has_every_page(browser, folder):
    with s3("seen"):
        _copy(folder, "s3://seen/runs/mine")
        with viewing("s3://seen/runs") as (url, _viewer), looking(browser, url) as page:
            page.get_by_role("link", name="mine", exact=True).first.click()
            expect(page.locator("#step")).to_have_text("Step 2")
            for name in ("Steps", "Rewards", "Ledger", "Actors", "Weights", "Search"):
                page.get_by_role("navigation").get_by_role("link", name=name).click()
                expect(page.get_by_role("heading", name=name, exact=True).first).to_be_visible()
            expect(page.locator("#count")).to_have_text("10 found")
            page.goto(f"{url}run/mine/ledger")
            expect(page.locator("#verdict")).to_contain_text("0 of the 2 steps below were read")
            page.get_by_role("link", name="check the others too").click()
            expect(page.locator("#records")).to_contain_text("as recorded")
            page.goto(f"{url}run/mine/step/2")
            expect(page.locator("circle.dot")).to_have_count(6)


_DRAWN = """() => [...document.querySelectorAll('circle[data-reward]')].map((dot) => {
    const axis = dot.closest('.strip').getBoundingClientRect(), own = dot.getBoundingClientRect();
    return { ticket: Number(dot.closest('tr').dataset.ticket), sample: Number(dot.dataset.sample), reward: Number(dot.dataset.reward),
             part: (own.left + own.width / 2 - axis.left) / axis.width };
})"""


def _copy(folder: Path, url: str) -> None:
    """The run of `folder`, as a driver leaves it in an object store."""
    directory = RunDirectory(url)
    directory.write_file("run.yaml", (folder / "run.yaml").read_bytes())
    for name in ("metrics.jsonl", "events.jsonl"):
        for line in (folder / name).read_text().splitlines():
            directory.append_json(name, json.loads(line))
    directory.flush_lines()
    record(url, *_steps())
