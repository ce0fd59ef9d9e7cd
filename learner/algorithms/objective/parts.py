"""The parts of an objective: all functions that config names, with their parameters bound."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Size, Tensor

from cluster.contracts.algorithm_config import AlgorithmConfig
from learner.algorithms.batch_rules.filters import Selection
from learner.algorithms.losses.surrogates import TokenLosses
from learner.algorithms.registry.variants import Variant


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    config: AlgorithmConfig
    advantage: Variant
    policy_loss: Variant
    aggregation: Variant
    value_loss: Variant | None
    value_aggregation: Variant | None
    reward_shaping: tuple[Variant, ...]
    advantage_shaping: tuple[Variant, ...]
    filters: tuple[Variant, ...]
    selection: Variant | None
    corrections: tuple[Variant, ...]

    @classmethod
    def from_config(cls, config: AlgorithmConfig) -> "Parts":
        def many(field: str) -> tuple[Variant, ...]:
            return tuple(
                Variant.from_plugin(plugin, field=f"{field}[{i}]") for i, plugin in enumerate(getattr(config, field))
            )

        value = config.value
        return cls(
            config=config,
            advantage=Variant.from_plugin(config.advantage, field="advantage"),
            policy_loss=Variant.from_plugin(config.policy_loss, field="policy_loss"),
            aggregation=Variant.from_plugin(config.aggregation, field="aggregation"),
            value_loss=value and Variant.from_plugin(value.loss, field="value.loss"),
            value_aggregation=value and Variant.from_plugin(value.aggregation, field="value.aggregation"),
            reward_shaping=many("reward_shaping"),
            advantage_shaping=many("advantage_shaping"),
            filters=many("filters"),
            selection=config.selection and Variant.from_plugin(config.selection, field="selection"),
            corrections=many("corrections"),
        )

    def all(self) -> list[Variant]:
        single = (
            *(self.advantage, self.policy_loss, self.aggregation),
            *(self.value_loss, self.value_aggregation, self.selection),
        )
        several = (*self.reward_shaping, *self.advantage_shaping, *self.filters, *self.corrections)
        return [variant for variant in (*single, *several) if variant is not None]

    @property
    def learn_from_reference(self) -> bool:
        """Whether the loss depends on the reference's log-probs. A KL that is only monitored does not count."""
        kl = self.config.kl
        return bool(kl.loss or kl.reward or self.config.distillation) or self.asks(
            "reference_logprobs_NT", "reference_logprobs_BT"
        )

    def asks(self, *names: str) -> bool:
        return any(name in variant.asks for variant in self.all() for name in names)

    def corrected(self, weights: Tensor, offered: Mapping[str, Any], *, of_the_batch: bool) -> Tensor:
        """The weights times the corrections that run before micro-batching (`of_the_batch`), or times the others."""
        for correction in self.corrections:
            if correction.is_of_the_batch == of_the_batch:
                result = correction.tensor(correction.with_given(offered), weights.shape)
                weights = weights * result.detach().to(weights.dtype)
        return weights


def choice(chosen: Variant, result: object, *shapes: Size) -> Tensor | Selection:
    """`result`, which a filter of the batch returned. Raises DataError unless it is a mask of one of `shapes`, or a `Selection` whose masks
    have the last one."""
    if isinstance(result, Selection):
        return Selection(chosen.mask(result.gradient_NT, shapes[-1]), chosen.mask(result.denominator_NT, shapes[-1]))
    return chosen.mask(result, *shapes)


def token_losses(loss: Variant, offered: Mapping[str, Any], *, shape: Size) -> TokenLosses:
    """The losses per token of these tensors. Raises DataError if a user's loss fails or returns another type or shape."""
    result = loss.with_given(offered)
    losses = result if isinstance(result, TokenLosses) else TokenLosses(result)
    loss.tensor(losses.losses_BT, shape)
    return losses
