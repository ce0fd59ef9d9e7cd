"""A run in the terminal."""

import io

from rich.console import Console

from cluster.sinks.console import LiveLine, PlainLines, line_of


def test_without_a_terminal_a_step_is_a_line():
    out, clock = io.StringIO(), [0.0]
    sink = PlainLines(4, stream=out, now=lambda: clock[0])
    sink.step(0, {"eval/accuracy": 0.5})
    for version in (1, 2, 3):
        clock[0] += 2.0
        sink.step(version, {"reward/mean": 0.5, "speed/sampling_tokens_per_s": 3412.0, "time/step_s": 2.0})
    sink.event({"kind": "failure", "message": "rollout-0 died"})
    sink.event({"kind": "checkpoint"})
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


def test_in_a_terminal_events_scroll_by_above_the_line():
    out = io.StringIO()
    sink = LiveLine(4, console=Console(file=out, force_terminal=True, width=120))
    sink.step(1, {"reward/mean": 0.5})
    sink.event({"kind": "failure", "message": "rollout-0 [/died]"})
    sink.close()
    assert "rollout-0 [/died]" in out.getvalue() and "reward 0.500" in out.getvalue()


def test_the_line_shows_what_is_there_and_which_kl_it_is():
    both = {"learner/kl_reference_k3_mean": 0.01234, "learner/kl_old_k3_mean": 0.5}
    assert line_of({**both, "staleness/max": 1.0, "foreign": 3.0}) == "KL to reference 0.0123  staleness 1"
    assert line_of({"learner/kl_old_k3_mean": 0.5}) == "KL to old policy 0.5000"
