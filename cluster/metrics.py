"""Numbers and events of a run, to every sink at once.

`METRICS` is the registry that docs/metrics.md is made from. A name that it lacks is logged all the same: nothing is lost.
"""

import asyncio
import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from typing import Any, Protocol, Self

from cluster.contracts.config import MetricsConfig
from cluster.contracts.errors import StorageError
from cluster.contracts.hiding import hidden
from cluster.contracts.plugins import SINKS, resolve
from cluster.contracts.types import GroupSummary, StepStats, mean_of
from cluster.episode_metrics import EPISODE_METRICS, episode_metrics
from cluster.record.run_directory import EVENTS, RunDirectory

METRICS: dict[str, str] = {
    "policy_version": "Steps that the policy has learned; each line of `metrics.jsonl` is of one.",
    "last_step_time": "Unix time at which it learned the last one, or the driver started; in Prometheus alone.",
    "reward/mean": "Mean reward of the step's trajectories whose reward is known.",
    "reward/<component>": "Mean of a component that the judge returned beside the reward, over the trajectories that have it; "
    "a component that is named as another metric here is left out.",
    "reward/<part>": "Of a reward of several parts, the mean of a part, before its weight; `reward/<part>/<name>` is a component that the "
    "part's judge returned. Of episodes also `environment`, what was returned, and `earned`, what was earned on the way.",
    "reward/<part>/num_failed": "Trajectories judged since the last step for which the part failed.",
    "reward/mean/<source>": "Mean reward of the trajectories judged since the last step whose prompt is of this source "
    "(`reward.by_source`, `prompts.sources`); `reward/<part>/<source>` too.",
    "prompts/num_dropped": "Times since the last step that another prompt took the place of one beyond `prompts.max_prompt_tokens`.",
    "prompts/num_truncated": "Prompts made since the last step that were cut to `prompts.max_prompt_tokens`.",
    "prompts/num_skipped": "Times since the last step that `prompts.difficulty` put another prompt in the place of one that "
    "is solved or far from the target.",
    "prompts/num_groups/<source>": "Groups of this source judged since the last step, those of dropped groups too.",
    "reward/num_errors": "Trajectories whose reward raised; they do not train. With `algorithm.selection` of all candidates.",
    "reward/num_timeouts": "Trajectories whose reward overran its deadline; they do not train. Of candidates as `reward/num_errors`.",
    "eval/reward": "Mean reward of the held-out prompts, greedy unless `evaluation.temperature` says otherwise.",
    "eval/accuracy": "Share of the held-out completions whose reward is `evaluation.success_at` (1) or more.",
    "eval/reward_stderr": "Standard error of `eval/reward`, over prompts; those of accuracy and pass@k over all prompts end the same. "
    "Without environments, rows whose prompts are the same are one prompt.",
    "eval/pass_at_<k>": "Chance that at least one of k completions of a prompt is such a success, unbiased (arXiv:2107.03374); "
    "for `evaluation.num_samples` above 1.",
    "eval/reward/<source>": "Mean reward of the held-out prompts of a source (`evaluation.source_column`); `eval/accuracy/<source>` too.",
    "eval/num_failed": "Held-out completions whose reward raised or overran its deadline; they count nowhere else.",
    "eval/num_dropped": "Held-out prompts that the engine refuses, or that end whatever samples or judges them.",
    "eval/num_too_long": "Held-out prompts beyond `evaluation.prompts.max_prompt_tokens`, in whose place later ones were sampled.",
    "eval/num_prompts": "Held-out prompts evaluated.",
    **EPISODE_METRICS,
    "tokens/sampled": "Completion tokens of the groups that the step consumed; those of dropped groups are not among them.",
    "tokens/trained": "Sampled completion tokens of the trajectories whose reward is known; those that filters leave out count too.",
    "tokens/completion_mean": "Mean completion length of the step's trajectories, in sampled tokens: of an episode the model's alone.",
    "tokens/truncated_share": "Share of trajectories that were cut off at `sampling.max_tokens` or by the context, or as episodes by any "
    "limit.",
    "speed/sampling_tokens_per_s": "Completion tokens sampled per second of sampling, over all workers.",
    "speed/learning_tokens_per_s": "Prompt and completion tokens per second of learning, over all ranks; every epoch counts them.",
    "time/step_s": "Wall-clock seconds from waiting for the step's groups until the next step may begin: when every worker serves the "
    "weights, or where `buffer.max_off_policy_steps` lets them travel beside it, when they are published.",
    "time/sampling_s": "Seconds of the step in which at least one group was under way.",
    "time/judging_s": "Of a reward without parts, the seconds that it took for a group in its service, mean; a reward model has scored the "
    "group before.",
    "time/<part>/judging_s": "The same, of each part of a reward that has several.",
    "time/held_s": "Of a reward without parts, the seconds since the last step in which groups waited, because what their judge calls was "
    "away; absent where none did.",
    "time/<part>/held_s": "The same, of each part of a reward that has several.",
    "time/learning_s": "Seconds of the learner's step.",
    "time/assemble_s": "Seconds of it that trajectories took to become tensors, but for those of its passes.",
    "time/first_look_s": "Seconds of its extra forward passes (recomputed log-probs, values); about 0 without them.",
    "time/gradient_s": "Seconds of its forward and backward passes.",
    "time/optimizer_s": "Seconds of its clipping and optimizer updates.",
    "time/join_s": "Seconds from asking for a rollout worker until it served, the wait for its node included: the median of the last five; "
    "absent until one has joined in mid-run.",
    "time/publish_s": "Seconds of the broadcast that the learner took to publish.",
    "time/broadcast_s": "Seconds from publishing weights to the last worker's attestation.",
    "time/eval_s": "Seconds of a held-out evaluation.",
    "staleness/mean": "Learner version minus that of a group's oldest token, mean over the step's groups.",
    "staleness/max": "The same, maximum: no token of the step is older; never above `buffer.max_off_policy_steps` in a run that samples.",
    "staleness/bound": "`buffer.max_off_policy_steps`.",
    "buffer/learner_wait_s": "Seconds that the learner waited for a full step of groups.",
    "buffer/head_of_line_s": "Seconds that a group of the step, finished, waited for the step's slowest one, mean.",
    "buffer/num_ready": "Groups that are finished and not yet taken.",
    "buffer/num_under_way": "Groups that are being sampled or scored.",
    "buffer/num_dropped": "Groups dropped since the last step, each replaced by another prompt.",
    "buffer/kept_share": "Of the groups that finished or were dropped since the last step, the share that was not dropped.",
    "buffer/tries_per_group": "Groups that finished or were dropped since the last step, per group that was not dropped.",
    "buffer/num_judged": "Trajectories of which `reward/num_errors` and `reward/num_timeouts` count those that failed: of the step's "
    "groups, or all that `algorithm.selection` chose from since the last step.",
    "buffer/candidate_reward": "Mean reward of the trajectories that `algorithm.selection` chose from since the last step: how good the "
    "policy is. `reward/mean` is of the chosen ones.",
    "buffer/dropped_<reason>": "Of the dropped groups, those that the filter of this name dropped, or for `rewards_failed`, `refused` (the "
    "engine did), `quarantined` or `straggler` (finished groups waited behind it too long, `buffer.max_head_of_line_s`).",
    "buffer/size_bytes": "Bytes of trajectories that wait in the object store.",
    "buffer/max_size_bytes": "Bytes that may: `buffer.max_size_bytes`.",
    "mismatch/mean_abs_nats": "|learner log-prob - rollout log-prob| over the step's newest tokens, mean.",
    "mismatch/max_abs_nats": "The same, maximum.",
    "mismatch/off_policy_steps": "Off-policy steps of those tokens: beyond 0 the policy's own last steps are in the difference.",
    "rollout/num_wanted": "Rollout workers that there should be: asked for, or decided by `elastic`.",
    "rollout/num_coming": "Of those, the ones that do not serve yet, or not again: they wait for a node, start, or load weights.",
    "rollout/num_workers": "Rollout workers that serve attested weights.",
    "rollout/idle_share": "Share of the serving workers' time since the last step in which they had nothing to sample.",
    "engine/num_running": "Most requests that vLLM ran at once under the last two weights, over all workers, by their last heartbeats.",
    "engine/num_waiting": "Most requests that waited in vLLM because its key-value cache had no room for them, likewise.",
    "engine/cache_share": "Largest share of a key-value cache that requests took, likewise, of the fullest worker.",
    "rollout/num_services": "Reward services that serve.",
    "rollout/spot_evictions": "Rollout workers that left since the last step because their node announced its end.",
    "rollout/groups_saved": "Finished groups that were copied off such nodes since the last step, before the learner took them.",
    "rollout/groups_handed_over": "Unfinished groups that went on at another worker since the last step, with the tokens that they had.",
    "rollout/num_aborted": "Trajectories aborted because enough of their groups' were finished (`rollout.extra_trajectories`).",
    "cost/<kind>/<cause>_s": "Seconds of all actors of a kind (`learner`, `rollout_worker`, `reward_service`, ...) since the last step, by "
    "what they went to: `busy`, or a wait for `learner`, `rollouts`, `rewards`, `prompts`, `weights`, or `restart`, starts among them. "
    "They add up to the actors' wall clock, as far as actors have told; a cause is there once it came up.",
    "cost/gpu_hours": "Hours of GPUs that actors had since the last step, servers of judges not counted; 0 without GPUs.",
    "cost/idle_gpu_hours": "Of these, those of actors that were not busy.",
    "supervision/num_restarts": "Actors restarted since the last step, all kinds; events.jsonl names them.",
    "supervision/num_deaths": "Of the restarts, those after a death of the process or its node.",
    "supervision/num_hangs": "Of the restarts, those after a silence or a missed deadline.",
    "supervision/num_errors": "Of the restarts, those after an error that the actor raised, a failed canary among them.",
    "learner/failed_rewards": "Trajectories left out because their reward failed.",
    "learner/aborted": "Trajectories left out because their completion was given up.",
    "learner/without_experts": "`rollout.routing_replay`: trajectories, or their segments, whose experts the engine did not return: the "
    "learner's routers chose.",
    "learner/micro_batches": "Forward and backward passes of the step, over all ranks.",
    "learner/skipped_in_a_row": "Updates skipped in a row because loss or gradient were not finite.",
    "updates/<quantity>/<number>": "Of each update of a step of several, by its number from 1: `loss`, `kl_old_k3_mean`, "
    "`kl_step_k3_mean`, `clip_fraction`, `value_clip_fraction`, `ratio_min`, `ratio_max`, `gradient_norm`, "
    "`critic_gradient_norm` and `skipped`, as they are named below.",
    "weights/learner_wait_s": "Seconds of the step in which the learner waited for weights: until all workers had those before, to publish "
    "its own, and where the next step may not begin without them, until all workers had these.",
    "weights/size_bytes": "Bytes of what is published: the whole weights, or the adapter.",
    "weights/sent_bytes": "Bytes sent to all workers together: the whole weights to each, or what changed (`weights.deltas`).",
    "weights/changed_share": "Share of the weights that differ from the version before; absent where all were sent (`weights.deltas`).",
    "weights/bytes_per_s": "Bytes sent per second of broadcast.",
    "weights/pause_s": "Seconds that sampling stood still for new weights, the longest of the workers.",
    "weights/num_refused": "Proofs that failed since the driver started: each time the worker was replaced.",
    "weights/canary_error": "Mean difference between engine and learner on the probe, in nats, the worst of the workers.",
    "weights/canary_max_error": "The same, the largest of a token.",
    "weights/canary_tolerance": "Mean difference beyond which a worker is refused: `weights.canary_tolerance`, or three times the noise.",
    "weights/noise_floor": "The mean difference when both had just loaded the starting files: noise of model, type and hardware.",
    "weights/num_indistinguishable": "Workers on which noise could hide the step: old and new weights are too near to each other.",
}
"""Name and meaning. The part before the slash is the group that a dashboard shows together."""

