"""Rollout worker: tickets in, one validated Arrow batch per finished group out, sampled under attested weights.

All methods share the actor's event loop. The engine has its own thread (`engine_thread.py`); when that ends, all waiting calls raise.
"""

import asyncio
import os
import time
import traceback
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from functools import partial
from itertools import zip_longest
from typing import Any, Literal, Self, TypeVar

import pyarrow as pa

from actors.chat.formatter import ChatFormatter
from actors.rollout.engine_thread import EngineThread, Update
from actors.rollout.episodes.episodes import Episodes
from actors.rollout.episodes.group import EpisodeGroup, PlayEnded
from actors.rollout.group import GroupInProgress
from actors.rollout.inbox import Inbox
from cluster.contracts.config import RunConfig
from cluster.contracts.environment_config import SINGLE_TURN
from cluster.contracts.errors import DataError, DeadlineError, EngineError, WeightsError, headline
from cluster.contracts.protocols import Engine
from cluster.contracts.schema import to_batch
from cluster.contracts.types import Attestation, Completion, Printed, Progress, RankGroup, Refusal, Ticket
from cluster.weights.attestation import Attestor
from cluster.weights.delta import LoadedCopy
from cluster.weights.manifest import WeightManifest, unpack, verify, verify_table
from cluster.weights.process_group import Incoming

T = TypeVar("T")
AnyGroup = GroupInProgress | EpisodeGroup

_GROUP_ABORTED = object()


@dataclass(frozen=True, slots=True)
class _HandOver:
    """The event that ends a group and hands it over. It is the group's last event in the inbox, after all outcomes."""

    group: "AnyGroup"
    kept: Mapping[str, Completion]
    sampled: asyncio.Future[pa.RecordBatch | None]


