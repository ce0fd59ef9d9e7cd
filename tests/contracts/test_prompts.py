"""What every prompt source promises; a new file in actors/prompts joins by an example here."""

import json

import pytest

from cluster.contracts.plugins import PROMPTS, Plugin, names, prompt_source
from cluster.contracts.types import Prompt
from tests.unit.actors.prompts.saved_dataset import save


def make_source(name, folder, monkeypatch):
    if name == "file":
        path = folder / "prompts.jsonl"
        path.write_text('{"prompt": "1 + 1 =", "answer": "2"}\n{"messages": [{"role": "user", "content": "2 + 2"}]}\n')
        params = {"path": str(path)}
    elif name == "dataset":
        if not (folder / "saved").exists():
            save(
                folder / "saved",
                [{"prompt": "1 + 1 =", "answer": "2"}, {"prompt": "2 + 2 =", "answer": "4"}],
                monkeypatch,
            )
        params = {"path": str(folder / "saved")}
    else:
        params = {
            "reasoning_gym": {"task": "chain_sum", "size": 5, "seed": 3},
            "repeat": {"message": "Guess my number.", "size": 3},
        }[name]
    return prompt_source(Plugin(name=name, params=params), field="prompts")


@pytest.fixture(params=names(PROMPTS))
def source(request, tmp_path, monkeypatch):
    return make_source(request.param, tmp_path, monkeypatch)


def test_every_index_has_a_prompt_and_no_other_does(source):
    assert len(source) > 0
    assert all(isinstance(source[index], Prompt) for index in range(len(source)))
    for index in (-1, len(source)):
        with pytest.raises(IndexError):
            source[index]


def test_a_prompt_has_a_text_or_messages(source):
    for index in range(len(source)):
        assert source[index].text or source[index].messages


def test_an_index_always_means_the_same_prompt(source):
    assert source[1] == source[1]


def test_ids_tell_prompts_apart(source):
    assert len({source[index].prompt_id for index in range(len(source))}) == len(source)


def test_columns_survive_json(source):
    for index in range(len(source)):
        assert json.loads(json.dumps(source[index].columns)) == source[index].columns


@pytest.mark.parametrize("name", names(PROMPTS))
def test_two_sources_of_the_same_parameters_agree(name, tmp_path, monkeypatch):
    one, other = (make_source(name, tmp_path, monkeypatch) for _ in range(2))
    assert [one[i] for i in range(len(one))] == [other[i] for i in range(len(other))]
