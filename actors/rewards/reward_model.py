"""Reward by a reward model: one output of a sequence classifier that the run hosts (`reward.models`)."""

from cluster.contracts.errors import DataError
from cluster.contracts.types import Scores


def reward_model(*, scores: Scores, model: str, label: str | None = None) -> float:
    """The model's score, before any softmax or sigmoid.

    `model` is a name of `reward.models`. `label` is one of the model's labels; a model with one output needs none. Raises DataError for a
    completion without a score, because it is too long for the model or its chat template refuses it. Source:
    `AutoModelForSequenceClassification` of transformers. Peers: TRL and OpenRLHF reward models, verl `reward_model`
    """
    found = scores.get(model, f"no scores of the reward model {model!r} came with this group")
    if isinstance(found, str):
        raise DataError(f"reward.models.{model}: {found}")
    if label is None and len(found) > 1:
        raise DataError(f"reward.models.{model} has {len(found)} labels ({', '.join(found)}); choose one as label")
    wanted = next(iter(found)) if label is None else label
    if wanted not in found:
        raise DataError(f"reward.models.{model} has no label {wanted!r}; it has: {', '.join(found)}")
    return found[wanted]
