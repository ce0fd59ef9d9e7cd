"""Passes at the start of a step, before anything is learned: the log-probs, entropies and values that updates compare with."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import Tensor

from cluster.contracts.config import RunConfig
from learner.algorithms.objective import Objective
from learner.algorithms.objective.batch import BatchTensors
from learner.algorithms.placing import placed
from learner.distributed import Ranks, reshard
from learner.forward_backward import MiniBatch, without_routes
from learner.model.critic import Networks
from learner.model.lora import without_adapters
from learner.progress import Phases


class FirstLook:
    """Passes without gradients over the mini-batches of the first epoch: the first update makes the same, so its ratio is exactly 1."""

    def __init__(
        self,
        networks: Networks,
        *,
        objective: Objective,
        ranks: Ranks,
        phases: Phases,
        config: RunConfig,
        averaged: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Inside `averaged` the policy has its averaged weights."""
        self._networks, self._objective, self._ranks, self._phases = networks, objective, ranks, phases
        self._averaged, self._scores_reference = averaged, config.learner_scores_reference
        # Updates then measure how far the policy has moved since the start of the step.
        self._measures_kl = config.learner.stop_at_kl is not None or config.optimizer.target_kl is not None

    @torch.no_grad()
    def at(self, tensors: BatchTensors, mini_batches: Sequence[MiniBatch]) -> BatchTensors:
        """The batch with the numbers that the objective needs of the networks at the start of the step."""
        needs = self._objective.needs | (frozenset() if tensors.is_sampler_known else {"proximal_logprobs"})
        needs |= {"starting_logprobs"} if self._measures_kl else frozenset()
        found: dict[str, Tensor] = {}
        if self._scores_reference and self._objective.wants_reference(tensors.current_version):
            self._phases.enter("scoring the reference", step=tensors.current_version + 1)
            # The policy without its adapters is the reference: no second copy of the model.
            with without_adapters(self._networks.policy.causal_lm):
                # The reference's own routers choose its experts, as in a separate model.
                unrouted = [without_routes(mini_batch) for mini_batch in mini_batches]
                found["reference_logprobs"] = self._seen(tensors, unrouted, ["logprobs"])["logprobs"]
        found |= self._of_the_start(tensors, mini_batches, needs)
        if "averaged_logprobs" in needs:
            self._phases.enter("first look", step=tensors.current_version + 1)
            reshard(self._networks)
            try:
                with self._averaged():
                    found["proximal_logprobs"] = self._seen(tensors, mini_batches, ["logprobs"])["logprobs"]
            finally:
                reshard(self._networks)
        return replace(tensors, **{f"{name}_NT": x_NT for name, x_NT in found.items()})

    def _of_the_start(
        self, tensors: BatchTensors, mini_batches: Sequence[MiniBatch], needs: frozenset[str]
    ) -> dict[str, Tensor]:
        """Numbers of the networks at the start of the step, by their names in the batch."""
        policies = needs & {"proximal_logprobs", "starting_logprobs"}
        names = ["logprobs"] if policies else []
        names += ["entropies"] if {"entropies", "proximal_logprobs"} <= needs else []
        names += ["values"] if "values" in needs else []
        if not names:
            return {}
        self._phases.enter("first look", step=tensors.current_version + 1)
        # Compute entropies if the updates do: with them the head may round log-probs differently, and the first ratio would not be 1.
        entropies = bool(policies) and self._objective.wants_entropies(tensors.current_version)
        found = self._seen(tensors, mini_batches, names, entropies=entropies)
        if policies:
            found |= dict.fromkeys(policies, found.pop("logprobs"))
        if not tensors.is_sampler_known:
            found["rollout_logprobs"] = found["proximal_logprobs"]
        return found

    def _seen(
        self, tensors: BatchTensors, mini_batches: Sequence[MiniBatch], names: Sequence[str], *, entropies: bool = False
    ) -> dict[str, Tensor]:
        """The named ones of the policy's "logprobs" and "entropies" and the critic's "values", [N, T], 0 where masked."""
        found = {name: torch.zeros_like(tensors.rollout_logprobs_NT) for name in names}
        for mini_batch in mini_batches:
            for micro_batch in mini_batch.micro_batches:
                outputs, values_C = self._networks(micro_batch, entropies=entropies)
                computed = {"logprobs": outputs.logprobs_C, "entropies": outputs.entropies_C, "values": values_C}
                if micro_batch.rows and self._ranks.leads:
                    # On a GPU, indexing with a list would wait for the pass.
                    rows = placed(mini_batch.in_batch(micro_batch), self._ranks.device)
                    for name in names:
                        found[name][rows] = micro_batch.scatter(computed[name].float())
                self._phases.move()
        return {name: self._ranks.sum(x_NT) for name, x_NT in found.items()}
