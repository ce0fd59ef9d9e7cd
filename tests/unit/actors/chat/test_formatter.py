import copy

import pytest

from actors.chat.formatter import ChatFormatter
from actors.reasoning import after_reasoning
from cluster.contracts.config import ModelConfig
from cluster.contracts.errors import ConfigError, DataError
from cluster.contracts.types import Prompt
from tests.models import make_tiny_model, make_tokenizer
from tests.unit.actors.chat.families import FAMILIES, tokenizer_of

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
TEMPLATE_WITH_BOS = "{{ bos_token }}" + TEMPLATE
BOS, EOS = 0, 1


def formatter(*, max_context: int = 64, **tokenizer) -> ChatFormatter:
    return ChatFormatter(make_tokenizer(**tokenizer), max_context=max_context)


def asked(content: str) -> Prompt:
    return Prompt(prompt_id="p", messages=[{"role": "user", "content": content}])


def test_messages_go_through_the_chat_template():
    assert formatter(chat_template=TEMPLATE).encode(asked("1+1=")).text == "[user]1+1=[assistant]"


def test_without_a_template_a_single_message_is_plain_text():
    assert formatter().encode(asked("1+1=")).text == "1+1="


def test_without_a_template_a_dialogue_names_its_roles():
    prompt = Prompt(prompt_id="p", messages=[{"role": "system", "content": "add"}, {"role": "user", "content": "1+1="}])
    assert formatter().encode(prompt).text == "system: add\nuser: 1+1=\nassistant:"


def test_text_is_never_put_through_a_template():
    assert formatter(chat_template=TEMPLATE).encode(Prompt(prompt_id="p", text="1+1=")).text == "1+1="


def test_a_prompt_that_is_both_goes_through_the_template_where_the_model_has_one():
    prompt = Prompt(prompt_id="p", text="1+1=", messages=[{"role": "user", "content": "1+1="}])
    assert formatter(chat_template=TEMPLATE).encode(prompt).text == "[user]1+1=[assistant]"
    assert formatter().encode(prompt).text == "1+1="
    assert formatter(chat_template="").encode(prompt).text == "1+1=", "an empty template is none"


@pytest.mark.parametrize("template", [None, TEMPLATE, TEMPLATE_WITH_BOS])
def test_a_tokenizer_that_adds_a_bos_gets_exactly_one(template):
    token_ids = formatter(adds_bos=True, chat_template=template).encode(asked("1+1=")).token_ids
    assert token_ids[0] == BOS
    assert token_ids.count(BOS) == 1


def test_a_tokenizer_that_adds_no_bos_gets_none():
    assert BOS not in formatter().encode(asked("1+1=")).token_ids


def test_a_prompt_that_fills_the_context_is_refused_by_name():
    with pytest.raises(DataError, match="prompt 'p' has 8 tokens, and the context takes 8"):
        formatter(max_context=8).encode(asked("12345678"))


def test_empty_prompts_are_refused_by_name():
    with pytest.raises(DataError, match="prompt 'p' is empty") as caught:
        formatter().encode(Prompt(prompt_id="p", text=""))
    assert caught.value.prompt_id == "p"
    with pytest.raises(DataError, match="prompt 'p' has neither"):
        formatter().encode(Prompt(prompt_id="p"))


def test_message_parts_need_a_template():
    prompt = Prompt(prompt_id="p", messages=[{"role": "user", "content": [{"type": "text", "text": "1"}]}])
    with pytest.raises(DataError, match="content is list"):
        formatter().encode(prompt)


def test_message_parts_need_a_template_that_reads_them():
    prompt = Prompt(prompt_id="p", messages=[{"role": "user", "content": [{"type": "text", "text": "1"}]}])
    with pytest.raises(DataError, match=r"prompt 'p' .* has a content of parts, .* give the content as one text"):
        formatter(chat_template=TEMPLATE).encode(prompt)
    reads_parts = "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
    assert formatter(chat_template=reads_parts).encode(prompt).text == "1"


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ raise_exception('system first') }}", "system first"),
        ("{{ messages[3].content.text }}", "UndefinedError"),
        ("{% for m in messages %}", "TemplateSyntaxError"),
        ("{{ 'a' + messages[0] }}", "TypeError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
    ],
)
def test_a_prompt_that_does_not_go_through_the_template_is_refused_by_name(template, why):
    with pytest.raises(DataError, match="prompt 'p' does not go through: the chat template .*" + why):
        formatter(chat_template=template).encode(asked("1+1="))


