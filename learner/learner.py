"""The learner: one rank, a plain class. Trajectories in, weights out.

`update` reads like the step it makes: assemble, a first look if the objective needs it, prepare, then for each mini-batch one backward
pass per micro-batch and one optimizer update. Micro-batches only split the work: all numbers that depend on the whole batch or mini-batch
are computed before the first one.

An update whose loss or gradient is not finite changes no weights; the step's other updates are made. A step without a single update counts
too: version, schedule and ledger advance.
"""

import asyncio
import gc
import json
import math
import os
import platform
import socket
import traceback
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from cluster.contracts.config import RunConfig
from cluster.contracts.errors import LostError, WorkerError, headline
from cluster.contracts.protocols import Demonstrations
from cluster.contracts.types import Packed, Progress, RankGroup, StepStats
from cluster.freed_memory import keep_freed_memory
from cluster.record.run_directory import QUARANTINE
from cluster.record.storage import Storage
from cluster.weights.manifest import WeightManifest
from cluster.weights.process_group import Sender
from learner.algorithms.objective import Objective
from learner.algorithms.objective.batch import Prepared
from learner.assemble import assemble
from learner.checkpoint.model_folder import ModelFolder
from learner.checkpoint.reading import checkpoints
from learner.checkpoint.saving import Saver
from learner.checkpoint.writing import adopt
from learner.distributed import Ranks, choose_device, leave, reshard
from learner.first_look import FirstLook
from learner.forward_backward import Passes
from learner.guard import NonFiniteGuard
from learner.learned import LearnedRows
from learner.memory import check_rank
from learner.model.building import build
from learner.model.compute_type import never_round_to_tf32
from learner.model.critic import rescale_head
from learner.model.head import head_kernels
from learner.model.policy import output_layer
from learner.optimizer import Optimizer
from learner.processor import cpu_facts, vector_units
from learner.progress import Laps, Phases
from learner.publishing import Publisher
from learner.reporting import statistics_of, stats_of
from learner.resting import Rest
from learner.updates import Update, Updater, split


