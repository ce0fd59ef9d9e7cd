"""Prompts that an agent writes itself: which tokens they become, and where an episode goes on."""

import copy
import json
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actors.chat.calls import NamedParser
from actors.chat.formatter import ChatFormatter
from actors.chat.rendered_calls import render_turn
from actors.reasoning import after_reasoning
from actors.rollout.episodes.speech import Opening, Speech
from actors.rollout.episodes.transcript import Transcript
from cluster.contracts.environment_config import EpisodesConfig
from cluster.contracts.episodes import Asked, Earned, RawPrompt, Rewritten, Said, ToolCall, Withdrawn
from cluster.contracts.errors import DataError, EpisodeOver, Limit, TooLongError
from cluster.contracts.plugins import Plugin
from cluster.contracts.types import Completion, FinishReason, Prompt
from tests.models import make_tokenizer
from tests.unit.actors.chat.families import FAMILIES, tokenizer_of, with_two_templates

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
PLAY = {"role": "user", "content": "play"}
TOOL = {
    "type": "function",
    "function": {"name": "t", "description": "A tool.", "parameters": {"type": "object", "properties": {}}},
}
BEGINNING = "<|im_start|>user\nplay<|im_end|>\n<|im_start|>assistant\n"
BETWEEN = "\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"
BYTES = ["qwen25", "glm4", "granite"]
METASPACE = ["gemma", "llama2", "phi3"]
FUZZ = settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@cache
def speech_of(name: str, *, parser: NamedParser | None = None) -> Speech:
    tokenizer = tokenizer_of(name)
    stops = tokenizer.convert_tokens_to_ids([*FAMILIES[name].stops])
    return Speech(ChatFormatter(tokenizer, max_context=512, stop_token_ids=stops), parser=parser)


def speech_with(template: str) -> Speech:
    tokenizer = copy.copy(tokenizer_of("chatml"))
    tokenizer.chat_template = template
    return Speech(ChatFormatter(tokenizer, max_context=512))


def say(*, text: str, tools: Any) -> tuple[str, list[Any]]:
    return text, []


def test_a_parser_of_anothers_sees_no_stop_token_as_with_its_own_server():
    speech = speech_of("qwen25", parser=NamedParser(Plugin(name=f"{__name__}:say")))
    ids = tokenizer_of("qwen25").convert_tokens_to_ids
    said = [*tokenizer_of("qwen25")("It is 42.", add_special_tokens=False).input_ids, ids("<|im_end|>")]
    for sampled_ids in (said, said[:-1]):  # the second was cut
        assert speech.hear(sampled_ids, written_ids=[]).text == "It is 42."


@pytest.mark.parametrize("parser", [None, NamedParser(Plugin(name=f"{__name__}:say"))])
@pytest.mark.parametrize(
    ("said", "reasoning", "text"),
    [
        ("Hm.\n</think>\n\nIt is 42.", "Hm.", "It is 42."),
        ("Is it 42?", "Is it 42?", ""),
        ("</think>It is 42.", "", "It is 42."),
        ("", None, ""),
    ],
)
def test_reasoning_that_the_template_began_is_none_of_the_words_whatever_reads_them(parser, said, reasoning, text):
    """An environment took what a model thought when it was cut off for its words, and a call in its reasoning was made."""
    speech = speech_of("deepseek_r1", parser=parser)
    written, sampled = (speech.turns.encoder.encode_on(each) for each in ("<｜Assistant｜><think>\n", said))
    reply = speech.hear(sampled, written_ids=written)
    assert (reply.reasoning, reply.text) == (reasoning, text)
    assert speech.hear(sampled, written_ids=[]).text == said


@pytest.mark.parametrize(
    ("name", "reasoning", "text"),
    [("deepseek_r1", "Hm.", "It is 42."), ("chatml", None, "<think>Hm.</think>It is 42.")],
)
def test_reasoning_that_the_model_begins_is_none_of_the_words_where_its_template_knows_of_any(name, reasoning, text):
    speech = speech_of(name)
    sampled = speech.turns.encoder.encode_on("<think>Hm.</think>It is 42.")
    reply = speech.hear(sampled, written_ids=[])
    assert (reply.reasoning, reply.text) == (reasoning, text)


