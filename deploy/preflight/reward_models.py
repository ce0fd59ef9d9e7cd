"""The reward models: each is a classifier that is pinned and reads text as the run gives it. No weights are loaded."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cluster.contracts.config import RewardConfig
from cluster.contracts.errors import DataError
from deploy.preflight.model import check_folder

if TYPE_CHECKING:
    from actors.reward_model import Reading


@dataclass(frozen=True, slots=True, kw_only=True)
class StandIn:
    """A reward model without its weights."""

    labels: tuple[str, ...]
    reading: "Reading"

    def scores(self, columns: Mapping[str, Any], *, prompt: str, completion: str) -> dict[str, float] | str:
        """0 for every label of what the model can read, or why it cannot: a judge that names no label of it fails on that too."""
        try:
            self.reading.token_ids(columns, prompt=prompt, completion=completion)
        except DataError as error:
            return str(error)
        return dict.fromkeys(self.labels, 0.0)


def stand_ins(reward: RewardConfig) -> dict[str, StandIn]:
    """By name. Raises ConfigError for a model that is no classifier, is not pinned, or lacks the template that it needs."""
    from actors.reward_model import Reading
    from learner.model.sequence_classification import classifier_config, labels_of, longest_of

    found = dict[str, StandIn]()
    for name, model in reward.models.items():
        field = f"reward.models.{name}"
        check_folder(model.path, field=f"{field}.path")
        config = classifier_config(model, field=field)
        reading = Reading(model, max_tokens=longest_of(config), field=field)
        found[name] = StandIn(labels=labels_of(config), reading=reading)
    return found