class Learner:
    """Holds the policy (and critic), the objective, the optimizer and its place among the ranks."""

    def __init__(
        self,
        config: RunConfig,
        *,
        rank: int = 0,
        rendezvous: str = "",
        listener: socket.socket | None = None,
        run_dir: str = "",
        probe_token_ids: Sequence[int] = (),
        demonstrations: Demonstrations | None = None,
        base_name: str | None = None,
    ) -> None:
        """Loads the model. Raises ConfigError for a model that does not fit into memory or cannot be computed exactly.

        `rendezvous`: host:port where several ranks meet; `listener`: rank 0's socket there. `run_dir`: a local folder for trajectories of
        failed updates; empty for none. `probe_token_ids`: the text that attests published weights; empty for one spread over the
        vocabulary. `demonstrations`: the texts of `algorithm.sft`. `base_name`: the run's name of a model downloaded into `model.path`.
        """
        assert (demonstrations is None) == (config.algorithm.sft is None), "algorithm.sft decides whether there are any"
        self._config, self._rank = config, rank
        self._phases = Phases("starting")
        self.timeline = self._phases.timeline
        self.version = 0
        """Policy version: completed optimizer steps."""
        self._last_step: StepStats | None = None
        self._learned: pa.RecordBatch | None = None
        self._host = rendezvous.rpartition(":")[0] or "127.0.0.1"
        self._sender: Sender | None = None
        """On rank 0, if weights are sent through process groups."""
        _prepare_torch(config)
        device = choose_device(config.learner)
        self._ranks = Ranks.join(
            rank=rank,
            size=config.learner.num_ranks,
            rendezvous=rendezvous,
            listener=listener,
            device=device,
            timeout_s=config.learner.timeout_s,
            sequence_parallel_size=config.learner.sequence_parallel_size,
        )
        self.objective = Objective.of_run(config, keeps_inert=True)
        check_rank(config, device=device)
        self.networks, self._loading = build(config, ranks=self._ranks)
        self.policy = self.networks.policy
        self.vocabulary_size = output_layer(self.policy.causal_lm).weight.shape[0]
        self.optimizer = Optimizer.of_run(self.networks.named_parameters(), config)
        shared: dict[str, Any] = {"objective": self.objective, "ranks": self._ranks, "phases": self._phases}
        self._passes = Passes(self.networks, config=config.learner, **shared)
        self._first_look = FirstLook(self.networks, config=config, averaged=self.optimizer.averaged, **shared)
        self._guard = NonFiniteGuard(
            max_in_a_row=config.learner.max_non_finite_updates,
            ranks=self._ranks,
            folder=Path(run_dir) / QUARANTINE if run_dir and "://" not in run_dir else None,
        )
        self._updater = Updater(
            self._passes,
            objective=self.objective,
            optimizer=self.optimizer,
            guard=self._guard,
            config=config,
            demonstrations=demonstrations,
            vocabulary_size=self.vocabulary_size,
            phases=self._phases,
        )
        folder = ModelFolder(self.policy.causal_lm, config, base_name=base_name)
        folder.check()
        self._saver = Saver(
            self.optimizer,
            objective=self.objective,
            guard=self._guard,
            model=folder,
            ranks=self._ranks,
            config=config.checkpoint,
        )
        self._rest = Rest(device)
        self._publisher = Publisher(
            self.networks, config=config, ranks=self._ranks, phases=self._phases, probe_token_ids=probe_token_ids
        )
        if device.type == "cpu" and self._ranks.mesh is None:
            keep_freed_memory()
        self._phases.enter("waiting")

    # One step

    def update(self, *groups: pa.RecordBatch) -> StepStats:
        """One step over the groups: the updates of `learner.epochs` and `learner.mini_batches`. A batch may hold several groups.

        Raises DataError for invalid trajectories, before anything has changed; NumericsError after more than
        `learner.max_non_finite_updates` skipped updates in a row; WorkerError if the GPU's memory is full.
        """
        try:
            return self._update(*groups)
        except torch.OutOfMemoryError as error:
            raise WorkerError(
                f"learner-{self._rank}: the GPU's memory is full; lower learner.max_tokens_per_micro_batch, set "
                f"learner.activation_checkpointing, or raise learner.num_ranks: {headline(error)}",
                details=traceback.format_exc(),
            ) from error

    def _update(self, *groups: pa.RecordBatch) -> StepStats:
        laps = Laps()
        self._return()
        self._phases.enter("assembling", step=self.version + 1)
        batch = assemble(
            groups,
            current_version=self.version,
            vocabulary_size=self.vocabulary_size,
            columns=self.objective.columns,
            routing=self.policy.routing,
        )
        first, *later = split(batch.tensors.group_index_N.tolist(), self._config, policy_version=self.version)
        first_epoch = [self._passes.mini_batch(batch, rows) for rows in first]
        demonstrated = self._updater.demonstrated(self.version, num_updates=sum(map(len, (first, *later))))
        laps.lap("time/assemble_s")
        prepared = self.objective.prepare(self._first_look.at(batch.tensors.to(self._ranks.device), first_epoch))
        # From here on a failure leaves a part of a step in the weights, which no checkpoint may contain.
        self._last_step = self._learned = None
        learned = LearnedRows(batch, num_groups=self._config.record.learned_groups)
        self._move_moments(prepared)
        laps.lap("time/first_look_s")
        updates: list[Update] = []
        mini_batches = chain(first_epoch, (self._passes.mini_batch(batch, rows) for rows in chain(*later)))
        for mini_batch, rows in zip(mini_batches, demonstrated, strict=True):
            update = self._updater.make(
                batch, prepared, mini_batch, version=self.version, before=updates, demonstrated=rows, learned=learned,
                laps=laps,
            )  # fmt: skip
            updates.append(update)
            if update.stops_step:
                break
        report = statistics_of(self.objective, prepared, updates)
        self._updater.observe(report, updates, version=self.version)
        self.version += 1
        self._learned = learned.batch()
        self._phases.enter("waiting")
        coefficients = {f"learner/kl_{name}_coefficient": beta for name, beta in prepared.kl_coefficients.items()}
        self._last_step = stats_of(
            batch,
            report,
            updates,
            laps=laps,
            policy_version=self.version,
            num_parts=self._ranks.data_parallel_size,
            more=coefficients | {"learner/skipped_in_a_row": float(self._guard.num_in_a_row)},
        )
        return self._last_step

    def _move_moments(self, prepared: Prepared) -> None:
        """Updates the running moments of rewards and returns. The critic's values stay the same, except for rounding of its head."""
        factor, shift = self.objective.adopt(prepared)
        if (factor, shift) != (1.0, 0.0):
            reshard(self.networks)
            # Adam's moments stay valid: the loss is normalised before and after.
            rescale_head(self.optimizer.masters(), factor=factor, shift=shift)
            self.optimizer.copy_masters()

    def last_step(self) -> StepStats | None:
        """The last step since the start or `restore`; None before the first one.

        None also after a step that failed between its updates: the weights then belong to no version.
        """
        return self._last_step

    def learned(self) -> Iterator[pa.RecordBatch]:
        """The record of learning of this rank's trajectories in the last step, at most one batch: see `record.learned_groups`."""
        if self._learned is not None:
            yield self._learned

    # Rest

    def rest(self) -> None:
        """Moves weights and optimizer to the host's memory and drops gradients, so that others can use the GPU. The next call that computes
        moves them back. On a CPU nothing moves."""
        self._phases.enter("going to rest", step=self.version)
        self.optimizer.zero()
        reshard(self.networks)
        self._rest.put_away(
            [*self.networks.parameters(), *self.optimizer.masters().values(), *self.optimizer.state().values()]
        )
        self._phases.enter("waiting")

    def _return(self) -> None:
        if self._rest.is_resting:
            self._phases.enter("returning from rest", step=self.version)
            self._rest.bring_back()

    # Weights

    def publish(self) -> Iterator[Any]:
        """Yields the buckets of the current weights and then their manifest on rank 0; nothing on the others.

        With `weights.deltas`, if the manifest has a delta, the changes of each bucket come before it: one array per bucket.
        All ranks must iterate: whole tensors are gathered one at a time, and the learner keeps no bucket once the next one is asked for. A
        read-only bucket is in the weights' own memory, which later steps change.
        """
        self._return()
        self._phases.enter("publishing", step=self.version)
        for part in self._publisher.parts(self.version):
            yield part.model_dump() if isinstance(part, WeightManifest) else part
        self._phases.enter("waiting")

    def pack(self) -> Iterator[Any]:
        """Yields the manifest of the current weights and their Packed on rank 0; nothing on the others, which must iterate too.

        Rank 0 keeps the buckets in its memory for `send`, with `weights.deltas` also their changes. They replace the previous ones.
        """
        self._return()
        self._phases.enter("publishing", step=self.version)
        parts = self._publisher.parts(self.version)
        if self._rank == 0:
            self._sender = self._sender or Sender(self._host, device=self._ranks.device)
            manifest = self._sender.keep(parts)
            yield manifest.model_dump()
            yield Packed(
                policy_version=manifest.policy_version,
                digest=manifest.digest,
                total_bytes=manifest.total_bytes,
                sender=self._sender.id,
                address=self._sender.address,
                backend=self._config.weights_backend,
                receivers_per_worker=self._config.rollout.tensor_parallel_size,
                delta=manifest.delta.model_dump(exclude={"num_changed"}) if manifest.delta else None,
            )
        else:
            left = list(parts)
            assert not left, "rank 0 has all of them"
        self._phases.enter("waiting")

    async def send(self, group: RankGroup) -> None:
        """Sends the weights that rank 0 packed last, or their changes, to all other members of `group`, while the rank does other work.
        Raises as `Sender.send` does."""
        if self._sender is None:
            raise LostError(f"group {group.name}: the learner that packed its weights is gone")
        await asyncio.to_thread(self._sender.send, group)

    async def give_up(self, group: RankGroup) -> None:
        """Makes all members that wait in `group` raise BroadcastError."""
        if self._sender is not None:
            # No thread: it only writes to this process's own store, and all threads may be sending.
            self._sender.give_up(group)

    # Checkpoints

    def save(self, directory: str, extra: Mapping[str, Any]) -> None:
        """Saves a checkpoint; before the last step possibly in the background, then `finish_saving` waits for it.

        Raises CheckpointError if this save or the previous one failed.
        """
        self._return()
        self._phases.enter("saving", step=self.version)
        is_last = self.version >= self._config.num_steps
        in_background = self._config.checkpoint.asynchronous and not is_last
        self._saver.save(directory, policy_version=self.version, extra=extra, in_background=in_background)
        self._phases.enter("waiting")

    def finish_saving(self) -> None:
        """Returns once the last checkpoint is on the disk. Raises CheckpointError if it could not be written."""
        self._phases.enter("saving", step=self.version)
        self._saver.finish()
        self._phases.enter("waiting")

    def restore(self, directory: str) -> Mapping[str, Any]:
        """Restores a checkpoint exactly. Returns the `extra` that it was saved with."""
        self._return()
        self._phases.enter("restoring")
        manifest = self._saver.restore(directory)
        self.version, self._last_step, self._learned = manifest.policy_version, None, None
        self._phases.enter("waiting")
        return manifest.extra

    def restore_latest(self, root: str, newest: int | None = None) -> Mapping[str, Any] | None:
        """Restores the newest checkpoint below `root`, of version `newest` at most. Returns its `extra`, or None if there is none."""
        storage = Storage(root)
        # Only without `newest`: a replay reads a folder that another driver may write.
        if self._ranks.rank == 0 and newest is None and storage.is_local:
            adopt(Path(storage.path()))
        found = checkpoints(storage, newest=newest) if self._ranks.rank == 0 else []
        # Rank 0 chooses for all: checkpoints may be committed or removed between two ranks' looks.
        chosen, *_ = self._ranks.texts(json.dumps(str(found[-1]) if found else None))
        directory: str | None = json.loads(chosen)
        return self.restore(directory) if directory is not None else None

    def export(self, directory: str, extra: Mapping[str, Any]) -> None:
        """Writes the current weights as a Hugging Face folder on a disk; `extra` as for `save`."""
        self._return()
        self._phases.enter("exporting")
        self._saver.export(Path(directory), policy_version=self.version, extra=extra)
        self._phases.enter("waiting")

    def close(self) -> None:
        """Ends saving and leaves torch's process group, threads included. The learner is unusable afterwards.

        Without this the group's threads outlive the interpreter, and sometimes abort the process.
        """
        self._saver.close()
        if self._sender is not None:
            self._sender.close()
        del self.networks, self.policy, self.optimizer, self._passes, self._first_look
        del self._guard, self._updater, self._saver, self._publisher, self._ranks
        leave()
        gc.collect()

    def describe(self) -> dict[str, str]:
        """Choices made while loading, for the log."""
        attention = str(self.policy.causal_lm.config._attn_implementation)
        chosen = {"layout": self.policy.layout, "attention": attention, "loading": self._loading}
        if self._ranks.device.type == "cuda":
            chosen |= {
                "head": head_kernels(self._ranks.device),
                "processor": torch.cuda.get_device_name(self._ranks.device),
            }
        else:
            chosen["processor"] = f"{cpu_facts()[1] or platform.machine()}, {vector_units()}"
        critic = self.networks.critic
        return chosen if critic is None else chosen | {"value_head": f"from {critic.head_start}"}

    def formula(self) -> dict[str, Any]:
        """The resolved mathematics, for the passport."""
        return self.objective.formula()

    def progress(self) -> Progress:
        return self._phases.progress(actor=f"learner-{self._rank}", policy_version=self.version)


def _prepare_torch(config: RunConfig) -> None:
    """Threads, exact products, seed and determinism, for the whole process."""
    never_round_to_tf32()
    torch.set_num_threads(config.learner.num_threads or math.ceil(config.learner.cpus_per_rank))
    torch.manual_seed(config.seed)
    if config.deterministic:
        # cuBLAS is deterministic only with this workspace, without which torch refuses to multiply. It must be set before its first use.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