def test_reasoning_in_special_tags_is_none_of_the_words():
    """All was reasoning: the tag that ends it was dropped."""
    tokenizer = copy.deepcopy(tokenizer_of("deepseek_r1"))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    speech = Speech(ChatFormatter(tokenizer, max_context=512))
    said = f"Hm.\n</think>\n\nIt is 42.{tokenizer.eos_token}"
    written, sampled = (speech.turns.encoder.encode_on(each) for each in ("<think>\n", said))
    reply = speech.hear(sampled, written_ids=written)
    assert (reply.reasoning, reply.text) == ("Hm.", "It is 42.")


def call_of_harmony(*, text: str, tools: Any) -> tuple[str, list[Any]]:
    head, _, arguments = text.partition("<|message|>")
    name = head.partition("to=functions.")[2].partition("<|")[0]
    return ("", [{"name": name, "arguments": json.loads(arguments)}]) if name else (arguments, [])


@pytest.mark.parametrize("parser", [None, NamedParser(Plugin(name=f"{__name__}:call_of_harmony"))])
@pytest.mark.parametrize(("history", "num_segments"), [("append", 1), ("template", 2)])
def test_the_channels_of_a_reply_are_reasoning_and_words(parser, history, num_segments):
    """Environments got 'analysisHm.assistantfinalIt is 42.'"""
    telling = Telling(speech=speech_of("harmony", parser=parser), history=history)
    sampled = telling.ids(
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>It is 42."
    )
    for messages in ((), (PLAY,)):
        said = telling.say(Asked(messages=messages), [*sampled, telling.end])
        assert (said.reasoning, said.text) == ("Hm.", "It is 42.")
    assert len(telling.segments) == num_segments
    begun = telling.segments[-1].prompt_text
    assert ("<|channel|>final<|message|>It is 42.<|end|>" in begun, "Hm." in begun) == (num_segments == 2, False)


def test_a_parser_of_anothers_gets_the_channels_without_the_reasoning():
    speech = speech_of("harmony", parser=NamedParser(Plugin(name=f"{__name__}:call_of_harmony")))
    call = '<|start|>assistant to=functions.t<|channel|>commentary json<|message|>{"n": 3}<|call|>'
    sampled = speech.turns.encoder.encode_on(f"<|channel|>analysis<|message|>Hm.<|end|>{call}")
    reply = speech.hear(sampled, written_ids=[], tools=[TOOL])
    assert (reply.reasoning, reply.text) == ("Hm.", "")
    assert reply.calls == (ToolCall(name="t", arguments={"n": 3}, id="call00000"),)


CUTTING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1].strip() }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(("history", "shown"), [("append", "<think>Hm.</think>4"), ("template", "4")])
def test_a_template_that_only_cuts_reasoning_out_knows_it(history, shown):
    """As that of the first distilled R1 models: environments got the thoughts as words."""
    telling = Telling(speech=speech_with(CUTTING), history=history)
    for messages in ((), (PLAY,)):
        said = telling.say(Asked(messages=messages), [*telling.ids("<think>Hm.</think>4"), telling.end])
        assert (said.reasoning, said.text) == ("Hm.", "4")
    context = telling.encoder.decode(telling.segments[-1].context_ids)
    turns = [f"{BEGINNING}{shown}<|im_end|>\n", f"{BEGINNING}<think>Hm.</think>4<|im_end|>"]
    assert context == "".join(turns)


def call_twice(*, text: str, tools: Any) -> tuple[str, list[Any]]:
    return text, [{"name": "find", "arguments": {}}, {"name": "read", "arguments": {}}]


def test_the_calls_of_a_turn_are_numbered_on_from_those_of_the_turns_before():
    speech = speech_of("qwen25", parser=NamedParser(Plugin(name=f"{__name__}:call_twice")))
    said = tokenizer_of("qwen25")("Both.", add_special_tokens=False).input_ids
    reply = speech.hear(said, written_ids=[], tools=[TOOL], num_calls=7)
    assert [(call.id, call.name) for call in reply.calls] == [("call00007", "find"), ("call00008", "read")]


@pytest.mark.parametrize("name", ["qwen25", "qwen35"])
def test_a_call_is_read_by_the_tools_of_its_context_where_its_ask_gives_none(name):
    tool = {"type": "function", "function": {"name": "t", "description": "A tool.", "parameters": {
        "type": "object", "properties": {"n": {"type": "integer"}}}}}  # fmt: skip
    call = ToolCall(name="t", arguments={"n": 3})
    telling = Telling(name)
    turn = render_turn(telling.turns.template, [call], tools=[tool], stops=telling.turns.stops)
    thought = "" if name == "qwen25" else "</think>\n\n"
    sampled = [*telling.ids(thought + turn.text), telling.end]
    telling.say(Asked(tools=(tool,)), sampled)
    answer = {"role": "tool", "name": "t", "tool_call_id": "call00000", "content": "x"}
    assert telling.say(Asked(messages=(answer,)), sampled).tool_calls == (replace(call, id="call00001"),)


