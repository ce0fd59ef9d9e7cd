"""The learner: one rank, a plain class (`cluster.contracts.protocols.Learner`). Trajectories in, weights out.

`update` reads like the step it makes: assemble, look once where the objective needs it, prepare, one backward per micro-batch, one
optimizer step. Micro-batches only cut the work: every number that depends on the whole batch is fixed before the first of them.

A step whose loss or gradient is not finite changes no weights, but counts: versions, schedule and ledger move on.
"""

import dataclasses
import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from cluster.contracts.config import RunConfig
from cluster.contracts.errors import CheckpointError, NumericsError
from cluster.contracts.types import Progress, StepStats
from cluster.weights.manifest import WeightManifest, packing
from learner.algorithms.batch import BatchTensors, Prepared
from learner.algorithms.objective import Objective
from learner.algorithms.statistics import Statistics
from learner.assemble import Batch, assemble
from learner.building import build, check_memory, choose_device
from learner.group import Group, reduce_once
from learner.lora import adapter_of, without_adapters
from learner.model import output_layer
from learner.optimizer import Optimizer
from learner.packing import MicroBatch, lay_out, plan, tokens_per_pass
from learner.publishing import canary_of, exported, exported_adapter
from learner.saving import Saver


class Learner:
    """Holds the policy (and critic), the objective, the optimizer and this rank's place in the group."""

    def __init__(self, config: RunConfig, *, rank: int = 0, rendezvous: str = "", run_dir: str = "") -> None:
        """Loads the model. Raises ConfigError for one that does not fit or cannot be computed exactly.

        `rendezvous` is host:port, where several ranks meet; `run_dir` a local folder for what went wrong, empty for none.
        """
        self._config, self._rank = config, rank
        self._phase, self._since, self._moved = "loading", time.time(), time.time()
        self.version = 0
        """Policy version: completed optimizer steps."""
        self._num_skipped = 0
        """Steps in a row that were not finite."""
        self._quarantine = Path(run_dir) / "quarantine" if run_dir and "://" not in run_dir else None
        torch.set_num_threads(config.learner.num_threads or math.ceil(config.learner.cpus_per_rank))
        torch.manual_seed(config.seed)
        if config.deterministic:
            torch.use_deterministic_algorithms(True)
        device = choose_device(config)
        self._group = Group.join(
            rank=rank,
            size=config.learner.num_ranks,
            rendezvous=rendezvous,
            device=device,
            timeout_s=config.learner.timeout_s,
        )
        self.objective = Objective.from_config(config.algorithm)
        self._compute_dtype: torch.dtype = getattr(torch, config.model.dtype)
        check_memory(config, device=device)
        self.networks = build(config, group=self._group, compute_dtype=self._compute_dtype)
        self.policy = self.networks.policy
        self.vocabulary_size = output_layer(self.policy.causal_lm).weight.shape[0]
        value = config.algorithm.value
        self.optimizer = Optimizer(
            self.networks.named_parameters(),
            config=config.optimizer,
            num_steps=config.num_steps,
            compute_dtype=self._compute_dtype,
            learning_rates={} if value is None else {"critic.": value.learning_rate},
        )
        self._saver = Saver(self)
        self._enter("waiting")

    # One step

    def update(self, *groups: pa.RecordBatch) -> StepStats:
        """One optimizer step over the groups, in the order given.

        Raises DataError for trajectories that cannot be trained on, before anything has changed; NumericsError after more than
        `learner.max_non_finite_steps` skipped steps in a row.
        """
        seconds = _Seconds()
        self._enter("assembling")
        batch = assemble(groups, current_version=self.version, vocabulary_size=self.vocabulary_size)
        micro_batches = self._micro_batches(batch)
        seconds.lap("time/assemble_s")
        tensors = self._with_first_look(batch.tensors.to(self._group.device), micro_batches)
        prepared = self.objective.prepare(tensors)
        seconds.lap("time/first_look_s")
        self._enter("learning")
        losses, statistics = self._accumulate(prepared, micro_batches)
        gradient_norm = self.optimizer.gradient_norm()
        seconds.lap("time/gradient_s")
        report, rate = self._step(
            batch, prepared, micro_batches, losses=losses, statistics=statistics, gradient_norm=gradient_norm
        )
        self.version += 1
        seconds.lap("time/optimizer_s")
        self._enter("waiting")
        return self._stats(
            batch, report, rate=rate, gradient_norm=float(gradient_norm), seconds=seconds, num_passes=len(micro_batches)
        )

    def _micro_batches(self, batch: Batch) -> list[MicroBatch]:
        """This rank's; every rank has equally many."""
        learner, layout = self._config.learner, self.policy.layout
        max_tokens = tokens_per_pass(learner.max_tokens_per_micro_batch, device=self._group.device)
        ranks = plan(batch.rows, max_tokens=max_tokens, layout=layout, num_ranks=self._group.size)
        width = batch.tensors.loss_mask_NT.shape[1]
        return [
            lay_out(batch.rows, rows, layout=layout, width=width, device=self._group.device)
            for rows in ranks[self._group.rank]
        ]

    @torch.no_grad()
    def _with_first_look(self, tensors: BatchTensors, micro_batches: list[MicroBatch]) -> BatchTensors:
        """The batch with what the objective must know of the policy at the start of the step."""
        needs = self.objective.needs
        if "reference_logprobs" in needs and tensors.reference_logprobs_NT is None and self._config.learner.lora:
            tensors = dataclasses.replace(tensors, reference_logprobs_NT=self._base_logprobs(tensors, micro_batches))
        if not needs & {"proximal_logprobs", "values"}:
            return tensors
        self._enter("first look")
        wants_entropies = "entropies" in needs and "proximal_logprobs" in needs
        found = {
            name: torch.zeros_like(tensors.rollout_logprobs_NT) for name in ("proximal_logprobs", "entropies", "values")
        }
        for micro_batch in micro_batches:
            outputs, values_C = self.networks(micro_batch, entropies=wants_entropies)
            rows = list(micro_batch.rows)
            computed = {"proximal_logprobs": outputs.logprobs_C, "entropies": outputs.entropies_C, "values": values_C}
            for name, values in computed.items():
                if values is not None and rows:
                    found[name][rows] = micro_batch.scatter(values.float())
            self._moved = time.time()
        wanted = {
            "proximal_logprobs": "proximal_logprobs" in needs,
            "entropies": wants_entropies,
            "values": "values" in needs,
        }
        return dataclasses.replace(
            tensors, **{f"{name}_NT": self._group.sum(found[name]) for name, is_wanted in wanted.items() if is_wanted}
        )

    def _base_logprobs(self, tensors: BatchTensors, micro_batches: list[MicroBatch]) -> Tensor:
        """The reference's, by the policy without its adapters: no second copy of the model."""
        self._enter("scoring the reference")
        found_NT = torch.zeros_like(tensors.rollout_logprobs_NT)
        with without_adapters(self.policy.causal_lm):
            for micro_batch in micro_batches:
                outputs, _ = self.networks(micro_batch)
                if micro_batch.rows:
                    found_NT[list(micro_batch.rows)] = micro_batch.scatter(outputs.logprobs_C)
                self._moved = time.time()
        return self._group.sum(found_NT)

    def _accumulate(self, prepared: Prepared, micro_batches: list[MicroBatch]) -> tuple[Tensor, Statistics]:
        """Gradients of all micro-batches; the ranks' losses, one per micro-batch of this rank, and the merged statistics."""
        self.optimizer.zero()
        losses: list[Tensor] = []
        statistics: list[Statistics] = []
        entropies = "entropies" in self.objective.needs
        for index in reduce_once(self.networks, len(micro_batches)):
            micro_batch = micro_batches[index]
            outputs, values_C = self.networks(micro_batch, entropies=entropies)
            if not micro_batch.rows:
                # No rows for this rank: it still gathers and reduces with the others.
                (outputs.logprobs_C.sum() + (0 if values_C is None else values_C.sum())).backward()
                losses.append(torch.zeros((), device=self._group.device))
                continue
            result = self.objective.loss(
                prepared.rows(list(micro_batch.rows)),
                policy_logprobs_BT=micro_batch.scatter(outputs.logprobs_C),
                entropies_BT=None if outputs.entropies_C is None else micro_batch.scatter(outputs.entropies_C),
                values_BT=None if values_C is None else micro_batch.scatter(values_C),
            )
            # FSDP means over ranks; the objective's weights are of the whole batch, so the step's gradient is the sum.
            (result.loss * self._group.size).backward()
            losses.append(result.loss.detach())
            statistics.append(result.statistics)
            self._moved = time.time()
        merged = Statistics.merge(statistics)
        parts = self._group.stack(merged.to_tensor().to(self._group.device))
        return torch.stack(losses), Statistics.merge([Statistics.from_tensor(part.cpu()) for part in parts])

    def _step(
        self,
        batch: Batch,
        prepared: Prepared,
        micro_batches: list[MicroBatch],
        *,
        losses: Tensor,
        statistics: Statistics,
        gradient_norm: Tensor,
    ) -> tuple[dict[str, float], float]:
        """Takes the optimizer step, or skips it. The report of the step and its learning rate, 0 when skipped."""
        report = statistics.compute()
        num_bad = self._group.sum((~losses.isfinite()).sum())
        if prepared.num_active_tokens == 0:
            # Filters took everything: there is no gradient, and weight decay alone is no step.
            self.optimizer.zero()
            return report | {"skipped": 0.0}, 0.0
        if int(num_bad) == 0 and bool(gradient_norm.isfinite()):
            rate = self.optimizer.step(self.version, gradient_norm=gradient_norm)
            self.objective.observe(report)
            self.optimizer.zero()
            self._num_skipped = 0
            return report | {"skipped": 0.0}, rate
        self.optimizer.zero()
        self._num_skipped += 1
        saved = self._save_offender(batch, micro_batches, losses)
        if self._num_skipped > self._config.learner.max_non_finite_steps:
            raise NumericsError(
                f"loss or gradient was not finite in {self._num_skipped} steps in a row, the last at policy version {self.version} "
                f"(gradient norm {float(gradient_norm)}, {int(num_bad)} micro-batches with a loss that is not finite); {saved}; "
                "lower optimizer.learning_rate, or look at these trajectories"
            )
        return report | {"skipped": 1.0}, 0.0

    def _save_offender(self, batch: Batch, micro_batches: list[MicroBatch], losses: Tensor) -> str:
        """Writes this rank's micro-batches with a loss that is not finite, or all of them if only the gradient is not."""
        if self._quarantine is None:
            return "its trajectories were not saved (no local run directory)"
        bad = [
            m for m, loss in zip(micro_batches, losses.tolist(), strict=True) if not np.isfinite(loss)
        ] or micro_batches
        rows = sorted(row for micro_batch in bad for row in micro_batch.rows)
        path = self._quarantine / f"version-{self.version:06d}-rank-{self._group.rank}.arrow"
        path.parent.mkdir(parents=True, exist_ok=True)
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, batch.trajectories.schema) as writer:
            writer.write_batch(batch.trajectories.take(pa.array(rows, type=pa.int64())))
        return f"its trajectories are in {path}"

    def _stats(
        self,
        batch: Batch,
        report: dict[str, float],
        *,
        rate: float,
        gradient_norm: float,
        seconds: "_Seconds",
        num_passes: int,
    ) -> StepStats:
        num_tokens = sum(len(row.prompt) + len(row.completion) for row in batch.rows)
        num_trained = int(batch.tensors.loss_mask_NT.sum())
        metrics = {f"learner/{name}": value for name, value in report.items()}
        metrics |= {
            "learner/gradient_norm": gradient_norm,
            "learner/learning_rate": rate,
            "learner/kl_coefficient": self.objective.kl_coefficient,
            "learner/skipped_in_a_row": float(self._num_skipped),
            "learner/failed_rewards": float(batch.num_failed),
            "learner/aborted": float(batch.num_aborted),
            "learner/micro_batches": float(num_passes * self._group.size),
            "speed/learning_tokens_per_s": num_tokens / seconds.total,
            **seconds.laps,
        }
        if "mismatch_mean" in report:
            metrics |= {
                "mismatch/mean_abs_nats": report["mismatch_mean"],
                "mismatch/max_abs_nats": report["mismatch_max"],
                "mismatch/off_policy_steps": report["mismatch_off_policy_steps_min"],
            }
        return StepStats(
            policy_version=self.version,
            metrics=metrics,
            num_trajectories=len(batch.rows),
            num_trained_tokens=num_trained,
            seconds=seconds.total,
        )

    # Weights

    def publish(self) -> Iterator[Any]:
        """On rank 0 the buckets of the current weights, one after the other, and their manifest last; nothing on the others.

        All ranks must iterate: whole tensors are gathered one at a time, and a bucket is not kept once the next is asked for.
        """
        self._enter("publishing")
        config, causal_lm = self._config, self.policy.causal_lm
        canary = canary_of(self.networks, num_tokens=config.weights.canary_tokens, device=self._group.device)
        lora, adapter = config.learner.lora, None
        if lora is not None and lora.publish == "adapter":
            adapter = adapter_of(causal_lm, lora=lora)
            named = exported_adapter(causal_lm, dtype=self._compute_dtype)
        else:
            named = exported(causal_lm, dtype=self._compute_dtype)
        if self._group.rank == 0:
            for part in packing(
                named,
                policy_version=self.version,
                bucket_bytes=config.weights.bucket_bytes,
                canary=canary,
                adapter=adapter,
            ):
                self._moved = time.time()
                yield part.model_dump() if isinstance(part, WeightManifest) else part
        else:
            for _ in named:
                self._moved = time.time()
        self._enter("waiting")

    # Checkpoints

    def save(self, directory: str, extra: Mapping[str, Any]) -> None:
        """A checkpoint; see `learner.saving`."""
        self._enter("saving")
        self._saver.save(_local_path(directory), extra)
        self._enter("waiting")

    def restore(self, directory: str) -> Mapping[str, Any]:
        """Goes back to a checkpoint exactly. Returns the `extra` that it was saved with."""
        self._enter("restoring")
        extra = self._saver.restore(_local_path(directory))
        self._enter("waiting")
        return extra

    def restore_latest(self, root: str) -> Mapping[str, Any] | None:
        """The newest checkpoint below `root`, or None and nothing done when there is none."""
        newest = None if "://" in root else self._saver.newest(Path(root))
        return None if newest is None else self.restore(str(newest))

    def export(self, directory: str) -> None:
        """The current weights as a Hugging Face folder."""
        self._enter("exporting")
        self._saver.export(_local_path(directory))
        self._enter("waiting")

    @property
    def config(self) -> RunConfig:
        return self._config

    @property
    def group(self) -> Group:
        return self._group

    @property
    def compute_dtype(self) -> torch.dtype:
        return self._compute_dtype

    def describe(self) -> dict[str, str]:
        """Choices that were made while loading, for the log."""
        return {"layout": self.policy.layout, "attention": str(self.policy.causal_lm.config._attn_implementation)}

    def formula(self) -> dict[str, Any]:
        """The resolved mathematics, for the passport."""
        return self.objective.formula()

    def progress(self) -> Progress:
        return Progress(
            actor=f"learner-{self._rank}",
            phase=self._phase,
            policy_version=self.version,
            since=self._since,
            last_progress=self._moved,
            pid=os.getpid(),
        )

    def _enter(self, phase: str) -> None:
        self._phase, self._since, self._moved = phase, time.time(), time.time()


def _local_path(directory: str) -> Path:
    if "://" in directory:
        raise CheckpointError(
            f"checkpoint {directory} was not saved: object stores are not supported yet; use a local run_dir"
        )
    return Path(directory)


class _Seconds:
    """Laps of one update."""

    def __init__(self) -> None:
        self._began = self._last = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name], self._last = now - self._last, now

    @property
    def total(self) -> float:
        return self._last - self._began
