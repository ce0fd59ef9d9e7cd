"""Episodes in a real browser: blocks and labels, what was written dimmed, tool calls, and the rule where the history was rewritten."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from playwright.sync_api import Page, expect
from tokenizers import Tokenizer

from tests.integration.browser import NAMELESS, looking, numbers_of, offline, screenshot, viewing
from tests.integration.commands import ROOT, treadwheel
from tests.unit.cluster.contracts.rows import row
from tests.unit.deploy.viewer.episode_rows import FIRST, HOSTILE, REWRITTEN, SECOND, episode_rows
from tests.unit.deploy.viewer.run_files import CONFIG, write_run, write_trajectories

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
MODEL = ROOT / "deploy/quickstart/model"
STEP = 4
FAILED = {
    **{name: [] for name in ("completion_token_ids", "loss_mask", "rollout_logprobs", "policy_versions", "turns")},
    **{"completion_text": "", "reward": None, "reward_status": "error", "reward_message": "no sandbox"},
    **{"environment": "sums", "episode": '{"num_calls": 0, "num_malformed_calls": 0}', "failed_stage": "sandbox"},
}
"""Before its first turn."""
COLOUR = "each => getComputedStyle(each).color"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A run of one step: an episode and a single turn of one prompt, and single turns of another."""
    folder = write_run(tmp_path_factory.mktemp("viewer") / "run")
    (folder / "run.yaml").write_text(json.dumps({**CONFIG, "model": {"path": str(MODEL)}}))
    write_trajectories(
        folder,
        STEP,
        [*episode_rows(_encoded), row(sample_index=1, reward=0.0)],
        [row(ticket_index=8, group_id="8"), row(ticket_index=8, group_id="8", sample_index=1)],
        [row(ticket_index=9, group_id="9", **FAILED)],
    )
    return folder


@pytest.fixture(scope="module")
def step(folder) -> Iterator[str]:
    """The address of the step."""
    with viewing(folder) as (url, _):
        yield f"{url}run/run/step/{STEP}"


def test_turns_and_what_was_written_between_are_blocks_with_labels(browser, step):
    sizes = [len(_encoded(text)) for text, _, _ in (*FIRST, *SECOND)]
    with looking(browser, f"{step}/group/7/0") as page:
        _expect_blocks(page, sizes)
        order = page.locator(".tokens > *").evaluate_all("all => all.map((each) => each.className.split(' ')[0])")
        assert order == ["block", "block", "block", "rewritten", "block", "block", "block"]
        assert page.locator(".block").all_text_contents()[4].endswith("go on please")


def test_written_tokens_are_dimmed_in_every_view_and_have_no_measures(browser, step):
    with looking(browser, f"{step}/group/7/0") as page:
        written, sampled = page.locator(".block.written .t"), page.locator(".block.sampled .t")
        expect(written.first).to_be_visible()
        expect(sampled.first).to_be_visible()
        soft = page.locator(".about .numbers dt").evaluate(COLOUR)
        for key in range(1, 10):
            page.keyboard.press(str(key))
            classes = written.evaluate_all("all => all.map((each) => each.className.split(' ')[1])")
            assert set(classes) == ({"mask-0"} if key == 7 else {"unknown"}), key
            assert set(written.evaluate_all(f"all => all.map({COLOUR})")) == {soft}, key
            assert sampled.first.evaluate(COLOUR) != soft, key
        written.first.hover()
        assert set(numbers_of(page)) == {"Text", "Token", "Trained on"}


def test_the_numbers_of_each_sampled_token_are_those_of_the_file(browser, step, folder):
    recorded = _recorded(folder)
    with looking(browser, f"{step}/group/7/0") as page:
        tokens = page.locator(".tokens .t")
        expect(tokens).to_have_count(len(recorded))
        for at, expected in enumerate(recorded):
            tokens.nth(at).hover()
            numbers = numbers_of(page)
            assert numbers["Token"] == f"{expected['id']}, place {at + 1}"
            if expected["mask"]:
                assert float(numbers["Log-prob, sampler"].split()[0]) == expected["logprob"]
                assert float(numbers["Token reward"]) == expected["reward"]


def test_tool_calls_are_boxes_and_the_rewritten_history_unfolds_and_all_of_it_is_text(browser, step):
    with looking(browser, f"{step}/group/7/0") as page:
        calls = page.locator(".block").first.locator(".call")
        expect(calls.locator("b")).to_have_text(["add", HOSTILE])
        expect(calls.locator("code")).to_have_text(['{"a": 47, "b": 38}', '{"a": 47'])
        expect(calls.get_by_text("malformed", exact=True)).to_have_count(1)
        prompt = page.locator(".rewritten pre")
        expect(prompt).to_be_hidden()
        page.get_by_text(f"history rewritten: {len(_encoded(REWRITTEN))} tokens of new context").click()
        expect(prompt).to_have_text(REWRITTEN)
        assert page.locator("main img, main script").count() == 0
        page.get_by_role("group", name="Completion of").focus()
        page.keyboard.press("End")
        assert numbers_of(page)["Token"].endswith(f"place {page.locator('.tokens .t').count()}")