@pytest.mark.parametrize("name", ["deepseek_r1", "glm45", "nemotron", "qwen3", "qwen35", "smollm"])
def test_reasoning_that_ends_with_the_turn_has_no_stop_token(name):
    telling = Telling(name)
    said = telling.say(Asked(), [*telling.ids("<think>\nI do not know"), telling.end])
    assert (said.reasoning or "").removeprefix("<think>").strip() == "I do not know"
    assert said.text == ""


@pytest.mark.parametrize("name", ["deepseek_r1", "nemotron", "qwen35"])
def test_reasoning_that_is_closed_at_once_is_apart_from_the_answer_of_an_episode_at_a_limit(name):
    """Where a parser reads the replies, judges took the answer for thoughts: its message had no reasoning."""
    telling = Telling(name)
    said = telling.say(Asked(), [*telling.ids("</think>\n\n4"), telling.end])
    (segment,) = telling.segments
    assert segment.prompt_text.endswith("<think>\n") and (said.reasoning, said.text) == ("", "4")
    given = {"prompt": segment.prompt_text, "finish_reason": "length", "messages": segment.messages}
    assert after_reasoning(said.text, **given) == "4"


class Telling:
    """A transcript, and a model that says what it is told to."""

    def __init__(self, name: str = "qwen25", *, speech: Speech | None = None, **config) -> None:
        speech = speech or speech_of(name)
        opening = Opening(Prompt(prompt_id="p", messages=[PLAY]), speech)
        self.transcript = Transcript(opening, speech, EpisodesConfig.model_validate(config), is_compared=True)
        self.turns = speech.turns
        self.encoder = self.turns.encoder
        self.end = speech._formatter._tokenizer.eos_token_id

    def ids(self, text: str) -> list[int]:
        return self.encoder.encode_on(text)

    def say(
        self, asked: Asked, sampled_ids: list[int], reason: FinishReason = STOP, *, expert: int | None = None
    ) -> Said:
        """`expert` reads every position, in a model with one layer and one expert a token; None: the engine does not tell."""
        self.transcript.take(asked.events)
        count, prompt = len(sampled_ids), self.transcript.prompt_for(asked)
        completion = Completion(
            token_ids=sampled_ids,
            rollout_logprobs=[-1.0] * count,
            policy_versions=[4] * count,
            finish_reason=reason,
            routed_experts=None if expert is None else bytes([expert] * (len(prompt.token_ids) + count - 1)),
        )
        return self.transcript.add(asked, prompt, completion)

    def after(self, raw: RawPrompt, text: str, *, expert: int | None = None, **asked) -> Said:
        """The model says this text after a raw prompt, and ends its turn."""
        return self.say(Asked(raw=raw, **asked), [*self.ids(text), self.end], expert=expert)

    @property
    def segments(self):
        return self.transcript.segments

    def rows(self):
        return [(each.prompt_token_ids, each.token_ids, each.loss_mask, each.turns) for each in self.segments]


def test_a_text_that_begins_with_the_context_goes_on_in_its_segment():
    telling = Telling()
    said = telling.after(BEGINNING, "yes")
    telling.after(f"{BEGINNING}{said.text}<|im_end|>{BETWEEN}", "no")
    (segment,) = telling.segments
    yes, no = [*telling.ids("yes"), telling.end], [*telling.ids("no"), telling.end]
    assert segment.prompt_token_ids == telling.encoder.encode(BEGINNING)
    assert segment.token_ids == [*yes, *telling.ids(BETWEEN), *no]
    assert segment.loss_mask == [True] * len(yes) + [False] * len(telling.ids(BETWEEN)) + [True] * len(no)


def test_tokens_that_were_sampled_are_never_made_of_text_again():
    telling = Telling()
    letters = [telling.ids(letter)[0] for letter in "the"]
    assert telling.ids("the") != letters
    telling.say(Asked(raw=BEGINNING), [*letters, telling.end])
    telling.after(f"{BEGINNING}the<|im_end|>{BETWEEN}", "no")
    assert telling.segments[0].token_ids[:3] == letters


