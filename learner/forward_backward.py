"""The passes of one step: a mini-batch is split into this rank's micro-batches, looked at, turned into gradients, and these are checked.

Every rank makes equally many passes, so that all meet in every collective operation. Nothing here changes weights for good.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from cluster.contracts.config import LearnerConfig
from cluster.contracts.errors import NumericsError
from learner.algorithms.objective import Objective
from learner.algorithms.objective.batch import BatchTensors, Prepared
from learner.algorithms.objective.statistics import Statistics
from learner.assemble import Batch
from learner.distributed import Ranks, reduce_once, reshard
from learner.model.critic import Networks
from learner.model.lora import without_adapters
from learner.model.packing import MicroBatch, TokenRow, lay_out, plan, tokens_per_pass
from learner.progress import Phases


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniBatch:
    """What one update trains on."""

    rows: list[int]
    """Places in the batch."""
    micro_batches: list[MicroBatch]
    """This rank's; their rows are places in the mini-batch. Every rank has equally many."""

    def in_batch(self, micro_batch: MicroBatch) -> list[int]:
        """Places of a micro-batch's rows in the batch."""
        return [self.rows[row] for row in micro_batch.rows]


class Passes:
    """Of one rank's networks under one objective."""

    def __init__(
        self,
        networks: Networks,
        *,
        objective: Objective,
        ranks: Ranks,
        config: LearnerConfig,
        measures_kl: bool,
        scores_reference: bool,
        phases: Phases,
    ) -> None:
        """`measures_kl`: the updates are told how far the policy has moved since the step began. `scores_reference`: no scorer does."""
        self._networks, self._objective, self._ranks, self._config = networks, objective, ranks, config
        self._phases, self._measures_kl, self._scores_reference = phases, measures_kl, scores_reference

    def mini_batch(self, batch: Batch, rows: list[int]) -> MiniBatch:
        """These rows of the batch, laid out."""
        chosen = [batch.rows[row] for row in rows]
        return MiniBatch(rows=rows, micro_batches=self._laid_out(chosen, width=batch.tensors.loss_mask_NT.shape[1]))

    def _laid_out(self, rows: Sequence[TokenRow], *, width: int) -> list[MicroBatch]:
        """This rank's share of the rows; every rank has equally many micro-batches."""
        layout = self._networks.policy.layout
        max_tokens = tokens_per_pass(self._config.max_tokens_per_micro_batch, device=self._ranks.device)
        rows_of_ranks = plan(rows, max_tokens=max_tokens, layout=layout, num_ranks=self._ranks.size)
        return [
            lay_out(rows, places, layout=layout, width=width, device=self._ranks.device)
            for places in rows_of_ranks[self._ranks.rank]
        ]

    @torch.no_grad()
    def with_first_look(
        self,
        tensors: BatchTensors,
        mini_batches: Sequence[MiniBatch],
        *,
        averaged: Callable[[], AbstractContextManager[None]],
    ) -> BatchTensors:
        """The batch with what the objective must know of the policy at the start of the step.

        `mini_batches` are those of the first epoch: in the same passes the first update has a ratio of exactly 1.
        Inside `averaged` the policy has its averaged weights.
        """
        needs = self._objective.needs | (frozenset() if tensors.is_sampler_known else {"proximal_logprobs"})
        needs |= {"starting_logprobs"} if self._measures_kl else frozenset()
        if self._scores_reference and self._objective.wants_reference(tensors.current_version):
            self._phases.enter("scoring the reference")
            with without_adapters(self._networks.policy.causal_lm):
                reference_NT = self._logprobs(tensors, mini_batches)
            tensors = dataclasses.replace(tensors, reference_logprobs_NT=reference_NT)
        if needs & {"proximal_logprobs", "starting_logprobs", "values"}:
            tensors = self._looked(tensors, mini_batches, needs)
        if "averaged_logprobs" in needs:
            self._phases.enter("first look")
            reshard(self._networks)
            try:
                with averaged():
                    averaged_NT = self._logprobs(tensors, mini_batches)
            finally:
                reshard(self._networks)
            tensors = dataclasses.replace(tensors, proximal_logprobs_NT=averaged_NT)
        return tensors

    def _looked(self, tensors: BatchTensors, mini_batches: Sequence[MiniBatch], needs: frozenset[str]) -> BatchTensors:
        """With what the networks give that begin the step."""
        self._phases.enter("first look")
        # As in the updates' passes: with entropies the head may round log-probs differently, and the first ratio would not be 1.
        looks_at_policy = bool(needs & {"proximal_logprobs", "starting_logprobs"})
        with_entropies = looks_at_policy and self._objective.wants_entropies(tensors.current_version)
        found = {
            name: torch.zeros_like(tensors.rollout_logprobs_NT)
            for name in ("proximal_logprobs", "starting_logprobs", "entropies", "values")
        }
        for rows, micro_batch in _passes_over(mini_batches):
            outputs, values_C = self._networks(micro_batch, entropies=with_entropies)
            computed = {
                "proximal_logprobs": outputs.logprobs_C,
                "starting_logprobs": outputs.logprobs_C,
                "entropies": outputs.entropies_C,
                "values": values_C,
            }
            for name, values in computed.items():
                if values is not None and rows:
                    found[name][rows] = micro_batch.scatter(values.float())
            self._phases.move()
        wanted = {
            "proximal_logprobs": "proximal_logprobs" in needs,
            "starting_logprobs": "starting_logprobs" in needs,
            "entropies": {"entropies", "proximal_logprobs"} <= needs,
            "values": "values" in needs,
        }
        looked = dataclasses.replace(
            tensors, **{f"{name}_NT": self._ranks.sum(found[name]) for name, is_wanted in wanted.items() if is_wanted}
        )
        if tensors.is_sampler_known or looked.proximal_logprobs_NT is None:
            return looked
        return dataclasses.replace(looked, rollout_logprobs_NT=looked.proximal_logprobs_NT)

    def _logprobs(self, tensors: BatchTensors, mini_batches: Sequence[MiniBatch]) -> Tensor:
        """Under the policy as it is now. Without its adapters it is the reference: no second copy of the model."""
        found_NT = torch.zeros_like(tensors.rollout_logprobs_NT)
        for rows, micro_batch in _passes_over(mini_batches):
            outputs, _ = self._networks(micro_batch)
            if rows:
                found_NT[rows] = micro_batch.scatter(outputs.logprobs_C)
            self._phases.move()
        return self._ranks.sum(found_NT)

    def accumulate(
        self, prepared: Prepared, micro_batches: list[MicroBatch], *, trains_policy: bool = True
    ) -> tuple[Tensor, Statistics]:
        """Adds up the gradients of all micro-batches, of the critic's parameters alone without `trains_policy`.

        The losses of this rank's micro-batches, and the statistics of all ranks'.
        """
        losses: list[Tensor] = []
        statistics: list[Statistics] = []
        for index in reduce_once(self._networks, len(micro_batches)):
            micro_batch = micro_batches[index]
            outputs, values_C = self._networks(
                micro_batch, entropies=prepared.wants_entropies, trains_policy=trains_policy
            )
            if not micro_batch.rows:
                # No rows for this rank: it still gathers and reduces with the others.
                (outputs.logprobs_C.sum() + (0 if values_C is None else values_C.sum())).backward()
                losses.append(torch.zeros((), dtype=torch.float64, device=self._ranks.device))
                continue
            result = self._objective.loss(
                prepared.rows(list(micro_batch.rows)),
                policy_logprobs_BT=micro_batch.scatter(outputs.logprobs_C),
                entropies_BT=None if outputs.entropies_C is None else micro_batch.scatter(outputs.entropies_C),
                values_BT=None if values_C is None else micro_batch.scatter(values_C),
            )
            # FSDP means over ranks; the objective's weights are of the whole mini-batch, so its gradient is the sum.
            (result.loss * self._ranks.size).backward()
            losses.append(result.loss.detach())
            statistics.append(result.statistics)
            self._phases.move()
        return torch.stack(losses), self._of_all_ranks(statistics)

    def imitate(self, rows: Sequence[TokenRow]) -> Statistics:
        """Adds the gradient of the demonstrations' loss to that of the trajectories; the statistics of all ranks."""
        statistics: list[Statistics] = []
        num_tokens = sum(int(row.loss_mask.sum()) for row in rows)
        micro_batches = self._laid_out(rows, width=max(len(row.completion) for row in rows))
        policy = self._networks.policy
        for index in reduce_once(self._networks, len(micro_batches)):
            # Under truncated sampling a demonstrated token may be one that is never sampled.
            with policy.full_softmax(temperature=policy.head.temperature):
                outputs, values_C = self._networks(micro_batches[index])
            result = self._objective.imitation_loss(outputs.logprobs_C, num_tokens=num_tokens)
            # A critic takes part in the pass, and so in its backward: FSDP waits for all of a pass.
            (result.loss * self._ranks.size + (0 if values_C is None else 0 * values_C.sum())).backward()
            statistics.append(result.statistics)
            self._phases.move()
        return self._of_all_ranks(statistics)

    def _of_all_ranks(self, statistics: Sequence[Statistics]) -> Statistics:
        merged = Statistics.merge(statistics)
        parts = self._ranks.stack(merged.to_tensor().to(self._ranks.device))
        return Statistics.merge([Statistics.from_tensor(part.cpu()) for part in parts])


