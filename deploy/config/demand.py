"""What a run's configuration asks of a cluster."""

from collections.abc import Collection

from cluster.contracts.config import RunConfig
from cluster.supervision.placement import Demand


def demand_of(config: RunConfig, *, needs: Collection[str]) -> Demand:
    """`needs` is what the objective asks for (`Objective.needs`): a loss of the user's may want reference log-probs though the KL
    has no coefficient.
    """
    return Demand(
        learner=config.learner,
        rollout=config.rollout,
        reference=config.reference if needs_reference(config, needs=needs) else None,
        elastic=config.elastic,
        takes_turns=config.buffer.max_off_policy_steps == 0,
    )


def needs_reference(config: RunConfig, *, needs: Collection[str]) -> bool:
    """True when something computes with reference log-probs that the learner cannot make itself from an adapter switched off."""
    is_base = config.learner.lora is not None and not (config.reference.path or config.reference.by_source)
    return "reference_logprobs" in needs and not is_base