@pytest.mark.parametrize(
    "second",
    [
        BEGINNING,
        f"{BEGINNING}yes{BETWEEN}",
        f"{BEGINNING}YES<|im_end|>{BETWEEN}",
        "Another.",
    ],
    ids=["asked again", "without the sampled end of turn", "edited", "another"],
)
def test_another_text_is_a_new_segment_whose_prompt_it_is(second):
    telling = Telling()
    telling.after(BEGINNING, "yes")
    telling.after(second, "no")
    assert len(telling.segments) == 2
    assert telling.segments[1].prompt_text == second
    assert telling.segments[1].prompt_token_ids == telling.encoder.encode(second)


def test_a_raw_prompt_after_turns_of_a_chat_goes_on_if_it_is_what_the_template_wrote():
    chat, mixed = Telling(), Telling()
    for telling in (chat, mixed):
        telling.say(Asked(), [*telling.ids("yes"), telling.end])
    go_on = {"role": "user", "content": "go on"}
    chat.say(Asked(messages=(go_on,)), [*chat.ids("no"), chat.end])
    prompt = mixed.segments[0].prompt_text
    mixed.after(f"{prompt}yes<|im_end|>{BETWEEN}", "no")
    assert mixed.rows() == chat.rows()
    assert mixed.segments[0].messages[2] == {"role": "user", "content": BETWEEN}


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "echo"])
def test_an_agent_with_the_models_own_template_has_the_tokens_of_a_chat(name):
    chat, raw = Telling(name), Telling(name)
    suffix = chat.turns.suffix([PLAY])
    yes = [*chat.ids("yes"), *suffix.close_ids]
    chat.say(Asked(), yes)
    chat.say(Asked(messages=(PLAY,)), yes)
    prompt = chat.segments[0].prompt_text
    raw.say(Asked(raw=prompt), yes)
    raw.say(Asked(raw=f"{prompt}yes{suffix.text}"), yes)
    assert raw.rows() == chat.rows()


def test_a_chat_after_a_raw_prompt_is_a_new_segment():
    telling = Telling()
    telling.after(BEGINNING, "yes")
    telling.say(Asked(events=(Rewritten(messages=(PLAY,)),)), [telling.end])
    assert [each.messages[0] for each in telling.segments] == [{"role": "user", "content": BEGINNING}, PLAY]


def test_after_a_rewrite_a_raw_prompt_begins_anew():
    telling = Telling()
    said = telling.after(BEGINNING, "yes")
    again = f"{BEGINNING}{said.text}<|im_end|>{BETWEEN}"
    telling.after(again, "no", events=(Rewritten(messages=(PLAY,)),))
    telling.after(f"{again}no<|im_end|>{BETWEEN}", "no")
    assert [each.prompt_text for each in telling.segments] == [BEGINNING, again]
    assert len(telling.segments[1].turns) == 2


def test_the_messages_of_a_raw_segment_are_what_was_written_and_what_was_said():
    telling = Telling(on_turn_length="continue")
    telling.say(Asked(raw=BEGINNING), telling.ids("ye"), LENGTH)
    telling.after(f"{BEGINNING}ye", "s")
    telling.after(f"{BEGINNING}yes<|im_end|>{BETWEEN}", "no")
    assert [(each["role"], each["content"]) for each in telling.segments[0].messages] == [
        ("user", BEGINNING),
        ("assistant", "ye"),
        ("assistant", "s"),
        ("user", BETWEEN),
        ("assistant", "no"),
    ]


def test_each_message_is_recorded_once_also_those_that_come_with_a_new_context():
    telling, hint = Telling(), {"role": "user", "content": "a hint"}
    yes = [*telling.ids("yes"), telling.end]
    telling.say(Asked(messages=(hint,)), yes)
    telling.say(Asked(events=(Rewritten(messages=(PLAY,)),), messages=(hint,)), yes)
    recorded = [[each["content"] for each in segment.messages] for segment in telling.segments]
    assert recorded == [["play", "a hint", "yes"]] * 2


def test_a_turn_that_was_taken_back_leaves_nothing():
    telling = Telling()
    telling.after(BEGINNING, "yes")
    before, messages = telling.rows(), [*telling.segments[0].messages]
    telling.after(f"{BEGINNING}yes<|im_end|>{BETWEEN}", "no")
    telling.transcript.take([Withdrawn(num_turns=1)])
    assert telling.rows() == before and telling.segments[0].messages == messages
    assert telling.transcript._text_of(telling.segments[0]) == f"{BEGINNING}yes<|im_end|>"


