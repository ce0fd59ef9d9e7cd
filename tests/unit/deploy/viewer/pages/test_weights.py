"""Which weights a worker serves."""

from deploy.viewer.pages import weights
from tests.unit.deploy.viewer.run_files import event


def test_a_worker_that_serves_an_earlier_version_is_behind():
    events = [
        event("published", 1.0, policy_version=0, digest="d0"),
        event("broadcast", 2.0, policy_version=1, digest="d1", num_workers=2),
        event(
            "attested",
            3.0,
            actor="rollout-1",
            policy_version=1,
            canary_mean_error=0.5,
            noise_floor=0.25,
            distinguishable=True,
        ),
        event("broadcast", 4.0, policy_version=2, digest="old", num_workers=2),
        event("broadcast", 5.0, policy_version=2, digest="d2", num_workers=2),
    ]
    found = [
        {"name": "learner-0", "state": "healthy", "policy_version": 2},
        {"name": "rollout-0", "state": "healthy", "policy_version": 2},
        {"name": "rollout-1", "state": "healthy", "policy_version": 1},
        {"name": "rollout-2", "state": "dead", "policy_version": None},
        {"name": "rollout-3", "state": "healthy", "policy_version": 3},
    ]
    rows = weights.workers(found, events)
    assert [(row["actor"], row["digest"], row["behind"]) for row in rows] == [
        ("rollout-0", "d2", 0),
        ("rollout-1", "d1", 1),
        ("rollout-2", None, None),
        ("rollout-3", None, 0),
    ]
    assert rows[1]["canary"]["canary_mean_error"] == 0.5 and rows[0]["canary"] is None
    assert [(sent["policy_version"], sent["digest"]) for sent in weights.broadcasts(events)] == [
        (0, "d0"),
        (1, "d1"),
        (2, "d2"),
    ]
