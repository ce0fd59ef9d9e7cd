"""Groups and tokens in a real browser: colours and numbers are those of the files, text is inert, and a step fits a file."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from playwright.sync_api import expect
from tokenizers import Tokenizer

from cluster.contracts.learned import LEARNED_SCHEMA, read_learned, written_learned
from tests.integration.browser import NAMELESS, looking, numbers_of, offline, screenshot, viewing
from tests.integration.commands import ROOT, treadwheel
from tests.unit.cluster.contracts.rows import row
from tests.unit.deploy.viewer.run_files import CONFIG, write_run, write_trajectories

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
MODEL = ROOT / "deploy/quickstart/model"
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>{{7*7}}</pre>"
STEP = 4
TOKENS = [21, 22, 23]
SAMPLED, REFERENCE = [-0.5, -1.0, -2.5], [-0.75, -1.0, -1.0]
LEARNED = {
    "ticket_index": 7,
    "sample_index": 0,
    "policy_logprobs": [-0.25, -1.0, -3.0],
    "proximal_logprobs": None,
    "advantages": [2.0, 2.0, -1.0],
    "weights": [0.5, 1.0, 2.0],
    "clipped": [True, False, False],
    "entropies": [0.0, 0.5, 4.0],
}
ASKED = {
    "messages": [
        {"role": "user", "content": "What is 47 + 38?"},
        {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 47}}}]},
        {"role": "tool", "name": "add", "content": "b is missing"},
    ]
}
COLOURS = {
    1: ["sequential-3", "sequential-4", "sequential-5"],  # surprise 0.5, 1, 2.5 nats
    2: ["sequential-7", "sequential-0", "sequential-8"],  # |−0.25 + 0.5| = 0.25, 0, 0.5 nats
    3: ["diverging-8", "diverging-4", "diverging-0"],  # e^0.25 = 1.28, 1, e^−0.5 = 0.61
    4: ["diverging-7", "diverging-8", "diverging-0"],  # 2 × 0.5 = 1, 2, −2, on a scale to ±2
    5: ["sequential-1", "sequential-1", "sequential-0"],  # policies 2, 2, 3 under the one of version 3
    6: ["diverging-7", "diverging-4", "diverging-0"],  # −0.25 + 0.75 = 0.5, 0, −3 + 1 = −2 nats
    7: ["mask-1", "mask-1", "mask-1"],
    8: ["unknown", "unknown", "unknown"],
    9: ["sequential-0", "sequential-4", "sequential-8"],  # 0, 0.5, 4 nats
}
"""By key, worked out by hand from the numbers above and the bounds of the legend."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A run of one step: three tokens whose numbers are known, hostile text, a tool between two turns, 50,000 tokens."""
    folder = write_run(tmp_path_factory.mktemp("viewer") / "run")
    config = {**CONFIG, "model": {"path": str(MODEL)}, "record": {"learned_groups": 1}}
    (folder / "run.yaml").write_text(json.dumps(config))
    known = _row(0, TOKENS, rollout_logprobs=SAMPLED, reference_logprobs=REFERENCE, policy_versions=[2, 2, 3])
    hostile = {"prompt_text": HOSTILE, "prompt_id": HOSTILE, "info": json.dumps({HOSTILE: HOSTILE})}
    write_trajectories(
        folder,
        STEP,
        [known, _row(1, [24, 25], reward=2.0)],
        [_row(0, _encoded(HOSTILE), ticket_index=8, **hostile), _row(1, [30], ticket_index=8, **hostile)],
        [_row(0, _encoded("47 plus 38 " * 20), ticket_index=9, masked=range(40, 60), info=json.dumps(ASKED))],
        [_row(0, [*_encoded("one two three\n") * 5000, 3][-50_000:], ticket_index=10)],
    )
    content = written_learned([pa.RecordBatch.from_pylist([LEARNED], schema=LEARNED_SCHEMA)], policy_version=3)
    (folder / "learned").mkdir()
    (folder / "learned/step-000004.arrow").write_bytes(content)
    return folder


@pytest.fixture(scope="module")
def group(folder) -> Iterator[str]:
    """The address of a group, but for its ticket."""
    with viewing(folder) as (url, _):
        yield f"{url}run/run/step/{STEP}/group"


