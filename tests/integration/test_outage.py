"""A judge's server goes away in mid-run, again and again: the run waits, is killed, is stopped, and loses and pays nothing."""

import re

import pytest

from tests.integration.commands import treadwheel
from tests.integration.faults import Run, assert_equal_bit_for_bit, until, write_run
from tests.integration.scored_server import ScoredServer
from tests.models import make_tiny_model
from tests.ports import free_ports

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.acceptance, pytest.mark.timeout(1800)]
NUM_STEPS = 8


@pytest.fixture(scope="module")
def port() -> int:
    return free_ports(1)[0]


@pytest.fixture(scope="module")
def file(tmp_path_factory, port):
    """4 groups a step, each of which the server is asked for once; deterministic, so that a resumed run samples the same."""
    folder = tmp_path_factory.mktemp("outage")
    judge = {"name": "tests.integration.judges:of_a_server", "url": f"http://127.0.0.1:{port}"}
    return write_run(
        folder,
        make_tiny_model(folder / "model"),
        num_steps=NUM_STEPS,
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


def test_a_run_through_outages_a_kill_and_a_stop_equals_one_without_and_asks_nothing_twice(
    undisturbed, file, port, tmp_path
):
    alone, alone_server = undisturbed
    run, server = Run(file.parent / "disturbed"), ScoredServer(tmp_path / "log", port=port)

    def held(number: int) -> bool:
        return len(run.events("reward_held")) == number

    server.up(num_answers=10)  # in the third step, after two of its groups
    with run.start(file) as driver:
        until(lambda: held(1) and "waits for http://127.0.0.1" in driver.output, process=driver)
        phases = treadwheel("info", run.path).stdout
        assert "holding for" in phases and "waits for http://127.0.0.1" in phases
        assert re.search(r"verdicts kept\s+10\b", phases)
        run.kill_driver()
    server.up(num_answers=5)  # the two that wait, and three of the fourth step
    with run.start(file) as driver:
        until(lambda: held(2), process=driver)
        driver.press_ctrl_c()
        assert driver.exit_code() == 130
        assert not driver.left_behind()
    server.up(num_answers=3)
    with run.start(file) as driver:
        until(lambda: held(3), process=driver)
        server.up()
        assert driver.exit_code() == 0, driver.output
    server.down()

    assert not run.events("failure", "quarantine", "drop", "reward_failure")
    assert run.events("reward_resumed")[-1]["message"].startswith("the part 'style' of the reward goes on: http://127")
    assert any(numbers.get("time/style/held_s", 0) > 0 for numbers in run.metrics().values())
    assert run.problems() == ()
    assert_equal_bit_for_bit(alone, run, steps=range(1, NUM_STEPS + 1), checkpoint=NUM_STEPS)
    assert run.groups() == alone.groups()
    assert server.answered() == alone_server.answered() and len(server.answered()) == 4 * NUM_STEPS
    assert run.replay().endswith(": equal\n"), "with the server down: what is recorded needs no judge"
