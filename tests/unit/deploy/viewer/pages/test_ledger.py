"""The ledger as a page: verified or broken, in steps of fifty, and what a group trained."""

import pytest
from starlette.exceptions import HTTPException
from starlette.testclient import TestClient

from cluster.record.ledger import NAME
from deploy.viewer.app import create_app
from deploy.viewer.pages.ledger import PER_PAGE, ledger, ranges
from tests.object_store import s3
from tests.unit.deploy.viewer.recorded import asking, group, opened, record, write_ledger
from tests.unit.deploy.viewer.run_files import event, write_run


@pytest.fixture
def folder(tmp_path):
    events = [event("drop", 1001.0, group_id="00000003", prompt_id="p", reason="zero_variance")]
    folder = write_run(tmp_path / "run", events=events)
    record(folder, [group(0, 1.0), group(1, 0.0)], [group(2, 1.0), group(4, 0.0)])
    return folder


def test_ranges_show_which_groups_were_dropped():
    assert ranges([0, 1, 2, 4, 7, 8]) == "0–2, 4, 7–8"
    assert ranges([5]) == "5"


def test_a_whole_chain_has_no_problem_and_the_newest_record_is_vouched_for_by_none(folder):
    told = ledger(opened(folder), asking())
    assert (told["num_steps"], told["problem"], told["bad_files"], told["num_checked"]) == (2, None, [], 2)
    assert [(row["step"], row["groups"], row["vouched_by"]) for row in told["rows"]] == [
        (2, [2, 4], "newest"),
        (1, [0, 1], "step 2"),
    ]
    assert told["rows"][0]["previous"] == told["rows"][1]["digest"]


def test_a_torn_last_line_is_told_unless_a_driver_may_be_writing_it(folder):
    whole = (folder / NAME).read_text()
    (folder / NAME).write_text(whole[:-20])
    run = opened(folder)
    assert [ledger(run, asking())[name] for name in ("num_steps", "problem", "is_torn")] == [1, None, True]
    run.directory.claim((folder / "run.yaml").read_text())
    assert not ledger(opened(folder), asking())["is_torn"]
    run.directory.release()


def test_no_later_step_vouches_for_the_last_record_of_a_broken_chain(folder):
    (folder / NAME).write_text((folder / NAME).read_text().replace('"groups":[0,1]', '"groups":[0]'))
    told = ledger(opened(folder), asking())
    assert [(row["step"], row["vouched_by"]) for row in told["rows"]] == [(1, "the chain breaks here")]


def test_of_an_object_store_files_are_checked_if_they_are_asked_for():
    with s3("ledgers"):
        record("s3://ledgers/run", [group(0, 1.0)])
        run = opened("s3://ledgers/run")
        states = [ledger(run, asking(query))["rows"][0]["file_state"] for query in ("", "files=check")]
    assert states == ["not checked", "as recorded"]


def test_more_files_than_one_answer_checks_are_left_to_the_command(folder, monkeypatch):
    for most in ("_MOST_BYTES", "_MOST_BYTES_ASKED"):
        monkeypatch.setattr(f"deploy.viewer.pages.ledger.{most}", 0)
    browser = TestClient(create_app([str(folder)]), base_url="http://localhost")
    for query, offered in (("", True), ("?files=check", False)):
        page = browser.get(f"/run/run/ledger{query}").text
        assert ("check the others too" in page) is offered and "treadwheel verify" in page


def test_an_altered_file_is_told_by_its_step(folder):
    (folder / "trajectories/step-000001.arrow").write_bytes(b"other")
    assert ledger(opened(folder), asking())["bad_files"] == [1]


@pytest.mark.parametrize(
    ("ticket", "step", "words"),
    [
        (4, 2, "Group 4 trained step 2."),
        (3, None, "Group 3 trained no step: it was dropped (zero_variance)."),
        (5, None, "Group 5 has trained no step yet: the last record ends before it."),
    ],
)
def test_a_group_trained_a_step_or_was_dropped_or_is_to_come(folder, ticket, step, words):
    told = ledger(opened(folder), asking(f"ticket={ticket}"))["ticket"]
    assert (told["step"], told["words"]) == (step, words)


def test_before_the_first_record_no_group_has_trained_a_step(tmp_path):
    told = ledger(opened(write_run(tmp_path / "run")), asking("ticket=0"))["ticket"]
    assert told["words"] == "Group 0 has trained no step yet: the last record ends before it."


def test_what_is_no_number_is_refused_in_words(folder):
    for query in ("ticket=<script>", "before=nan", "ticket=1.5", "before=1e99"):
        with pytest.raises(HTTPException, match="number"):
            ledger(opened(folder), asking(query))


def test_ten_thousand_steps_are_pages_of_fifty(tmp_path):
    folder = write_run(tmp_path / "run")
    write_ledger(folder, num_steps=10_000)
    run = opened(folder)
    first = ledger(run, asking())
    assert [row["step"] for row in first["rows"]] == list(range(10_000, 10_000 - PER_PAGE, -1))
    assert (first["newer"], first["older"]) == (None, 9_951)
    second = ledger(run, asking("before=9951"))
    assert (second["rows"][0]["step"], second["newer"], second["older"]) == (9_950, 10_001, 9_901)
    assert ledger(run, asking("before=2"))["older"] is None
    assert ledger(run, asking("before=-5"))["rows"] == []
