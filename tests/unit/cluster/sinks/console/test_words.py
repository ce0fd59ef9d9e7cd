"""Events in words."""

import pytest

from cluster.sinks.console.words import Weight, printed, stage, told


@pytest.mark.parametrize(
    ("record", "words", "weight"),
    [
        ({"kind": "checkpoint", "policy_version": 8, "metric": 0.5}, "step 8 is saved, rated 0.500", "NOTE"),
        ({"kind": "recovery", "actor": "w", "seconds": 4.2}, "w is back after 4 s", "NOTE"),
        (
            {"kind": "failure", "actor": "w", "reason": "no engine step for 60 s", "decision": "restart"},
            "w: no engine step for 60 s; it starts again",
            "WARNING",
        ),
        (
            {"kind": "failure", "actor": "w", "reason": "w failed in 'build': no disk", "decision": "abort"},
            "w failed in 'build': no disk; the run stops",
            "FAILURE",
        ),
        (
            {"kind": "groups_lost", "groups": [3, 4], "reason": "x"},
            "2 groups were lost and are sampled again",
            "WARNING",
        ),
        ({"kind": "my_event", "message": "look\nat this"}, "look", "WARNING"),
        ({"kind": "placement", "message": "two share a core"}, "two share a core", "NOTE"),
        (
            {"kind": "scale", "actors": "rollout_workers", "num_workers": 3, "before": 2, "reason": "elastic"},
            "3 rollout workers wanted, 2 before (elastic)",
            "NOTE",
        ),
    ],
)
def test_an_event_is_a_sentence_of_its_weight(record, words, weight):
    sentence = told({**record, "time": 1.0})
    assert sentence and (sentence.words, sentence.weight) == (words, Weight[weight])


def test_what_only_programs_read_has_no_words():
    assert told({"kind": "broadcast", "time": 1.0, "digest": "ab"}) is None


def test_a_foreign_or_bare_record_of_a_known_kind_breaks_nothing():
    from cluster.sinks.console.words import _SENTENCES, _STAGES

    for kind in _SENTENCES:
        assert told({"kind": kind}) is not None
    for kind in _STAGES:
        assert stage({"kind": kind})
    assert printed({"kind": "printed"}) == []


def test_what_a_run_waits_for_is_said():
    assert stage({"kind": "connecting", "address": None}) == "Ray starts on this machine"
    assert stage({"kind": "connecting", "address": "head:6379"}) == "connects to Ray at head:6379"
    assert stage({"kind": "evaluating", "num_prompts": 64}) == "64 held-out prompts are evaluated"
    assert stage({"kind": "checkpoint"}) is None


def test_what_an_actor_printed_is_shown_line_by_line():
    record = {"kind": "printed", "actor": "reward", "lines": ["a", "b"], "num_more": 3}
    assert printed(record) == ["reward: (3 lines before these are in its log)", "reward: a", "reward: b"]
    assert told({**record, "time": 1.0}) is None and printed({"kind": "failure"}) == []


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\x1b[2Jb\x1b[31mred\x1b[0m", "abred"),
        ("a\x1b]0;title\x07b\x1b]8;;http://x\x1b\\c", "abc"),
        ("a\x1bcb\x1b", "ab"),
        ("a\x9b2Jb\x08\x7f\td", "a2Jb\td"),
        ("数学 é", "数学 é"),
    ],
)
def test_what_a_model_wrote_moves_no_cursor_and_changes_no_terminal(text, shown):
    assert printed({"kind": "printed", "actor": "reward", "lines": [text]}) == [f"reward: {shown}"]
    sentence = told({"kind": "reward_failure", "message": text})
    assert sentence and sentence.words == shown
