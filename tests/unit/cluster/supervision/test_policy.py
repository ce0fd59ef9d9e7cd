"""What is done about failures, decided by hand-made histories."""

from dataclasses import replace

import pytest

from cluster.contracts.config import SupervisionConfig
from cluster.contracts.types import ActorKind
from cluster.supervision.policy import Abort, Failure, FailureKind, History, Restart, decide

CONFIG = SupervisionConfig(max_restarts=3, window_s=100, backoff_s=2)


def failure(at=0.0, actor="rollout-0", kind=FailureKind.DEATH, node_id=None, reason="gone", is_lost_node=False):
    return Failure(
        actor=actor,
        actor_kind=ActorKind.LEARNER if actor.startswith("learner") else ActorKind.ROLLOUT_WORKER,
        kind=kind,
        reason=reason,
        at=at,
        node_id=node_id,
        is_lost_node=is_lost_node,
    )


def test_a_first_death_is_healed_at_once():
    assert decide(failure(), History(), CONFIG) == Restart(actor="rollout-0", delay_s=0.0)


def test_repetition_backs_off_twice_as_long_each_time():
    past = History([failure(1), failure(2)])
    assert decide(failure(3), past, CONFIG) == Restart(actor="rollout-0", delay_s=4.0)


def test_nobody_waits_longer_than_a_minute():
    past, config = History([failure(at) for at in range(7)]), CONFIG.model_copy(update={"max_restarts": 9})
    assert decide(failure(7), past, config) == Restart(actor="rollout-0", delay_s=60.0)  # not 2 * 2**6 = 128


def test_another_actors_deaths_do_not_delay_this_one():
    past = History([failure(1, actor="rollout-1"), failure(2, actor="rollout-1")])
    assert decide(failure(3), past, CONFIG) == Restart(actor="rollout-0", delay_s=0.0)


def test_a_spent_budget_ends_the_run_and_names_the_setting():
    decision = decide(failure(1004), History([failure(1001), failure(1002), failure(1003)]), CONFIG)
    assert isinstance(decision, Abort) and "supervision.max_restarts=3" in decision.reason


def test_a_learner_without_a_new_step_spends_the_budget_however_slowly_and_the_loss_of_a_node_costs_it_one_restart():
    """Two ranks die with their node every 1000 s: the fourth time after 3 restarts."""
    history = History()
    for at in (0, 1, 1000, 1001, 2000, 2001):
        death = failure(at, actor=f"learner-{at % 2}", node_id="node-1")
        assert isinstance(decide(death, history, CONFIG), Restart)
        history.add(death, window_s=CONFIG.window_s)
    fourth = failure(3000, actor="learner-0", node_id="node-1")
    decision = decide(fourth, history, CONFIG)
    assert isinstance(decision, Abort) and "3 restarts of the learner without a new step" in decision.reason
    history.note_success("the learner")
    assert decide(fourth, history, CONFIG) == Restart(actor="learner-0", delay_s=0.0)


def decisions(*failures):
    history, decided = History(), []
    for each in failures:
        decided.append(decide(each, history, CONFIG))
        history.add(each, window_s=CONFIG.window_s)
    return decided


@pytest.mark.parametrize("node_id", [None, "node-1"])
def test_a_worker_without_a_finished_group_spends_the_budget_however_slowly(node_id):
    """None: each of its starts fails."""
    *restarts, last = decisions(*(failure(1000 * number, node_id=node_id) for number in range(4)))
    assert restarts == [Restart(actor="rollout-0", delay_s=0.0)] * 3
    assert isinstance(last, Abort) and "3 restarts of rollout-0 without a finished group" in last.reason


def test_a_finished_group_gives_its_worker_the_budget_back():
    history = History()
    for number in range(20):
        for actor in ("rollout-0", "rollout-1") if number < 3 else ("rollout-0",):
            death = failure(1000 * number, actor=actor, node_id="node-1")
            assert isinstance(decide(death, history, CONFIG), Restart)
            history.add(death, window_s=CONFIG.window_s)
        history.note_success("rollout-0")
    assert isinstance(decide(failure(20_000, actor="rollout-1", node_id="node-1"), history, CONFIG), Abort)


