"""Calls read by vLLM's own parsers, on what a template of that kind writes."""

import pytest

from actors.chat.calls import NamedParser, ToolCall
from actors.chat.round_trip import PROBE_TOOLS
from cluster.contracts.errors import ConfigError, DataError
from cluster.contracts.plugins import Plugin
from tests.unit.actors.chat.families import tokenizer_of

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer_of("hermes").save_pretrained(path)
    return path


def parser(folder, name: str) -> NamedParser:
    return NamedParser(Plugin(name="vllm", params={"parser": name, "tokenizer": str(folder)}))


def test_a_call_is_read_with_the_words_before_it(folder):
    said = 'Let me look.\n<tool_call>\n{"name": "zqfind", "arguments": {"text": "a cat", "count": 2}}\n</tool_call>'
    reply = parser(folder, "hermes")(said, prompt="", tools=PROBE_TOOLS)
    assert reply.calls == (ToolCall(name="zqfind", arguments={"text": "a cat", "count": 2}),)
    assert reply.text.strip() == "Let me look."


def test_words_alone_are_no_call(folder):
    assert parser(folder, "hermes")("It is 42.", prompt="", tools=PROBE_TOOLS).calls == ()


@pytest.mark.parametrize("call", ['{"name": "zqfind", "arguments": {"text": ', '{"arguments": {}}\n</tool_call>', ""])
def test_a_call_that_cannot_be_read_is_malformed_and_not_words(folder, call):
    with pytest.raises(DataError, match="a tool call is malformed: <tool_call> begins a call that hermes cannot read"):
        parser(folder, "hermes")(f"Let me look.\n<tool_call>\n{call}", prompt="", tools=PROBE_TOOLS)


def test_a_format_without_types_has_them_from_the_tools(folder):
    given = "<parameter=text>\n7\n</parameter>\n<parameter=count>\n2\n</parameter>"
    said = f"<tool_call>\n<function=zqfind>\n{given}\n</function>\n</tool_call>"
    reply = parser(folder, "qwen3_coder")(said, prompt="", tools=PROBE_TOOLS)
    assert reply.calls == (ToolCall(name="zqfind", arguments={"text": "7", "count": 2}),)


def test_an_unknown_parser_is_refused_with_the_names_there_are(folder):
    with pytest.raises(ConfigError, match=r"episodes[.]parser[.]parser='hermess' is none of vLLM's: .*hermes"):
        parser(folder, "hermess")("anything", prompt="", tools=PROBE_TOOLS)


def test_a_parser_that_vllm_only_names_is_refused_and_makes_no_reply_malformed(folder):
    with pytest.raises(
        ConfigError, match=r"episodes[.]parser[.]parser='openai' reads no text .*; name a function of yours"
    ):
        parser(folder, "openai")("It is 42.", prompt="", tools=PROBE_TOOLS)


def test_a_parameter_that_is_missing_is_named(folder):
    with pytest.raises(ConfigError, match=r"episodes[.]parser='vllm' needs parser"):
        NamedParser(Plugin(name="vllm", params={"tokenizer": str(folder)}))


def read_brackets(*, text: str, tools: list, closing: str = "]"):
    words, _, call = text.partition("[")
    name, _, rest = call.partition(" ")
    if call and closing not in rest:
        raise ValueError("the call does not end")
    return words, [{"name": name, "arguments": {"text": rest.partition(closing)[0]}}] if call else []


def test_a_function_of_a_users_reads_calls_and_its_value_error_is_a_malformed_call():
    own = NamedParser(Plugin(name=f"{__name__}:read_brackets"))
    reply = own("see [zqfind a cat]", prompt="", tools=PROBE_TOOLS)
    assert (reply.text, reply.calls) == ("see ", (ToolCall(name="zqfind", arguments={"text": "a cat"}),))
    with pytest.raises(DataError, match="a tool call is malformed: the call does not end"):
        own("see [zqfind a", prompt="", tools=PROBE_TOOLS)
