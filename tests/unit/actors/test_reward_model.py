"""A reward model reads each trajectory in its own tokens; what it cannot read has a reason, and never a zero."""

import json

import pytest
from transformers import AutoTokenizer, LlamaConfig

from actors.reward_model import Reading, RewardModel
from actors.reward_service.service import Told, conversation
from cluster.contracts.errors import ConfigError
from cluster.contracts.reward_config import RewardModelConfig
from cluster.contracts.schema import with_columns
from tests.models import make_tokenizer
from tests.unit.actors.batches import batch_of

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "[{{ m.role[0] }}]{{ m.content }}{% endfor %}{{ eos_token }}"
)
MESSAGES = {"messages": [{"role": "user", "content": "hi"}]}


def reading(folder, *, template=None, max_tokens=64, vocab_size=32000, **settings) -> Reading:
    make_tokenizer(adds_bos=True, chat_template=template).save_pretrained(folder)
    names = {number: f"label {number}" for number in range(12)}
    LlamaConfig(
        max_position_embeddings=max_tokens,
        vocab_size=vocab_size,
        architectures=["LlamaForSequenceClassification"],
        id2label=names,
    ).save_pretrained(folder)
    config = RewardModelConfig.model_validate({"path": str(folder), **settings})
    return Reading(config, field="reward.models.helpful")


def trajectory(columns, *, prompt, completion) -> Told:
    messages = conversation(columns, prompt=prompt, completion=completion)
    return Told(prompt=prompt, completion=completion, messages=messages)


@pytest.mark.parametrize(
    ("text", "columns", "prompt", "expected"),
    [
        ("messages", MESSAGES, "hi?", "<bos>[u]hi[a]no<eos>"),
        ("messages", {}, "hi?", "<bos>[u]hi?[a]no<eos>"),
        ("prompt_and_completion", MESSAGES, "hi?", "<bos>hi?no"),
        ("prompt_and_completion", MESSAGES, "<bos>hi?", "<bos>hi?no"),
        ("completion", MESSAGES, "hi?", "<bos>no"),
    ],
)
def test_each_text_has_one_bos_be_it_the_templates_or_the_tokenizers(tmp_path, text, columns, prompt, expected):
    ids = reading(tmp_path, template=TEMPLATE, text=text).read(trajectory(columns, prompt=prompt, completion="no"))
    assert AutoTokenizer.from_pretrained(tmp_path).decode(ids) == expected


def test_a_text_that_is_too_long_or_refused_by_the_template_says_so(tmp_path):
    own = reading(tmp_path, template=TEMPLATE, max_tokens=12)
    assert len(own.read(trajectory({}, prompt="", completion="four"))) == 12  # [u], [a], four, bos and eos
    assert own.read(trajectory({}, prompt="ab", completion="four")) == "14 tokens, and the model takes 12"
    refused = own.read(trajectory({"messages": [{"role": "tool", "content": "x"}]}, prompt="", completion="four"))
    assert refused == "its chat template refuses: TemplateError: no tools"


def test_a_token_that_the_model_has_no_embedding_for_says_so(tmp_path):
    own = reading(tmp_path, text="completion", vocab_size=90)
    assert own.read(trajectory({}, prompt="", completion="four")) == [0, 19, 28, 34, 31]
    assert (
        own.read(trajectory({}, prompt="", completion="]"))
        == "its tokenizer writes token id 90, and the model knows 90"
    )


def test_labels_are_in_the_order_of_the_models_outputs(tmp_path):
    assert reading(tmp_path, template=TEMPLATE).labels == tuple(f"label {number}" for number in range(12))


def test_messages_need_a_template(tmp_path):
    with pytest.raises(
        ConfigError, match=r"reward.models.helpful.text='messages': .* has no chat template; use prompt"
    ):
        reading(tmp_path)


def test_a_trajectory_that_cannot_be_read_has_its_reason_and_the_others_their_scores(tmp_path):
    class Lengths:
        def score(self, token_ids):
            return [[float(len(ids)), *range(11)] for ids in token_ids]

    batch = batch_of(["a", "b", "c"])
    batch = with_columns(batch, completion_text=["xy", "much too long", "z"])
    scored = RewardModel(Lengths(), reading=reading(tmp_path, text="completion", max_tokens=5)).score(batch)
    assert scored[1] == "14 tokens, and the model takes 5"
    assert [each["label 0"] for each in (scored[0], scored[2])] == [3.0, 2.0] and scored[0]["label 11"] == 10


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("messages", "<bos>[u]1[a]one[u]2[a]two<eos>"),
        ("completion", "<bos>two"),
        ("prompt_and_completion", "<bos>q two"),
    ],
)
def test_of_an_episode_it_reads_who_said_what_and_its_own_prompt(tmp_path, text, expected):
    """The first row is another episode, which began otherwise."""
    turns = [("user", "1"), ("assistant", "one"), ("user", "2"), ("assistant", "two")]
    messages = json.dumps([{"role": role, "content": content} for role, content in turns])
    batch = with_columns(
        batch_of(["", "one user 2 two"]), messages=['[{"role": "user", "content": "0"}]', messages],
        prompt_text=["other ", "q "],
    )  # fmt: skip
    own = reading(tmp_path, template=TEMPLATE, text=text)
    seen = []

    class Seen:
        def score(self, token_ids):
            seen.extend(token_ids)
            return [[0.0] * 12 for _ in token_ids]

    RewardModel(Seen(), reading=own).score(batch)
    assert AutoTokenizer.from_pretrained(tmp_path).decode(seen[-1]) == expected
