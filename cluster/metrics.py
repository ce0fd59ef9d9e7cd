"""The metrics and events of a run, sent to all of its sinks.

`METRICS` is the registry from which docs/metrics.md is made. A metric that is not in it is logged all the same.
"""

import asyncio
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Protocol, Self

from cluster.contracts.config import MetricsConfig
from cluster.contracts.errors import StorageError, TreadwheelError
from cluster.contracts.hiding import hidden
from cluster.contracts.plugins import SINKS, resolve
from cluster.contracts.types import GroupSummary, StepStats, mean_of
from cluster.episode_metrics import EPISODE_METRICS, episode_metrics, failed_episodes
from cluster.record.run_directory import EVENTS, RunDirectory
from cluster.record.storage import finite

METRICS: dict[str, str] = {
    "policy_version": "Number of steps that the policy has learned. Each line of `metrics.jsonl` has the metrics of one version.",
    "last_step_time": "Unix time of the end of the last step; before the first one, of the driver's start. In Prometheus only.",
    "reward/mean": "Mean reward of the step's trajectories whose reward is known.",
    "reward/<component>": "Mean of a component that the judge returned with the reward, over the trajectories that have it. One named like "
    "another metric is left out.",
    "reward/<part>": "Mean of a reward part before its weight, for a reward with several parts. `reward/<part>/<name>` is a component that "
    "the part's judge returned. Episodes add `environment` (the returned reward) and `earned` (rewards earned on the way).",
    "reward/<part>/num_failed": "Number of trajectories judged since the last step for which this part failed.",
    "reward/mean/<source>": "Mean reward of the trajectories judged since the last step whose prompt comes from this source "
    "(`reward.by_source`, `prompts.sources`). `reward/<part>/<source>` is the same for one part.",
    "prompts/num_dropped": "Times since the last step that another prompt replaced one longer than `prompts.max_prompt_tokens`.",
    "prompts/num_truncated": "Number of prompts since the last step that were truncated to `prompts.max_prompt_tokens`.",
    "prompts/num_skipped": "Times since the last step that `prompts.difficulty` replaced a prompt that is solved or far from the target.",
    "prompts/num_groups/<source>": "Number of groups of this source judged since the last step, dropped groups included.",
    "reward/num_errors": "Trajectories whose judge or episode raised an error. They do not train. With `algorithm.selection`, of all "
    "candidates.",
    "reward/num_timeouts": "Trajectories whose judge or episode missed its deadline. They do not train. With `algorithm.selection`, of all "
    "candidates.",
    "eval/reward": "Mean reward of the held-out prompts. Sampling is greedy unless `evaluation.temperature` is set.",
    "eval/accuracy": "Share of the held-out completions that succeed: their reward is at least `evaluation.success_at` (default 1).",
    "eval/reward_stderr": "Standard error of `eval/reward` over prompts. Without environments, rows with the same prompt count as one.",
    "eval/accuracy_stderr": "Standard error of `eval/accuracy`, computed alike.",
    "eval/pass_at_<k>": "Unbiased estimate (arXiv:2107.03374) of the probability that at least one of k completions of a prompt "
    "succeeds. Only with `evaluation.num_samples` above 1.",
    "eval/pass_at_<k>_stderr": "Standard error of `eval/pass_at_<k>`, computed as that of `eval/reward`.",
    "eval/reward/<source>": "Mean reward of the held-out prompts of one source (`evaluation.source_column`).",
    "eval/accuracy/<source>": "Share of the held-out completions of one source that succeed.",
    "eval/num_failed": "Held-out completions whose reward failed (error or timeout). All other evaluation metrics leave them out.",
    "eval/num_dropped": "Held-out prompts left out because the engine refuses them, or because they repeatedly end workers or judges.",
    "eval/num_too_long": "Number of held-out prompts longer than `evaluation.prompts.max_prompt_tokens`. Later prompts replace them.",
    "eval/num_prompts": "Number of held-out prompts evaluated.",
    **EPISODE_METRICS,
    "tokens/sampled": "Sampled completion tokens of the groups that the step consumed. Dropped groups do not count.",
    "tokens/trained": "Sampled completion tokens of the trajectories whose reward is known. Tokens that filters leave out count too.",
    "tokens/completion_mean": "Mean number of sampled tokens in a trajectory. In episodes, only tokens of the model count.",
    "tokens/truncated_share": "Share of trajectories that ended at a limit: `sampling.max_tokens`, context, or a limit of an episode.",
    "speed/sampling_tokens_per_s": "Completion tokens of finished groups per second of sampling, over all workers. Tokens of aborted "
    "trajectories and of stragglers do not count.",
    "speed/learning_tokens_per_s": "Prompt and completion tokens per second of learning, over all ranks, demonstrations included. Every "
    "epoch counts them again.",
    "time/step_s": "Wall-clock seconds of a step. It begins when the learner waits for groups, and ends when every worker serves the new "
    "weights. If weights travel while the next step learns (asynchronous runs), it ends when they are published.",
    "time/sampling_s": "Seconds of the step in which at least one group was under way.",
    "time/judging_s": "Mean seconds in which the reward service judged a group, for a reward without parts. A reward model's scoring comes "
    "before.",
    "time/<part>/judging_s": "The same for each part of a reward with several parts.",
    "time/held_s": "Seconds since the last step in which groups waited because a service that the judge calls was unavailable, for a "
    "reward without parts. Absent when no group waited.",
    "time/<part>/held_s": "The same for each part of a reward with several parts.",
    "time/learning_s": "Seconds of the learner's step.",
    "time/assemble_s": "Part of `time/learning_s`: turning trajectories into tensors, outside the passes.",
    "time/first_look_s": "Part of `time/learning_s`: extra forward passes (recomputed log-probs, values). About 0 without them.",
    "time/gradient_s": "Part of `time/learning_s`: forward and backward passes.",
    "time/optimizer_s": "Part of `time/learning_s`: gradient clipping and optimizer updates.",
    "time/join_s": "Seconds from the request for a rollout worker until it serves, including the wait for its node. Median of the last "
    "five workers that joined in mid-run; absent before the first.",
    "time/publish_s": "Seconds in which the learner published the weights; part of the broadcast.",
    "time/broadcast_s": "Seconds from the start of publishing the weights to the last worker's attestation.",
    "time/eval_s": "Seconds of a held-out evaluation.",
    "staleness/mean": "Learner version minus the version of a group's oldest token; mean over the step's groups.",
    "staleness/max": "Learner version minus the version of the step's oldest token; at most `buffer.max_off_policy_steps` in a run that "
    "samples.",
    "staleness/bound": "`buffer.max_off_policy_steps`.",
    "buffer/learner_wait_s": "Seconds that the learner waited until all groups of its step were finished.",
    "buffer/head_of_line_s": "Mean seconds that a finished group of the step waited for the step's slowest group.",
    "buffer/num_ready": "Number of finished groups that no step has taken yet.",
    "buffer/num_under_way": "Number of groups that are being sampled or scored.",
    "buffer/num_dropped": "Number of groups dropped since the last step. Another prompt replaces each.",
    "buffer/kept_share": "Of the groups that finished or were dropped since the last step, the share that was not dropped.",
    "buffer/tries_per_group": "Groups that finished or were dropped since the last step, per group that was not dropped.",
    "buffer/num_judged": "Number of trajectories that `reward/num_errors` and `reward/num_timeouts` refer to: those of the step's groups, "
    "or, with `algorithm.selection`, all candidates since the last step.",
    "buffer/candidate_reward": "Mean reward of all candidates of `algorithm.selection` since the last step. It measures the policy; "
    "`reward/mean` is the mean of the selected trajectories.",
    "buffer/dropped_<reason>": "Number of groups dropped since the last step for one reason: the name of a filter, `rewards_failed`, "
    "`refused` (by the engine), `quarantined`, or `straggler` (finished groups waited for it longer than `buffer.max_head_of_line_s`).",
    "buffer/size_bytes": "Bytes of the trajectories that wait in the object store.",
    "buffer/max_size_bytes": "Limit of `buffer/size_bytes`: `buffer.max_size_bytes`.",
    "mismatch/mean_abs_nats": "Mean of |learner log-prob - rollout log-prob| over the step's newest tokens. Of several "
    "`learner.mini_batches` only the first counts, unless a pass before the updates sees all: with `algorithm.proximal: recompute`, "
    "`learner.stop_at_kl` or `optimizer.target_kl`.",
    "mismatch/max_abs_nats": "Maximum of |learner log-prob - rollout log-prob| over the same tokens.",
    "mismatch/off_policy_steps": "Off-policy steps of the same tokens. Above 0, the mismatch includes the policy's change in these steps.",
    "rollout/num_wanted": "Target number of rollout workers, set by the user or by `elastic`.",
    "rollout/num_coming": "Number of wanted rollout workers that do not serve: they wait for a node, start, or load weights.",
    "rollout/num_workers": "Number of rollout workers that serve attested weights.",
    "rollout/idle_share": "Share of the serving workers' time since the last step in which they had nothing to sample.",
    "engine/num_running": "Maximum number of requests that a worker's vLLM ran at once under its last two policy versions, as of its last "
    "heartbeat; summed over workers.",
    "engine/num_waiting": "The same for requests that waited in vLLM for room in its key-value cache.",
    "engine/cache_share": "Largest share of its key-value cache that any worker used under its last two policy versions, as of its last "
    "heartbeat.",
    "rollout/num_services": "Number of reward services that serve.",
    "rollout/spot_evictions": "Number of rollout workers that left since the last step because their node announced its end.",
    "rollout/groups_saved": "Number of finished groups copied off such nodes since the last step, before the learner took them.",
    "rollout/groups_handed_over": "Number of unfinished groups that continued on another worker since the last step, keeping their tokens.",
    "rollout/num_aborted": "Trajectories aborted because enough others of their group had finished (`rollout.extra_trajectories`).",
    "cost/<kind>/<cause>_s": "Seconds of all actors of one kind (`learner`, `rollout_worker`, `reward_service`, ...) since the last step, "
    "by cause: `busy`, a wait for `learner`, `rollouts`, `rewards`, `prompts` or `weights`, or `restart`, which includes starts. The "
    "causes add up to the actors' wall-clock time, as far as the actors have reported it. A cause is absent until it first occurs.",
    "cost/gpu_hours": "GPU hours that actors held since the last step, without the servers of judges; 0 without GPUs.",
    "cost/idle_gpu_hours": "Part of `cost/gpu_hours`: GPU hours of actors that were not busy.",
    "supervision/num_restarts": "Number of actors restarted since the last step, of all kinds. events.jsonl names them.",
    "supervision/num_deaths": "Restarts after the death of a process or its node; part of `supervision/num_restarts`.",
    "supervision/num_hangs": "Restarts after an actor did not answer or missed a deadline; part of `supervision/num_restarts`.",
    "supervision/num_errors": "Restarts after an actor raised an error, failed canaries included; part of `supervision/num_restarts`.",
    "learner/failed_rewards": "Number of trajectories left out because their reward failed.",
    "learner/aborted": "Number of trajectories left out because their completion was aborted.",
    "learner/without_experts": "With `rollout.routing_replay`: segments for which the engine returned no experts. The learner's own "
    "routers chose theirs.",
    "learner/micro_batches": "Number of forward and backward passes in the step, over all ranks.",
    "learner/skipped_in_a_row": "Consecutive updates skipped because loss or gradient was not finite.",
    "updates/<quantity>/<number>": "A metric of each update of a step with several, by its number from 1: `loss`, `kl_old_k3_mean`, "
    "`kl_step_k3_mean`, `clip_fraction`, `value_clip_fraction`, `ratio_min`, `ratio_max`, `gradient_norm`, `critic_gradient_norm` and "
    "`skipped`, defined below.",
    "weights/learner_wait_s": "Seconds of the step in which the learner waited for weights: until all workers had the previous version, "
    "until the new one was published, and, where the next step may not begin earlier, until all workers had the new one.",
    "weights/size_bytes": "Bytes of the published weights: the whole model, or the adapter.",
    "weights/sent_bytes": "Bytes sent to all workers together. With `weights.deltas` only changes may be sent.",
    "weights/changed_share": "Share of the weights that changed since the previous version. Absent when all were sent (`weights.deltas`).",
    "weights/bytes_per_s": "Bytes sent per second of broadcast.",
    "weights/pause_s": "Seconds that a worker paused sampling to load the new weights; the longest over the workers.",
    "weights/num_refused": "Number of failed attestations since the driver started. Each time the worker was replaced.",
    "weights/canary_error": "Mean absolute difference between engine and learner log-probs on the canary, in nats; the worst worker's.",
    "weights/canary_max_error": "Largest absolute difference at one token of the canary, in nats; the worst worker's.",
    "weights/canary_tolerance": "Mean difference above which a worker is refused: `weights.canary_tolerance`, or three times the noise.",
    "weights/noise_floor": "Mean difference on the canary when both had just loaded the starting files: noise of model, type and hardware.",
    "weights/num_indistinguishable": "Workers whose canary cannot tell new from previous weights: the difference is too small against the "
    "noise.",
}
"""Name to meaning. A dashboard groups metrics by the part of the name before the slash."""