def test_three_tokens_have_the_colours_and_numbers_of_the_files(browser, group, folder):
    with looking(browser, f"{group}/7/0") as page:
        tokens = page.locator(".tokens .t")
        expect(tokens).to_have_count(3)
        for key, expected in COLOURS.items():
            page.keyboard.press(str(key))
            found = [str(each.get_attribute("class")).split()[1] for each in tokens.all()]
            assert found == expected, f"key {key}"
        page.keyboard.press("1")
        legend = page.locator(".token-legend .sequential-5")
        expect(legend).to_have_text("2")
        background = "each => getComputedStyle(each).backgroundColor"
        assert tokens.nth(2).evaluate(background) == legend.evaluate(background)
        trajectory, learned = _recorded(folder)
        for at in range(3):
            tokens.nth(at).hover()
            numbers = numbers_of(page)
            assert numbers["Token"] == f"{trajectory['completion_token_ids'][at]}, place {at + 1}"
            assert float(numbers["Log-prob, sampler"].split()[0]) == trajectory["rollout_logprobs"][at]
            assert float(numbers["Log-prob, reference"]) == trajectory["reference_logprobs"][at]
            assert float(numbers["Log-prob, learner"]) == learned.policy_logprobs[at]
            assert float(numbers["Advantage"]) == learned.advantages[at]
            assert float(numbers["Weight"]) == learned.weights[at]
            assert float(numbers["Entropy"]) == learned.entropies[at]
            assert ("clipped" in numbers["Ratio"]) is learned.clipped[at]
            assert numbers["Policy version"] == f"{trajectory['policy_versions'][at]}, {[1, 1, 0][at]} behind"
        screenshot(page, "trajectory")


