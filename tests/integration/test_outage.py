"""A judge's server goes away in mid-run, again and again: the run waits, is killed, is stopped, and loses and pays nothing.

Its prompts are of two sources, with long, repeated and solved ones: it samples those of a run that nothing befell, bit for bit.
"""

import json
import re

import pytest

from tests.integration.commands import treadwheel
from tests.integration.faults import Run, assert_equal_bit_for_bit, until, write_run
from tests.integration.scored_server import ScoredServer
from tests.models import make_tiny_model
from tests.ports import free_ports

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.acceptance, pytest.mark.timeout(1800)]
STEPS = range(1, 9)
GROUPS_PER_STEP = 6


@pytest.fixture(scope="module")
def port() -> int:
    return free_ports(1)[0]


@pytest.fixture(scope="module")
def file(tmp_path_factory, port):
    """The server is asked for each group once; deterministic, so that a resumed run samples the same."""
    folder = tmp_path_factory.mktemp("outage")
    sums = [{"prompt": f"{number} + 1 ="} for number in range(8)] + [{"prompt": "0 + 1 ="}] * 4
    long = [{"prompt": f"say {letter} " + "again " * (10 * (letter in "xyz"))} for letter in "abcdxyz"]
    sources = {}
    for name, rows, weight in (("sums", sums, 2), ("chat", long, 1)):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        sources[name] = {"name": "file", "path": str(folder / f"{name}.jsonl"), "text_as": "text", "weight": weight}
    judge = {"name": "tests.integration.judges:of_a_server", "url": f"http://127.0.0.1:{port}"}
    return write_run(
        folder,
        make_tiny_model(folder / "model"),
        num_steps=len(STEPS),
        buffer={"groups_per_step": GROUPS_PER_STEP, "trajectories_per_group": 4},
        prompts={
            "sources": sources,
            "max_prompt_tokens": 20,
            "on_long_prompt": "drop",
            "deduplicate": True,
            "difficulty": {"target": 0.5, "skip_solved_steps": 3, "success_at": 0.12},
        },
        reward={"parts": {"style": {"judge": judge, "cache": True}}},
        algorithm={},
        metrics={"sinks": ["jsonl", "console"]},
        supervision__heartbeat_s=0.2,  # it brings what holds, and the steps after the last outage take a second or so
    )


@pytest.fixture(scope="module")
def undisturbed(file, port, tmp_path_factory) -> tuple[Run, ScoredServer]:
    server = ScoredServer(tmp_path_factory.mktemp("undisturbed") / "log", port=port)
    server.up()
    run = Run(file.parent / "undisturbed").to_end(file)
    server.down()
    return run, server


@pytest.fixture(scope="module")
def disturbed(undisturbed, file, port, tmp_path_factory) -> tuple[Run, ScoredServer]:
    """The server is away three times. In the first time the driver is killed, in the second it is stopped."""
    run = Run(file.parent / "disturbed")
    server = ScoredServer(tmp_path_factory.mktemp("disturbed") / "log", port=port)

    def held(number: int) -> bool:
        return len(run.events("reward_held")) == number

    server.up(num_answers=14)  # in the third step, after two of its groups
    with run.start(file) as driver:
        until(lambda: held(1) and "waits for http://127.0.0.1" in driver.output, process=driver)
        phases = treadwheel("info", run.path).stdout
        assert "holding for" in phases and "waits for http://127.0.0.1" in phases
        assert re.search(r"verdicts kept\s+14\b", phases)
        run.kill_driver()
    server.up(num_answers=7)  # the four that wait, and three of the fourth step
    with run.start(file) as driver:
        until(lambda: held(2), process=driver)
        driver.press_ctrl_c()
        assert driver.exit_code() == 130
        assert not driver.left_behind()
    server.up(num_answers=5)
    with run.start(file) as driver:
        until(lambda: held(3), process=driver)
        server.up()
        assert driver.exit_code() == 0, driver.output
    server.down()
    return run, server


@pytest.fixture(scope="module")
def alone(undisturbed) -> Run:
    return undisturbed[0]


def prompts(run: Run) -> list[list[tuple[str, str]]]:
    """Ids of each step's groups and prompts, in the order consumed."""
    tables = run.trajectories()
    return [
        list(dict.fromkeys(zip(*tables[step].select(["group_id", "prompt_id"]).to_pydict().values(), strict=True)))
        for step in STEPS
    ]


def ledger(run: Run) -> list[dict]:
    return [json.loads(line) for line in run.directory.read_lines("ledger/ledger.jsonl")]


def test_a_run_through_outages_a_kill_and_a_stop_equals_one_without_and_asks_nothing_twice(undisturbed, disturbed):
    (alone, alone_server), (run, server) = undisturbed, disturbed
    assert not run.events("failure", "quarantine", "drop", "reward_failure")
    assert run.events("reward_resumed")[-1]["message"].startswith("the part 'style' of the reward goes on: http://127")
    assert any(numbers.get("time/style/held_s", 0) > 0 for numbers in run.metrics().values())
    assert run.problems() == () == alone.problems()
    assert_equal_bit_for_bit(alone, run, steps=STEPS, checkpoint=STEPS[-1])
    assert run.groups() == alone.groups()
    assert server.answered() == alone_server.answered() and len(server.answered()) == GROUPS_PER_STEP * len(STEPS)
    assert run.replay().endswith(": equal\n"), "with the server down: what is recorded needs no judge"


def test_a_killed_run_goes_on_with_the_prompts_that_it_would_have_had(alone, disturbed):
    run, _ = disturbed
    assert [event["recorded_steps"] for event in run.events("resumed")] == [2, 3]
    assert prompts(run) == prompts(alone)
    known = [[(record["groups"], record["pass_rates"]) for record in ledger(each)] for each in (alone, run)]
    assert known[0] == known[1]


def test_shares_hold_in_every_step_and_no_long_or_repeated_prompt_is_sampled(alone):
    for step in prompts(alone):
        names = [prompt_id.split("/")[0] for _, prompt_id in step]
        assert names.count("sums") == 4 and names.count("chat") == 2
    sampled = {prompt_id for step in prompts(alone) for _, prompt_id in step}
    assert {int(each.rpartition("/")[2]) for each in sampled if each.startswith("sums")} <= set(range(8))
    assert {int(each.rpartition("/")[2]) for each in sampled if each.startswith("chat")} <= set(range(4))
    numbers = [*alone.metrics().values()]
    assert all(each["prompts/num_groups/sums"] == 4 and "reward/mean/chat" in each for each in numbers)
    assert sum(each.get("prompts/num_dropped", 0) for each in numbers) > 0


def test_solved_prompts_rest(alone):
    sizes, solved, num_rested = {"sums": 8, "chat": 4}, {}, 0
    for record, step in zip(ledger(alone), prompts(alone), strict=True):
        resting = {prompt_id for prompt_id, at in solved.items() if record["step"] - 1 - at < 3}
        for _, prompt_id in step:
            source = prompt_id.split("/")[0]
            of_source = {each for each in resting if each.startswith(source)}
            assert prompt_id not in resting or len(of_source) == sizes[source], "where all rest the epoch goes on"
        num_rested += len(resting)
        rates = record["pass_rates"]
        assert rates.keys() == {prompt_id for _, prompt_id in step}
        unsolved = {prompt_id: at for prompt_id, at in solved.items() if prompt_id not in rates}
        solved = unsolved | {prompt_id: record["step"] for prompt_id, rate in rates.items() if rate == 1}
    assert num_rested, "the test tests something"
    assert sum(each.get("prompts/num_skipped", 0) for each in alone.metrics().values()) > 0
