"""A live page goes on where its last message ended."""

import json
import threading
from collections.abc import Callable

import pytest
from starlette.requests import Request

from cluster.contracts.errors import StorageError
from cluster.record.run_directory import RunDirectory
from deploy.viewer import live
from deploy.viewer.app import create_app
from deploy.viewer.runs import Run
from tests.unit.deploy.viewer.run_files import append, event, step, write_run


@pytest.fixture
def folder(tmp_path):
    return write_run(tmp_path / "run", steps=[step(1, reward__mean=0.5)])


def _run(folder) -> Run:
    return Run("run", RunDirectory(str(folder)))


def test_only_what_came_since_is_told(folder):
    run = _run(folder)
    mark = run.mark()
    append(folder / "metrics.jsonl", [step(2, reward__mean=0.75)])
    append(folder / "events.jsonl", [event("hang", 1002.0, actor="rollout-0", silent_s=9.0)])
    kind, news, after = live.since(run, mark)
    assert (kind, [each["policy_version"] for each in news["steps"]]) == ("news", [2])
    assert [each["words"] for each in news["marks"]] == ["rollout-0 was silent for 9 s"]
    assert news["facts"]["reward"] == 0.75
    assert live.since(run, after)[1]["steps"] == []
    assert live.since(_run(folder), mark)[1]["steps"] == news["steps"], (
        "a viewer that was restarted goes on from the same mark"
    )


def test_what_comes_while_news_are_gathered_is_in_the_next_news_alone(folder, monkeypatch):
    run = _run(folder)
    before = run.mark()
    append(folder / "metrics.jsonl", [step(2)])
    now = run.mark()
    append(folder / "metrics.jsonl", [step(3)])
    append(folder / "events.jsonl", [event("hang", 1002.0, actor="rollout-0", silent_s=9.0)])
    with monkeypatch.context() as patch:
        patch.setattr(Run, "mark", lambda _: now)
        _, news, after = live.since(run, before)
    assert ([each["policy_version"] for each in news["steps"]], news["marks"], after) == ([2], [], now)
    _, news, _ = live.since(run, after)
    assert [each["policy_version"] for each in news["steps"]] == [3] and len(news["marks"]) == 1


class _Overtaken:
    """A lock after whose first release another thread has its turn at once."""

    def __init__(self, turn: Callable[[], object]) -> None:
        self._lock, self._turns = threading.Lock(), [turn]

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        if self._turns:
            self._turns.pop()()


def test_a_mark_is_of_the_lines_that_it_counts_even_if_another_thread_finds_them_changed(folder):
    run = _run(folder)
    append(folder / "metrics.jsonl", [step(number) for number in (2, 3)])

    def another_thread() -> None:
        (folder / "metrics.jsonl").write_text("")
        append(folder / "metrics.jsonl", [step(1)])
        run.metrics()

    run._metrics._lock = _Overtaken(another_thread)
    mark = run.mark()
    assert mark.startswith("3/") and live.since(run, mark)[0] == "again"


def test_a_page_whose_lines_were_written_anew_loads_again(folder):
    run = _run(folder)
    mark = run.mark()
    (folder / "metrics.jsonl").write_text("")
    append(folder / "metrics.jsonl", [step(1, reward__mean=0.125)])
    kind, _, after = live.since(run, mark)
    assert kind == "again"
    assert live.since(run, after)[0] == "news"


@pytest.mark.parametrize("mark", ["", "nonsense", "1/2", "1/x/0.0", "../../etc"])
def test_a_mark_that_is_none_loads_again(folder, mark):
    assert live.since(_run(folder), mark)[0] == "again"


async def test_each_time_that_lines_are_written_anew_the_page_is_told(folder):
    run = _run(folder)
    run.poll_s = 0.001
    messages = live._messages(run, "")
    assert await anext(messages) == "retry: 2000\n\n"
    for reward in (0.125, 0.0625):
        assert (await anext(messages)).endswith("event: again\ndata: {}\n\n")
        (folder / "metrics.jsonl").write_text("")
        append(folder / "metrics.jsonl", [step(1, reward__mean=reward)])
    assert "event: again" in await anext(messages)


async def test_a_browser_that_connects_again_goes_on_after_its_last_message(folder):
    app = create_app([str(folder)])
    run = app.state.runs.get("run")
    opened, last = run.mark(), run.mark().replace("1/", "2/", 1)
    append(folder / "metrics.jsonl", [step(2), step(3)])
    scope = {"type": "http", "app": app, "path_params": {"run": "run"}, "query_string": f"after={opened}".encode()}
    for headers, steps in (([], [2, 3]), ([(b"last-event-id", last.encode())], [3])):
        messages = (await live.follow(Request({**scope, "headers": headers}))).body_iterator
        assert await anext(messages) == "retry: 2000\n\n"
        news = json.loads((await anext(messages)).partition("data: ")[2])
        assert [each["policy_version"] for each in news["steps"]] == steps


async def test_a_run_that_cannot_be_read_for_a_while_says_so_and_is_followed_on(folder, monkeypatch):
    def refuse(_):
        raise StorageError("the store does not answer")

    run = _run(folder)
    run.poll_s = 0.001
    messages = live._messages(run, run.mark())
    assert await anext(messages) == "retry: 2000\n\n"
    with monkeypatch.context() as patch:
        patch.setattr(Run, "mark", refuse)
        assert 'event: away\ndata: {"reason": "the store does not answer"}' in await anext(messages)
    assert "event: news" in await anext(messages)


async def test_of_a_run_that_stands_still_nothing_is_worked_out_again(folder, monkeypatch):
    asked: list[str] = []
    monkeypatch.setattr(live, "since", lambda run, after, since=live.since: asked.append(after) or since(run, after))
    monkeypatch.setattr(live, "_ALIVE_EVERY_S", 0.01)
    run = _run(folder)
    run.poll_s = 0.001
    messages = live._messages(run, "")
    assert [(await anext(messages)).partition("\n")[0] for _ in range(2)] == ["retry: 2000", f"id: {run.mark()}"]
    assert "event: news" in await anext(messages)
    assert await anext(messages) == ": alive\n\n" and asked == ["", run.mark()]
    (folder / "status.json").write_text('{"time": 1003.0, "actors": []}')
    assert await anext(messages) == ": alive\n\n" and len(asked) == 3, "the same news are not sent again"
    doing = {"actor": "rollout-0", "phase": "sampling", "since": 1003.0, "policy_version": 7}
    (folder / "status.json").write_text(json.dumps({"time": 1004.0, "actors": [doing]}))
    assert '"policy_version": 7' in await anext(messages)
    append(folder / "metrics.jsonl", [step(2, reward__mean=0.75)])
    assert '"policy_version": 2' in await anext(messages)
