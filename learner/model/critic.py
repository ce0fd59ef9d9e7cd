"""Values: a critic with its own backbone, or a value head on the policy's hidden states, in one module with the policy.

The value of a token is predicted from the hidden state before it, as its log-prob is. Shapes: C completion positions, H hidden size.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from cluster.contracts.algorithm_config import ValueConfig
from cluster.contracts.config import ModelConfig, RunConfig
from cluster.contracts.errors import ConfigError
from learner.distributed import fill
from learner.model.packing import MicroBatch, cut
from learner.model.policy import CRITIC_PATH, PolicyModel, TokenOutputs, elsewhere, hidden_states
from learner.sequence_parallel import SequenceGroup, refuse_what_cannot_be_split
from learner.shape import read_config


def critic_config(model: ModelConfig, value: ValueConfig | None) -> ModelConfig | None:
    """The model that the critic's own backbone starts from; None without such a backbone. Raises ConfigError as `elsewhere` does."""
    if value is None or value.backbone == "shared":
        return None
    return elsewhere(model, value, section="algorithm.value")


def check_sequence_parallel(config: RunConfig) -> None:
    """Raises ConfigError for a policy or critic whose passes ranks cannot share. Reads nothing if ranks share no passes."""
    size = config.learner.sequence_parallel_size
    if size == 1:
        return
    models = {"model.path": config.model, CRITIC_PATH: critic_config(config.model, config.algorithm.value)}
    for field, model in models.items():
        if model is not None:
            text = read_config(model, field=field).get_text_config()
            refuse_what_cannot_be_split(text, size=size, named=f"{field}={model.path!r}")


def refuse_another_architecture(backbone: PreTrainedModel, *, like: PreTrainedModel, path: str) -> None:
    """Raises ConfigError for another class than the policy's backbone, since the layout of rows is proven for that class only, and for
    fewer embeddings than the policy has."""
    own, num_rows = (cast(nn.Embedding, each.get_input_embeddings()).num_embeddings for each in (backbone, like))
    if type(backbone) is not type(like.base_model):
        raise ConfigError(
            f"{CRITIC_PATH}={path!r} is a {type(backbone).__name__}, the policy's backbone a {type(like.base_model).__name__}; "
            "take a model of the policy's architecture, of any size"
        )
    if own < num_rows:
        raise ConfigError(
            f"{CRITIC_PATH}={path!r} has embeddings of {own} tokens, the policy of {num_rows}; take a model with the policy's vocabulary"
        )


class Critic(nn.Module):
    """Predicts values. They are 0 at first, unless the critic starts from a reward model."""

    def __init__(self, policy: PolicyModel, *, backbone: PreTrainedModel | None) -> None:
        """With `backbone` None the value head reads the policy's hidden states."""
        super().__init__()
        like = next(policy.parameters())
        size = (backbone or policy.causal_lm).config.get_text_config().hidden_size
        self.backbone = backbone
        self.head_start: Literal["zero", "score"] = "zero"
        self.value_head = nn.Linear(size, 1, dtype=like.dtype, device=like.device)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def start_head(self, score_1H: Tensor | None) -> None:
        """Copies a reward model's score into the head, whose weight may be a shard. None leaves it at 0."""
        if score_1H is not None:
            self.head_start = "score"
            fill(self.value_head.weight, score_1H.to(self.value_head.weight.device))

    def forward(self, batch: MicroBatch, *, policy_hidden_CH: Tensor) -> Tensor:
        """Values of the micro-batch's positions, [C], float32."""
        hidden_CH = policy_hidden_CH if self.backbone is None else hidden_states(self.backbone, batch)
        weight_1H, bias_1 = (part.float() for part in (self.value_head.weight, self.value_head.bias))
        # Without a copy it is a view, of which torch warns on every rank of a sharded critic.
        return F.linear(hidden_CH.float(), weight_1H, bias_1)[:, 0].clone()


@torch.no_grad()
def rescale_head(parameters: Mapping[str, Tensor], *, factor: float, shift: float) -> None:
    """Values v become factor · v + shift (arXiv:1602.07714). `parameters`: the networks' parameters or shards, by name."""
    weight, bias = (parameters[f"critic.value_head.{name}"] for name in ("weight", "bias"))
    weight.mul_(factor)
    bias.mul_(factor).add_(shift)


class Networks(nn.Module):
    """Policy and critic in one module, so that they are sharded together."""

    def __init__(
        self, policy: PolicyModel, critic: Critic | None, *, sequence_group: SequenceGroup | None = None
    ) -> None:
        """With a sequence group, its ranks share each pass: each computes a slice of the packed row, and all get the results of the row."""
        super().__init__()
        self.policy = policy
        self.critic = critic
        self._sequence_group = sequence_group

    def forward(
        self, batch: MicroBatch, *, entropies: bool = False, trains_policy: bool = True
    ) -> tuple[TokenOutputs, Tensor | None]:
        """Log-probs (and entropies) of the policy, and values of the critic if there is one.

        Without `trains_policy` only the critic gets gradients; on a shared backbone, only its value head.
        """
        group = self._sequence_group
        own, places_C = (batch, None) if group is None else cut(batch, group)
        with torch.set_grad_enabled(trains_policy and torch.is_grad_enabled()):
            outputs = self.policy(own, entropies=entropies)
        values_C = None if self.critic is None else self.critic(own, policy_hidden_CH=outputs.hidden_CH)
        if group is None or places_C is None:
            return outputs, values_C

        def joined(own_C: Tensor | None) -> Tensor | None:
            return None if own_C is None else group.joined(own_C, places=places_C, size=len(batch.targets_C))

        names = ("logprobs_C", "entropies_C", "partition_CP")
        whole: dict[str, Any] = {name: joined(getattr(outputs, name)) for name in names}
        return replace(outputs, **whole), joined(values_C)

    def own_logits(self, token_ids_L: Tensor) -> Tensor:
        """As `PolicyModel.own_logits`. A method here too, because only the outermost module gathers shards."""
        return self.policy.own_logits(token_ids_L)
