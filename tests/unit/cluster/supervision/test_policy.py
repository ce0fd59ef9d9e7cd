"""What is done about failures, decided by hand-made histories."""

from cluster.contracts.config import SupervisionConfig
from cluster.contracts.types import ActorKind
from cluster.supervision.policy import Abort, Drain, Failure, FailureKind, History, Restart, decide, is_poison

CONFIG = SupervisionConfig(max_restarts=3, window_s=100, backoff_s=2)


def failure(at=0.0, actor="rollout-0", kind=FailureKind.DEATH):
    return Failure(actor=actor, actor_kind=ActorKind.ROLLOUT_WORKER, kind=kind, reason="gone", at=at)


def test_a_first_death_is_healed_at_once():
    assert decide(failure(), History(), CONFIG) == Restart(actor="rollout-0", delay_s=0.0)


def test_repetition_backs_off_twice_as_long_each_time():
    past = History([failure(1), failure(2)])
    assert decide(failure(3), past, CONFIG) == Restart(actor="rollout-0", delay_s=4.0)


def test_another_actors_deaths_do_not_delay_this_one():
    past = History([failure(1, actor="rollout-1"), failure(2, actor="rollout-1")])
    assert decide(failure(3), past, CONFIG) == Restart(actor="rollout-0", delay_s=0.0)


def test_a_spent_budget_ends_the_run_and_names_the_setting():
    decision = decide(failure(4), History([failure(1), failure(2), failure(3)]), CONFIG)
    assert isinstance(decision, Abort) and "supervision.max_restarts=3" in decision.reason


def test_old_failures_are_forgotten():
    past = History([failure(1), failure(2), failure(3)])
    assert isinstance(decide(failure(500), past, CONFIG), Restart)


def test_a_refusal_is_never_tried_again():
    assert decide(failure(kind=FailureKind.REFUSAL), History(), CONFIG) == Abort(reason="rollout-0: gone")


def test_a_leaving_node_is_drained():
    assert decide(failure(kind=FailureKind.TERMINATION), History(), CONFIG) == Drain(actor="rollout-0")


def test_a_prompt_that_kills_three_times_is_poison():
    history = History()
    for _ in range(2):
        history.blame(["a", "b"])
    history.blame(["a"])
    assert is_poison("a", history, SupervisionConfig()) and not is_poison("b", history, SupervisionConfig())


def test_what_nothing_decides_by_any_more_is_forgotten():
    history = History()
    for at in range(1000):
        history.add(failure(at), window_s=100)
    assert len(history.failures) == 101