class RolloutWorker:
    """Samples groups. Plain Python: all dependencies are arguments."""

    def __init__(
        self,
        *,
        name: str,
        run_id: str,
        make_engine: Callable[[], Engine],
        formatter: ChatFormatter,
        attestor: Attestor,
        on_update: Literal["continue", "finish", "abort_and_resume"] = "continue",
        timeout_s: float = 600.0,
        episodes: Episodes | None = None,
        environment_of: Callable[[Mapping[str, Any]], str] = lambda columns: SINGLE_TURN.name,
        keeps_weights: bool = False,
        may_resume: bool = True,
    ) -> None:
        """Returns when the engine is up with the model's files. `timeout_s`: deadline of an engine without progress. Without `episodes`
        every prompt is a single turn. `environment_of` names the environment of a prompt by its columns. `keeps_weights`: the worker, or
        the engine's processes, keep a copy of the weights to which changes are added. `may_resume` as for `EngineThread`."""
        self._name = name
        self._run_id = run_id
        self._formatter = formatter
        self._attestor = attestor
        self._timeout_s = timeout_s
        self._episodes = episodes
        self._environment_of = environment_of
        self._may_change_version = on_update != "finish"
        self._keeps_weights = keeps_weights
        self._copy = LoadedCopy()
        self._inboxes: set[Inbox] = set()
        self._groups: dict[str, tuple[AnyGroup, Inbox]] = {}
        self._handed: dict[str, _HandOver] = {}
        """By the group's key, until its `generate` has read the event."""
        self._num_groups = 0
        self._engine = EngineThread(make_engine, on_update=on_update, may_resume=may_resume)
        self._engine.ended.add_done_callback(self._tell_everyone)
        self.timeline = self._engine.timeline

    @classmethod
    def with_vllm(cls, config: RunConfig, *, name: str, run_id: str, num_threads: int) -> Self:
        """A worker around an in-process vLLM on `num_threads` cores. Raises ConfigError when model or settings cannot be served."""
        from actors.rollout.vllm_engine import VllmEngine

        formatter = ChatFormatter.load(config.model)
        return cls(
            name=name,
            run_id=run_id,
            make_engine=partial(VllmEngine, config, formatter=formatter, num_threads=num_threads),
            formatter=formatter,
            attestor=Attestor.from_config(
                config.weights, config.model, worker=name, is_quantized=config.rollout.quantization is not None
            ),
            on_update=config.rollout.on_update,
            timeout_s=config.rollout.timeout_s,
            episodes=Episodes(config, formatter) if config.has_episodes else None,
            environment_of=config.environment_of,
            keeps_weights=config.weights.deltas,
            may_resume=not config.sampling.not_resumable(),
        )

    async def warm_up(self) -> None:
        """Starts the environments. Raises ConfigError for one that does not import or whose parameters do not fit."""
        if self._episodes:
            await self._episodes.start()

    async def generate(
        self, tickets: Sequence[Ticket], *kept: pa.RecordBatch | None
    ) -> AsyncIterator[pa.RecordBatch | Refusal]:
        """One batch per ticket, in the order in which groups finish; none for a group that is aborted or handed over.

        `kept`: per ticket, the part of its group that another worker handed over, from which the group continues. None, or no `kept` at
        all: the group begins anew.

        For a prompt that does not fit, or that the engine refuses, a Refusal replaces the batch; other groups are not affected. A ticket's
        surplus trajectories are aborted when its group is finished.

        All tickets of a call enter the engine before its next step, in their order: the same call makes the same batches of requests.
        Raises WeightsError without attested weights, EngineError when the engine ends, DeadlineError when it makes no progress.
        """
        await self.warm_up()
        groups: list[AnyGroup] = []
        for ticket, sampled in zip_longest(tickets, kept):
            try:
                groups.append(self._group(ticket, sampled))
            except DataError as error:
                yield _refusal(ticket, headline(error))
        inbox = self._open_inbox()
        try:
            self._groups |= {group.key: (group, inbox) for group in groups}
            singles = [group for group in groups if isinstance(group, GroupInProgress)]
            by_request = {request.request_id: (group, request) for group in singles for request in group.requests()}
            self._engine.submit([request for _, request in by_request.values()], inbox.put_outcome)
            if self._episodes:
                played = [group for group in groups if isinstance(group, EpisodeGroup)]
                self._episodes.begin(played, self._engine, inbox)
            num_open = len(groups)
            while num_open:
                request_id, event = await self._next(inbox)
                result = None
                if event is _GROUP_ABORTED:
                    num_open -= 1
                elif isinstance(event, _HandOver):
                    num_open -= self._give_away(event)
                elif isinstance(event, PlayEnded):
                    result = self._result_of_play(event)
                else:
                    result = self._result(by_request[request_id][0], request_id, event)
                if result is not None:
                    num_open -= 1
                    yield result
        finally:
            self._close(groups, inbox)

    async def load(self, manifest: Mapping[str, Any], *buckets: Any) -> Attestation:
        """Loads and attests a version's weights. After a WeightsError no request is served until a later load succeeds.

        `manifest` is a WeightManifest as a dict, each bucket a uint8 array. `on_update` decides what happens to running requests.
        """
        parsed = WeightManifest.model_validate(dict(manifest))
        if not self._keeps_weights:
            return await self._take(parsed, lambda: unpack(parsed, buckets), check=partial(verify, parsed, buckets))
        copy = self._copy
        return await self._take(
            parsed, lambda: unpack(parsed, copy.buckets), check=partial(copy.take_whole, parsed, buckets)
        )

    async def load_changes(self, manifest: Mapping[str, Any], *changes: Any) -> Attestation:
        """As `load`, from the changes since the version that this worker serves: one array per bucket.

        The engine loads all weights: vLLM fuses and packs them, so single values cannot be changed in place.
        """
        parsed, copy = WeightManifest.model_validate(dict(manifest)), self._copy
        return await self._take(
            parsed, lambda: unpack(parsed, copy.buckets), check=partial(copy.take_changes, parsed, changes)
        )

    async def receive(self, manifest: Mapping[str, Any], group: RankGroup, first_rank: int) -> Attestation:
        """As `load`, or as `load_changes`, from the sender in `group`. The engine's processes have the ranks from `first_rank` on.

        Raises BroadcastError when a member of the group is lost. Requests then wait until a later load succeeds.
        """
        parsed = WeightManifest.model_validate(dict(manifest))
        incoming = Incoming(group=group, first_rank=first_rank, manifest=parsed, keeps=self._keeps_weights)
        return await self._take(parsed, lambda: incoming, check=partial(verify_table, parsed))

    async def _take(
        self, parsed: WeightManifest, tensors: Callable[[], Any], *, check: Callable[[], None]
    ) -> Attestation:
        """`check` raises WeightsError for wrong weights before any of them is loaded."""
        try:
            await asyncio.to_thread(check)
            if self._attestor.needs_start:
                measured = await self._wait_for(self._engine.probe(parsed.canary.token_ids))
                await asyncio.to_thread(self._attestor.start, parsed.canary, measured)
        except WeightsError as error:
            self._engine.refuse(error)
            raise
        update = Update(
            policy_version=parsed.policy_version,
            tensors=tensors,
            adapter=parsed.adapter,
            probe_token_ids=parsed.canary.token_ids,
            prove=partial(self._attestor.compare, parsed),
        )
        proof, pause_seconds = await self._wait_for(self._engine.update(update))
        return Attestation(
            worker=self._name,
            policy_version=parsed.policy_version,
            digest=parsed.digest,
            pause_seconds=pause_seconds,
            **asdict(proof),
        )

    async def sleep(self, keeps_weights: bool) -> None:
        """Frees the engine's GPU, except for memory that a process cannot release. Requests wait until the engine wakes.

        Without its weights it wakes at its next load. An engine before its first load always keeps the weights of its model's files, with
        which the noise floor is measured.
        """
        await self._wait_for(self._engine.sleep(keeps_weights=keeps_weights or self._attestor.needs_start))

    async def wake(self) -> None:
        """Samples again, if the engine kept its weights."""
        await self._wait_for(self._engine.wake())

    async def abort(self, group_ids: Sequence[str]) -> list[str]:
        """Drops these groups; their `generate` continues without them. Returns the ids of those that were running."""
        wanted = set(group_ids)
        dropped = [found for found in self._groups.values() if found[0].ticket.group_id in wanted]
        for group, inbox in dropped:
            self._end(group)
            inbox.put(("", _GROUP_ABORTED))
        return [group.ticket.group_id for group, _ in dropped]

    async def hand_over(self, group_ids: Sequence[str]) -> list[pa.RecordBatch | None]:
        """Ends these groups as `abort` does. Returns what is sampled of each, in the given order, for another worker's `generate`.

        None for a group without tokens or that is not running. None also if its completions cannot continue elsewhere: they must be of one
        version (`on_update: finish`), a setting of their sampling counts their own tokens, or a `stop` text could cross the seam. Finished
        completions are then not kept either: with the others drawn anew, short completions would be too frequent.
        """
        running = {group.ticket.group_id: (group, inbox) for group, inbox in self._groups.values()}
        wanted = [running[group_id] for group_id in group_ids if group_id in running]
        unfinished = [request_id for group, _ in wanted for request_id in group.unfinished()]
        kept = await self._wait_for(self._engine.hand_over(unfinished))
        ended = {group.ticket.group_id: _HandOver(group, kept, asyncio.Future()) for group, _ in wanted}
        for group, inbox in wanted:
            event = ended[group.ticket.group_id]
            if group.key in self._groups and group.key not in self._handed:
                self._handed[group.key] = event
                inbox.put(("", event))
            else:  # the group has ended meanwhile, or an earlier call gets it; its inbox may have no reader any more
                event.sampled.set_result(None)
        return [await ended[group_id].sampled if group_id in ended else None for group_id in group_ids]

    def progress(self) -> Progress:
        phase, since = self._engine.phase
        version = self._engine.policy_version
        if self._engine.ended.done():
            phase = "ended"
        return Progress(
            actor=self._name,
            phase=phase,
            policy_version=version or 0,
            since=since,
            last_progress=self._engine.last_progress,
            pid=os.getpid(),
            engine=self._engine.most_used,
            detail="no attested weights" if version is None else f"{len(self._groups)} groups",
            printed=self._episodes.printed.last() if self._episodes else Printed(),
        )

    def stop(self) -> None:
        """Ends the engine; calls that wait raise EngineError."""
        self._engine.stop()

    async def close(self) -> None:
        """Ends the processes of environments. They also end with this process."""
        if self._episodes:
            await self._episodes.close()

    def _give_away(self, event: _HandOver) -> bool:
        """Ends the group and answers the hand-over. Returns whether the group was still open."""
        group = event.group
        self._handed.pop(group.key, None)
        if is_open := group.key in self._groups:
            self._end(group)
        sampling = group.ticket.sampling
        may_resume = self._may_change_version and not sampling.not_resumable() and not sampling.stop
        if not event.sampled.done():  # otherwise its waiter was cancelled
            event.sampled.set_result(group.sampled(event.kept) if is_open and may_resume else None)
        return is_open

    def _group(self, ticket: Ticket, sampled: pa.RecordBatch | None) -> AnyGroup:
        self._num_groups += 1
        # A group may return to the same worker after an abort: its requests must not be confused with the old ones.
        key = f"{ticket.group_id}.{self._num_groups}"
        environment = self._environment_of(ticket.prompt.columns)
        if self._episodes and self._episodes.is_played(environment):
            return self._episodes.group(ticket, environment=environment, key=key)
        return GroupInProgress(
            ticket=ticket,
            encoded=self._formatter.encode(ticket.prompt),
            key=key,
            decode=self._formatter.decode,
            environment=environment,
            # With episodes, older groups have priority, since their turns return again and again. Otherwise first come, first served.
            place=ticket.place if self._episodes else 0,
            kept=sampled,
        )

    def _open_inbox(self) -> Inbox:
        inbox = Inbox(asyncio.get_running_loop())
        self._inboxes.add(inbox)
        # Checked after adding: an engine that ends from now on finds the inbox; one that ended before is seen here.
        if self._engine.ended.done():
            inbox.put(self._end_of_engine())
        return inbox

    def _close(self, groups: Sequence[AnyGroup], inbox: Inbox) -> None:
        for group in groups:
            if group.key in self._groups:
                self._end(group)
            if (unread := self._handed.pop(group.key, None)) and not unread.sampled.done():
                unread.sampled.set_result(None)
        self._inboxes.discard(inbox)

    def _result(
        self, group: GroupInProgress, request_id: str, outcome: Completion | DataError
    ) -> pa.RecordBatch | Refusal | None:
        """The group's result after this outcome; None while it waits for others, and for surplus outcomes."""
        if group.key not in self._groups:
            return None
        if isinstance(outcome, DataError):
            self._end(group)
            prompt_id = group.ticket.prompt.prompt_id
            return _refusal(group.ticket, f"the engine refuses prompt {prompt_id!r}: {headline(outcome)}")
        group.add(request_id, outcome)
        if not group.is_finished:
            return None
        self._end(group)
        return self._batch(group)

    def _result_of_play(self, event: PlayEnded) -> pa.RecordBatch | Refusal | None:
        """As `_result`."""
        group = event.group
        if group.key not in self._groups:
            return None
        if isinstance(event.outcome, DataError):
            self._end(group)
            return _refusal(group.ticket, headline(event.outcome))
        group.add(event.play, event.outcome)
        if not group.is_finished:
            return None
        self._end(group)
        try:
            return self._batch(group)
        except ValueError as error:  # from its environment's report; other groups must not fail with it
            return _refusal(group.ticket, f"its environment's report cannot be written: {headline(error)}")
        except DataError as error:
            return _refusal(group.ticket, headline(error))

    def _end(self, group: AnyGroup) -> None:
        """Closes the group and aborts its unfinished requests."""
        del self._groups[group.key]
        group.stop(self._engine)

    def _batch(self, group: AnyGroup) -> pa.RecordBatch:
        return to_batch(group.rows(run_id=self._run_id, worker=self._name))

    async def _wait_for(self, result: Future[T]) -> T:
        inbox = self._open_inbox()
        try:
            result.add_done_callback(inbox.put)
            return (await self._next(inbox)).result()
        finally:
            self._inboxes.discard(inbox)

    async def _next(self, inbox: Inbox) -> Any:
        while True:
            try:
                async with asyncio.timeout(self._timeout_s):
                    event = await inbox.get()
            except TimeoutError:
                self._check_that_engine_moves()
                continue
            if isinstance(event, BaseException):
                raise event
            return event

    def _check_that_engine_moves(self) -> None:
        still_s = time.time() - self._engine.last_progress
        if still_s < self._timeout_s:
            return
        phase, _ = self._engine.phase
        raise DeadlineError(
            f"{self._name}, {phase}, policy version {self._engine.policy_version}: no engine step for {still_s:.0f} s "
            f"(rollout.timeout_s={self._timeout_s:g})"
        )

    def _end_of_engine(self) -> EngineError:
        cause = self._engine.ended.exception()
        assert cause is not None  # only an exception ends the thread
        what = f"{self._name}: the engine ended: {type(cause).__name__}: {headline(cause)}"
        error = EngineError(what, details="".join(traceback.format_exception(cause)))
        error.__cause__ = cause
        return error

    def _tell_everyone(self, ended: Future[None]) -> None:
        for inbox in tuple(self._inboxes):
            inbox.put(self._end_of_engine())


def _refusal(ticket: Ticket, reason: str) -> Refusal:
    return Refusal(group_id=ticket.group_id, prompt_id=ticket.prompt.prompt_id, reason=reason)