def test_after_a_turn_that_was_taken_back_with_its_context_rewards_are_for_the_turn_before_and_add_up():
    telling = Telling()
    telling.after(BEGINNING, "yes")
    before = telling.rows()
    telling.after("Another.", "no")
    earned = [Earned(reward=reward, name="step") for reward in (1.0, 0.5)]
    telling.transcript.take([Withdrawn(num_turns=1), *earned])
    assert telling.rows() == before
    assert (telling.segments[0].token_rewards[-1], telling.transcript.earned) == (1.5, {"step": 1.5})


def test_tools_of_a_context_may_be_left_out_of_a_later_turn():
    telling = Telling()
    yes = [*telling.ids("yes"), telling.end]
    telling.say(Asked(tools=(TOOL,)), yes)
    telling.say(Asked(messages=(PLAY,)), yes)
    telling.say(Asked(messages=(PLAY,), tools=(TOOL,)), yes)
    assert len(telling.segments) == 1


@pytest.mark.parametrize("history", ["append", "template"])
def test_a_tools_answer_is_written_by_the_template_with_tools_although_its_ask_gives_none(history):
    """Hermes 3 has a template of its own for tools, and the other one writes no calls: the ask failed."""
    speech = Speech(ChatFormatter(with_two_templates(), max_context=512))
    telling = Telling(speech=speech, history=history)
    telling.say(
        Asked(tools=(TOOL,)), [*telling.ids('<tool_call>\n{"name": "t", "arguments": {}}\n</tool_call>'), telling.end]
    )
    answer = {"role": "tool", "name": "t", "tool_call_id": "call00000", "content": "x"}
    asked = Asked(messages=(answer,))
    written = telling.encoder.decode(telling.transcript.prompt_for(asked).written_ids)
    assert written.endswith("<|im_start|>tool\n<tool_response>\nx\n</tool_response><|im_end|>\n<|im_start|>assistant\n")
    telling.say(asked, [*telling.ids("yes"), telling.end])
    telling.say(Asked(messages=(PLAY,), tools=(TOOL,)), [telling.end])
    assert len(telling.segments) == 1


def test_a_context_that_the_template_writes_anew_keeps_its_tools_although_an_ask_gives_none():
    telling = Telling("qwen3", history="template")
    thought = [*telling.ids("<think>\nhm\n</think>\n\nyes"), telling.end]
    for tools in ((TOOL,), (), (TOOL,)):
        telling.say(Asked(messages=(PLAY,), tools=tools), thought)
    assert [each.tools for each in telling.segments] == [(TOOL,)] * 3


def test_a_context_that_the_template_writes_anew_has_its_tools_and_each_message_once():
    telling = Telling("qwen3", history="template")
    thought = [*telling.ids("<think>\nhm\n</think>\n\nyes"), telling.end]
    telling.say(Asked(tools=(TOOL,)), thought)
    for _ in range(2):
        telling.say(Asked(messages=(PLAY,), tools=(TOOL,)), thought)
    assert [[each["role"] for each in segment.messages] for segment in telling.segments] == [
        ["user", "assistant"] * count for count in (1, 2, 3)
    ]


def test_a_template_that_writes_the_same_text_with_other_tokens_begins_no_new_context():
    telling = Telling(history="template")
    letters = [telling.ids(letter)[0] for letter in "the"]
    telling.say(Asked(), [*letters, telling.end])
    telling.say(Asked(messages=(PLAY,)), [telling.end])
    assert len(telling.segments) == 1


def test_a_beginning_with_tools_is_not_the_one_without():
    opening = Opening(Prompt(prompt_id="p", messages=[PLAY]), speech_of("qwen25"))
    assert opening.begin().text != opening.begin(tools=(TOOL,)).text


