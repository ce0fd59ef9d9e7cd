import time
from dataclasses import replace

import pytest

from actors.chat.after_turn import ASKED
from actors.chat.calls import NamedParser, TemplateParser, ToolCall
from actors.chat.derivation import derived
from actors.chat.rendered_calls import render_turn
from actors.chat.round_trip import PROBE_TOOLS, find_parser, prove
from cluster.contracts.errors import ConfigError, DataError
from cluster.contracts.plugins import Plugin
from tests.unit.actors.chat.families import FAMILIES, report_of, turns_of

READ = [
    "deepseek",
    "glm45",
    "granite",
    "hermes",
    "llama31",
    "ministral",
    "mistral",
    "nemotron",
    "phi4",
    "qwen25",
    "qwen3",
    "qwen35",
    "smollm",
]
MULTIPLY = ToolCall(name="multiply", arguments={"a": 6, "b": "seven"})
TOOLS = [{"type": "function", "function": {"name": "multiply", "description": "", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}}}]  # fmt: skip


def parser_of(name, *, own=None):
    turns = turns_of(name)
    return find_parser(turns.template, own=own, stops=turns.stops, generation_prompt=report_of(name).generation_prompt)


def read(name, sampled):
    prompt = turns_of(name).template.prompt([{"role": "user", "content": "6 times 7?"}], tools=TOOLS)
    return parser_of(name).parser(sampled, prompt=prompt, tools=TOOLS)