def test_a_worker_that_loses_node_after_node_is_restarted_for_ever():
    """Its node is known to be lost, also before the worker came up; or the worker dies or falls silent first and comes to another node."""
    known = [failure(1000 * number, is_lost_node=True) for number in range(20)]
    unknown = [failure(1000 * number, kind=FailureKind.HANG, node_id=f"node-{number}") for number in range(20)]
    for failures in (known, unknown):
        assert decisions(*failures) == [Restart(actor="rollout-0", delay_s=0.0)] * 20


def test_a_server_of_which_no_success_is_known_is_restarted_now_and_then_in_a_run_of_weeks():
    days = [replace(failure(86_400 * day), actor_kind=ActorKind.JUDGE_SERVER) for day in range(9)]
    assert decisions(*days) == [Restart(actor="rollout-0", delay_s=0.0)] * 9


def test_sixteen_workers_that_die_with_their_node_are_all_restarted_at_once():
    """Seen before: they shared the default budget of 8, and the ninth death ended the run."""
    history = History()
    for number in range(16):
        death = failure(number, actor=f"rollout-{number}", node_id="node-1")
        assert decide(death, history, SupervisionConfig()) == Restart(actor=death.actor, delay_s=0.0)
        history.add(death)


def test_ranks_share_one_budget_and_the_loss_of_their_node_costs_it_one_restart():
    together = [failure(at, actor=f"learner-{at}", node_id="node-1") for at in range(8)]
    assert decide(together[7], History(together[:7]), CONFIG) == Restart(actor="learner-7", delay_s=0.0)
    apart = [failure(at, actor=f"learner-{at}", node_id=f"node-{at}") for at in range(4)]
    decision = decide(apart[3], History(apart[:3]), CONFIG)
    assert isinstance(decision, Abort) and "3 restarts of the learner within 100 s" in decision.reason


def test_ranks_that_die_in_turn_on_a_living_node_spend_the_budget():
    """Deaths at 0 to 6 s of ranks 0, 1, 0, 1, ...: three pairs are three restarts, the seventh death is one too many."""
    deaths = [failure(at, actor=f"learner-{at % 2}", node_id="node-1") for at in range(7)]
    assert isinstance(decide(deaths[5], History(deaths[:5]), CONFIG), Restart)
    assert isinstance(decide(deaths[6], History(deaths[:6]), CONFIG), Abort)


def test_errors_of_two_ranks_on_one_node_are_two_failures():
    past = History([failure(0, actor="learner-0", node_id="n", kind=FailureKind.ERROR)])
    again = failure(1, actor="learner-1", node_id="n", kind=FailureKind.ERROR)
    assert decide(again, past, CONFIG) == Restart(actor="learner-1", delay_s=2.0)


def test_deaths_of_ranks_that_never_had_a_node_are_not_of_one_node():
    past = History([failure(0, actor="learner-0")])
    assert decide(failure(1, actor="learner-1"), past, CONFIG) == Restart(actor="learner-1", delay_s=2.0)


def test_old_failures_are_forgotten():
    past = History([failure(1), failure(2), failure(3)])
    assert isinstance(decide(failure(500), past, CONFIG), Restart)


def test_a_refusal_is_never_tried_again():
    assert decide(failure(kind=FailureKind.REFUSAL), History(), CONFIG) == Abort(reason="rollout-0: gone")
    named = failure(kind=FailureKind.REFUSAL, reason="rollout-0 has no such model")
    assert decide(named, History(), CONFIG) == Abort(reason="rollout-0 has no such model")


def test_what_nothing_decides_by_any_more_is_forgotten():
    history = History()
    for at in range(1000):
        history.add(failure(at), window_s=100)
    assert len(history.failures) == 101


def test_a_run_of_weeks_that_allows_thousands_of_restarts_waits_a_minute_before_each():
    """Seen before: the 1,026th one ended the run with an OverflowError. Two to the power of 1,024 is no number."""
    config = SupervisionConfig(max_restarts=5000, window_s=604_800)
    past = History([failure(at) for at in range(1100)])
    assert decide(failure(1100), past, config) == Restart(actor="rollout-0", delay_s=60.0)
    at_once = config.model_copy(update={"backoff_s": 0.0})
    assert decide(failure(1100), past, at_once) == Restart(actor="rollout-0", delay_s=0.0)
