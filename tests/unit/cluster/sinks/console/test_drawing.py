"""The table, as a terminal of some width shows it."""

import io
import math
import sys

import pytest
from rich.console import Console

from cluster.sinks.console.drawing import Drawn, duration, spark
from cluster.sinks.console.standing import Standing

BEGAN = 1_795_000_000.0
NUMBERS = {
    "learner/kl_reference_k3_mean": 0.0123,
    "learner/entropy_mean": 0.635,
    "speed/sampling_tokens_per_s": 3412.0,
    "speed/learning_tokens_per_s": 6001.0,
    "staleness/max": 1.0,
    "buffer/learner_wait_s": 0.5,
    "time/step_s": 2.0,
    "rollout/num_workers": 2.0,
    "rollout/num_wanted": 2.0,
}


def standing_after(num_steps: int, *, of: int = 80, waited_s: float = 0.5) -> Standing:
    clock = [BEGAN]
    standing = Standing(title="runs/quickstart", num_steps=of, max_off_policy_steps=2, now=lambda: clock[0])
    standing.event({"kind": "launched", "time": BEGAN})
    standing.step(0, {"eval/reward": 0.25}, at=BEGAN)
    for version in range(1, num_steps + 1):
        standing.step(version, {**NUMBERS, "reward/mean": version / of}, at=BEGAN + 2.0 * version)
    clock[0] = BEGAN + 2.0 * num_steps + waited_s
    return standing


def drawn(standing: Standing, *, width: int = 100, height: int = 40, encoding: str = "utf-8") -> str:
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    Console(file=out, width=width, height=height, force_terminal=True, no_color=True, color_system=None).print(
        Drawn(standing)
    )
    out.flush()
    return out.buffer.getvalue().decode(encoding)


def test_the_share_that_succeeds_stands_beside_a_held_out_reward_that_differs():
    standing = standing_after(4)
    standing.step(5, {"reward/mean": 0.5, "eval/reward": 0.9, "eval/accuracy": 0.0}, at=BEGAN + 10.0)
    (line,) = [line for line in drawn(standing).splitlines() if "held-out" in line]
    assert "held-out   0.900  " in line and "from 0.250  0.000 succeed" in line


def test_it_says_how_far_how_long_still_and_what_the_model_learns():
    text = drawn(standing_after(40))
    assert "step 40 of 80" in text and "50%" in text
    assert "2.0 s a step, about 1:20 left" in text
    for told in (
        "reward     0.500  ▁▁▂▂▃▃▄▄▅▅▆▆▇▇██  from 0.013",
        "held-out   0.250  at step 0",
        "KL         0.0123 nats to the reference",
        "entropy    0.635 nats",
        "sampling   3,412 tokens/s",
        "learning   6,001 tokens/s",
        "staleness  1 of at most 2 steps",
        "wait       0.5 s of 2.0 s (25%) for groups",
        "workers    2 of 2 serve",
    ):
        assert told in text


@pytest.mark.parametrize("width", [40, 60, 80, 84, 100, 200])
def test_no_line_is_wider_than_the_terminal(width):
    standing = standing_after(40)
    reason = "rollout-1 died in 'generate': " + "its process ended without a word " * 5
    standing.event({"kind": "failure", "actor": "rollout-1", "time": BEGAN, "reason": reason, "decision": "restart"})
    actors = [{"actor": "rollout-1", "phase": "starting", "since": BEGAN + 70}]
    standing.status({"time": BEGAN + 80, "actors": actors})
    lines = drawn(standing, width=width).splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) <= 20 and "40 of 80" in lines[1]


def test_a_worker_that_is_away_and_an_event_are_seen():
    standing = standing_after(40)
    standing.event(
        {"kind": "failure", "actor": "rollout-1", "time": BEGAN, "reason": "rollout-1 died", "decision": "restart"}
    )
    actors = [
        {"actor": "rollout-0", "phase": "sampling", "since": BEGAN},
        {"actor": "rollout-1", "phase": "starting", "since": BEGAN + 70.5},
    ]
    standing.status({"time": BEGAN + 80, "actors": actors})
    text = drawn(standing)
    assert "1 of 2 serve, 1 restart, rollout-1 starting 0:10" in text
    assert text.rstrip().endswith("rollout-1 died; it starts again")


