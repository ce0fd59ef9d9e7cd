import itertools
import sys

from cluster.contracts.sampling_config import SamplingConfig
from cluster.contracts.types import PartStats, Prompt, Ticket
from cluster.rollouts.part_metrics import PartMetrics
from tests.fakes import group_summary


def judged(metrics, index, *, source, rewards, style, seconds, num_failed=0):
    prompt = Prompt(prompt_id="p", text="?", columns={"source": source})
    ticket = Ticket(
        index=index, prompt=prompt, num_trajectories=2, seed=0, policy_version=0, sampling=SamplingConfig(max_tokens=1)
    )
    stats = {"style": PartStats(seconds=seconds, num_failed=num_failed)}
    metrics.note(ticket, group_summary(index, rewards=rewards, reward_components={"style": style}, part_stats=stats))


def test_parts_tell_failures_time_and_means_by_source():
    metrics = PartMetrics(source_column="source")
    judged(metrics, 0, source="chat", rewards=(1.0, 2.0), style=(0.0, 1.0), seconds=1.0, num_failed=2)
    judged(metrics, 1, source="maths", rewards=(4.0, None), style=(0.5, None), seconds=3.0, num_failed=1)
    judged(metrics, -1, source="chat", rewards=(9.0, 9.0), style=(9.0, 9.0), seconds=9.0)  # held out
    assert metrics.drain() == {
        "time/style/judging_s": 2.0,
        "reward/style/num_failed": 3.0,
        "prompts/num_groups/chat": 1.0,
        "prompts/num_groups/maths": 1.0,
        "reward/mean/chat": 1.5,
        "reward/mean/maths": 4.0,
        "reward/style/chat": 0.5,
        "reward/style/maths": 0.5,
    }
    assert metrics.drain() == {}


def test_a_component_that_a_judge_calls_mean_is_not_mixed_with_the_reward():
    metrics = PartMetrics(source_column="source")
    prompt = Prompt(prompt_id="p", text="?", columns={"source": "chat"})
    ticket = Ticket(
        index=0, prompt=prompt, num_trajectories=2, seed=0, policy_version=0, sampling=SamplingConfig(max_tokens=1)
    )
    metrics.note(ticket, group_summary(0, rewards=(1.0, 2.0), reward_components={"mean": (9.0, 9.0)}))
    assert metrics.drain()["reward/mean/chat"] == 1.5


def test_the_largest_rewards_have_a_mean():
    """Seen before: the step ended with an OverflowError, and the run with it."""
    metrics, most = PartMetrics(source_column="source"), sys.float_info.max
    judged(metrics, 0, source="chat", rewards=(most, most), style=(most, most), seconds=1.0)
    found = metrics.drain()
    assert found["reward/mean/chat"] == found["reward/style/chat"] == most


def test_means_are_the_same_in_whatever_order_groups_were_judged():
    """Seen before: a resumed run, whose groups came in another order, differed in the last bit."""
    groups = [(0.1, 0.7), (0.2, 1e-17), (0.3, 0.6)]
    means = set()
    for ordered in itertools.permutations(groups):
        metrics = PartMetrics(source_column="source")
        for rewards in ordered:
            judged(metrics, 0, source="chat", rewards=rewards, style=rewards, seconds=1.0)
        means.add(metrics.drain()["reward/mean/chat"])
    assert len(means) == 1