def _passes_over(mini_batches: Sequence[MiniBatch]) -> Iterator[tuple[list[int], MicroBatch]]:
    """Every micro-batch, and the places of its rows in the batch."""
    for mini_batch in mini_batches:
        for micro_batch in mini_batch.micro_batches:
            yield mini_batch.in_batch(micro_batch), micro_batch


class NonFiniteGuard:
    """Keeps updates whose loss or gradient is not finite from the weights, saves what made them, and ends a run that has too many."""

    def __init__(self, *, max_in_a_row: int, ranks: Ranks, folder: Path | None) -> None:
        """`folder` takes the trajectories of such updates, for inspection; None saves none."""
        self._max_in_a_row, self._ranks, self._folder = max_in_a_row, ranks, folder
        self.num_in_a_row = 0

    def admits(
        self,
        batch: Batch,
        mini_batch: MiniBatch,
        *,
        losses: Tensor,
        gradient_norm: Tensor,
        place: tuple[int, int],
    ) -> bool:
        """Whether the update may be made. `losses` are of this rank's micro-batches; all ranks must call it, and get one answer.

        `place` is the policy version and the update's number in its step. Raises NumericsError when this is one update too many in a
        row that may not.
        """
        is_bad = ~losses.isfinite()
        num_bad = int(self._ranks.sum(is_bad.sum()))
        if num_bad == 0 and bool(gradient_norm.isfinite()):
            self.num_in_a_row = 0
            return True
        self.num_in_a_row += 1
        # Where only the gradient is not finite, any micro-batch of any rank may be why.
        found = zip(mini_batch.micro_batches, is_bad.tolist(), strict=True)
        suspects = sorted(row for m, bad in found if bad or num_bad == 0 for row in mini_batch.in_batch(m))
        saved = self._save(batch, suspects, place=place)
        if self.num_in_a_row > self._max_in_a_row:
            raise NumericsError(
                f"loss or gradient was not finite in {self.num_in_a_row} updates in a row, the last at policy version {place[0]} "
                f"(gradient norm {float(gradient_norm)}, {num_bad} micro-batches with a loss that is not finite); {saved}; "
                "lower optimizer.learning_rate, or look at these trajectories"
            )
        return False

    def state_dict(self) -> dict[str, int]:
        return {"num_in_a_row": self.num_in_a_row}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.num_in_a_row = state["num_in_a_row"]

    def _save(self, batch: Batch, rows: list[int], *, place: tuple[int, int]) -> str:
        """Writes these trajectories, which this rank computed; says where they are, or why nowhere."""
        if not rows:
            return "its trajectories are with another rank"
        if self._folder is None:
            return "its trajectories were not saved (no local run directory)"
        version, update = place
        path = self._folder / f"version-{version:06d}-update-{update}-rank-{self._ranks.rank}.arrow"
        try:
            batch.write_rows(rows, path)
        except OSError as error:
            # They are for inspection: a full disk does not end a run that goes on without them.
            return f"its trajectories were not saved ({error})"
        return f"its trajectories are in {path}"
