from actors.chat.formatter import ChatFormatter
from cluster.contracts.environment_config import EpisodesConfig
from deploy.preflight.chat import chat_rows
from tests.models import make_tokenizer
from tests.unit.actors.chat.families import FAMILIES, tokenizer_of


def rows(tokenizer, *, stops=(), **episodes):
    stop_token_ids = tokenizer.convert_tokens_to_ids([*stops])
    formatter = ChatFormatter(tokenizer, max_context=64, stop_token_ids=stop_token_ids)
    return [row[1:] for row in chat_rows(formatter, EpisodesConfig.model_validate(episodes))]


def rows_of(name, **episodes):
    return rows(tokenizer_of(name), stops=FAMILIES[name].stops, **episodes)


def test_a_model_without_a_template_has_no_chat_section():
    assert rows(make_tokenizer()) == []


def test_three_lines_tell_what_is_exact():
    assert rows_of("qwen3") == [
        ("turns", r"exact; a reply begins with '<|im_start|>assistant\n' and ends with '<|im_end|>'; system messages"),
        (
            "history",
            "stays as sampled, although a user's message makes the template rewrite earlier turns: earlier reasoning is dropped",
        ),
        (
            "tools",
            "answers exact, several answers in a row; several calls a turn, read by a parser made from the chat template",
        ),
    ]


def test_what_the_run_says_of_its_episodes_is_what_it_does():
    found = dict(rows_of("qwen3", history="template", parser="my_parsers:read"))
    assert found == {
        "turns": dict(rows_of("qwen3"))["turns"],
        "history": "a new segment begins where a user's message makes the template rewrite earlier turns: earlier reasoning is dropped",
        "tools": "answers exact, several answers in a row; calls are read by episodes.parser='my_parsers:read'",
    }
    assert dict(rows_of("pythonic", parser="my_parsers:read"))["tools"] == found["tools"]


def test_templates_with_less_of_a_frame_are_told_in_the_same_line():
    assert (
        dict(rows_of("llama2"))["turns"]
        == "exact; a reply begins with nothing of its own and ends with ' </s>'; system messages"
    )
    assert dict(rows_of("falcon"))["turns"].endswith("and ends with no stop token; system messages")
    assert dict(rows_of("gemma"))["turns"].endswith("; no system messages")


def test_what_is_not_exact_says_why():
    assert dict(rows_of("echo"))["turns"].startswith("not exact: the chat template cannot continue after a turn")
    assert dict(rows_of("gemma"))["tools"] == "not supported: the chat template does not show tools to the model"
    assert dict(rows_of("pythonic"))["tools"].startswith(
        "answers exact, several answers in a row; calls cannot be read: no parser"
    )


def test_a_template_that_takes_no_message_is_no_problem_of_a_run_of_plain_texts():
    assert rows(make_tokenizer(chat_template="{{ raise_exception('never') }}"))[0][1].startswith("not supported: ")


def test_a_control_token_that_no_message_may_hold_is_named():
    tokenizer = make_tokenizer(chat_template="{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}")
    tokenizer.add_special_tokens({"additional_special_tokens": ["\u2402"]})
    assert ("note", "no message may contain '\u2402', which cannot be encoded as plain text") in rows(tokenizer)