ENDS = ("finished", "stopped", "failed")
"""Kinds of the last event of a driver that was not killed."""
PATIENCE_S = 30.0
"""How long a run's end waits for its sinks to take it, and again for them to close: a tracker's server may never answer, and the numbers
are in the run directory."""
_MOST_BEHIND = 10_000
"""Steps and events that a sink has not done yet: what waits is in the driver's memory."""


class Sink(Protocol):
    """Where numbers go: a file or package below cluster.sinks, or yours by full path. Called from a thread of its own, in order."""

    def step(self, version: int, metrics: Mapping[str, float]) -> None:
        """Numbers of the step that made policy `version`; version 0 is before the first step (evaluation).

        A resumed run comes back to versions that it had before: the later numbers count.
        """
        ...

    def event(self, record: Mapping[str, Any]) -> None:
        """Something happened; `record` has `kind`, `time`, `pid`, and fields of its kind."""
        ...

    def close(self) -> None: ...


class MetricLog:
    """One log for the run; a context manager that closes its sinks. Events always go to events.jsonl as well, sinks or not.

    Logging returns at once, however slow a disk or a sink is. Raises StorageError when a disk did not take an earlier event;
    for an object store it waits and is written later.
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
        self._has_ended = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, listener: Sink) -> None:
        """Hears everything from now on, at once and in the caller's thread: it must not block."""
        self._listeners.append(listener)

    def step(self, version: int, metrics: Mapping[str, float]) -> None:
        """Logs the numbers of one step. May be called again for a version: what comes later adds to it or replaces it."""
        self._version = version
        numbers = {name: float(value) for name, value in metrics.items()}
        self._tell_of_failures()
        for sink in (*self._listeners, *self._sinks):
            sink.step(version, dict(numbers))  # a copy each: a callback may alter its own

    def event(self, kind: str, **fields: Any) -> None:
        """Logs one event, without secrets. A `message` among the fields is for people: the console shows it."""
        facts = {"time": self._now(), "kind": kind, "pid": os.getpid(), "policy_version": self._version, **fields}
        record: dict[str, Any] = hidden(finite(facts))
        for sink in (*self._listeners, *self._sinks):
            sink.event(dict(record))
        if directory := self._directory:
            directory.writer.put(lambda: directory.append_json(EVENTS, record))

    def end(self, kind: str, **fields: Any) -> None:
        """Logs how the run ended, one of `ENDS`: the first call does. Sinks have it when this returns, or are left behind.

        A run whose events a disk did not take has not `finished`: that raises, and logs nothing.
        """
        if self._has_ended:
            return
        if kind == "finished" and self._directory:
            self._directory.writer.flush()
        self._has_ended = True
        self._tell_of_failures()
        self.event(kind, **fields)
        self._leave_behind(self._sinks)

    def _tell_of_failures(self) -> None:
        for sink in self._sinks:
            if why := sink.drain_failure():
                self.event("sink_left_out", sink=sink.name, message=f"metrics sink {sink.name} is left out: {why}")

    async def written(self) -> None:
        """Returns once what was logged is on the disk, or in the object store, where lines else wait for others.

        A store that takes none is no reason to stop: the lines are kept, an event says so, and they are written later."""
        directory = self._directory
        if directory is None:
            return
        # A tracker that is late is for the end to leave behind; it is waited for once until it has caught up.
        await asyncio.to_thread(self._late, [sink for sink in self._sinks if not sink.is_late])
        await asyncio.to_thread(directory.writer.flush)
        try:
            await asyncio.to_thread(directory.flush_lines)
        except StorageError as error:
            self.event("storage_failed", reason=str(error), message=f"{error}; lines wait until the store takes them")

    def close(self) -> None:
        """Returns when everything is written, but for what sinks leave undone that are late. May be called twice."""
        sinks, self._sinks, self._listeners = self._sinks, [], []
        for sink in sinks:
            sink.close()
        self._leave_behind(sinks)
        if self._directory:
            self._directory.writer.flush()

    def _late(self, sinks: "Sequence[_InThread]") -> "list[_InThread]":
        """Those that have not done all that they were given when the patience for them, side by side, is at its end."""
        waits = [(sink, sink.mark()) for sink in sinks]
        until = time.monotonic() + self._patience_s
        return [sink for sink, mark in waits if not sink.is_done(mark, within_s=max(until - time.monotonic(), 0.0))]

    def _leave_behind(self, sinks: "Sequence[_InThread]") -> None:
        for sink in self._late(sinks):
            sink.leave_out(f"it was not done {self._patience_s:g} s after the run's end")