def test_a_system_message_alone_goes_through_where_an_environment_may_add_the_users_that_the_template_wants():
    """As Qwen3.5: "No user query found in messages"."""
    wants_user = "{% if messages | selectattr('role', 'equalto', 'user') | list == [] %}{{ raise_exception('no user') }}{% endif %}"
    chat = formatter(chat_template=wants_user + TEMPLATE)
    prompt = Prompt(prompt_id="p", messages=[{"role": "system", "content": "1+1="}])
    assert chat.encode_unasked(prompt).text == "[system]1+1=[user]Hi[assistant]"
    assert chat.num_tokens(prompt) == len(chat.encode_unasked(prompt).token_ids)
    with pytest.raises(DataError, match="no user"):
        chat.encode(prompt)
    with pytest.raises(DataError, match="no user"):
        chat.encode_unasked(Prompt(prompt_id="p", messages=[{"role": "assistant", "content": "1+1="}]))
    assert formatter(chat_template=TEMPLATE).encode_unasked(prompt).text == "[system]1+1=[assistant]"


def test_a_completion_that_the_template_does_not_take_after_its_prompt_is_refused_by_name():
    prompt = Prompt(prompt_id="p", messages=[*asked("1+1=").messages, {"role": "assistant", "content": "2"}])
    with pytest.raises(DataError, match=r"prompt 'p' .* take turns"):
        of_family("gemma").encode_completion(prompt, "2")


def test_a_dialogue_without_roles_needs_a_template():
    prompt = Prompt(prompt_id="p", messages=[{"content": "add"}, {"content": "1+1="}])
    with pytest.raises(DataError, match="prompt 'p' has a message without a role"):
        formatter().encode(prompt)


def test_decoded_text_leaves_special_tokens_out():
    tokenizer = make_tokenizer()
    assert formatter().decode([*tokenizer("a b").input_ids, EOS]) == "a b"


def with_special_tags(name: str) -> ChatFormatter:
    """As users make them before a cold start."""
    tokenizer = copy.deepcopy(tokenizer_of(name))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    return ChatFormatter(tokenizer, max_context=64)


@pytest.mark.parametrize("name", ["chatml", "gemma", "qwen25"])
def test_the_tags_of_reasoning_stay_in_decoded_text_where_they_are_special(name: str):
    """Judges took thoughts for answers, and `format` never paid."""
    chat, said = with_special_tags(name), "<think>\n5?\n</think>\n\nIt is 4"
    token_ids = chat.encode_completion(Prompt(prompt_id="p", text="2+2="), said)
    assert "".join(chat.shown(token_ids)).startswith("<think>\n5?") and token_ids[-1] in chat.stop_token_ids
    assert chat.decode(token_ids) == said
    assert after_reasoning(chat.decode(token_ids)) == "\n\nIt is 4"
    # vLLM finds no stop text in special tokens.
    assert chat.searched(token_ids) == "\n5?\n\n\nIt is 4"


def of_family(name: str) -> ChatFormatter:
    tokenizer = tokenizer_of(name)
    stops = [tokenizer.get_vocab()[stop] for stop in FAMILIES[name].stops]
    return ChatFormatter(tokenizer, max_context=128, stop_token_ids=stops)


def test_the_answer_of_a_model_with_channels_is_its_final_one():
    """Judges got 'analysis2 and 2.assistantfinal4'."""
    said = "<|channel|>analysis<|message|>2 and 2.<|end|><|start|>assistant<|channel|>final<|message|>4<|return|>"
    text = of_family("harmony").decode(tokenizer_of("harmony")(said, add_special_tokens=False).input_ids)
    assert text == "<think>2 and 2.</think>4"
    # Other tokenizers' `<|end|>` ends a turn, and the marks are text.
    phi = of_family("phi3")
    assert phi.decode(tokenizer_of("phi3")("4<|channel|><|end|>", add_special_tokens=False).input_ids) == "4<|channel|>"


@pytest.mark.parametrize(
    ("name", "first", "last"),
    [
        ("qwen25", "a", "<|im_end|>"),
        ("zephyr", "a", "</s>"),  # this tokenizer puts a space before a text that begins
        ("gemma", "a", "<end_of_turn>"),
        ("phi3", "▁a", "<|end|>"),  # as after all of its control tokens
        ("llama2", "▁a", "</s>"),  # these templates write a space before it
        ("falcon", "Ġa", "<|endoftext|>"),
    ],
)
def test_a_given_completion_begins_and_ends_as_the_template_writes_it(name: str, first: str, last: str):
    chat = of_family(name)
    begun, *_, ended = chat.encode_completion(asked("x"), "a name")
    assert tokenizer_of(name).convert_ids_to_tokens([begun, ended]) == [first, last]


_ANALYSIS = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>4"


