"""A run without a terminal: lines."""

import io
import sys

import pytest

from cluster.sinks.console.plain import PlainLines, Warnings, line_of


def test_without_a_terminal_a_step_is_a_line():
    out, clock = io.StringIO(), [0.0]
    sink = PlainLines(4, stream=out, now=lambda: clock[0])
    sink.step(0, {"eval/reward": 0.5, "eval/accuracy": 0.5})
    for version in (1, 2, 3):
        clock[0] += 2.0
        sink.step(version, {"reward/mean": 0.5, "speed/sampling_tokens_per_s": 3412.0, "time/step_s": 2.0})
    sink.event({"kind": "failure", "message": "rollout-0 died"})
    sink.event({"kind": "checkpoint", "policy_version": 3})
    assert out.getvalue().splitlines() == [
        "step 0/4  eval 0.500",
        "step 1/4  reward 0.500  sampling 3,412 tok/s",
        "step 2/4  reward 0.500  sampling 3,412 tok/s  left 0:00:04",
        "step 3/4  reward 0.500  sampling 3,412 tok/s  left 0:00:02",
        "failure: rollout-0 died",
    ]


def test_steps_learned_again_do_not_tell_how_long_the_rest_takes():
    out, clock = io.StringIO(), [0.0]
    sink = PlainLines(100, stream=out, now=lambda: clock[0])
    for version in (1, 2, 3):
        clock[0] += 0.25
        sink.step(version, {"reward/mean": 0.5})
    for version in (4, 5, 6):
        clock[0] += 60.0
        sink.step(version, {"reward/mean": 0.5, "time/step_s": 60.0})
    left = [line.partition("left ")[2] for line in out.getvalue().splitlines()]
    assert left == ["", "", "", "", "1:35:00", "1:34:00"]


def test_a_run_without_an_end_has_a_time_left_all_the_same():
    out, clock = io.StringIO(), [0.0]
    sink = PlainLines(sys.maxsize, stream=out, now=lambda: clock[0])
    for version in (1, 2):
        clock[0] += 60.0
        sink.step(version, {"time/step_s": 60.0})
    assert out.getvalue().splitlines()[-1].endswith("left 115740 days, 17:46:40")


def test_an_actors_failure_is_a_line_and_what_the_command_says_last_is_not():
    out = io.StringIO()
    sink = PlainLines(4, stream=out)
    sink.event({"kind": "failure", "actor": "w", "reason": "w died in 'generate': killed", "decision": "restart"})
    sink.event({"kind": "failed", "reason": "w died in 'generate': killed"})
    assert out.getvalue() == "failure: w died in 'generate': killed; it starts again\n"


def test_quiet_is_warnings_alone():
    out = io.StringIO()
    sink = Warnings(stream=out)
    sink.step(1, {"reward/mean": 0.5})
    sink.event({"kind": "placement", "message": "rollout-0 shares a core"})
    sink.event({"kind": "checkpoint", "policy_version": 3})
    sink.event({"kind": "failed", "reason": "the command says it last"})
    sink.event({"kind": "reward_failure", "message": "prompt 'p0': 2 of 2 rewards failed: KeyError: 'anser'"})
    assert out.getvalue() == "reward_failure: prompt 'p0': 2 of 2 rewards failed: KeyError: 'anser'\n"


def test_the_line_shows_what_is_there_and_which_kl_it_is():
    both = {"learner/kl_reference_k3_mean": 0.01234, "learner/kl_old_k3_mean": 0.5}
    assert line_of({**both, "staleness/max": 1.0, "foreign": 3.0}) == "KL to reference 0.0123  staleness 1"
    assert line_of({"learner/kl_old_k3_mean": 0.5}) == "KL to old policy 0.5000"


def test_the_share_that_succeeds_is_shown_beside_a_held_out_reward_that_differs():
    """Seen before: a judge whose best reward is 0.9 had `eval 0.000` on every line."""
    assert line_of({"eval/reward": 0.9, "eval/accuracy": 0.0}) == "eval 0.900  succeed 0.000"


def test_the_start_is_told_until_the_first_step_and_prints_as_they_come():
    out = io.StringIO()
    sink = PlainLines(4, stream=out)
    sink.event({"kind": "connecting", "address": None})
    sink.event({"kind": "evaluating", "num_prompts": 64})
    sink.step(0, {"eval/reward": 0.5, "eval/accuracy": 0.5})
    sink.event({"kind": "evaluating", "num_prompts": 64})
    sink.event({"kind": "printed", "actor": "reward", "lines": ["7 of 9"], "num_more": 0})
    PlainLines(0, stream=out).event({"kind": "connecting", "address": None})  # an evaluation
    assert out.getvalue().splitlines() == [
        "starting: Ray starts on this machine",
        "starting: 64 held-out prompts are evaluated",
        "step 0/4  eval 0.500",
        "reward: 7 of 9",
    ]


@pytest.mark.parametrize(("encoding", "shown"), [("latin-1", b"??? \xe9"), ("utf-8", "数学? é".encode())])
def test_a_character_that_the_terminal_has_no_code_for_is_a_question_mark(encoding, shown):
    for make in (lambda stream: PlainLines(4, stream=stream), lambda stream: Warnings(stream=stream)):
        stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        make(stream).event({"kind": "failure", "message": "数学\ud800 é"})
        assert stream.buffer.getvalue() == b"failure: " + shown + b"\n"
