"""Search finds by each criterion, looks no further than it may, and goes on where it stopped."""

import json

import pytest
from starlette.exceptions import HTTPException
from starlette.testclient import TestClient

from deploy.viewer import looking, steps
from deploy.viewer.app import create_app
from deploy.viewer.pages.rewards import rewards
from deploy.viewer.pages.search import search
from tests.object_store import s3
from tests.unit.deploy.viewer.episode_rows import episode_rows
from tests.unit.deploy.viewer.recorded import asking, group, opened, record
from tests.unit.deploy.viewer.run_files import CONFIG, write_run

HOSTILE = "\"'><script>alert(1)</script>(?i)[\\"


@pytest.fixture
def folder(tmp_path):
    folder = write_run(tmp_path / "run")
    record(
        folder,
        [group(0, 0.0, 1.0, completion_text="a Needle in hay"), group(1, 0.5, prompt_text="Where is the needle?")],
        [group(2, 0.25, None, worker="rollout-1", policy_versions=[0, 1, 1]), group(3, 1.0, completion_text=HOSTILE)],
    )
    return folder


def _found(folder, query: str) -> list[tuple[int, int, int]]:
    told = search(opened(folder), asking(query))
    return [(each["step"], each["ticket"], each["sample"]) for each in told["found"]]


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("", [(2, 2, 0), (2, 2, 1), (2, 3, 0), (1, 0, 0), (1, 0, 1), (1, 1, 0)]),
        ("text=needle", [(1, 0, 0), (1, 0, 1), (1, 1, 0)]),
        ("text=NEEDLE&min_reward=0.75", [(1, 0, 1)]),
        ("min_reward=0.25&max_reward=0.5", [(2, 2, 0), (1, 1, 0)]),
        ("worker=%20rollout-1%20", [(2, 2, 0), (2, 2, 1)]),
        ("steps=1", [(1, 0, 0), (1, 0, 1), (1, 1, 0)]),
        ("staleness=1", [(2, 2, 0), (2, 2, 1)]),
        ("steps=1&max_reward=0", [(1, 0, 0)]),
        ("steps=2-9&min_reward=1", [(2, 3, 0)]),
        ("text=nowhere", []),
    ],
)
def test_all_that_is_asked_for_must_be_so(folder, query, found):
    assert _found(folder, query) == found


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("environment=sums", [(3, 4, 0), (3, 5, 0)]),
        ("environment=sum", []),
        ("failed_stage=tool", [(3, 4, 0)]),
        ("failed_stage=tool:add", [(3, 4, 0)]),
        ("failed_stage=tool:a", []),
        ("environment=sums&failed_stage=sandbox", [(3, 5, 0)]),
        ("environment=single_turn&steps=2-3", [(2, 2, 0), (2, 2, 1), (2, 3, 0)]),
    ],
)
def test_episodes_are_found_by_their_environment_and_by_what_failed(folder, query, found):
    first, second = (
        episode_rows(lambda text: [3] * len(text), ticket_index=ticket, group_id=f"{ticket:08d}", failed_stage=stage)
        for ticket, stage in ((4, "tool:add"), (5, "sandbox"))
    )
    record(folder, [first, second])
    assert _found(folder, query) == found


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({}, []),
        ({"environment": {"name": "single_turn", "params": {}}}, []),
        ({"environment": "my_package.games:guess"}, ["guess"]),
        ({"environment": {"name": "my_package.games:guess"}}, ["guess"]),
        ({"environment": "single_turn", "environments": {"sums": "a:b", "chat": "c:d"}}, ["chat", "sums"]),
    ],
)
def test_the_form_asks_for_an_environment_where_a_run_has_one(folder, config, names):
    (folder / "run.yaml").write_text(json.dumps({**CONFIG, **config}))
    assert search(opened(folder), asking())["environments"] == names
    page = TestClient(create_app([str(folder)]), base_url="http://localhost").get("/run/run/search").text
    assert ('name="failed_stage"' in page) is bool(names)


def test_a_match_is_shown_where_it_is(folder):
    first, _, third = search(opened(folder), asking("text=needle"))["found"]
    assert (first["where"], first["before"], first["match"], first["after"]) == (
        "completion",
        "a ",
        "Needle",
        " in hay",
    )
    assert (third["where"], third["match"], third["completion"]) == ("prompt", "needle", "2")


