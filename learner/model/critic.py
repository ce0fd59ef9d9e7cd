"""Values: a critic with its own backbone or a head on the policy's hidden states, in one module with the policy.

The value of a token is predicted from the hidden state before it, as its log-prob is. Shapes: C completion positions, H hidden size.
"""

import copy
from collections.abc import Mapping
from typing import Literal, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from learner.model.packing import MicroBatch
from learner.model.policy import PolicyModel, TokenOutputs, hidden_states


class Critic(nn.Module):
    """Values are 0 until it has learned."""

    def __init__(self, policy: PolicyModel, *, backbone: Literal["own", "shared"]) -> None:
        """`own` starts from a copy of the policy's backbone."""
        super().__init__()
        like = next(policy.parameters())
        size = policy.causal_lm.config.get_text_config().hidden_size
        own = copy.deepcopy(policy.causal_lm.base_model) if backbone == "own" else None
        self.backbone = cast(PreTrainedModel | None, own)
        self.value_head = nn.Linear(size, 1, dtype=like.dtype, device=like.device)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def forward(self, batch: MicroBatch, *, policy_hidden_CH: Tensor) -> Tensor:
        """Values of the micro-batch's positions, [C], float32."""
        hidden_CH = policy_hidden_CH if self.backbone is None else hidden_states(self.backbone, batch)
        return self.value_head(hidden_CH)[:, 0].float()


@torch.no_grad()
def rescale_head(parameters: Mapping[str, Tensor], *, factor: float, shift: float) -> None:
    """Values v become factor · v + shift (arXiv:1602.07714). `parameters` are those of the networks, by name; shards too."""
    weight, bias = (parameters[f"critic.value_head.{name}"] for name in ("weight", "bias"))
    weight.mul_(factor)
    bias.mul_(factor).add_(shift)


class Networks(nn.Module):
    """Everything that has gradients, called as one so that it is sharded as one."""

    def __init__(self, policy: PolicyModel, critic: Critic | None) -> None:
        super().__init__()
        self.policy = policy
        self.critic = critic

    def forward(
        self, batch: MicroBatch, *, entropies: bool = False, trains_policy: bool = True
    ) -> tuple[TokenOutputs, Tensor | None]:
        """Log-probs (and entropies) of the policy, values of the critic if there is one.

        Without `trains_policy` only the values have gradients, and on a shared backbone only those of the value head.
        """
        with torch.set_grad_enabled(trains_policy and torch.is_grad_enabled()):
            outputs = self.policy(batch, entropies=entropies)
        values_C = None if self.critic is None else self.critic(batch, policy_hidden_CH=outputs.hidden_CH)
        return outputs, values_C

    def own_logits(self, token_ids_L: Tensor) -> Tensor:
        """The policy's; a method here because only the outermost module gathers shards."""
        return self.policy.own_logits(token_ids_L)