@pytest.mark.parametrize(
    ("name", "sampled"),
    [
        ("qwen25", '<tool_call>\n{"name": "multiply", "arguments": {"a": 6, "b": "seven"}}\n</tool_call><|im_end|>'),
        ("qwen25", '<tool_call>{"name":"multiply","arguments":{"a":6,"b":"seven"}}</tool_call>'),
        ("qwen25", '\n<tool_call>\n{"arguments": {"b": "seven", "a": 6}, "name": "multiply"}\n\n</tool_call>\n<|endoftext|>'),
        ("qwen35", "Hm.\n</think>\n\n<tool_call>\n<function=multiply>\n"
                   "<parameter=a>\n6\n</parameter>\n<parameter=b>\nseven\n</parameter>\n</function>\n</tool_call>"),
        ("glm45", "<tool_call>multiply\n<arg_key>a</arg_key>\n<arg_value>6</arg_value>\n"
                  "<arg_key>b</arg_key><arg_value>seven</arg_value>\n</tool_call>"),
        ("llama31", '{"name": "multiply", "parameters": {"a": 6, "b": "seven"}}<|eom_id|>'),
        ("mistral", '[TOOL_CALLS] [{"name": "multiply", "arguments": {"a": 6, "b": "seven"}, "id": "abcdefghi"}]</s>'),
        ("ministral", '[TOOL_CALLS]multiply[ARGS]{"a": 6, "b": "seven"}</s>'),
        ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>multiply\n```json\n"
                     '{"a": 6, "b": "seven"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>'),
    ],
)  # fmt: skip
def test_a_call_is_read_as_its_template_writes_it_with_other_white_space_too(name, sampled):
    reply = read(name, sampled)
    assert (reply.text.strip(), reply.calls) == ("", (MULTIPLY,))


@pytest.mark.parametrize("name", READ)
def test_white_space_without_end_is_read_at_once(name):
    """The worker's event loop waits for it, and a policy that has lost its way writes line ends up to its limit."""
    parser, blank = parser_of(name).parser, "\n" * 1000
    began = time.process_time()
    reply = parser(blank, prompt="", tools=TOOLS)
    assert (reply.text.strip(), reply.calls) == ("", ())
    assert time.process_time() - began < 1


@pytest.mark.parametrize("name", READ)
def test_a_long_reply_without_a_call_is_read_at_once(name):
    """400,000 characters take a tenth of a second. They took 3 to 12 seconds, in which the worker's event loop stood still."""
    parser, words = parser_of(name).parser, "<b> " * 100_000
    began = time.thread_time()
    reply = parser(f"</think>{words}", prompt="", tools=TOOLS)
    assert (words.strip() in reply.text, reply.calls) == (True, ())
    assert time.thread_time() - began < 2


@pytest.mark.parametrize(
    ("name", "begins", "tag"),
    [
        ("qwen35", "</think><tool_call>\n<function=multiply>\n", "<parameter=a>\n"),
        ("glm45", "<tool_call>multiply\n", "<arg_key>a</arg_key><arg_value>"),
    ],
)
def test_tags_that_open_and_never_close_are_read_at_once(name, begins, tag):
    """The worker's event loop waits for it: 100,000 characters took over a minute."""
    parser, sampled = parser_of(name).parser, begins + tag * (40_000 // len(tag))
    began = time.process_time()
    with pytest.raises(DataError, match="a tool call is malformed"):
        parser(sampled, prompt="", tools=TOOLS)
    assert time.process_time() - began < 1


def test_words_reasoning_and_several_calls_are_read_apart():
    sampled = (
        "<think>\nTwice, then.\n</think>\n\nLet me see.\n"
        '<tool_call>\n{"name": "multiply", "arguments": {"a": 6, "b": "seven"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "halve", "arguments": {}}\n</tool_call><|im_end|>'
    )
    reply = read("qwen3", sampled)
    assert (reply.reasoning, reply.text) == ("Twice, then.", "Let me see.")
    assert reply.calls == (MULTIPLY, ToolCall(name="halve", arguments={}))


def test_reasoning_that_the_prompt_opened_is_none_of_the_words():
    reply = read("qwen35", "Easy.\n</think>\n\nIt is 42.<|im_end|>")
    assert (reply.reasoning, reply.text, reply.calls) == ("Easy.", "It is 42.", ())


def test_a_value_in_tags_keeps_its_white_space_and_is_a_number_where_the_schema_says_so():
    arguments = "<parameter=a>\n12\n</parameter>\n<parameter=b>\n\n 12 \n</parameter>\n"
    sampled = f"</think>\n\n<tool_call>\n<function=multiply>\n{arguments}</function>\n</tool_call>"
    assert read("qwen35", sampled).calls == (ToolCall(name="multiply", arguments={"a": 12, "b": "\n 12 "}),)


_MOVE = {"type": "function", "function": {"name": "move", "description": "", "parameters": {
    "type": "object",
    "properties": {"to": {"$ref": "#/$defs/Point"}, "level": {"allOf": [{"$ref": "#/$defs/Level"}]},
                   "tree": {"$ref": "#/$defs/Tree"}, "by": {"anyOf": [{"$ref": "#/$defs/Point"}, {"type": "null"}]},
                   "lost": {"$ref": "#/$defs/nowhere"}},
    "$defs": {"Point": {"type": "object", "properties": {"x": {"type": "integer"}}}, "Level": {"type": "integer"},
              "Tree": {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/Tree"}}, {"$ref": "#/$defs/Tree"}]}}}}}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_arguments_have_the_types_that_a_schema_refers_to(name):
    """Schemas of pydantic models refer to their parts. In formats with tags each correct call was told that its arguments are wrong."""
    call = ToolCall(
        name="move", arguments={"to": {"x": 1}, "level": 2, "tree": [[], []], "by": {"x": 3}, "lost": "here"}
    )
    turns = turns_of(name)
    turn = render_turn(turns.template, [call], tools=[_MOVE], stops=turns.stops)
    assert parser_of(name).parser(turn.text + turn.stop, prompt=turn.prompt, tools=[_MOVE]).calls == (call,)


def test_a_text_in_json_stays_one_where_the_schema_allows_texts():
    types = {"a": ["integer", "null"], "b": ["string", "integer"], "c": ["string", "null"]}
    properties = {key: {"anyOf": [{"type": each} for each in kinds]} for key, kinds in types.items()}
    tool = {"type": "function", "function": {"name": "post", "description": "", "parameters": {
        "type": "object", "properties": properties}}}  # fmt: skip
    sampled = '<tool_call>\n{"name": "post", "arguments": {"a": "7", "b": "02139", "c": "None"}}\n</tool_call>'
    (call,) = parser_of("qwen25").parser(sampled, prompt="", tools=[tool]).calls
    assert call.arguments == {"a": 7, "b": "02139", "c": "None"}


@pytest.mark.parametrize(
    "broken",
    [
        '<tool_call>\n{"name": "multiply", "arguments": {"a": 6\n</tool_call>',
        '<tool_call>\n{"name": "multiply"}\n</tool_call>',
        '<tool_call>\n{"name": ["multiply"], "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "multiply", "arguments": "6"}\n</tool_call>',
        '<tool_call>\n{"name": "multiply", "arguments": {"a": 6}}',
        '<tool_call>\n{"name": "multiply", "arguments": {"a": NaN}}\n</tool_call>',
        '<tool_call>\n{"name": "multiply", "arguments": {"a": [1e999]}}\n</tool_call>',
        f'<tool_call>\n{{"name": "multiply", "arguments": {{"a": {"[" * 300}{"]" * 300}}}}}\n</tool_call>',
        f'<tool_call>\n{{"name": "multiply", "arguments": {{"a": {"[" * 5000}\n</tool_call>',
    ],
)
def test_a_malformed_call_is_an_error_and_not_left_out(broken):
    if broken.endswith("6}}"):
        assert read("qwen25", broken).calls, "one that nothing closes is whole all the same"
        return
    with pytest.raises(DataError, match="a tool call is malformed"):
        read("qwen25", broken)


CALLS_IN_TAGS = {
    "qwen35": "</think>\n\n<tool_call>\n<function=multiply>\n<parameter=a>\n6\n</parameter>\n"
              "<parameter=b>\nseven\n</parameter>\n</function>\n</tool_call>",
    "glm45": "<think></think>\n<tool_call>multiply\n<arg_key>a</arg_key>\n<arg_value>6</arg_value>\n"
             "<arg_key>b</arg_key>\n<arg_value>seven</arg_value>\n</tool_call>",
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS_IN_TAGS)
def test_a_call_in_tags_that_is_cut_off_anywhere_is_malformed(name):
    """It ran without the argument that was cut off: `remove` with its default path."""
    whole = CALLS_IN_TAGS[name]
    assert read(name, whole).calls == (MULTIPLY,)
    for length in range(whole.index("multiply") + len("multiply"), len(whole)):
        with pytest.raises(DataError, match="a tool call is malformed"):
            read(name, whole[:length])


@pytest.mark.parametrize(
    ("name", "lost"),
    [
        ("qwen35", "</parameter>\n<parameter=b>"),
        ("qwen35", "</parameter>\n</function>"),
        ("qwen35", "<parameter=b>"),
        ("glm45", "</arg_value>\n<arg_key>"),
        ("glm45", "</arg_value>\n</tool_call>"),
        ("glm45", "<arg_value>"),
    ],
)
def test_a_call_in_tags_that_lacks_one_of_them_is_malformed(name, lost):
    """The first tag of `lost`."""
    torn = CALLS_IN_TAGS[name].replace(lost, lost.partition(">")[2], 1)
    assert torn != CALLS_IN_TAGS[name]
    with pytest.raises(DataError, match="a tool call is malformed"):
        read(name, torn)


def test_the_tokenizers_own_response_template_refuses_a_call_in_tags_that_is_cut_off_too():
    options = {"tools": PROBE_TOOLS, "stops": turns_of("qwen35").stops}
    begins = report_of("qwen35").generation_prompt
    own = derived(turns_of("qwen35").template, generation_prompt=begins, **options)
    found = parser_of("qwen35", own=own)
    assert found.is_own
    with pytest.raises(DataError, match="a tool call is malformed"):
        found.parser("</think><tool_call>\n<function=multiply>\n", prompt=begins, tools=TOOLS)


def fails(text, tools):
    raise AssertionError("no such tool")


def gives_nothing(text, tools):
    return text, None


@pytest.mark.parametrize(("parser", "why"), [(fails, "no such tool"), (gives_nothing, "not iterable")])
def test_whatever_a_users_parser_raises_makes_the_reply_malformed_and_ends_no_episode(parser, why):
    read_by = NamedParser(Plugin(name=f"{__name__}:{parser.__name__}"))
    with pytest.raises(DataError, match=f"a tool call is malformed: .*{why}"):
        read_by("words", prompt="", tools=())


def refuses(text, tools):
    raise ConfigError("hermess is no format")


def test_a_parser_that_refuses_its_setting_is_not_taken_for_a_malformed_reply():
    read_by = NamedParser(Plugin(name=f"{__name__}:refuses"))
    with pytest.raises(ConfigError, match="hermess is no format"):
        read_by("words", prompt="", tools=())


@pytest.mark.parametrize("name", READ)
def test_a_parser_made_from_these_templates_is_proved(name):
    assert parser_of(name).takes_several is (name != "llama31")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("pythonic", "no parser can be made from the chat template: nothing marks where a call, a key or a value ends"),
        ("glm4", "no parser can be made from the chat template: nothing begins a call"),
        ("gemma_calls", "no parser can be made"),
        ("run_together", "a tool call is malformed"),
        ("harmony", "words without a call is read as something else: .*final<.message.>No"),
    ],
)
def test_what_fails_the_proof_is_refused_with_a_reason(name, why):
    with pytest.raises(DataError, match=why):
        parser_of(name)


def test_the_proof_finds_a_parser_that_reads_too_little():
    """It takes the first call for the last, keeps quotes, or makes numbers of texts: each is found."""
    turns = turns_of("qwen25")
    options = {"stops": turns.stops}
    good = derived(turns.template, tools=PROBE_TOOLS, generation_prompt="<|im_start|>assistant\n", **options)
    assert prove(TemplateParser(good), turns.template, **options)
    calls = good["fields"]["tool_calls"]
    for spoiled in ({"repeats": False}, {"close_pattern": '"'}, {"open_pattern": "<call>"}, {"close_pattern": r"\}"}):
        fields = {**good["fields"], "tool_calls": {**calls, **spoiled}}
        with pytest.raises(DataError):
            prove(TemplateParser({**good, "fields": fields}), turns.template, **options)


def test_the_tokenizers_own_response_template_comes_first_if_it_is_right():
    turns = turns_of("qwen25")
    options = {"stops": turns.stops}
    own = derived(turns.template, tools=PROBE_TOOLS, generation_prompt="<|im_start|>assistant\n", **options)
    assert parser_of("qwen25", own=own).is_own
    wrong = {"start_anchor": "x", "fields": {"content": {"content": "text"}}}
    assert not parser_of("qwen25", own=wrong).is_own
    with pytest.raises(
        DataError, match=r"the tokenizer's response template: .* is read as something else.*; no parser can"
    ):
        parser_of("pythonic", own=wrong)


@pytest.mark.parametrize(("name", "as_text"), [("deepseek", True), ("qwen3", False), ("mistral", False)])
def test_templates_that_want_arguments_as_text_are_known(name, as_text):
    template = turns_of(name).template
    assert [template.wants_arguments_as_text(tools=tools) for tools in (TOOLS, ())] == [as_text] * 2


@pytest.mark.parametrize("name", READ)
def test_earlier_calls_are_written_as_the_model_writes_them(name):
    """Seen before: templates that want arguments as text refused each conversation with a call."""
    turns = turns_of(name)
    called = {"role": "assistant", "content": "", "tool_calls": [replace(MULTIPLY, id="call00000").as_json()]}
    answer = {"role": "tool", "name": "multiply", "tool_call_id": "call00000", "content": "42"}
    written, _ = turns.first_prompt([ASKED, called, answer], tools=TOOLS)
    assert render_turn(turns.template, [MULTIPLY], tools=TOOLS, stops=turns.stops).text.strip() in written


def test_every_family_is_read_or_says_why():
    read_by = {name for name in FAMILIES if report_of(name).calls_are_read_by}
    assert read_by == {*READ}
    assert all(report_of(name).why_no_calls for name in FAMILIES if name not in READ)
