"""Which demonstrations an update gets, and what a row must have."""

import json

import pytest

from actors.chat.demonstrations import SourceDemonstrations
from cluster.contracts.algorithm_config import SftConfig
from cluster.contracts.config import ModelConfig
from cluster.contracts.errors import DataError
from tests.models import make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> ModelConfig:
    return ModelConfig(path=str(make_tiny_model(tmp_path_factory.mktemp("model"))))


def opened(
    tmp_path, model, *, batch_size: int = 2, column: str = "completion", seed: int = 0, **row
) -> SourceDemonstrations:
    rows = [{"prompt": f"{i}?", "completion": str(i)} | row for i in range(5)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in rows))
    prompts = {"name": "file", "path": str(file)}
    config = SftConfig.model_validate({"prompts": prompts, "batch_size": batch_size, "column": column})
    return SourceDemonstrations(config, model=model, seed=seed)


def test_an_epoch_shows_every_row_once_and_the_next_one_in_another_order(tmp_path, model):
    made = opened(tmp_path, model)
    shown = [row for number in range(5) for row in made.of_update(number)]
    # The tokenizer's ids of "0" to "4" are 4 to 8, and its end of sequence is 1.
    epochs = [sorted(completion for _, completion in shown[i : i + 5]) for i in (0, 5)]
    assert epochs == [[[4, 1], [5, 1], [6, 1], [7, 1], [8, 1]]] * 2
    assert shown[:5] != shown[5:]


def test_an_updates_demonstrations_depend_on_its_number_and_the_seed_alone(tmp_path, model):
    assert opened(tmp_path, model).of_update(3) == opened(tmp_path, model).of_update(3)
    orders = [[opened(tmp_path, model, seed=seed).of_update(n) for n in range(2)] for seed in range(4)]
    assert any(order != orders[0] for order in orders)


def test_a_row_without_the_completion_is_named(tmp_path, model):
    with pytest.raises(
        DataError, match=r"algorithm\.sft\.column='solution': prompt 'file/rows\.jsonl/0' has 'None'.*completion"
    ):
        opened(tmp_path, model, column="solution")
    with pytest.raises(DataError, match="shorten or drop it"):
        opened(tmp_path, model, completion="x" * 300)