def test_what_stands_around_a_match_is_cut_and_marked_where_it_is_cut():
    around = [
        looking.context(f"{'x' * before}needle{'y' * after}", "", "needle")
        for before, after in ((160, 160), (161, 161), (2, 400))
    ]
    assert [(each["before"], each["after"]) for each in around] == [
        ("x" * 160, "y" * 160),
        (f"…{'x' * 160}", f"{'y' * 160}…"),
        ("xx", f"{'y' * 160}…"),
    ]


def test_a_trajectory_that_failed_before_its_first_token_has_no_staleness(folder):
    empty = {name: [] for name in ("completion_token_ids", "loss_mask", "rollout_logprobs", "policy_versions")}
    record(folder, [group(4, None, completion_text="", **empty)])
    assert _found(folder, "staleness=1") == [(2, 2, 0), (2, 2, 1)]


def test_an_answer_says_how_far_it_looked_and_where_the_next_one_begins(folder, monkeypatch):
    monkeypatch.setattr(looking, "_MOST_TRAJECTORIES", 3)
    first = search(opened(folder), asking("text=needle"))
    assert (first["found"], first["num_trajectories"], first["first_step"]) == ([], 3, 2)
    second = search(opened(folder), asking(first["further"]))
    assert [each["ticket"] for each in second["found"]] == [0, 0, 1]
    assert second["further"] is None


def test_an_answer_reads_few_characters_and_leaves_out_steps_that_were_removed_since_they_were_listed(
    folder, monkeypatch
):
    whole = looking.look(opened(folder), looking.Wanted(), [1, 2, 3])
    assert (len(whole.found), whole.damaged, whole.further) == (6, [], None)
    monkeypatch.setattr(looking, "_MOST_CHARACTERS", 1)
    assert search(opened(folder), asking())["further"] == "from=2.1"


def test_an_answer_ends_within_a_step_when_it_has_found_enough(folder, monkeypatch):
    monkeypatch.setattr(looking, "_MOST_FOUND", 1)
    query, seen = "min_reward=0", []
    while query:
        told = search(opened(folder), asking(query))
        seen.append([each["ticket"] for each in told["found"]])
        query = told["further"]
    assert seen == [[2], [3], [0, 0], [1]]


def test_a_damaged_step_is_said_and_the_others_are_searched(folder):
    (folder / "trajectories/step-000002.arrow").write_bytes(b"torn")
    told = search(opened(folder), asking("text=needle"))
    assert len(told["found"]) == 3
    assert [each.partition(" is ")[2][:7] for each in told["damaged"]] == ["damaged"]
    assert [each["name"] for each in rewards(opened(folder), asking())["components"]] == ["reward"]


def test_few_steps_are_opened_for_one_answer(folder, monkeypatch):
    monkeypatch.setattr(looking, "_MOST_STEPS", 1)
    first = search(opened(folder), asking("text=needle"))
    assert (first["found"], first["further"]) == ([], "text=needle&from=1.0")
    assert len(_found(folder, first["further"])) == 3


def test_of_an_object_store_one_answer_takes_few_bytes_and_one_step_at_least(monkeypatch):
    with s3("searched"):
        place = "s3://searched/run"
        record(place, [group(0, 1.0)], [group(1, 0.0)])
        assert [found[0] for found in _found(place, "")] == [2, 1]
        monkeypatch.setattr(steps, "_MOST_BYTES", 1)
        assert search(opened(place), asking("min_reward=1"))["further"] == "min_reward=1&from=1.0"


@pytest.mark.parametrize("query", ["min_reward=much", "staleness=0.5", "steps=1-2-3", "max_reward=inf"])
def test_what_cannot_be_meant_is_refused(folder, query):
    with pytest.raises(HTTPException, match="400"):
        search(opened(folder), asking(query))


def test_a_hostile_query_and_a_hostile_text_are_text(folder):
    browser = TestClient(create_app([str(folder)]), base_url="http://localhost")
    page = browser.get("/run/run/search", params={"text": HOSTILE})
    assert page.status_code == 200 and "Step 2, group 3" in page.text
    assert "<script>alert" not in page.text and page.text.count("&lt;script&gt;alert(1)") == 2