class _InThread:
    """A sink in a thread of its own. One that cannot write is loud and left out: numbers are not worth a run. One whose call never returns
    keeps neither the run nor the process from ending."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._calls: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._is_left_out = False
        self._failure: str | None = None
        self.is_late = False
        """Whether it has not done yet what the last flush waited for."""
        threading.Thread(target=self._work, name="sink", daemon=True).start()

    @property
    def name(self) -> str:
        return type(self._sink).__name__

    def step(self, version: int, metrics: Mapping[str, float]) -> None:
        self._give(lambda: self._sink.step(version, metrics))

    def event(self, record: Mapping[str, Any]) -> None:
        self._give(lambda: self._sink.event(record))

    def mark(self) -> threading.Event:
        """Set when it has done all that it was given."""
        is_reached = threading.Event()
        self._calls.put(is_reached.set)
        return is_reached

    def is_done(self, mark: threading.Event, *, within_s: float) -> bool:
        """Waits for `mark`. A sink that is left out has nothing to do."""
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
        """Returns at once; the next mark is set when it is closed."""
        self._calls.put(lambda: self._guarded(self._sink.close))

    def leave_out(self, why: str) -> None:
        """Told once: what is left behind may still fail."""
        if self._is_left_out:
            return
        self._is_left_out = True
        self._failure = " ".join(why.split())
        told = f"treadwheel: metrics sink {self.name} is left out from now on: {self._failure}"
        with contextlib.suppress(OSError, ValueError):  # nobody may read it any more
            print(told, file=sys.stderr, flush=True)

    def drain_failure(self) -> str | None:
        """Why it is left out, once."""
        failure, self._failure = self._failure, None
        return failure

    def _note_caught_up(self) -> None:
        self.is_late = False

    def _work(self) -> None:
        while True:
            self._calls.get()()

    def _guarded(self, call: Callable[[], None]) -> None:
        if self._is_left_out:
            return
        try:
            call()
        except Exception as error:  # noqa: BLE001  a tracker or a user's own: foreign code, which raises what it likes
            is_plain = isinstance(error, (OSError, StorageError))
            self.leave_out(str(error) if is_plain else f"{type(error).__name__}: {error}")


def open_log(
    config: MetricsConfig, *, directory: RunDirectory, num_steps: int, sinks: Sequence[Sink] = ()
) -> MetricLog:
    """The log that a configuration asks for, with more `sinks`. Raises ConfigError for one that does not import or take its parameters."""
    named: list[Sink] = []
    # Closed where a later one refuses the run: an open live table would take the words that say why.
    with contextlib.ExitStack() as to_close:
        for index in range(len(config.sinks)):
            named.append(resolve_sink(config, index)(directory=directory, num_steps=num_steps))
            to_close.callback(_close, named[-1])
        to_close.pop_all()
    return MetricLog([*named, *sinks], directory=directory)


def _close(sink: Sink) -> None:
    """Whatever it raises: another says why the run does not begin."""
    with contextlib.suppress(Exception):
        sink.close()


def in_ascii(character: str) -> str:
    """What stands for a character that a tracker's names do not take. One of another script is its number: two names stay two."""
    return "_" if character.isascii() else f"u{ord(character):x}"


