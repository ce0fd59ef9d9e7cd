"""Prompts beyond `max_prompt_tokens`: an error with both numbers, dropped, or cut at one side. A token of these tests is a character."""

import pytest

from actors.chat.formatter import ChatFormatter
from actors.chat.limit import PromptLimit
from cluster.contracts.errors import DataError
from cluster.contracts.prompts_config import PromptsConfig
from cluster.contracts.types import Prompt
from tests.embedded_models.quickstart import make_tokenizer as byte_level_tokenizer
from tests.models import make_tokenizer

TEMPLATE = "{% for m in messages %}<{{ m.content }}>{% endfor %}"


def limited(prompt, on_long_prompt, *, most=6, template=None):
    config = PromptsConfig.model_validate({"name": "file", "max_prompt_tokens": most, "on_long_prompt": on_long_prompt})
    return PromptLimit(config, ChatFormatter(make_tokenizer(chat_template=template), max_context=9), field="prompts")(
        prompt
    )


def said(*contents):
    roles = ("system", "user", "assistant", "user")[-len(contents) :]
    return Prompt(
        prompt_id="p", messages=[{"role": role, "content": each} for role, each in zip(roles, contents, strict=True)]
    )


@pytest.mark.parametrize(("rule", "text"), [("truncate_start", "456789"), ("truncate_end", "123456"), ("drop", None)])
def test_a_text_is_cut_at_the_side_that_the_rule_names(rule, text):
    fitted = limited(Prompt(prompt_id="p", text="123456789"), rule)
    assert (fitted and fitted.text) == text, "9 tokens, of which 6 stay"


@pytest.mark.parametrize(("rule", "kept"), [("truncate_start", "34"), ("truncate_end", "12")])
def test_of_messages_the_first_users_is_cut_and_the_template_stays_whole(rule, kept):
    fitted = limited(said("s", "1234", "a", "u"), rule, most=13, template=TEMPLATE)
    assert [message["content"] for message in fitted.messages] == ["s", kept, "a", "u"], "<s><1234><a><u> has 15 tokens"


def test_of_text_and_messages_that_differ_what_the_model_reads_is_cut():
    both = Prompt(prompt_id="p", text="Q: 1234 A:", messages=[{"role": "user", "content": "1234"}])
    chat = limited(both, "truncate_end", most=4, template=TEMPLATE)
    assert chat.messages == [{"role": "user", "content": "12"}] and chat.text == "Q: 1234 A:", "<1234> has 6 tokens"
    plain = limited(both, "truncate_start", most=7)
    assert plain.text == "1234 A:" and plain.messages == both.messages


@pytest.mark.parametrize(
    ("text", "rule", "kept"),
    [
        ("\U00013000abc", "truncate_start", "abc"),
        ("ab\U00013000\U00013000", "truncate_start", "\U00013000"),
        ("\U00013000\U00013000ab", "truncate_end", "\U00013000"),
    ],
)
def test_a_character_of_several_tokens_is_cut_as_a_whole(text, rule, kept):
    tokenizer = byte_level_tokenizer(["ab"])
    assert len(tokenizer(text).input_ids) > 5, "a token a byte, four of the hieroglyph"
    config = PromptsConfig.model_validate({"name": "file", "max_prompt_tokens": 5, "on_long_prompt": rule})
    fitted = PromptLimit(config, ChatFormatter(tokenizer, max_context=64), field="prompts")(
        Prompt(prompt_id="p", text=text)
    )
    assert fitted.text == kept


def test_a_prompt_at_the_limit_stays_as_it_is():
    prompt = Prompt(prompt_id="p", text="123456")
    assert limited(prompt, "error") is limited(prompt, "drop") is limited(prompt, "truncate_end") is prompt


def test_an_error_names_the_prompt_and_both_numbers_also_beyond_the_context():
    with pytest.raises(DataError, match=r"prompt 'p' has 12 tokens, and prompts\.max_prompt_tokens is 6"):
        limited(Prompt(prompt_id="p", text="1" * 12), "error")


@pytest.mark.parametrize("rule", ["error", "drop", "truncate_end"])
def test_a_prompt_that_the_template_refuses_stays_as_it_is_so_that_its_worker_refuses_that_group_alone(rule):
    prompt = said("1234")
    assert limited(prompt, rule, template="{{ raise_exception('no users') }}") is prompt


def test_what_cannot_be_cut_enough_is_an_error():
    with pytest.raises(
        DataError, match=r"has 11 tokens, .* is 4; its text or first user message is too short .*on_long_prompt: drop"
    ):
        limited(said("12", "3", "", ""), "truncate_end", most=4, template=TEMPLATE)
