"""The passes of one update: splits a mini-batch into this rank's micro-batches, and turns these into gradients.

Every rank makes equally many passes, so that all meet in every collective operation. Weights do not change here.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cluster.contracts.config import LearnerConfig
from cluster.contracts.errors import DataError
from learner.algorithms.objective import Objective
from learner.algorithms.objective.batch import Prepared
from learner.algorithms.objective.statistics import Statistics
from learner.algorithms.placing import placed
from learner.assemble import Batch
from learner.distributed import Ranks, reduce_once
from learner.learned import LearnedRows
from learner.model.critic import Networks
from learner.model.packing import MicroBatch, Row, TokenRow, cost, lay_out, plan, tokens_per_pass
from learner.progress import Phases


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniBatch:
    """The trajectories of one update."""

    rows: list[int]
    """Their places in the batch."""
    micro_batches: Sequence[MicroBatch]
    """Those of this rank; every rank has equally many. Their rows are places in the mini-batch."""

    def in_batch(self, micro_batch: MicroBatch) -> list[int]:
        """Places of a micro-batch's rows in the batch."""
        return [self.rows[row] for row in micro_batch.rows]


class _LaidOut(Sequence[MicroBatch]):
    """Lays each micro-batch out when it is first used: on a GPU, while the pass before it is still computed."""

    def __init__(self, plans: Sequence[tuple[int, ...]], lay_out: Callable[[tuple[int, ...]], MicroBatch]) -> None:
        self._plans, self._lay_out = plans, functools.cache(lay_out)

    def __len__(self) -> int:
        return len(self._plans)

    def __getitem__(self, index: int) -> MicroBatch:
        return self._lay_out(self._plans[index])


def without_routes(mini_batch: MiniBatch) -> MiniBatch:
    """The same mini-batch without recorded experts: the model's own routers choose."""
    return replace(mini_batch, micro_batches=[replace(each, routes=None) for each in mini_batch.micro_batches])


