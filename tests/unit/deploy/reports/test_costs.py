from deploy.reports.costs import costs
from tests.unit.deploy.viewer.run_files import event, step


def test_seconds_are_summed_by_what_happened_in_them():
    steps = [step(version, time__step_s=10.0, time__learning_s=4.0, time__broadcast_s=1.0) for version in (1, 2)]
    spent = costs(steps, [])
    assert spent.steps_s == 20.0
    assert spent.spent == (("the learner learned", 8.0, 0.4), ("weights were sent to workers", 2.0, 0.1))


def test_an_evaluation_is_no_share_of_the_steps_which_it_is_beside():
    """Seen before: 106 % of the steps' time."""
    spent = costs([step(0, time__eval_s=2.0), step(1, time__step_s=1.0, time__learning_s=0.5, time__eval_s=2.0)], [])
    assert spent.spent == (("the learner learned", 0.5, 0.5), ("held-out prompts were evaluated", 4.0, None))


def test_a_step_that_was_learned_again_at_a_start_is_in_no_share_of_the_steps():
    """Seen in a run whose driver was killed: its learning counted, and its wall-clock is not known. A store loses more than one."""
    spent = costs([step(1, time__step_s=10.0, time__learning_s=4.0), step(2, time__learning_s=20.0)], [])
    assert spent.spent == (("the learner learned", 4.0, 0.4),)


def test_what_actors_told_is_summed_by_kind_and_cause():
    told = {
        "cost/rollout_worker/busy_s": 3.0,
        "cost/rollout_worker/learner_s": 1.0,
        "cost/rollout_worker/restart_s": 2.0,
    }
    hours = {"cost/gpu_hours": 0.5, "cost/idle_gpu_hours": 0.25}
    spent = costs([{**step(1), **told, **hours}, {**step(2), **hours, "cost/rollout_worker/busy_s": 2.0}], [])
    (workers,) = spent.of_actors
    assert (workers.kind, workers.seconds, workers.busy) == ("rollout worker", 8.0, 0.625)
    assert workers.waits == (("start or restart", 0.25), ("learner", 0.125))
    assert (spent.gpu_hours, spent.idle_gpu_hours) == (1.0, 0.5)


def test_drivers_lived_to_their_last_sign_and_not_between():
    events = [
        event("launched", 100.0, started_at=90.0),
        event("checkpoint", 130.0),
        event("launched", 500.0, started_at=495.0),
        event("finished", 520.0),
    ]
    steps = [{"policy_version": 1, "time": 140.0}, {"policy_version": 2, "time": 510.0}]
    spent = costs(steps, events)
    assert (spent.num_drivers, spent.driven_s) == (2, 50.0 + 25.0)
