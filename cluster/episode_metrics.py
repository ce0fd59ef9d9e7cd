"""Metrics of the step's episodes, for each environment."""

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean

from cluster.contracts.types import EpisodeStats, GroupSummary, mean_of

EPISODE_METRICS: Mapping[str, str] = {
    "environment/<name>/reward": "Mean reward of the step's episodes in this environment.",
    "environment/<name>/turns": "Mean number of the model's turns in an episode.",
    "environment/<name>/calls": "Mean number of tool calls in an episode.",
    "environment/<name>/malformed_share": "Share of tool calls that returned an error to the model: unreadable, of an unknown tool, with "
    "arguments that do not fit, or refused by the tool.",
    "environment/<name>/written_share": "Share of completion tokens written by the template, a tool or the environment. They do not train.",
    "environment/<name>/written_share/<role>": "Share of completion tokens written before a turn that follows a message of this role, such "
    "as `tool` or `user`: the messages since the previous turn and the template's tokens around them.",
    "environment/<name>/uncanonical_share": "Share of compared turns (`episodes.compared_share`) whose prompt differs from the chat "
    "template's tokens for the whole conversation. There the model sees another history than behind a server that keeps no tokens.",
    "environment/<name>/truncated_share": "Share of episodes that ended at a limit: turns, context, or length of a turn.",
    "environment/<name>/num_retried": "Times that an episode began anew because a process of its environment, its own or a shared one, "
    "died. Episodes of refused prompts do not count. With `algorithm.selection`, of all candidates.",
    "environment/<name>/num_failed": "Number of episodes that failed while they were sampled. They do not train. "
    "With `algorithm.selection`, of all candidates. `environment/<name>/num_failed/<stage>` counts one stage: `environment`, or `tool:` "
    "and the tool's name.",
    "environment/<name>/<logged>": "Mean of a number that the environment logged, over the episodes that logged it. One named like another "
    "metric is left out.",
    "time/environment/<name>/episode_s": "Mean seconds of an episode.",
    "time/environment/<name>/waiting_share": "Share of that time in which environment or tools worked, or the episode waited for a "
    "process.",
}


_FAILURES = ("num_retried", "num_failed")


def episode_metrics(summaries: Sequence[GroupSummary]) -> dict[str, float]:
    """By the names in `EPISODE_METRICS`, except those of `failed_episodes`; none for single turns."""
    found: dict[str, float] = {}
    for name, of_environment in _by_environment(summaries).items():
        found |= _of(name, of_environment)
    return found


def failed_episodes(summaries: Sequence[GroupSummary]) -> dict[str, float]:
    """Numbers of failures and of episodes that began anew, for each environment."""
    found: dict[str, float] = {}
    for name, of_environment in _by_environment(summaries).items():
        stats = _stats(of_environment)
        failed = Counter(each.failed_stage for each in stats if each.failed_stage is not None)
        found |= {
            f"environment/{name}/num_retried": float(sum(each.num_retries for each in stats)),
            f"environment/{name}/num_failed": float(failed.total()),
            **{f"environment/{name}/num_failed/{stage}": float(number) for stage, number in failed.items()},
        }
    return found


def _by_environment(summaries: Sequence[GroupSummary]) -> dict[str, list[GroupSummary]]:
    groups: dict[str, list[GroupSummary]] = {}
    for summary in summaries:
        if stats := _stats([summary]):
            groups.setdefault(stats[0].environment, []).append(summary)
    return groups


def _stats(summaries: Sequence[GroupSummary]) -> list[EpisodeStats]:
    return [each for summary in summaries for each in summary.episodes if each is not None]


def _of(name: str, summaries: Sequence[GroupSummary]) -> dict[str, float]:
    stats = _stats(summaries)
    rewards = [value for summary in summaries for value in summary.known_rewards]
    num_calls = sum(each.num_calls for each in stats)
    num_compared = sum(each.num_compared_turns for each in stats)
    num_uncanonical = sum(each.num_uncanonical_turns for each in stats)
    num_written = sum(each.num_written_tokens for each in stats)
    num_tokens = num_written + sum(each.num_sampled_tokens for each in stats)
    written = sum((Counter(each.written_by_role) for each in stats), Counter[str]())
    seconds = sum(each.seconds for each in stats)
    logged = {log for each in stats for log in each.log if log not in _FAILURES}
    own = {log: mean_of([each.log[log] for each in stats if log in each.log]) for log in sorted(logged)}
    of_environment = own | {
        **({"reward": mean_of(rewards)} if rewards else {}),
        **({"uncanonical_share": num_uncanonical / num_compared} if num_compared else {}),
        "turns": sum(each.num_turns for each in stats) / len(stats),
        "calls": num_calls / len(stats),
        "malformed_share": sum(each.num_malformed_calls for each in stats) / num_calls if num_calls else 0.0,
        "written_share": num_written / num_tokens if num_tokens else 0.0,
        **{f"written_share/{role}": number / num_tokens for role, number in written.items()},
        "truncated_share": fmean(is_cut for summary in summaries for is_cut in summary.truncated),
    }
    times = {
        "episode_s": seconds / len(stats),
        "waiting_share": 1.0 - sum(each.model_seconds for each in stats) / seconds if seconds else 0.0,
    }
    return {
        **{f"environment/{name}/{metric}": value for metric, value in of_environment.items()},
        **{f"time/environment/{name}/{metric}": value for metric, value in times.items()},
    }
