"""Routing replay: a mixture of experts computes with the experts recorded at sampling, not with those that its routers would choose.

Rollout routing replay, R3 (arXiv:2510.11370). A router computes its scores with its current weights; only its choice of the best experts is
replaced, so the gate values of the recorded experts have gradients as usual. This works for any router of transformers that chooses by one
`topk` over scores of all experts; each router is tested when the model is loaded.

Shapes: T positions of a pass, flattened; L layers of the model; K experts per token; E experts.
"""

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from cluster.contracts.errors import ConfigError
from learner.algorithms.objective.statistics import Recorder, Statistics


@dataclass(frozen=True, slots=True, kw_only=True)
class Routes:
    """Experts recorded for the positions of one pass."""

    experts_TLK: Tensor
    """Integers; arbitrary at positions without a record."""
    num_rows_T: Tensor
    """Number of rows with a record that share a position: several at a shared prompt, 0 without a record."""
    pull_E: Tensor | None = None
    """Factor of each expert's probability in the load-balance loss, for every position, layer and row; None without such a loss."""

    @property
    def is_recorded_T(self) -> Tensor:
        return self.num_rows_T > 0


class Routing:
    """Makes the routers of one model follow given routes, also when backward computes activations again."""

    def __init__(self, causal_lm: PreTrainedModel) -> None:
        """Works on a skeleton too, before it is sharded. Raises ConfigError for a model without routers or with an unsupported one."""
        found = _routers_of(causal_lm)
        if not found:
            raise ConfigError(
                f"rollout.routing_replay=true: {type(causal_lm).__name__} has no router of a supported kind, and so no experts to replay; "
                "leave it out for dense models"
            )
        self._routers = [_Router(layer, module) for layer, module in found]
        self.num_layers: int = causal_lm.config.get_text_config().num_hidden_layers
        self.num_experts_per_token, self.num_experts = self._routers[0].num_chosen, self._routers[0].num_experts

    def follow(self, routes: Routes | None) -> None:
        """Sets the routes until the next call; None lets routers choose."""
        for router in self._routers:
            router.routes, router.aux_loss = routes, None

    def pull(self, rows: Sequence[np.ndarray], *, coefficient: float) -> Tensor | None:
        """`Routes.pull_E` for an update whose rows have these recorded experts, [inputs, layers, experts per token] each; None without any.

        The load-balance loss is E Σ f P (Switch Transformers, arXiv:2101.03961; pooled over layers as in transformers'
        `load_balancing_loss_func`). f has no gradient and P is a mean over positions: with f of the whole update, the loss is a sum over
        positions, and its gradient does not depend on how they are split into passes.
        """
        layers = [router.layer for router in self._routers]
        counts_E = sum((np.bincount(experts[:, layers].ravel(), minlength=self.num_experts) for experts in rows), 0)
        num_positions = len(layers) * sum(len(experts) for experts in rows)
        if not num_positions:
            return None
        return torch.as_tensor(coefficient * self.num_experts * counts_E / num_positions**2, dtype=torch.float32)

    def aux_loss(self) -> Tensor | None:
        """The last pass's part of the update's load-balance loss; None without one."""
        losses = [router.aux_loss for router in self._routers if router.aux_loss is not None]
        return torch.stack(losses).sum() if losses else None

    def statistics(self) -> Statistics:
        """Of the last pass: the share of recorded experts that the routers would not have chosen, and its load-balance loss."""
        routes = self._routers[0].routes
        recorder = Recorder(next(self._routers[0].module.parameters()).device)
        if routes is not None:
            num_differing_T = torch.stack([router.num_differing_T for router in self._routers]).sum(0)
            share_T = num_differing_T / (len(self._routers) * self.num_experts_per_token)
            # Each row that shares a position recorded its choices.
            recorder.share("routing_differs", share_T, counts=routes.num_rows_T)
        if (aux_loss := self.aux_loss()) is not None:
            recorder.total("router_aux_loss", aux_loss)
            recorder.total("loss", aux_loss)
        return recorder.statistics()


