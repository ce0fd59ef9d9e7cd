"""All ranks of the learner, used as one learner. Every rank gets every call, in the same order. One death restarts them all.

A death loses nothing: the ranks return to their last checkpoint and learn the recorded trajectories of the steps since then again.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from cluster.contracts.config import RunConfig
from cluster.contracts.errors import (
    OF_ITS_MACHINE,
    CheckpointError,
    DataError,
    DeadlineError,
    FailureKind,
    LedgerError,
    LostError,
    NumericsError,
    StorageError,
    TreadwheelError,
    WorkerError,
    failure_of_its_actor,
)
from cluster.contracts.provenance import Provenance, unknown
from cluster.contracts.types import Group, GroupSummary, RankGroup, StepStats
from cluster.record.ledger import Ledger, Record
from cluster.record.run_directory import checkpoint_name
from cluster.remote.actor import ActorSpec, RemoteActor, found_no_room
from cluster.remote.failures import answer_of
from cluster.saving import SavingRules
from cluster.supervision.supervisor import Start, SupervisedActor, Supervisor
from cluster.supervision.tasks import all_or_none, together
from cluster.supervision.turns import GpuTurns

Tell = Callable[[StepStats, list[GroupSummary]], None]
"""Logs a step."""


class Written(Protocol):
    def __call__(self, *, within_s: float | None) -> Awaitable[None]:
        """Returns once the log of all steps so far is as durable as a checkpoint. Raises TimeoutError after `within_s`."""
        ...


_GIVE_UP_S = 10.0
"""Deadline of a message to a rank that answers while it learns."""
_MOST_UNSENT = 2
"""A rank is restarted after this many failures to send in a row."""


class LearnerGroup:
    """All ranks of the learner, restarted together."""

    def __init__(
        self,
        *,
        config: RunConfig,
        ranks: Sequence[ActorSpec],
        spawn: Start,
        supervisor: Supervisor,
        recorder: SupervisedActor,
        ledger: Ledger,
        checkpoints: str,
        saving: SavingRules,
        written: Written,
        pass_rates: Callable[[int], dict[str, float]] | None = None,
        provenance: Callable[[int], Provenance] = unknown,
        turns: GpuTurns | None = None,
    ) -> None:
        """`checkpoints`: the directory in which every rank saves and restores. Each save waits for `written`. `pass_rates`: those of the
        step that ends before an index, for its record. `provenance`: the run's facts for a checkpoint of a version. `turns`: the ranks'
        turns with the workers on their GPUs; None if the ranks have the GPUs alone."""
        self._chooses = config.algorithm.selection is not None
        self._num_learned_groups = config.record.learned_groups
        self._update_s, self._publish_s = config.learner.timeout_s, config.weights.timeout_s
        self._save_s = config.checkpoint.timeout_s
        self._specs = ranks
        self._spawn = spawn
        self._supervisor = supervisor
        self._recorder = recorder
        self._ledger = ledger
        self._records = ledger.is_whole
        """Whether steps are recorded. A ledger that is only read belongs to another driver or a finished run."""
        self._checkpoints = checkpoints
        self._ranks: list[RemoteActor] = []
        self._are_built = False
        self._turn = asyncio.Lock()
        self.formula: dict[str, Any] = {}
        """The resolved mathematics, once the ranks are built."""
        self.chosen: dict[str, str] = {}
        """The ranks' choices at their first loading."""
        self.version = 0
        """Policy version: completed steps. It stays while ranks that died are restored to it."""
        self._held = 0
        """The ranks' own version, which is lower while they are restored."""
        self.saved_version = 0
        """Version of the newest checkpoint that was begun and has not failed; 0 without one."""
        self.saved_metric: float | None = None
        """Rating of that checkpoint."""
        self._saved_before = 0
        self._evaluations: dict[int, float | None] = {}
        """Version to the metric given to `save`, for a save that a death interrupts: it is made again."""
        self._asked: tuple[int, list[GroupSummary]] = (0, [])
        """The last step that the ranks were asked for, and its groups."""
        self._rating: tuple[int, float | None] = (0, None)
        """The last evaluated version, and its metric."""
        self._trajectories = ""
        """The trajectories file of the last step that the ranks were asked for."""
        self._could_not_send: list[tuple[RemoteActor, WorkerError | DeadlineError]] = []
        """Consecutive failures to send, with the first rank at that time."""
        self._tell: Tell | None = None
        """Called with the steps that `restore` learns again."""
        self._saving = saving
        self._written = written
        self._is_writing = False
        """Whether a save was begun that nobody has waited for yet."""
        self._pass_rates = pass_rates
        self._provenance = provenance
        self._turns = turns

    async def start(self) -> None:
        """Builds all ranks on the initial weights. A death meanwhile counts as a failure of the rank; other errors are raised."""
        while True:
            try:
                await self._begin()
                self.formula, self.chosen = await self._all("formula"), await self._all("describe")
                message = "learner: " + ", ".join(f"{what} {choice}" for what, choice in self.chosen.items())
                return self._supervisor.events.event("learner_loaded", message=message, **self.chosen)
            except WorkerError as error:
                if error.kind is not FailureKind.DEATH:
                    raise
                await self._let_go(error)

    async def restore(self, tell: Tell | None = None) -> list[tuple[StepStats, list[GroupSummary]]]:
        """Restores the newest checkpoint, then learns the recorded steps after it again. Returns the results of those steps. The last one
        may not be saved yet: see `owes_a_save`.

        `tell` logs each step before a checkpoint of it exists. If a death interrupts the restore, it begins again at the newest checkpoint,
        and the steps before that are not returned. Raises LedgerError for a checkpoint of a step that is not recorded.
        """
        async with self._turn:
            self._tell = tell
            try:
                return await self._restore()
            except (WorkerError, DeadlineError, LostError) as error:
                return await self._recover(error)
            finally:
                self._tell = None

    async def update(self, groups: Sequence[tuple[int, Group]]) -> StepStats:
        """Records the groups, then makes one step of them. After a death the ranks are restored, and the step is still made.

        Raises LostError, without recording anything, if a group was lost with its node: `lost` says which. Raises DataError for a step that
        cannot be learned. It stays recorded, the step before it is saved, and the message says how to continue.
        """
        async with self._turn:
            self._ledger.check_claim()
            step = self._ledger.version + 1
            pieces = [piece for _, group in groups for piece in group.pieces]
            # As one object: otherwise every rank would fetch and join hundreds of small ones.
            (everything,), (name, digest) = await self._recorder.call_for_batches(
                "record", step, *pieces, num_batches=1, deadline_s=self._update_s
            )
            indices = [index for index, _ in groups]
            rates = self._pass_rates(indices[-1] + 1) if self._pass_rates else None
            record = await asyncio.to_thread(
                self._ledger.append, groups=indices, trajectories=name, trajectories_digest=digest, pass_rates=rates
            )
            self._asked = step, [group.summary for _, group in groups]
            # Not earlier: if a group is lost, sampling continues under weights that the engines would have dropped.
            await self._begin_turn(ends_with_broadcast=True)
            try:
                stats = await self._learn([everything], trajectories=name)
            except (WorkerError, DeadlineError, LostError) as error:
                stats, _ = (await self._recover(error))[-1]
            assert self._held == record.step, f"learner is at {self._held} after step {record.step}"
            return stats

    async def lost(self, groups: Sequence[tuple[int, Group]]) -> set[int]:
        """Indices of the groups that were lost with a node."""
        return {index for index, group in groups if not await self._holds(group)}

    async def learned(self) -> list[Any]:
        """Object refs of the ranks' parts of the record of learning of the last step."""
        calls = (rank.call_for_object_refs("learned", deadline_s=self._update_s) for rank in self._ranks)
        return [part for parts in await together(*calls) for part in parts]

    async def publish(self) -> list[Any]:
        """Object refs of the buckets of the current weights, of their changes if the manifest has a delta, and last of the manifest."""
        return await self._published("publish")

    async def pack(self) -> list[Any]:
        """Makes the first rank keep the buckets of the current weights for `send`. Object refs of their manifest and of their Packed."""
        return await self._published("pack")

    async def send(self, group: RankGroup) -> None:
        """Sends the last packed weights, or their changes, to all other members of `group`, while the ranks do other work.

        Raises BroadcastError when a member is lost, LostError when the ranks are being restarted or have not packed these weights, and the
        first rank's failure. After two failures in a row, the next call that publishes restarts the ranks: otherwise a rank that lives but
        cannot send would pack forever.
        """
        if not self._are_up:
            raise LostError("the learner is restarting: the packed weights are lost")
        rank = self._ranks[0]
        try:
            await rank.call("send", group, deadline_s=group.timeout_s + _GIVE_UP_S)
        except (WorkerError, DeadlineError) as error:
            self._could_not_send.append((rank, error))
            raise
        self._could_not_send.clear()

    async def give_up(self, group: RankGroup) -> None:
        """Makes all waiting members of `group` raise BroadcastError. If the first rank is lost, they do so by themselves."""
        if self._ranks:
            with contextlib.suppress(TreadwheelError):
                await self._ranks[0].call("give_up", group, deadline_s=_GIVE_UP_S)

    def rate(self, metric: float) -> None:
        """Sets the evaluation of the current version, whether or not it is saved."""
        self._rating = self.version, metric

    def is_save_due(self) -> bool:
        return self._saving.is_due(self.version)

    def owes_a_save(self) -> bool:
        """Whether the last step that was learned again must be saved before anything else. An evaluation of it rates the checkpoint."""
        return self.saved_version < self.version and self.is_save_due()

    async def save(self, metric: float | None) -> None:
        """Saves a checkpoint of the current version; `metric` is its evaluation. A failed save is an event; the last good one stays."""
        async with self._turn:
            self._evaluations[self.version] = metric
            is_saved = False
            while True:
                try:
                    if not is_saved:
                        await self._save()
                    return await self._end_turn()
                except (WorkerError, DeadlineError) as error:
                    is_saved = bool(await self._recover(error))  # a step that is learned again is saved on the way

    async def save_progress(self, tell: Tell, *, log_s: float | None = None) -> None:
        """Saves the checkpoint of a run that is stopped at any moment: of the step under way if there is one, else of the last step. On
        return it is on the disk, or an event says that it failed.

        `tell` logs that step first, since a driver that resumes from its checkpoint does not log it again. After `log_s` the save no longer
        waits for a log that is not durable, and an event says so. Nothing is saved if the step failed between its updates, or while the
        ranks are being restarted, which may have to wait for a node. Then the last checkpoint stands, and the steps after it are learned
        again.
        """
        if not self._are_up:
            return
        async with self._turn:
            if not self._are_up:
                return
            # A rank answers after the step under way, for whose result its caller no longer waits.
            stats: StepStats | None = await self._all("last_step")
            step, summaries = self._asked
            asked_for = stats if stats and stats.policy_version == step else None
            if asked_for:
                tell(asked_for, summaries)
            await self._save_last_step(stats, log_s=log_s)
            if asked_for:
                try:
                    await self._record_learned()
                except TreadwheelError as error:  # the step is saved
                    self._tell_unrecorded(error)

    async def finish_saving(self) -> None:
        """Waits for the last checkpoint. On return it is on the disk, or an event says that it failed."""
        if not self._is_writing or not self._are_up:
            return
        async with self._turn:
            if self._are_up:
                await self._finish_saving()

    async def heal(self, rank: RemoteActor, error: TreadwheelError) -> None:
        """Starts new ranks after the death of `rank`, unless a call has done so already.

        If the ranks rest, the next call that needs them does it: until then the GPUs are the workers'."""
        async with self._turn:
            if rank in self._ranks and (self._turns is None or self._turns.is_learners):
                await self._recover(error)

    async def export(self, directory: str) -> None:
        """Writes the current weights as a Hugging Face folder. A death meanwhile is healed."""
        async with self._turn:
            provenance = await asyncio.to_thread(self._provenance, self.version)
            while True:
                try:
                    return await self._all_files("export", directory, provenance.as_extra())
                except (WorkerError, DeadlineError) as error:
                    await self._recover(error)

    def actors(self) -> list[RemoteActor]:
        return list(self._ranks)

    async def stop(self) -> None:
        ranks, self._ranks = self._ranks, []
        await asyncio.gather(*(rank.kill() for rank in ranks))

    @property
    def _are_up(self) -> bool:
        """Whether there are ranks that can answer."""
        return bool(self._ranks) and self._are_built

    async def _learn(self, pieces: Sequence[Any], *, trajectories: str) -> StepStats:
        self._trajectories = trajectories
        try:
            stats: StepStats = await self._all("update", *pieces)
        except DataError as error:  # the ledger cannot be undone: a recorded step is consumed
            if self._records:
                await self._save_last_step(await self._all("last_step"))
            raise DataError(
                f"step {self._asked[0]} is recorded and cannot be learned: {error}; mend what made it and begin another run_dir with "
                f"{self._newest_model()}"
            ) from error
        except NumericsError as error:
            # A resumed run would learn the same steps again, and may not change the learning rate.
            await self._finish_saving()
            raise NumericsError(
                f"{error}; look at these trajectories, and begin another run_dir with a lower optimizer.learning_rate and "
                f"{self._newest_model()}"
            ) from error
        self._hold(stats.policy_version)
        await self._record_learned()
        return stats

    def _newest_model(self) -> str:
        """The model from which another run can continue."""
        if not self.saved_version:
            return "the same model.path"
        return f"model.path={self._checkpoints}/{checkpoint_name(self.saved_version)}/model"

    async def _record_learned(self) -> None:
        """Records what the objective saw in the last step. Nothing depends on it: if it cannot be written, an event says so."""
        if not self._records or self._num_learned_groups == 0:
            return
        parts = await self.learned()
        self._ledger.check_claim()
        try:
            about = self._trajectories, self._held - 1
            await self._recorder.call("record_learned", *about, *parts, deadline_s=self._update_s)
        except StorageError as error:
            self._tell_unrecorded(error)

    async def _forget_learned(self, trajectories: str) -> None:
        """Removes the record of learning of a step that is learned again. A record that cannot be removed is replaced later."""
        if not self._records:
            return
        self._ledger.check_claim()
        try:
            await self._recorder.call("forget_learned", trajectories, deadline_s=self._update_s)
        except StorageError as error:
            self._tell_unrecorded(error)

    def _tell_unrecorded(self, error: TreadwheelError) -> None:
        self._supervisor.events.event(
            "learned_not_recorded", policy_version=self._held, reason=str(error), message=str(error)
        )

    async def _save_last_step(self, stats: StepStats | None, *, log_s: float | None = None) -> None:
        """Saves the step with these results; None: there is no whole step. On return it is on the disk, or an event says that it failed."""
        await self._finish_saving()
        if stats is not None:
            self._hold(stats.policy_version)
            if self._held != self.saved_version:
                await self._save(log_s=log_s)
                await self._finish_saving()

    async def _save(self, *, log_s: float | None = None) -> None:
        await self._log_first(within_s=log_s)
        self._ledger.check_claim()
        await self._begin_turn(ends_with_broadcast=False)  # first: a rank that died at rest restarts on these GPUs
        await self._finish_saving()
        self._saving.note_save()
        (rated, rating), (step, summaries) = self._rating, self._asked
        metric = self._evaluations.get(self._held)
        if metric is None and rated == self._held:
            metric = rating
        provenance = await asyncio.to_thread(self._provenance, self._held)
        if metric is None:  # an earlier driver may have evaluated a step whose save was lost with it
            metric = self._saving.evaluation_in(provenance.evaluations.get(self._held, {}))
        if metric is None and step == self._held:
            metric = self._saving.metric_of(summaries)
        extra = {"policy_version": self._held, "metric": metric, **provenance.as_extra()}
        if metric is not None:
            extra["rated_by"] = self._saving.rated_by()
        try:
            await self._all_files("save", f"{self._checkpoints}/{checkpoint_name(self._held)}", extra)
        except CheckpointError as error:
            return self._tell_failure(error, version=self._held)
        self._is_writing = True
        self._saved_before, self.saved_version, self.saved_metric = self.saved_version, self._held, metric
        self._supervisor.events.event("checkpoint", policy_version=self._held, metric=metric)

    async def _log_first(self, *, within_s: float | None) -> None:
        """Waits until the log has all steps, which no driver logs again that resumes from the checkpoint."""
        try:
            await self._written(within_s=within_s)
        except TimeoutError:
            reason = f"the log was not written in {within_s:.1f} s"
            message = f"{reason}; the checkpoint is saved all the same, and metrics.jsonl may lack its last steps"
            self._supervisor.events.event("storage_failed", reason=reason, message=message)

    async def _finish_saving(self) -> None:
        """Waits for the last save that was begun. If it failed, its version is not saved."""
        try:
            await self._all_files("finish_saving")
        except CheckpointError as error:
            failed, self.saved_version = self.saved_version, self._saved_before
            self._tell_failure(error, version=failed)
        self._is_writing = False

    def _tell_failure(self, error: CheckpointError, *, version: int) -> None:
        self._supervisor.events.event(
            "checkpoint_failed", policy_version=version, reason=str(error), message=str(error)
        )

    async def _learn_again(self, record: Record) -> tuple[StepStats, list[GroupSummary]]:
        object_refs = await self._recorder.call_for_object_refs(
            "read", record.trajectories, record.trajectories_digest, deadline_s=self._update_s
        )
        summaries: list[GroupSummary] = await self._recorder.call("summaries", *object_refs, deadline_s=self._update_s)
        summaries = [replace(summary, is_chosen=self._chooses) for summary in summaries]
        self._asked = record.step, summaries
        await self._forget_learned(record.trajectories)
        return await self._learn(object_refs, trajectories=record.trajectories), summaries

    async def _holds(self, group: Group) -> bool:
        try:
            return await self._recorder.call("holds", *group.pieces, deadline_s=self._update_s)
        except LostError:
            return False

    def _hold(self, version: int) -> None:
        if version > self.version:
            self._supervisor.note_success(self._specs[0])
        self._held, self.version = version, max(self.version, version)

    async def _begin(self) -> None:
        config = self._supervisor.config
        self._are_built = False
        # A rank alone would occupy the seat.
        self._ranks = await all_or_none(map(self._spawn, self._specs), end=lambda rank: rank.kill())
        address = await self._ranks[0].reserve_address()
        await together(*(rank.build(deadline_s=config.start_s, rendezvous=address) for rank in self._ranks))
        self._held, self._are_built = 0, True

    async def _begin_again(self) -> None:
        """As `_begin`, for ranks that were up before. It waits for room. An error of a rank's machine counts as one more failure."""
        while True:
            try:
                return await self._begin()
            except DeadlineError as error:
                if not found_no_room(error):
                    raise
                self._supervisor.waits_for_room(self._spec_of(error), error)
            except OF_ITS_MACHINE as error:
                if error.actor is None:  # the driver's own: its disk may be full
                    raise
                raise failure_of_its_actor(error) from error

    async def _published(self, method: str) -> list[Any]:
        """Object refs that the method returns on rank 0, after all ranks have run it. A death meanwhile is healed."""
        async with self._turn:
            # Engines that are awake keep their weights. This may be for a worker that joins, after the weights were lost with a node.
            await self._begin_turn(ends_with_broadcast=False)
            await self._heal_sender()
            while True:
                try:
                    calls = (rank.call_for_object_refs(method, deadline_s=self._publish_s) for rank in self._ranks)
                    published = (await together(*calls))[0]
                    # The driver keeps the manifest from now on, even if the rank's node is lost.
                    await answer_of(published[-1], actor=self._ranks[0].name, stage=method, deadline_s=self._publish_s)
                    await self._end_turn()
                    return published
                except (WorkerError, DeadlineError, LostError) as error:
                    await self._recover(error)

    async def _heal_sender(self) -> None:
        """Restarts the ranks if the first one could not send. One failure may be a moment without memory."""
        failures = [error for rank, error in self._could_not_send if rank in self._ranks]
        if len(failures) < _MOST_UNSENT:
            return
        self._could_not_send.clear()
        await self._recover(failures[-1])

    async def _begin_turn(self, *, ends_with_broadcast: bool) -> None:
        """Waits until the ranks may use their GPUs."""
        if self._turns is not None:
            await self._turns.begin_learners(ends_with_broadcast=ends_with_broadcast)

    async def _end_turn(self) -> None:
        """Gives the GPUs to the workers, until a call needs the ranks again."""
        if self._turns is not None:
            await self._all("rest")
            await self._turns.end_learners()

    async def _restore(self) -> list[tuple[StepStats, list[GroupSummary]]]:
        # A ledger that is only read is replayed for its last step: that one is learned, not restored.
        newest = None if self._records else self._ledger.version - 1
        extra = await self._all_files("restore_latest", self._checkpoints, newest)
        saved = int(extra["policy_version"]) if extra else 0
        if saved > self._ledger.version:  # a step is recorded before it is learned
            raise LedgerError(
                f"the newest checkpoint is of step {saved}, and the ledger ends at step {self._ledger.version}: a part of the run's "
                "folder ledger was removed, or not copied; bring all of it back, move the checkpoints of later steps away, or begin "
                f"another run_dir with model.path={self._checkpoints}/{checkpoint_name(saved)}/model"
            )
        self.saved_version = saved
        self._hold(saved)
        found = extra or {}
        # A run may have begun to evaluate since, or evaluate otherwise.
        self.saved_metric = self._saving.own_rating(found.get("metric"), rated_by=found.get("rated_by", ""))
        learned: list[tuple[StepStats, list[GroupSummary]]] = []
        for record in await asyncio.to_thread(self._ledger.after, self._held):
            learned.append(await self._learn_again(record))
            if self._tell is not None:
                self._tell(*learned[-1])
            # The caller saves the last step, unless it was evaluated already and its save was lost.
            is_before_last = self._held < self._ledger.version
            if self._held in self._evaluations or (is_before_last and self._saving.is_due(self._held)):
                await self._save()
        return learned

    async def _let_go(self, error: TreadwheelError) -> ActorSpec:
        """Kills all ranks, waits for the back-off, and returns the failed rank. Raises if the restart budget is spent or the recorder
        failed."""
        if isinstance(error, WorkerError) and error.actor == self._recorder.spec.name:
            raise error
        ranks, self._ranks = self._ranks, []
        # Hung ranks first: once they are killed, the others fail too.
        by_hang = sorted(ranks, key=lambda rank: not rank.is_hung)
        failed = next((rank for rank in by_hang if rank.is_hung or rank.name == error.actor), None)
        await asyncio.gather(*(rank.kill() for rank in ranks))
        spec = failed.spec if failed else self._spec_of(error)
        await self._supervisor.handle(spec, error, actor=failed)
        return spec

    def _spec_of(self, error: TreadwheelError) -> ActorSpec:
        """The rank that the error names, or the first one."""
        return next((spec for spec in self._specs if spec.name == error.actor), self._specs[0])

    async def _recover(self, error: TreadwheelError) -> list[tuple[StepStats, list[GroupSummary]]]:
        """Starts new ranks at the ledger's version. Raises when the restart budget is spent."""
        began, lost = time.monotonic(), self.version
        while True:
            failed = await self._let_go(error)
            try:
                await self._begin_again()
                learned = await self._restore()
            except (WorkerError, DeadlineError, LostError) as again:
                error = again
                continue
            self._supervisor.events.event(
                "recovery",
                actor=failed.name,
                actor_kind=str(failed.kind),
                actor_pid=self._ranks[0].pid,
                seconds=time.monotonic() - began,
                rolled_back_to=self._held - len(learned),
                steps_learned_again=len(learned),
                policy_version=self._held,
                version_at_failure=lost,
                driver_pid=os.getpid(),
            )
            return learned

    async def _all(self, method: str, *args: Any) -> Any:
        """Rank 0's result, once every rank is done. The first failure is raised at once, since the other ranks wait for the failed one."""
        return await self._all_within(self._update_s, method, *args)

    async def _all_files(self, method: str, *args: Any) -> Any:
        """As `_all`, for calls that wait for a disk or a store."""
        try:
            return await self._all_within(self._save_s, method, *args)
        except DeadlineError as error:
            # Ranks that are killed while they write would be as slow the next time, again and again.
            hint = f"{error}; if the disk or the store is that slow, raise checkpoint.timeout_s={self._save_s:g}"
            raise DeadlineError(hint, actor=error.actor, stage=error.stage) from error

    async def _all_within(self, deadline_s: float, method: str, *args: Any) -> Any:
        calls = (rank.call(method, *args, deadline_s=deadline_s) for rank in self._ranks)
        return (await together(*calls))[0]
