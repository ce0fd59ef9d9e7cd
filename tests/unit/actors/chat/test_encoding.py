import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from actors.chat.encoding import TextEncoder
from actors.chat.turns import Turns
from cluster.contracts.errors import DataError
from tests.models import make_tokenizer
from tests.unit.actors.chat.families import tokenizer_of, turns_of


def tokens(name, token_ids):
    return " ".join(tokenizer_of(name).convert_ids_to_tokens(token_ids))


@pytest.mark.parametrize(
    ("name", "begun", "gone_on"), [("llama2", "▁the", "the"), ("mistral", "▁the", "the"), ("qwen3", "the", "the")]
)
def test_text_that_goes_on_gets_no_space_of_its_own(name, begun, gone_on):
    encoder = turns_of(name).encoder
    assert tokens(name, encoder.encode("the")) == begun
    assert tokens(name, encoder.encode_on("the")) == gone_on


@pytest.mark.parametrize(
    ("name", "puts_space_first"), [("llama2", True), ("mistral", True), ("qwen3", False), ("falcon", False)]
)
def test_a_tokenizer_that_puts_a_space_first_is_known_and_cut_cleanly(name, puts_space_first):
    encoder = turns_of(name).encoder
    assert encoder.puts_space_first is puts_space_first
    assert encoder.cuts_cleanly


def test_the_space_that_a_text_has_itself_is_kept():
    encoder = turns_of("mistral").encoder
    assert tokens("mistral", encoder.encode_on(" the")) == "▁the"
    assert tokens("mistral", encoder.encode_on("</s> the")) == "</s> ▁the"


def test_a_cut_that_merges_reach_across_is_not_clean():
    """Every character merges with every anchor, and a word always begins with a space."""
    characters = [*map(chr, range(33, 127)), "\n", "▁"]
    merges = [(anchor, other) for anchor in (".", "x", "1", "\n", ":") for other in characters]
    pieces = ["<unk>", *characters, *dict.fromkeys("".join(pair) for pair in merges)]
    core = Tokenizer(models.BPE({piece: index for index, piece in enumerate(pieces)}, merges, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    core.decoder = decoders.Metaspace()
    encoder = TextEncoder(PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>"), template="")
    assert encoder.puts_space_first and not encoder.cuts_cleanly


def test_special_tokens_and_added_ones_that_the_template_writes_are_control_tokens():
    controls = turns_of("olmo").encoder.controls
    assert [*controls] == ["<|endoftext|>"], "runs of spaces are text"
    assert {"<tool_call>", "</think>", "<|im_end|>"} <= {*turns_of("qwen3").encoder.controls}
    assert "<tool_call>" not in TextEncoder(tokenizer_of("qwen3"), template="{{ messages }}").controls


def test_control_tokens_are_found_where_they_overlap():
    core = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    core.add_special_tokens([AddedToken("<a<", normalized=False), AddedToken("<a>", normalized=False)])
    encoder = TextEncoder(PreTrainedTokenizerFast(tokenizer_object=core), template="")
    assert encoder.cut_inside("<a<a>", "|") == "<|a<|a>"


@pytest.mark.parametrize("name", ["qwen25", "gemma", "llama2"])
def test_ids_that_go_on_keep_the_space_before_their_first_word(name):
    encoder = turns_of(name).encoder
    assert encoder.decode_on(encoder.encode_on(" the a")) == " the a"
    assert encoder.decode_on([]) == ""


def test_a_character_that_the_vocabulary_lacks_is_no_control_token():
    encoder = TextEncoder(make_tokenizer(), template="")
    assert encoder.control_ids(encoder.encode("é")) == []
    assert encoder.writes_control("<unk>"), "but nobody may write it"


def test_a_control_token_of_one_character_cannot_be_written_as_text():
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["\u2402"]})
    assert TextEncoder(tokenizer, template="").unsplittable == ("\u2402",)
    assert turns_of("qwen3").encoder.unsplittable == ()


def test_a_text_that_a_normalizer_makes_a_control_token_is_cut_as_well():
    tokenizer = make_tokenizer(chat_template="{% for m in messages %}{{ m.content }}<end>{% endfor %}")
    tokenizer.backend_tokenizer.normalizer = normalizers.NFKC()
    tokenizer.add_tokens([AddedToken("<end>", normalized=True)])
    wide = "\uff1cend\uff1e"
    end = tokenizer.convert_tokens_to_ids("<end>")
    assert tokenizer(wide).input_ids == [end]
    suffix = Turns(tokenizer, stop_token_ids=[end]).suffix([{"role": "user", "content": wide}])
    assert tokenizer.convert_ids_to_tokens(suffix.token_ids) == ["<end>", "<", "e", "n", "d", ">", "<end>"]


def test_a_message_that_cannot_be_written_without_a_control_token_is_refused():
    tokenizer = make_tokenizer(chat_template="{% for m in messages %}{{ m.content }}<eos>{% endfor %}")
    tokenizer.add_special_tokens({"additional_special_tokens": ["\u2402"]})
    turns = Turns(tokenizer, stop_token_ids=[1])
    with pytest.raises(
        DataError, match=r"has control tokens .\u2402. in its text that look like the chat template's own"
    ):
        turns.suffix([{"role": "user", "content": "a \u2402"}])