class _Router:
    """One layer's router, with hooks around its forward."""

    num_differing_T: Tensor
    """Number of experts recorded for a position that the router would not have chosen; set by each pass that follows routes."""

    def __init__(self, layer: int, module: Any) -> None:
        self.layer, self.num_experts, self.num_chosen = layer, int(module.num_experts), int(module.top_k)
        self.module = module
        self.routes: Routes | None = None
        self.aux_loss: Tensor | None = None
        self._mode: _Choice | None = None
        self._prove()
        module.register_forward_pre_hook(self._begin)
        module.register_forward_hook(self._end, always_call=True)

    @torch.no_grad()
    def _prove(self) -> None:
        """Raises ConfigError unless the router calls `topk` over all experts and uses its result."""
        module: Any = copy.deepcopy(self.module)
        if next(module.parameters()).is_meta:
            module.to_empty(device="cpu")
        weight: Tensor = next(module.parameters())
        chosen_TLK = torch.arange(self.num_chosen, device=weight.device).flip(0).expand(3, self.layer + 1, -1)
        routes = Routes(experts_TLK=chosen_TLK, num_rows_T=torch.ones(3, device=weight.device))
        with _Choice(self, routes):
            answer = _answer(module, torch.ones(3, weight.shape[-1], dtype=weight.dtype, device=weight.device))
        if not any(torch.equal(each, chosen_TLK[:, 0]) for each in answer):
            raise ConfigError(
                f"rollout.routing_replay=true: a {type(module).__name__} chooses its experts in an unsupported way; leave it "
                "out for this model"
            )

    def _begin(self, module: nn.Module, args: object) -> None:
        if self.routes is not None:
            self._mode = _Choice(self, self.routes)
            self._mode.__enter__()

    def _end(self, module: nn.Module, args: object, output: Any) -> None:
        mode, self._mode = self._mode, None
        if mode is None:
            return
        mode.__exit__(None, None, None)
        if output is not None and self.routes is not None and self.routes.pull_E is not None:
            # If every expert is chosen, other outputs have this shape too, and the pull is the same for each expert.
            logits_TE = next(each for each in output if each.shape[1:] == (self.num_experts,))
            pull_T = logits_TE.float().softmax(-1) @ self.routes.pull_E
            aux_loss = (pull_T * self.routes.num_rows_T).sum()
            # A layer that backward computes again must compute this too, as checkpointing expects the same saved tensors. Only the first
            # result is kept: the second one would keep the layer's activations.
            self.aux_loss = aux_loss if self.aux_loss is None else self.aux_loss


class _Choice(TorchFunctionMode):
    """While a router computes, its `topk` over all experts returns the recorded experts and their scores."""

    def __init__(self, router: _Router, routes: Routes) -> None:
        super().__init__()
        self._router, self._routes = router, routes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk) or not self._is_the_choice(scores := args[0], own.indices):
            return own
        experts_TK = self._routes.experts_TLK[:, self._router.layer].to(own.indices.dtype)
        is_own_TK = (experts_TK[:, :, None] == own.indices[:, None, :]).any(-1)
        self._router.num_differing_T = (~is_own_TK).sum(-1)
        chosen_TK = torch.where(self._routes.is_recorded_T[:, None], experts_TK, own.indices)
        return torch.return_types.topk((scores.gather(-1, chosen_TK), chosen_TK))

    def _is_the_choice(self, scores: Tensor, found: Tensor) -> bool:
        """False for the `topk` by which some routers first choose groups of experts."""
        return scores.shape[1:] == (self._router.num_experts,) and found.shape[1:] == (self._router.num_chosen,)


def _answer(router: nn.Module, hidden_states: Tensor) -> tuple[Tensor, ...]:
    """The router's output; empty for a router with more inputs than hidden states."""
    try:
        return router(hidden_states)
    except TypeError:
        return ()


def _routers_of(causal_lm: PreTrainedModel) -> list[tuple[int, nn.Module]]:
    """(layer, router) pairs. All routers of transformers have a class name that ends in Router, and these attributes."""
    found: list[tuple[int, nn.Module]] = []
    for name, module in causal_lm.named_modules():
        layer = re.search(r"\.layers\.(\d+)\.", name)
        attributes = [getattr(module, each, None) for each in ("top_k", "num_experts")]
        if layer and type(module).__name__.endswith("Router") and all(isinstance(each, int) for each in attributes):
            found.append((int(layer[1]), module))
    return found