ENDS = ("finished", "stopped", "failed")
"""Kinds of a run's last event, unless its driver was killed."""
PATIENCE_S = 30.0
"""Longest wait at a run's end for the sinks to take its last numbers, and again for them to close. A tracker's server may never answer;
the run directory has all numbers."""
_MOST_BEHIND = 10_000
"""Maximum number of steps and events that wait for one sink in the driver's memory."""


class Sink(Protocol):
    """Receives metrics and events: a file or package below cluster.sinks, or yours by full path. It is made with the run's `directory`
    and `num_steps`, and called in order, from its own thread."""

    def step(self, version: int, metrics: Mapping[str, float]) -> None:
        """Numbers of the step that made policy `version`; version 0 is before the first step (evaluation).

        A resumed run comes back to versions that it had before: the later numbers count.
        """
        ...

    def event(self, record: Mapping[str, Any]) -> None:
        """An event. `record` has `kind`, `time`, `pid`, and fields of its kind."""
        ...

    def close(self) -> None:
        """Called once, after the run's last step and event."""
        ...


class MetricLog:
    """The log of the run, a context manager that closes its sinks. Events always go to events.jsonl too.

    Logging returns at once, however slow a disk or a sink is. Raises StorageError if a disk did not take an earlier event; for an object
    store, events wait and are written later.
    """

    def __init__(
        self,
        sinks: Sequence[Sink],
        *,
        directory: RunDirectory | None = None,
        now: Callable[[], float] = time.time,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._patience_s = patience_s
        self._sinks = [_InThread(sink) for sink in sinks]
        self._listeners: list[Sink] = []
        self._directory = directory
        self._now = now
        self._version = 0
        self._pending: tuple[int, dict[str, float]] | None = None
        self._has_ended = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """An error of ours that ends the block takes precedence over one of the log, which is then only printed."""
        try:
            self.close()
        except StorageError as failed:
            if not isinstance(error, TreadwheelError):
                raise
            print(f"treadwheel: {failed}", file=sys.stderr, flush=True)

    def add(self, listener: Sink) -> None:
        """Adds a sink that is called at once, in the caller's thread. It must not block."""
        self._listeners.append(listener)

    def step(self, version: int, metrics: Mapping[str, float]) -> None:
        """Logs the numbers of one step. It may be called again for a version: later numbers are added or replace earlier ones."""
        self._version = version
        if self._pending and self._pending[0] == version:
            self._pending = None
        numbers = {name: float(value) for name, value in metrics.items()}
        self._report_failures()
        for sink in (*self._listeners, *self._sinks):
            sink.step(version, dict(numbers))  # a copy for each, since a callback may change it

    def pending(self, version: int, metrics: Mapping[str, float]) -> None:
        """Takes the numbers of a step that is not over yet. `written` logs them if it comes before `step` of this version."""
        self._pending = version, dict(metrics)

    def event(self, kind: str, **fields: Any) -> None:
        """Logs one event, without secrets. A field `message` is for people: the console shows it."""
        facts = {"time": self._now(), "kind": kind, "pid": os.getpid(), "policy_version": self._version, **fields}
        record: dict[str, Any] = hidden(finite(facts))
        for sink in (*self._listeners, *self._sinks):
            sink.event(dict(record))
        if directory := self._directory:
            directory.writer.put(lambda: directory.append_json(EVENTS, record))

    def end(self, kind: str, **fields: Any) -> None:
        """Logs the run's end, one of `ENDS`; only the first call counts. On return every sink has it, or is left out.

        A run whose events a disk did not take is not `finished`: then this raises StorageError, and logs nothing. For another end `close`
        raises it.
        """
        if self._has_ended:
            return
        if kind != "finished":
            self.keep_errors()
        elif self._directory:
            self._directory.writer.flush()
        self._has_ended = True
        self._report_failures()
        self.event(kind, **fields)
        self._leave_behind(self._sinks)

    def _report_failures(self) -> None:
        for sink in self._sinks:
            if why := sink.drain_failure():
                self.event("sink_left_out", sink=sink.name, message=f"metrics sink {sink.name} is left out: {why}")

    async def written(self, *, within_s: float | None = None) -> None:
        """Returns once all that was logged is on the disk or in the object store. Raises TimeoutError after `within_s`, of which the sinks
        may take half.

        A store that fails does not stop the run: the lines are kept and written later, and an event says so."""
        if self._pending:
            self.step(*self._pending)
        directory = self._directory
        if directory is None:
            return
        # Late sinks are not waited for again before the run's end, unless they have caught up.
        sinks = [sink for sink in self._sinks if not sink.is_late]
        patience_s = self._patience_s if within_s is None else min(self._patience_s, within_s / 2)
        async with asyncio.timeout(within_s):
            await asyncio.to_thread(self._late, sinks, patience_s)
            await asyncio.to_thread(directory.writer.flush)
            try:
                await asyncio.to_thread(directory.flush_lines)
            except StorageError as error:
                message = f"{error}; lines wait until the store takes them"
                self.event("storage_failed", reason=str(error), message=message)

    def keep_errors(self) -> None:
        """From now on a disk that did not take an event is raised by `close`, and by nothing before: a run that ends saves first."""
        if self._directory:
            self._directory.writer.keep_errors()

    def close(self) -> None:
        """Returns when everything is written, except by sinks that are late. May be called twice. The threads of the other sinks end."""
        sinks, self._sinks, self._listeners = self._sinks, [], []
        for sink in sinks:
            sink.close()
        self._leave_behind(sinks)
        for sink in sinks:
            sink.end()
        if self._directory:
            self._directory.writer.finish()

    def _late(self, sinks: "Sequence[_InThread]", patience_s: float) -> "list[_InThread]":
        """The sinks that have not done all of their calls after the patience, which runs for all sinks at once."""
        waits = [(sink, sink.mark()) for sink in sinks]
        until = time.monotonic() + patience_s
        return [sink for sink, mark in waits if not sink.is_done(mark, within_s=max(until - time.monotonic(), 0.0))]

    def _leave_behind(self, sinks: "Sequence[_InThread]") -> None:
        for sink in self._late(sinks, self._patience_s):
            sink.leave_out(f"it was not done {self._patience_s:g} s after the run's end")


class _InThread:
    """A sink in its own thread. If it fails, it is left out with a message, and the run continues. If a call never returns, run and process
    can still end."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        """None ends the thread."""
        self._is_left_out = False
        self._failure: str | None = None
        self.is_late = False
        """Whether it had not done its calls at the end of the last wait."""
        threading.Thread(target=self._work, name="sink", daemon=True).start()

    @property
    def name(self) -> str:
        return type(self._sink).__name__

    def step(self, version: int, metrics: Mapping[str, float]) -> None:
        self._give(lambda: self._sink.step(version, metrics))

    def event(self, record: Mapping[str, Any]) -> None:
        self._give(lambda: self._sink.event(record))

    def mark(self) -> threading.Event:
        """An event that is set when all calls so far are done."""
        is_reached = threading.Event()
        self._calls.put(is_reached.set)
        return is_reached

    def is_done(self, mark: threading.Event, *, within_s: float) -> bool:
        """Waits for `mark`. A sink that is left out counts as done."""
        self.is_late = not self._is_left_out and not mark.wait(within_s)
        if self.is_late:
            self._calls.put(self._note_caught_up)
        return not self.is_late

    def _give(self, call: Callable[[], None]) -> None:
        if not self._is_left_out and self._calls.qsize() >= _MOST_BEHIND:
            self.leave_out(f"it is {_MOST_BEHIND:,} steps and events behind")
        if not self._is_left_out:
            self._calls.put(lambda: self._guarded(call))

    def close(self) -> None:
        """Returns at once. The next mark is set when the sink is closed."""
        self._calls.put(lambda: self._guarded(lambda: self._sink.close()))  # a user's may lack it

    def end(self) -> None:
        """Returns at once. The thread ends when all calls so far are done."""
        self._calls.put(None)

    def leave_out(self, why: str) -> None:
        """Reports the reason, only once: a sink that is left out may still fail."""
        if self._is_left_out:
            return
        self._is_left_out = True
        self._failure = hidden(" ".join(why.split()))
        line = f"treadwheel: metrics sink {self.name} is left out from now on: {self._failure}"
        with contextlib.suppress(OSError, ValueError):  # nobody may read it any more
            print(line, file=sys.stderr, flush=True)

    def drain_failure(self) -> str | None:
        """Why the sink was left out; returned only once."""
        failure, self._failure = self._failure, None
        return failure

    def _note_caught_up(self) -> None:
        self.is_late = False

    def _work(self) -> None:
        while call := self._calls.get():
            call()

    def _guarded(self, call: Callable[[], None]) -> None:
        if self._is_left_out:
            return
        try:
            call()
        except Exception as error:  # noqa: BLE001  a tracker's or a user's code, which may raise anything
            is_plain = isinstance(error, (OSError, StorageError))
            self.leave_out(str(error) if is_plain else f"{type(error).__name__}: {error}")


def open_log(
    config: MetricsConfig, *, directory: RunDirectory, num_steps: int, sinks: Sequence[Sink] = ()
) -> MetricLog:
    """The log with the configured sinks and more `sinks`. Raises ConfigError for a sink that does not import or refuses its parameters."""
    named: list[Sink] = []
    # Sinks that were made are closed when a later one fails: an open live table would swallow the error.
    with contextlib.ExitStack() as to_close:
        for index in range(len(config.sinks)):
            named.append(resolve_sink(config, index)(directory=directory, num_steps=num_steps))
            to_close.callback(_close, named[-1])
        to_close.pop_all()
    return MetricLog([*named, *sinks], directory=directory)


def _close(sink: Sink) -> None:
    """Ignores errors: the run already fails for another reason."""
    with contextlib.suppress(Exception):
        sink.close()


def in_ascii(character: str) -> str:
    """Replacement for a character that a tracker's names do not allow. A non-ASCII one becomes its number, so that names stay distinct."""
    return "_" if character.isascii() else f"u{ord(character):x}"


def resolve_sink(config: MetricsConfig, index: int) -> Callable[..., Sink]:
    """The sink's factory with its parameters bound; it takes `directory` and `num_steps`."""
    return resolve(config.sinks[index], home=SINKS, field=f"metrics.sinks[{index}]")


def step_metrics(summaries: Sequence[GroupSummary], stats: StepStats) -> dict[str, float]:
    """Metrics of a step's groups and its update. They do not depend on timing: a step that is learned again has the same."""
    num_sampled = sum(summary.num_tokens for summary in summaries)
    num_trajectories = sum(summary.num_trajectories for summary in summaries)
    version = stats.policy_version - 1  # the learner's version when it took the groups
    staleness = [version - summary.min_policy_version for summary in summaries]
    return {
        **_component_means(summaries),
        "reward/mean": mean_reward(summaries),
        # With a selection, the step's line has those of all candidates, and keeps them if the step is logged again.
        **({} if any(summary.is_chosen for summary in summaries) else failures(summaries)),
        "tokens/sampled": float(num_sampled),
        "tokens/trained": float(stats.num_trained_tokens),
        "tokens/completion_mean": num_sampled / num_trajectories,
        "tokens/truncated_share": sum(sum(summary.truncated) for summary in summaries) / num_trajectories,
        "staleness/mean": sum(staleness) / len(staleness),
        "staleness/max": float(max(staleness)),
        "time/learning_s": stats.seconds,
        **episode_metrics(summaries),
        **stats.metrics,
    }


def mean_reward(summaries: Sequence[GroupSummary]) -> float:
    rewards = [value for summary in summaries for value in summary.known_rewards]
    return mean_of(rewards) if rewards else float("nan")


def failures(summaries: Sequence[GroupSummary]) -> dict[str, float]:
    """Number of judged trajectories, of those without a known reward, and of failed episodes."""
    return {
        "buffer/num_judged": float(sum(summary.num_trajectories for summary in summaries)),
        "reward/num_errors": float(sum(summary.num_reward_errors for summary in summaries)),
        "reward/num_timeouts": float(sum(summary.num_reward_timeouts for summary in summaries)),
        **failed_episodes(summaries),
    }


def _component_means(summaries: Sequence[GroupSummary]) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for summary in summaries:
        for name, values in summary.reward_components.items():
            found.setdefault(name, []).extend(value for value in values if value is not None)
    return {f"reward/{name}": mean_of(values) for name, values in found.items() if values}