def resolve_sink(config: MetricsConfig, index: int) -> Callable[..., Sink]:
    """The sink's factory with its parameters bound; it takes `directory` and `num_steps`."""
    return resolve(config.sinks[index], home=SINKS, field=f"metrics.sinks[{index}]")


def step_metrics(summaries: Sequence[GroupSummary], stats: StepStats) -> dict[str, float]:
    """What a step's groups and its update say, whatever the timing: a step learned again from its record says the same."""
    num_sampled = sum(summary.num_tokens for summary in summaries)
    num_trajectories = sum(summary.num_trajectories for summary in summaries)
    version = stats.policy_version - 1  # what the learner was when it took them
    staleness = [version - summary.min_policy_version for summary in summaries]
    return {
        **_component_means(summaries),
        "reward/mean": mean_reward(summaries),
        # Of a selection the step's line has those of its candidates, and keeps them when the step is told again.
        **({} if any(summary.is_chosen for summary in summaries) else failed_rewards(summaries)),
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


def failed_rewards(summaries: Sequence[GroupSummary]) -> dict[str, float]:
    """How many trajectories were judged, and of how many of them no reward is known."""
    return {
        "buffer/num_judged": float(sum(summary.num_trajectories for summary in summaries)),
        "reward/num_errors": float(sum(summary.num_reward_errors for summary in summaries)),
        "reward/num_timeouts": float(sum(summary.num_reward_timeouts for summary in summaries)),
    }


def _component_means(summaries: Sequence[GroupSummary]) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for summary in summaries:
        for name, values in summary.reward_components.items():
            found.setdefault(name, []).extend(value for value in values if value is not None)
    return {f"reward/{name}": mean_of(values) for name, values in found.items() if values}


def finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """For JSON, which knows no NaN and no infinity: None stands for them."""
    return {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in values.items()}