def test_a_position_keeps_the_experts_that_read_it_first():
    telling = Telling()
    first, second = f"{BEGINNING}yes<|im_end|>{BETWEEN}", f"{BEGINNING}yes<|im_end|>{BETWEEN}no<|im_end|>{BETWEEN}"
    telling.after(BEGINNING, "yes", expert=1)
    (segment,) = telling.segments
    num_first = len(segment.prompt_token_ids) + len(segment.token_ids) - 1
    assert segment.routed_experts == bytes([1] * num_first)
    telling.after(first, "no", expert=2)
    num_second = len(segment.context_ids) - 1 - num_first
    assert segment.routed_experts == bytes([1] * num_first + [2] * num_second)
    telling.after(second, "perhaps")
    assert segment.routed_experts is None, "of the last turn nothing is known"
    telling.transcript.take([Withdrawn(num_turns=2)])
    assert segment.routed_experts == bytes([1] * num_first + [2] * num_second)
    telling.transcript.take([Withdrawn(num_turns=1)])
    telling.after(first, "no")
    telling.after(second, "yes", expert=3)
    assert segment.routed_experts == bytes([1] * num_first + [3] * (len(segment.context_ids) - 1 - num_first))


def test_token_ids_come_with_the_answer_where_they_are_wanted():
    telling = Telling()
    assert telling.after("a", "b").token_ids is None
    said = telling.after("a", "b", wants_token_ids=True)
    assert said.prompt_token_ids == (*telling.ids("a"),)
    assert said.token_ids == (*telling.ids("b"), telling.end)
    assert (said.num_tokens, said.num_context_tokens) == (2, 3)


@pytest.mark.parametrize(
    ("sampled", "stops", "text"),
    [
        ("yes", (), "yes"),
        ("see\nObs", ("\nObs",), "see"),
        ("see\nObs", ("x", "s", "bs"), "see\nOb"),
        ("see", ("\nObs",), "see"),
        ("<tool_call>", (), "<tool_call>"),
    ],
)
def test_a_text_is_without_the_stop_that_the_agent_named(sampled, stops, text):
    telling = Telling()
    ids = [token_id for letter in sampled for token_id in telling.ids(letter)] if stops else telling.ids(sampled)
    assert telling.say(Asked(raw="a", stop=stops), ids).text == text
    telling.after(f"a{sampled}!", "b")
    assert len(telling.segments) == 1, "the context has the stop that was sampled"


def test_a_stop_whose_last_character_is_of_two_tokens_is_left_out_too():
    telling = Telling()
    half, rest = telling.ids("é")
    assert telling.say(Asked(raw="a", stop=("né",)), [*telling.ids("an"), half, rest]).text == "a"


def test_of_two_stops_in_one_token_the_one_that_is_complete_first_ends_the_turn():
    telling = Telling()
    (the,) = telling.ids("the")
    assert telling.say(Asked(raw="a", stop=("the", "h")), [the]).text == "t"


def test_a_special_token_in_the_middle_stays_in_the_text():
    telling = Telling()
    middle = [*telling.ids("a<|im_start|>b"), telling.end]
    assert telling.say(Asked(raw="a"), middle).text == "a<|im_start|>b"


def test_a_turn_that_was_cut_off_ends_the_episode_where_the_run_says_so_but_not_a_new_segment():
    telling = Telling()
    telling.say(Asked(raw=BEGINNING), telling.ids("ye"), LENGTH)
    with pytest.raises(EpisodeOver) as over:
        telling.after(f"{BEGINNING}ye", "s")
    assert over.value.limit is Limit.TURN_LENGTH
    telling.after("Another.", "yes")
    assert len(telling.segments) == 2


def test_template_history_and_comparison_leave_raw_segments_alone():
    telling = Telling("qwen3", history="template")
    thought = "<think>\nhm\n</think>\n\nyes"
    telling.after(BEGINNING, thought)
    telling.after(f"{BEGINNING}{thought}<|im_end|>{BETWEEN}", "no")
    assert len(telling.segments) == 1 and telling.transcript.num_uncanonical is None


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        ("", "the prompt is empty"),
        ((), "the prompt is empty"),
        ((1, 10_000), "token id 10000, and the tokenizer knows 0 to "),
        ((-1,), "token id -1"),
        ("a" * 600, "the new part of the prompt has 600 tokens, and the context takes 512; shorten them"),
    ],
)
def test_a_prompt_that_no_model_could_go_on_from_is_refused(raw, why):
    with pytest.raises(DataError, match=why):
        Telling().after(raw, "b")


def test_unknown_ids_are_refused_where_they_go_on_and_those_that_were_sampled_are_not():
    """Vocabularies have places that no tokenizer knows, and a model can sample them."""
    telling = Telling()
    telling.say(Asked(raw=(5,)), [9_999, telling.end])
    with pytest.raises(DataError, match="token id 9998"):
        telling.after((5, 9_999, telling.end, 9_998), "b")
    telling.after((5, 9_999, telling.end, 6), "b")
    assert len(telling.segments) == 1


