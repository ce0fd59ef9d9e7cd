"""Ray's errors as ours: who failed, and who only had an argument that is gone."""

import pickle

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, ObjectLostError, RayActorError, RayTaskError

from cluster.contracts.errors import EngineError, FailureKind, LostError, UnreachableError, WeightsError, WorkerError
from cluster.remote.failures import answer_of, translated


def raised_in_score(cause: Exception) -> Exception:
    """As Ray raises it to who called `score`."""
    return RayTaskError("score", "", cause).as_instanceof_cause()


@pytest.mark.parametrize("cause", [ActorDiedError(), ObjectLostError("ab" * 28, "", "")])
def test_an_argument_whose_maker_or_node_died_is_lost_and_nobodys_failure(cause):
    with pytest.raises(LostError, match=r"^reward, 'score': ") as caught, translated("reward", "score"):
        raise raised_in_score(cause)
    assert (caught.value.kind, caught.value.actor) == (FailureKind.LOST, "reward"), "to which it is lost"


def test_the_death_of_the_actor_itself_is_its_failure():
    with pytest.raises(WorkerError, match=r"^reward died in 'score': ") as caught, translated("reward", "score"):
        raise ActorDiedError()
    assert type(caught.value) is WorkerError
    assert (caught.value.kind, caught.value.actor, caught.value.stage) == (FailureKind.DEATH, "reward", "score")


@pytest.mark.parametrize(
    "error",
    [
        ActorUnavailableError("Socket closed", None),
        RayActorError(error_msg="The actor died because its node has died. Node Id: 80db"),
    ],
)
def test_an_actor_that_went_with_its_node_is_known_from_one_that_died(error):
    with pytest.raises(UnreachableError, match=r"^worker died in 'generate': "), translated("worker", "generate"):
        raise error


def test_a_message_that_speaks_of_death_is_no_death():
    """Seen before: the words decided."""
    with pytest.raises(WorkerError) as caught, translated("reward", "score"):
        raise raised_in_score(KeyError("he died in 'May'"))
    assert caught.value.kind is FailureKind.ERROR


def test_what_the_object_raised_is_named_and_a_deliberate_error_stays_itself():
    with (
        pytest.raises(WorkerError, match=r"^reward failed in 'score': KeyError: 'answer'"),
        translated("reward", "score"),
    ):
        raise raised_in_score(KeyError("answer"))
    with pytest.raises(WeightsError, match=r"^stale head$") as caught, translated("reward", "score"):
        raise raised_in_score(WeightsError("stale head"))
    assert (caught.value.kind, caught.value.actor, caught.value.stage) == (FailureKind.REFUSAL, "reward", "score")
    with pytest.raises(EngineError) as caught, translated("reward", "score"):
        raise raised_in_score(EngineError("gone", actor="judge", stage="sample"))
    assert (caught.value.actor, caught.value.stage) == ("judge", "sample"), "the one that failed itself"


async def test_a_timeout_of_the_objects_own_is_its_error_and_not_a_late_answer():
    async def times_out() -> None:
        raise raised_in_score(TimeoutError("the database"))

    with pytest.raises(WorkerError, match=r"^reward failed in 'score': TimeoutError: the database"):
        await answer_of(times_out(), actor="reward", stage="score", deadline_s=600.0)


def test_the_message_is_a_sentence_and_the_whole_is_kept():
    with pytest.raises(WorkerError) as caught, translated("reward", "score"):
        raise RayTaskError("score", "File judge.py, line 7", KeyError("a\nb")).as_instanceof_cause()
    assert str(caught.value) == r"reward failed in 'score': KeyError: 'a\nb'"
    assert caught.value.details is not None and "File judge.py, line 7" in caught.value.details
    again = pickle.loads(pickle.dumps(caught.value))
    assert again.details == caught.value.details
