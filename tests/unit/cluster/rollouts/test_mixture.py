"""Several sources as one: shares hold at every moment, and each prompt has its source's name."""

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.contracts.errors import ConfigError, DataError
from cluster.contracts.prompts_config import PromptsConfig
from cluster.contracts.sampling_config import SamplingConfig
from cluster.rollouts.mixture import open_prompts, place
from cluster.rollouts.tickets import TicketOffice

WEIGHTS = st.lists(st.integers(1, 50), min_size=1, max_size=5)


def test_two_thirds_and_a_third_alternate():
    weights = [2, 1]
    assert [place(index, weights) for index in range(6)] == [(0, 0), (0, 1), (1, 0), (0, 2), (0, 3), (1, 1)]


@given(weights=WEIGHTS, count=st.integers(1, 400))
def test_every_source_has_its_share_at_every_moment(weights, count):
    places = [place(index, weights) for index in range(count)]
    counts = Counter(number for number, _ in places)
    for number, weight in enumerate(weights):
        assert abs(counts[number] - count * weight / sum(weights)) <= max(1, len(weights) - 1)
        assert [turn for each, turn in places if each == number] == list(range(counts[number]))


@given(sizes=WEIGHTS)
def test_by_their_sizes_every_prompt_comes_once(sizes):
    places = {place(index, sizes) for index in range(int(sum(sizes)))}
    assert places == {(number, row) for number, size in enumerate(sizes) for row in range(int(size))}


def source(folder, name, rows, **settings):
    path = folder / f"{name}.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return {"name": "file", "path": str(path), **settings}


def opened(sources, *, column="source", **settings):
    config = PromptsConfig.model_validate({"sources": sources, **settings})
    return open_prompts(config, field="prompts", source_column=column)


def texts(prefix, count):
    return [{"prompt": f"{prefix}{row}"} for row in range(count)]


def office(mixture, *, seed=7):
    return TicketOffice(source=mixture, seed=seed, trajectories_per_group=1, sampling=SamplingConfig())


def test_one_source_alone_keeps_the_order_it_always_had(tmp_path):
    config = PromptsConfig.model_validate(source(tmp_path, "old", texts("", 10)))
    desk = office(open_prompts(config, field="prompts"))
    rows = [int(desk.prompt(index).text) for index in range(20)]
    assert rows == [8, 2, 6, 3, 4, 7, 9, 1, 0, 5, 9, 6, 4, 3, 5, 7, 1, 2, 8, 0]
    assert desk.prompt(0).prompt_id == "file/old.jsonl/8" and desk.prompt(0).columns == {}


def test_each_source_has_epochs_of_its_own_and_names_its_prompts(tmp_path):
    sources = {
        "sums": source(tmp_path, "a", texts("a", 4), weight=2),
        "chat": source(tmp_path, "a-too", texts("b", 3)),
    }
    prompts = [office(opened(sources)).prompt(index) for index in range(18)]
    of = {name: [each.text for each in prompts if each.columns == {"source": name}] for name in sources}
    assert [sorted(of["sums"][start : start + 4]) for start in (0, 4, 8)] == [["a0", "a1", "a2", "a3"]] * 3
    assert [sorted(of["chat"][start : start + 3]) for start in (0, 3)] == [["b0", "b1", "b2"]] * 2
    assert {each.prompt_id.split("/")[0] for each in prompts} == {"sums", "chat"}
    assert [office(opened(sources)).prompt(index) for index in (17, 3)] == [prompts[17], prompts[3]]


def test_shares_are_whole_numbers_in_the_ratio_of_the_weights(tmp_path):
    weights = {"a": 0.5, "b": 0.2}
    mixture = opened({name: source(tmp_path, name, texts(name, 2), weight=each) for name, each in weights.items()})
    assert mixture.weights == [5, 2]


def test_held_out_prompts_of_all_sources_come_first(tmp_path):
    mixture = opened({"few": source(tmp_path, "a", texts("a", 2)), "many": source(tmp_path, "b", texts("b", 4))})
    assert [mixture[index].text for index in range(6)] == ["a0", "b0", "b1", "a1", "b2", "b3"]


def test_a_row_that_names_another_source_is_an_error_with_both_names(tmp_path):
    rows = [{"prompt": "?", "source": "gsm8k"}]
    with pytest.raises(DataError, match=r"of the source 'sums' has 'gsm8k' in its column 'source'"):
        opened({"sums": source(tmp_path, "a", rows)})[0]
    assert opened({"gsm8k": source(tmp_path, "a", rows)})[0].columns == {"source": "gsm8k"}
    other = opened({"sums": source(tmp_path, "a", rows)}, column="data_source")[0]
    assert other.columns == {"source": "gsm8k", "data_source": "sums"}


def test_the_same_prompt_stays_once_with_its_first_row(tmp_path):
    first = [{"prompt": "x", "answer": 1}, {"prompt": "y"}, {"prompt": "x", "answer": 2}]
    second = [{"messages": [{"role": "user", "content": "x"}]}, {"prompt": "y"}, {"prompt": "z"}]
    sources = {"a": source(tmp_path, "a", first), "b": source(tmp_path, "b", second, text_as="user_message")}
    mixture = opened({name: each | {"text_as": "user_message"} for name, each in sources.items()}, deduplicate=True)
    assert [source.num_duplicates for source in mixture.sources] == [1, 2]
    assert [mixture[index].columns.get("answer") for index in range(3)] == [1, None, None]
    assert [(mixture[index].messages or [{}])[0].get("content") for index in range(3)] == ["x", "y", "z"]
    with pytest.raises(IndexError):
        mixture[-1]
    with pytest.raises(ConfigError, match=r"prompts.sources.b: every prompt is one of an earlier source too"):
        opened({"a": sources["a"], "b": sources["a"]}, deduplicate=True)
