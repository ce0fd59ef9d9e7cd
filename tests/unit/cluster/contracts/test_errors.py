"""Errors cross process borders whole: message for people, facts for code."""

import pickle

import pytest
from ray import cloudpickle
from ray.exceptions import RayTaskError

from cluster.contracts import errors
from cluster.contracts.errors import (
    DataError,
    DeadlineError,
    FailureKind,
    LostError,
    TreadwheelError,
    WorkerError,
    headline,
)

CLASSES = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, TreadwheelError)]


@pytest.mark.parametrize("by", [pickle, cloudpickle])
@pytest.mark.parametrize("made", CLASSES)
def test_every_error_keeps_its_facts_when_it_is_pickled(made, by):
    error = made("no room", kind=FailureKind.DEATH, actor="rollout-3", prompt_id="gsm8k/7", stage="generate")
    # As Ray sends it: inside its own error, whose `cause` it is on the other side.
    (again,) = (by.loads(by.dumps(RayTaskError("generate", "", error))).cause,)
    assert type(again) is made and str(again) == "no room"
    assert vars(again) == vars(error)
    assert (again.kind, again.actor, again.prompt_id, again.stage) == ("death", "rollout-3", "gsm8k/7", "generate")


def test_the_class_says_the_kind_unless_the_error_does():
    kinds = [made("why").kind for made in (DataError, DeadlineError, WorkerError, LostError)]
    assert kinds == [FailureKind.REFUSAL, FailureKind.HANG, FailureKind.ERROR, FailureKind.LOST]
    assert WorkerError("gone", kind=FailureKind.DEATH).kind is FailureKind.DEATH


def test_a_headline_is_the_first_line_of_a_message_or_the_errors_name():
    assert headline(ValueError("first\nsecond")) == "first"
    assert headline(ValueError()) == "ValueError"