@pytest.mark.parametrize(
    ("name", "completion", "sampled"),
    [
        # These prompts end with `<think>\n`.
        ("qwen35", "4", "\n</think>\n\n4<|im_end|>"),
        ("qwen35", "<think>\nhm\n</think>\n\n4", "hm\n</think>\n\n4<|im_end|>"),
        ("qwen35", "hm\n</think>\n\n4", "hm\n</think>\n\n4<|im_end|>"),
        ("qwen35", "<think>\nhm", "hm<|im_end|>"),
        ("qwen35", "<tool_call>", "\n</think>\n\n<tool_call><|im_end|>"),
        ("deepseek_r1", "4", "\n</think>\n\n4<｜end▁of▁sentence｜>"),
        ("deepseek_r1", "<think>hm</think>4", "hm</think>4<｜end▁of▁sentence｜>"),
        # With these templates the model opens the reasoning itself.
        ("qwen3", "4", "<think>\n\n</think>\n\n4<|im_end|>"),
        ("qwen3", "<think>\nhm\n</think>\n\n4", "<think>\nhm\n</think>\n\n4<|im_end|>"),
        ("glm45", "4", "\n<think></think>\n4<|endoftext|>"),
        ("glm45", "<think>hm</think>\n4", "\n<think>hm</think>\n4<|endoftext|>"),
        ("glm45", "\n<think>hm</think>\n4", "\n<think>hm</think>\n4<|endoftext|>"),
        # It names the channel, too.
        ("harmony", "4", "<|channel|>final<|message|>4<|return|>"),
        ("harmony", _ANALYSIS, f"{_ANALYSIS}<|return|>"),
        ("qwen25", "<think>hm</think>4", "<think>hm</think>4<|im_end|>"),
    ],
)
def test_a_given_completion_is_tokens_that_the_model_would_have_sampled(name: str, completion: str, sampled: str):
    """Seen before: `<think>` twice, an answer inside the thoughts, and words without a channel."""
    chat = of_family(name)
    assert "".join(chat.shown(chat.encode_completion(asked("x"), completion))) == sampled


@pytest.mark.parametrize("completion", ["4", "4<|endoftext|>", "4<|endoftext|><|im_end|>"])
def test_a_given_completion_has_the_templates_text_between_the_words_and_the_stop_token_once(completion: str):
    """As Cohere's `<|END_RESPONSE|>`."""
    tokenizer = copy.deepcopy(tokenizer_of("chatml"))
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.content + '<|endoftext|>' * (m.role == 'assistant') + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>{% endif %}"
    )
    chat = ChatFormatter(tokenizer, max_context=64)
    assert chat.shown(chat.encode_completion(asked("x"), completion)) == ("4", "<|endoftext|>", "<|im_end|>")


def test_a_given_completion_of_a_text_that_opens_the_reasoning_does_not_open_it_again():
    chat, prompt = of_family("zephyr"), Prompt(prompt_id="p", text="1+1=? <think>")
    assert chat.encode_completion(prompt, "<think>2</think>2") == chat.encode_completion(prompt, "2</think>2")


@pytest.mark.parametrize("completion", ["e", "im", "end", "user", " a", "\n"])
def test_a_given_completion_that_stands_in_the_template_too_ends_as_any_other(completion: str):
    chat = of_family("qwen25")
    token_ids = chat.encode_completion(asked("x"), completion)
    assert chat.shown(token_ids)[-1] == "<|im_end|>" and "".join(chat.shown(token_ids[:-1])) == completion


def test_a_given_completion_of_a_text_goes_on_where_that_ends():
    chat, prompt = of_family("zephyr"), Prompt(prompt_id="p", text="1+1=")
    token_ids = [*chat.encode(prompt).token_ids, *chat.encode_completion(prompt, "2")]
    assert chat.decode(token_ids) == "1+1=2"


def test_a_given_completion_that_ends_itself_ends_once():
    chat = of_family("qwen25")
    assert chat.encode_completion(asked("x"), "a<|im_end|>") == chat.encode_completion(asked("x"), "a")


def test_stop_tokens_are_the_tokenizers_eos_and_the_models(tmp_path):
    path = make_tiny_model(tmp_path, pad_is_eos=True)
    (path / "generation_config.json").write_text('{"eos_token_id": [1, 5]}')
    assert ChatFormatter.load(ModelConfig(path=str(path))).stop_token_ids == (1, 5)


def test_a_template_from_the_configuration_replaces_the_tokenizers(tmp_path):
    path = make_tiny_model(tmp_path, chat_template=TEMPLATE)
    loaded = ChatFormatter.load(ModelConfig(path=str(path), chat_template="<{{ messages[0].content }}>"))
    assert loaded.encode(asked("1+1=")).text == "<1+1=>"


def test_the_context_is_the_models_or_less(tmp_path):
    path = str(make_tiny_model(tmp_path, max_context=256))
    assert ChatFormatter.load(ModelConfig(path=path)).max_context == 256
    assert ChatFormatter.load(ModelConfig(path=path, max_context=100)).max_context == 100
    with pytest.raises(ConfigError, match=r"model\.max_context=300 is beyond the model's own 256"):
        ChatFormatter.load(ModelConfig(path=path, max_context=300))


def test_a_missing_model_names_the_field_and_the_way_out(tmp_path):
    with pytest.raises(
        ConfigError, match=r"model\.path=.* It must be a Hugging Face folder|neither a folder nor a hub name"
    ):
        ChatFormatter.load(ModelConfig(path=str(tmp_path / "nothing")))