def test_a_step_that_takes_much_longer_than_usual_is_told():
    assert "step 41 takes 0:30 so far" in drawn(standing_after(40, waited_s=30.0))


def test_a_run_that_begins_says_for_how_long():
    standing = standing_after(0, waited_s=75.0)
    assert "starting for 1:15" in drawn(standing) and "not up yet" in drawn(standing)


def test_a_run_that_begins_says_what_it_waits_for_and_who_is_not_up():
    standing = standing_after(0, waited_s=20.0)
    standing.event({"kind": "connecting", "time": BEGAN + 1, "address": None})
    assert "starting for 0:20: Ray starts on this machine" in drawn(standing)
    standing.event({"kind": "starting", "time": BEGAN + 8})
    waits = [
        {"actor": name, "phase": "starting", "since": BEGAN + at} for name, at in (("rollout-0", 8), ("rollout-1", 9))
    ]
    standing.status({"time": BEGAN + 9, "actors": waits})
    text = drawn(standing)
    assert "starting for 0:20: the actors start, the learner loads its model" in text
    assert "0 of 2 serve, rollout-0 +1 starting 0:12" in text
    standing.event({"kind": "started", "time": BEGAN + 15})
    standing.event({"kind": "evaluating", "time": BEGAN + 15, "num_prompts": 64})
    assert "step 1 for 0:05: 64 held-out prompts are evaluated" in drawn(standing)
    standing.step(0, {"eval/reward": 0.5}, at=BEGAN + 18)
    assert "step 1 for 0:05 " in drawn(standing)


def test_the_end_is_said_and_nothing_is_left():
    standing = standing_after(80)
    standing.event({"kind": "finished", "time": BEGAN + 161})
    text = drawn(standing)
    assert "finished" in text and "100%" in text and "left" not in text
    assert "2.0 s a step, 2:41 in all" in text


def test_a_terminal_without_unicode_gets_plain_characters():
    text = drawn(standing_after(40), encoding="ascii")
    assert "step 40 of 80" in text and "#" in text and "?" not in text


def test_hostile_text_is_text():
    standing = standing_after(2)
    standing.event({"kind": "quarantine", "prompt_id": "[bold]\x1b[2J", "reason": "[/]", "time": BEGAN})
    text = drawn(standing)
    assert "[bold]" in text and "\x1b[2J" not in text


def test_a_low_terminal_keeps_the_table_and_the_last_event():
    standing = standing_after(40)
    for version in range(9):
        standing.event({"kind": "checkpoint", "policy_version": version, "time": BEGAN})
    text = drawn(standing, height=14)
    assert text.count("is saved") == 1 and "step 8 is saved" in text


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ([], ""),
        ([0.5], "▁"),
        ([0.0, 1.0], "▁█"),
        ([1.0, 1.0, 1.0], "▁▁▁"),
        ([0.0, 0.0, 7.0, 7.0], "▁▁██"),
        (list(range(64)), "▁▂▃▄▅▆▇█"),
    ],
)
def test_a_spark_line_shows_the_course(values, line):
    assert spark(values, width=8) == line


def test_a_spark_line_of_numbers_too_far_apart_is_flat():
    most = sys.float_info.max
    assert spark([0.0, math.inf], width=2) == spark([-math.inf, math.nan], width=2) == spark([-most, most], width=2)
    assert spark([most, most, 0.0, 0.0], width=2) == "▁▁"


def test_durations_are_short():
    assert [duration(seconds) for seconds in (42, 61, 3723, 176_400)] == ["0:42", "1:01", "1:02:03", "2 days, 1:00:00"]