class Passes:
    """Forward and backward passes of one rank's networks."""

    def __init__(
        self, networks: Networks, *, objective: Objective, ranks: Ranks, config: LearnerConfig, phases: Phases
    ) -> None:
        self._networks, self._objective, self._ranks, self._phases = networks, objective, ranks, phases
        self._most_tokens_of_a_rank = config.max_tokens_per_micro_batch
        self._most_tokens = ranks.num_per_pass * config.max_tokens_per_micro_batch
        self._max_tokens = ranks.num_per_pass * tokens_per_pass(config.max_tokens_per_micro_batch, device=ranks.device)
        self._router_coefficient = objective.config.router_aux_loss_coefficient

    def mini_batch(self, batch: Batch, rows: list[int]) -> MiniBatch:
        """Plans the micro-batches of these rows. Raises DataError for an episode of several segments that does not fit in one pass."""
        chosen = [batch.rows[row] for row in rows]
        self._refuse_oversized_episodes(batch, rows)
        micro_batches = self._laid_out(chosen, width=batch.tensors.loss_mask_NT.shape[1])
        return MiniBatch(rows=rows, micro_batches=self._balancing(micro_batches, chosen))

    def _balancing(self, micro_batches: Sequence[MicroBatch], rows: Sequence[Row]) -> Sequence[MicroBatch]:
        """Adds the load-balancing gradient of all these rows to the micro-batches, if the run balances experts."""
        routing = self._networks.policy.routing
        if routing is None or not self._router_coefficient:
            return micro_batches
        recorded = [each.experts for row in rows for each in row.segments if each.experts is not None]
        pull_E = routing.pull(recorded, coefficient=self._router_coefficient)
        if pull_E is None:
            return micro_batches
        pull_E = placed(pull_E, self._ranks.device)
        return [
            each if each.routes is None else replace(each, routes=replace(each.routes, pull_E=pull_E))
            for each in micro_batches
        ]

    def _refuse_oversized_episodes(self, batch: Batch, rows: Sequence[int]) -> None:
        """An episode's segments must be in one pass: a ratio of the sequence is over all of them, and statistics count the episode once."""
        for row in rows:
            num_segments = len(batch.rows[row].segments)
            if num_segments == 1:
                continue
            num_tokens = cost(batch.rows, [row], layout=self._networks.policy.layout)
            if num_tokens > self._most_tokens:
                raise DataError(
                    f"{batch.tensors.name(row)}: its {num_segments} segments take {num_tokens} tokens of one pass, and "
                    f"learner.max_tokens_per_micro_batch={self._most_tokens_of_a_rank}; raise it: all segments of an episode must fit in "
                    "one pass"
                )

    def _laid_out(self, rows: Sequence[Row], *, width: int) -> Sequence[MicroBatch]:
        """Micro-batches of this rank's share of the rows; every rank has equally many."""
        layout = self._networks.policy.layout
        num_parts, part = self._ranks.data_parallel_size, self._ranks.data_parallel_rank
        rows_of_parts = plan(rows, max_tokens=self._max_tokens, layout=layout, num_ranks=num_parts)
        device = self._ranks.device
        return _LaidOut(
            rows_of_parts[part], lambda places: lay_out(rows, places, layout=layout, width=width, device=device)
        )

    def accumulate(
        self, prepared: Prepared, mini_batch: MiniBatch, *, learned: LearnedRows, trains_policy: bool = True
    ) -> tuple[Tensor, list[Statistics]]:
        """Adds up the gradients of all micro-batches; only the critic's without `trains_policy`. `learned` records each micro-batch.

        Returns the losses and the statistics of this rank's micro-batches. It does not wait for the GPU, except to look up places for
        distillation, for `clip_cov` and in passes that ranks share.
        """
        micro_batches = mini_batch.micro_batches
        losses: list[Tensor] = []
        statistics: list[Statistics] = []
        for index in reduce_once(self._networks, len(micro_batches)):
            micro_batch = micro_batches[index]
            outputs, values_C = self._networks(
                micro_batch, entropies=prepared.wants_entropies, trains_policy=trains_policy
            )
            aux_loss = None
            if (routing := self._networks.policy.routing) is not None:
                # Of this rank's slice if a pass is split. Read before the backward pass, which may recompute activations and so routes.
                statistics.append(routing.statistics())
                aux_loss = routing.aux_loss()
            if not micro_batch.rows:
                # Without rows this rank still gathers and reduces with the others.
                (outputs.logprobs_C.sum() + (0 if values_C is None else values_C.sum())).backward()
                losses.append(torch.zeros((), dtype=torch.float64, device=self._ranks.device))
                continue
            result = self._objective.loss(
                prepared.rows(list(micro_batch.rows)),
                policy_logprobs_BT=micro_batch.scatter(outputs.logprobs_C),
                entropies_BT=None if outputs.entropies_C is None else micro_batch.scatter(outputs.entropies_C),
                values_BT=None if values_C is None else micro_batch.scatter(values_C),
                policy_partition_BTP=None
                if outputs.partition_CP is None
                else micro_batch.scatter(outputs.partition_CP),
            )
            # FSDP averages over ranks, but the objective's weights are of the whole mini-batch: the gradient is the sum over ranks. Ranks
            # that share a pass have the same loss, and each a slice of its gradient.
            loss = result.loss if aux_loss is None else result.loss + aux_loss
            (loss * self._ranks.size).backward()
            losses.append(loss.detach())
            if self._ranks.leads:
                statistics.append(result.statistics)
                if result.seen is not None:
                    learned.take(mini_batch.in_batch(micro_batch), result.seen)
            # Otherwise their tensors would stay in memory through the next forward pass.
            del result, loss, aux_loss
            self._phases.move()
        learned.pass_by(mini_batch.rows)
        return torch.stack(losses), statistics

    def imitate(self, rows: Sequence[TokenRow]) -> list[Statistics]:
        """Adds the gradient of the demonstrations' loss to that of the trajectories. Returns its statistics."""
        statistics: list[Statistics] = []
        num_tokens = sum(int(row.loss_mask.sum()) for row in rows)
        micro_batches = self._laid_out(rows, width=max(len(row.completion) for row in rows))
        policy = self._networks.policy
        for index in reduce_once(self._networks, len(micro_batches)):
            # Truncated sampling may never sample a demonstrated token.
            with policy.full_softmax(temperature=policy.head.temperature):
                outputs, values_C = self._networks(micro_batches[index])
            result = self._objective.imitation_loss(outputs.logprobs_C, num_tokens=num_tokens)
            # The critic was in the forward pass, and FSDP waits for its backward.
            (result.loss * self._ranks.size + (0 if values_C is None else 0 * values_C.sum())).backward()
            if self._ranks.leads:
                statistics.append(result.statistics)
            self._phases.move()
        return statistics

    def of_all_ranks(self, statistics: Sequence[Statistics]) -> Statistics:
        """Statistics of all ranks' passes, on the CPU; waits for these passes."""
        moments_Q5 = Statistics.merge(statistics).moments_Q5.to(self._ranks.device)
        return Statistics.merge([Statistics(part_Q5.cpu()) for part_Q5 in self._ranks.stack(moments_Q5)])