def test_an_episode_that_failed_before_its_first_turn_says_so(browser, step):
    with looking(browser, f"{step}/group/9/0") as page:
        expect(page.locator(".tokens")).to_have_text("There are no tokens: the trajectory failed before the first one.")
        expect(page.locator("main")).to_contain_text("Failed insandbox")
        page.get_by_role("group", name="Completion of").focus()
        for key in ("ArrowRight", "End", "n", "8"):
            page.keyboard.press(key)


def test_lists_say_what_became_of_an_episode_and_say_nothing_of_single_turns(browser, step):
    with looking(browser, f"{step}/group/7") as page:
        lines = page.get_by_role("article", name="Trajectory 0").locator(".lines")
        for said in ("Environmentsums", "Turns4", "Tool calls2", "Malformed calls1", "Failed intool:add"):
            expect(lines).to_contain_text(said)
        expect(page.get_by_role("article", name="Trajectory 1").locator(".lines")).not_to_contain_text("Turns")
    with looking(browser, step) as page:
        row = page.locator("tr[data-ticket='7']")
        expect(row.locator(".episodes")).to_have_text("sums: 4 turns, 2 tool calls (1 malformed)")
        expect(row.locator(".troubles")).to_contain_text("1× in tool:add")
        expect(page.locator("tr[data-ticket='8'] .episodes")).to_have_count(0)
        screenshot(page, "step-episodes")


def test_episodes_fit_a_telephone_and_have_names_in_both_colours(browser, step):
    for width, scheme in ((390, "dark"), (1280, "light")):
        with looking(browser, step, width=width, scheme=scheme) as page:
            for path, name in (("/group/7/0", "trajectory"), ("/group/7", "group"), ("", "step")):
                page.goto(f"{step}{path}")
                page.locator("main dl, main table").first.wait_for()
                for rule in page.locator(".rewritten summary").all():
                    rule.click()
                screenshot(page, f"episode-{name}-{width}-{scheme}")
                wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
                assert wide <= 0, f"{name} is {wide} px wider than {width}"
                assert page.evaluate(NAMELESS) == [], name


def test_an_exported_step_has_the_conversation_too(browser, folder, tmp_path):
    file = tmp_path / "step-4.html"
    treadwheel("view", folder, "--export", file)
    with offline(browser, file) as page:
        expect(page.locator(".groups small")).to_have_text(
            [
                "sums: turns 4, tool calls 2 (1 malformed), failed in tool:add",
                "sums: turns 0, tool calls 0, failed in sandbox",
            ]
        )
        screenshot(page, "export-episodes")
        page.get_by_role("link", name="Group 7").click()
        page.get_by_role("link", name="Trajectory 0").click()
        _expect_blocks(page, [len(_encoded(text)) for text, _, _ in (*FIRST, *SECOND)])
        page.locator(".rewritten summary").click()
        expect(page.locator(".rewritten pre")).to_have_text(REWRITTEN)
        expect(page.locator(".call.malformed")).to_have_count(1)


def _expect_blocks(page: Page, sizes: list[int]) -> None:
    """The heads of the hand-made episode's blocks."""
    expect(page.locator(".writer")).to_have_text(
        [
            f"assistant, turn 1 {sizes[0]} tokens earned 0.5",
            f"written: tool add, tool {HOSTILE} {sizes[1]} tokens",
            f"assistant, turn 2 {sizes[2]} tokens earned 0",
            f"assistant, turn 3 {sizes[3]} tokens · cut at the limit earned -0.25",
            f"written: user {sizes[4]} tokens",
            f"assistant, turn 4 {sizes[5]} tokens earned 1",
        ]
    )


def _encoded(text: str) -> list[int]:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json")).encode(text).ids


def _recorded(folder: Path) -> list[Mapping[str, Any]]:
    """A token of the episode each, from the file."""
    with pa.ipc.open_file((folder / "trajectories/step-000004.arrow").read_bytes()) as reader:
        segments = reader.get_batch(0).slice(0, 2).to_pylist()
    columns = ("completion_token_ids", "loss_mask", "rollout_logprobs", "token_rewards")
    return [
        dict(zip(("id", "mask", "logprob", "reward"), values, strict=True))
        for segment in segments
        for values in zip(*(segment[name] for name in columns), strict=True)
    ]