def test_a_context_that_is_full_is_a_limit_of_the_policys_doing():
    telling = Telling()
    text = "a" * 300
    said = telling.after(text, "b" * 150)
    with pytest.raises(EpisodeOver) as over:
        telling.after(f"{text}{said.text}<|im_end|>{'c' * 100}", "d")
    assert over.value.limit is Limit.CONTEXT


@pytest.mark.parametrize("text", ["a", "<bos>a"])
def test_before_a_text_stands_one_bos_where_the_tokenizer_adds_one(text):
    template = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}<eos>{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
    tokenizer = make_tokenizer(adds_bos=True, chat_template=template)
    speech = Speech(ChatFormatter(tokenizer, max_context=64))
    telling = Telling(speech=speech)
    telling.after(text, "b")
    telling.after(f"{text}b<eos>c", "d")
    (segment,) = telling.segments
    assert segment.prompt_token_ids == [tokenizer.bos_token_id, *tokenizer("a", add_special_tokens=False).input_ids]
    assert tokenizer.bos_token_id not in segment.token_ids


CALLED = 'I search.\n<tool_call>\n{"name": "t", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(
    ("name", "sampled", "reasoning", "text"),
    [
        ("qwen25", CALLED, None, CALLED),
        ("qwen3", f"<think>\nHm.\n</think>\n\n{CALLED}", "Hm.", CALLED),
        ("qwen3", "<think>\nHm.\n</think>\n\n<tool_call>\nt()\n</tool_call>", "Hm.", "<tool_call>\nt()\n</tool_call>"),
        ("llama31", '{"name": "Zoe", "parameters": {"age": 3}}', None, '{"name": "Zoe", "parameters": {"age": 3}}'),
    ],
)
def test_where_the_context_shows_no_tools_the_text_of_a_call_is_words(name, sampled, reasoning, text):
    """Seen before: environments with their own text protocol, and JSON answers, lost the model's words."""
    telling = Telling(name)
    said = telling.say(Asked(), [*telling.ids(sampled), telling.end])
    assert (said.text, said.reasoning, said.tool_calls) == (text, reasoning, ())
    assert telling.segments[0].messages[-1]["content"] == text


def test_where_the_context_shows_tools_a_call_is_read_although_this_ask_has_none():
    telling = Telling()
    telling.say(Asked(tools=(TOOL,)), [*telling.ids("Hm."), telling.end])
    said = telling.say(Asked(messages=(PLAY,)), [*telling.ids(CALLED), telling.end])
    assert said.text == "I search." and [call.name for call in said.tool_calls] == ["t"]


@pytest.mark.parametrize("history", ["append", "template"])
def test_a_conversation_that_fills_its_context_meets_a_limit_although_each_turn_begins_a_segment(history):
    """Seen before: with `history: template` an overlong episode was an error, not the policy's."""
    telling = Telling("qwen3", history=history)
    thought = [*telling.ids("<think>\nHm.\n</think>\n\nyes"), telling.end]
    telling.say(Asked(), thought)
    with pytest.raises(EpisodeOver) as over:
        for _ in range(50):
            telling.say(Asked(messages=({"role": "user", "content": "go on"},)), thought)
    assert over.value.limit is Limit.CONTEXT and telling.transcript.num_turns > 5
    assert len(telling.segments) == (1 if history == "append" else telling.transcript.num_turns)


@pytest.mark.parametrize(("added", "error"), [("b" * 90, EpisodeOver), ("b" * 600, TooLongError)])
def test_an_agent_that_edits_its_history_meets_the_limit_unless_what_it_adds_is_too_long_alone(added, error):
    """A context of 512 tokens, and 450 of them are old."""
    telling = Telling()
    told = [{"role": "user", "content": "a" * 200}, {"role": "assistant", "content": "a" * 250}]
    telling.say(Asked(events=(Rewritten(messages=(told[0],)),)), [*telling.ids("a" * 250), telling.end])
    edited = ({"role": "system", "content": "Be brief."}, *told, {"role": "user", "content": added})
    with pytest.raises(error):
        telling.say(Asked(events=(Rewritten(messages=edited),)), [telling.end])


@pytest.mark.parametrize(("added", "error"), [("c" * 110, EpisodeOver), ("c" * 600, TooLongError)])
def test_a_raw_prompt_that_edits_the_last_turn_meets_the_limit_unless_its_new_part_is_too_long_alone(added, error):
    telling = Telling()
    telling.after("a" * 300, "b" * 150)
    with pytest.raises(error):
        telling.after("a" * 300 + "b" * 149 + added, "d")