def test_keys_go_from_token_to_token_and_what_is_not_recorded_is_said(browser, group):
    with looking(browser, f"{group}/9/0") as page:
        page.keyboard.press("2")
        expect(page.get_by_role("button", name="Mismatch")).to_have_attribute("aria-pressed", "true")
        expect(page.locator(".token-legend")).to_contain_text(
            "Mismatch: not recorded for this group: record.learned_groups=1"
        )
        page.keyboard.press("7")
        page.get_by_role("group", name="Completion of").focus()
        for key, place in (("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("End", 220)):
            page.keyboard.press(key)
            assert numbers_of(page)["Token"].endswith(f"place {place}"), key
        expect(page.locator("#token-said")).to_contain_text("Trained on yes")
        expect(page.locator(".writer")).to_have_text(
            ["1. Policy", "2. Tool or environment, not trained on", "3. Policy"]
        )
        assert page.locator(".piece.masked .t.mask-0").count() == 20
        page.keyboard.press("1")
        page.reload()
        expect(page.locator(".token-card")).to_have_attribute("data-measure", "1")
        page.keyboard.press("k")
        expect(page).to_have_url(f"{group}/9/0")


def test_a_prompt_with_tools_is_a_conversation_of_roles(browser, group):
    with looking(browser, f"{group}/9") as page:
        messages = page.locator(".message")
        expect(messages.locator("b")).to_have_text(["user", "assistant", "tool add"])
        assert json.loads(str(messages.nth(1).locator("pre").text_content())) == {"name": "add", "arguments": {"a": 47}}
        page.get_by_text("Text that the policy read").click()
        expect(page.locator(".prompt")).to_contain_text("1+1=")


def test_a_group_shows_its_completions_the_best_first_and_leads_to_their_tokens(browser, group):
    with looking(browser, f"{group}/7") as page:
        expect(page.locator(".completion .reward")).to_have_text(["2", "1"])
        page.keyboard.press("j")
        expect(page.get_by_role("heading", name="Group 8 of step 4")).to_be_visible()
        page.get_by_role("link", name="Previous group").click()
        page.get_by_role("link", name="Trajectory 0").click()
        expect(page.locator(".tokens .t")).to_have_count(3)
        page.keyboard.press("k")
        expect(page.get_by_role("heading", name="Trajectory 1")).to_be_visible()


def test_hostile_text_stays_text(browser, group):
    for path in ("8", "8/0"):
        with looking(browser, f"{group}/{path}") as page:
            expect(page.locator("main")).to_contain_text(HOSTILE)
            assert page.locator("main script, main img").count() == 0
    with looking(browser, f"{group}/8/0") as page:
        assert page.locator(".tokens").text_content() == HOSTILE


def test_fifty_thousand_tokens_are_all_there_and_only_those_in_sight_are_built(browser, group):
    with looking(browser, f"{group}/10/0") as page:
        expect(page.get_by_role("group", name="Completion of 50,000 tokens")).to_be_visible()
        expect(page.locator("[data-at='0']")).to_be_visible()
        assert page.locator(".tokens .t").count() < 10_000
        assert page.locator("[data-at='49999']").count() == 0
        page.locator(".tokens").evaluate("each => each.scrollIntoView({block: 'end'})")
        expect(page.locator("[data-at='49999']")).to_be_in_viewport()
        expect(page.locator("[data-at='49999']")).to_have_text("<|end|>")
        page.keyboard.press("5")
        expect(page.locator("[data-at='49999']")).to_have_class("t sequential-0 special")
        strip = page.locator(".strip")
        strip.click(position={"x": 1, "y": 5})
        expect(page.locator(".t.at")).to_be_in_viewport()
        assert int(str(page.locator(".t.at").get_attribute("data-at"))) < 200
        assert page.locator(".tokens .t").count() < 20_000


def test_groups_and_tokens_fit_a_telephone_and_have_names(browser, group):
    for width, scheme in ((390, "dark"), (1280, "light")):
        with looking(browser, f"{group}/7", width=width, scheme=scheme) as page:
            for path in ("7", "7/0", "8", "8/0", "9/0"):
                page.goto(f"{group}/{path}")
                page.locator("#view dl").first.wait_for()
                screenshot(page, f"{'trajectory' if '/' in path else 'group'}-{width}")
                wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
                assert wide <= 0, f"{path} is {wide} px wider than {width}"
                assert page.evaluate(NAMELESS) == [], path


def test_an_exported_step_opens_from_a_disk_without_a_network(browser, folder, tmp_path):
    file = tmp_path / "step-4.html"
    told = treadwheel("view", folder, "--export", file)
    assert told.stdout == f"step 4 of run: 4 groups, 6 trajectories in {file}\n"
    with offline(browser, file) as page:
        page.get_by_role("link", name="Group 7").click()
        expect(page.locator(".completion .reward")).to_have_text(["2", "1"])
        page.get_by_role("link", name="Trajectory 0").click()
        expect(page.locator(".tokens .t")).to_have_count(3)
        page.keyboard.press("4")
        found = [str(each.get_attribute("class")).split()[1] for each in page.locator(".tokens .t").all()]
        assert found == COLOURS[4]
        page.get_by_role("link", name="Group 7").click()
        page.get_by_role("link", name="Next group").click()
        expect(page.locator("main")).to_contain_text(HOSTILE)
        page.get_by_role("link", name="Step 4", exact=True).click()
        expect(page.get_by_role("heading", name="Step 4 of run")).to_be_visible()
        screenshot(page, "export")


def _row(sample: int, token_ids: list[int], *, masked: range = range(0), **changed: Any) -> dict[str, Any]:
    ticket = changed.get("ticket_index", 7)
    count = len(token_ids)
    return row(**{
        "group_id": f"{ticket:08d}",
        "sample_index": sample,
        "completion_token_ids": token_ids,
        "completion_text": _tokenizer().decode(token_ids),
        "loss_mask": [at not in masked for at in range(count)],
        "rollout_logprobs": [0.0 if at in masked else -0.5 for at in range(count)],
        "policy_versions": [3] * count,
        **changed,
    })  # fmt: skip


def _tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


def _encoded(text: str) -> list[int]:
    return _tokenizer().encode(text).ids


def _recorded(folder: Path) -> tuple[Mapping[str, Any], Any]:
    """Of the first trajectory, from the files."""
    with pa.ipc.open_file((folder / "trajectories/step-000004.arrow").read_bytes()) as reader:
        trajectory = reader.get_batch(0).slice(0, 1).to_pylist()[0]
    learned = read_learned((folder / "learned/step-000004.arrow").read_bytes())
    return trajectory, learned.trajectory(ticket_index=7, sample_index=0)
