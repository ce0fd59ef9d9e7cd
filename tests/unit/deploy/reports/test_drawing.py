from deploy.reports.drawing import BOTTOM, LEFT, RIGHT, TOP, drawing
from deploy.reports.panels import Curve, Mark, Panel


def panel(*curves, **more):
    return Panel(title="Reward", curves=curves, **more)


def line(*points, **more):
    return Curve(label="sampled", color=1, points=points, **more)


def test_the_axis_spans_the_values_and_the_steps():
    drawn = drawing(panel(line((0, 0.0), (10, 1.0)), has_zero=True), [], (0, 10))
    assert drawn.strokes[0].path == f"M{LEFT + 4} {BOTTOM}L{RIGHT - 4} {round(BOTTOM - (BOTTOM - TOP) / 1.06, 1)}"
    assert [label.words for label in drawn.heights] == ["0", "0.5", "1"]
    assert [label.words for label in drawn.steps] == ["0", "5", "10"]


def test_an_evaluation_is_a_dot_with_a_bar_as_long_as_its_error():
    held_out = Curve(label="held out", color=2, points=((0, 0.5), (10, 0.5)), is_line=False, errors=(0.25, None))
    drawn = drawing(panel(held_out), [], (0, 10))
    (_, first), (_, second) = drawn.dots
    assert drawn.strokes == () and first.low is not None and first.high is not None
    assert first.low > first.y > first.high and second.low is None
    assert first.words == "step 0: 0.5 ± 0.25" and second.words == "step 10: 0.5"


def test_a_single_step_is_seen():
    (stroke,) = drawing(panel(line((3, 0.5))), [], (3, 3)).strokes
    first, _, second = stroke.path[1:].partition("L")
    assert first == second


def test_interruptions_stand_at_their_steps_and_words_say_what_is_drawn():
    mark = Mark(step=5, is_failure=True, words="rollout-0: death")
    drawn = drawing(panel(line((0, 0.0), (10, 1.0)), bound=(1.0, "bound 1")), [mark], (0, 10))
    assert drawn.marks == (((LEFT + RIGHT) / 2, mark),) and drawn.bound is not None
    assert drawn.words == "sampled: 0 in step 0, 1 in step 10; bound 1"
    assert [label.words for label in drawn.labels] == ["sampled", "bound 1"]


def test_a_failure_in_a_step_that_never_ended_is_marked_at_the_last_step():
    mark = Mark(step=11, is_failure=True, words="rollout-0: death")
    drawn = drawing(panel(line((0, 0.0), (10, 1.0))), [mark], (0, 10))
    assert drawn.marks == ((RIGHT - 4, mark),)