TEXTS = st.lists(st.sampled_from(["the", " a", "\n", "é", ".", "1"]), min_size=1, max_size=4).map("".join)
FORMS = st.sampled_from(["text", "ids"])


@st.composite
def conversations(draw):
    """A beginning, and turns: seeds of what is sampled, how it ends, what is written after it, and how the next one asks."""
    turn = st.tuples(
        st.lists(st.integers(0, 10**6), min_size=1, max_size=5),
        st.sampled_from(["close", "stop", "cut"]),
        st.booleans(),
        TEXTS,
        FORMS,
    )
    return draw(TEXTS), draw(FORMS), draw(st.lists(turn, min_size=1, max_size=5))


def told(name: str, conversation, form: str | None = None) -> Telling:
    """All requests of one form, or each of its own."""
    telling = Telling(name, on_turn_length="continue")
    controls = {*telling.encoder.controls.values(), telling.end}
    ordinary = [index for index in range(3, len(tokenizer_of(name))) if index not in controls]
    text, own, turns = conversation
    ids = telling.encoder.encode(text)
    for seeds, end, is_marked, written, following in turns:
        sampled = [ordinary[seed % len(ordinary)] for seed in seeds]
        rest = ""
        if end == "close":
            sampled.append(telling.end)
            rest = telling.encoder.decode([telling.end])
        if end == "stop":
            sampled += telling.ids("END")
            rest = "END"
        raw = text if (form or own) == "text" else (*ids,)
        stops = ("END",) if end == "stop" else ()
        said = telling.say(Asked(raw=raw, stop=stops), sampled, LENGTH if end == "cut" else STOP)
        written = written + telling.encoder.decode([telling.end]) if is_marked else written
        text += said.text + rest + written
        ids = [*ids, *sampled, *telling.encoder.encode_after(sampled[-1], written)]
        own = following
    return telling


@pytest.mark.parametrize("name", BYTES)
@FUZZ
@given(conversations())
def test_texts_and_ids_in_any_order_make_the_same_tokens(name, conversation):
    mixed, by_ids = told(name, conversation), told(name, conversation, "ids")
    assert mixed.rows() == by_ids.rows()
    assert len(mixed.segments) == 1


@pytest.mark.parametrize("name", METASPACE)
@FUZZ
@given(conversations())
def test_texts_make_the_tokens_of_ids_where_words_begin_with_a_space_too(name, conversation):
    assert told(name, conversation, "text").rows() == told(name, conversation, "ids").rows()


def test_a_prompt_of_ids_is_recorded_as_its_text():
    telling = Telling()
    telling.after((*telling.encoder.encode(BEGINNING),), "yes")
    (segment,) = telling.segments
    assert segment.prompt_text == segment.messages[0]["content"] == BEGINNING


def test_a_turn_that_its_limit_ended_has_its_whole_text():
    telling = Telling()
    assert telling.say(Asked(raw="a", stop=("top",)), telling.ids("a stop"), LENGTH).text == "a stop"
    said = telling.say(
        Asked(messages=(PLAY,), stop=("top",), events=(Rewritten(messages=(PLAY,)),)), telling.ids("stop"), LENGTH
    )
    assert (said.text, said.ending) == ("stop", "")


@pytest.mark.parametrize(
    ("sampled", "stops", "text", "ending"),
    [
        (["see", "\nObs"], ("\nObs",), "see\nObs", "\nObs"),
        (["see ", "the"], ("x", "h"), "see the", "he"),
        # The parser takes white space away that ends a text.
        (["see.", "\n", "\n"], (".\n\n",), "see.", "."),
        (["see", "\n"], ("\n",), "see", ""),
        # The engine takes none before min_tokens.
        (["a", "END", " b", "END"], ("END",), "aEND bEND", "END"),
        (["a", "END", " b", "<|im_end|>"], ("END",), "aEND b", ""),
    ],
)
def test_a_chat_tells_where_the_stop_begins_that_ended_its_turn(sampled, stops, text, ending):
    telling = Telling()
    said = telling.say(Asked(stop=stops), [token_id for piece in sampled for token_id in telling.ids(piece)])
    assert (said.text, said.ending, telling.segments[0].endings) == (text, ending, [ending])
