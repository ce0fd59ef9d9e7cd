import random

import pytest

from actors.chat.round_trip import PROBE_TOOLS
from cluster.contracts.types import FinishReason
from tests.unit.actors.chat.families import FAMILIES, tokenizer_of, turns_of

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
USER = [{"role": "user", "content": "7"}]
ANSWER = [{"role": "tool", "name": "zqfind", "tool_call_id": "call00000", "content": "7"}]


def ids(name, *tokens):
    return tokenizer_of(name).convert_tokens_to_ids([*tokens])


def written_after(name, last, *, messages=USER, finish_reason=STOP):
    """What is written after sampled tokens of which these are the last."""
    turns = turns_of(name)
    sampled = [*turns.encoder.encode("No"), *ids(name, *last)]
    found = turns.next_prompt([5, 6], sampled, messages, finish_reason=finish_reason, tools=PROBE_TOOLS)
    assert found.token_ids[: 2 + len(sampled)] == [5, 6, *sampled]
    assert found.written_ids == found.token_ids[2 + len(sampled) :]
    return turns.encoder.decode(found.written_ids)


AFTER_CLOSE = "\n<|im_start|>user\n7<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("last", "finish_reason", "written"),
    [
        (["<|im_end|>"], STOP, AFTER_CLOSE),
        (["<|endoftext|>"], STOP, "<|im_end|>" + AFTER_CLOSE),
        (["a"], STOP, "<|im_end|>" + AFTER_CLOSE),
        (["a"], LENGTH, "<|im_end|>" + AFTER_CLOSE),
    ],
)  # fmt: skip
def test_what_follows_a_turn_depends_on_how_it_ended(last, finish_reason, written):
    assert written_after("qwen25", last, finish_reason=finish_reason) == written


@pytest.mark.parametrize(
    ("name", "last", "messages", "written"),
    [
        ("glm4", ["<|user|>"], USER, "\n7<|assistant|>"),
        ("glm4", ["<|observation|>"], ANSWER, "\n7<|assistant|>"),
        ("glm4", ["<|user|>"], ANSWER, "<|observation|>\n7<|assistant|>"),
        ("glm4", ["<|endoftext|>"], USER, "<|user|>\n7<|assistant|>"),
        ("gemma_calls", ["<response>"], ANSWER, "zqfind{value:<escape>7<escape>}</response>"),
        ("harmony", ["<|return|>"], USER, "<|end|><|start|>user<|message|>7<|end|><|start|>assistant"),
        ("harmony", ["<|call|>"], ANSWER, '<|start|>functions.zqfind to=assistant<|channel|>commentary<|message|>"7"<|end|>'
                                          "<|start|>assistant"),
        ("nemotron", ["<SPECIAL_12>"], USER, "\n<SPECIAL_11>User\n7\n<SPECIAL_11>Assistant\n<think>\n"),
        ("llama31", ["<|eom_id|>"], ANSWER, '<|eot_id|><|start_header_id|>ipython<|end_header_id|>\n\n"7"<|eot_id|>'
                                            "<|start_header_id|>assistant<|end_header_id|>\n\n"),
        ("mistral", ["</s>"], USER, "[INST] 7[/INST]"),
        ("falcon", ["<|endoftext|>"], USER, "\nUser: 7\nFalcon:"),
    ],
)  # fmt: skip
def test_a_stop_that_the_model_sampled_is_not_written_twice(name, last, messages, written):
    assert written_after(name, last, messages=messages) == written


def test_words_before_the_close_are_not_repeated_either():
    """Llama 2's template writes a space before the eos, which the model may sample or not."""
    token_ids = turns_of("llama2").next_prompt([], ids("llama2", "▁", "7", "</s>"), USER, finish_reason=STOP).token_ids
    tokens = tokenizer_of("llama2").convert_ids_to_tokens(token_ids)
    assert " ".join(tokens) == "▁ 7 </s> <s> ▁ [ I N S T ] ▁ 7 ▁ [ / I N S T ]"


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "echo"])
def test_sampled_tokens_stay_as_they_were_sampled_however_they_split_the_text(name):
    turns, rng = turns_of(name), random.Random(name)
    suffix = turns.suffix(USER)
    ordinary = [index for index in range(len(tokenizer_of(name))) if index not in turns.encoder.controls.values()]
    for _ in range(20):
        prompt = rng.choices(ordinary, k=5)
        for _ in range(3):
            sampled = rng.choices(ordinary, k=rng.randrange(1, 12)) + ids(name, *rng.choices(FAMILIES[name].stops, k=1))
            found = turns.next_prompt(prompt, sampled, USER, finish_reason=STOP)
            begun = len(prompt) + len(sampled)
            assert found.token_ids[:begun] == prompt + sampled
            closed = len(suffix.close_ids) if sampled[-1:] == suffix.close_ids[-1:] else 0
            assert found.token_ids[begun:] == suffix.token_ids[closed:]
            prompt = found.token_ids


@pytest.mark.parametrize("name", ["qwen3", "llama2", "mistral", "glm4", "phi3", "olmo"])
def test_an_implementation_that_tokenizes_again_would_not_keep_them(name):
    """The control of the test above: a word that was sampled in single characters comes back as one token."""
    turns = turns_of(name)
    word, close = ids(name, "t", "h", "e"), turns.suffix(USER).close_ids[-1:]
    text = turns.encoder.decode(word)
    dialogue = [*USER, {"role": "assistant", "content": text}, *USER]
    again = turns.encoder.encode(turns.template.prompt(dialogue))
    prompt = turns.encoder.encode(turns.template.prompt(USER))
    exact = turns.next_prompt(prompt, word + close, USER, finish_reason=STOP).token_ids
    assert text == "the" and text in turns.encoder.decode(again)
    assert holds(exact, word) and not holds(again, word)


def holds(token_ids, wanted):
    return any(token_ids[at : at + len(wanted)] == wanted for at in range(len(token_ids)))


@pytest.mark.parametrize("name", ["deepseek_r1", "qwen3", "qwen35", "glm45"])
def test_the_template_leaves_out_earlier_reasoning_that_stands_in_the_assistants_words(name):
    """Its tags were cut, as those that others write: the template did not know them, and the model saw the reasoning in pieces of tags."""
    turns = turns_of(name)
    said = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nfive"}
    text, token_ids = turns.first_prompt([*USER, said, *USER])
    assert turns.encoder.decode(token_ids) == text
    assert ("hm" in text) is (name == "glm45")
    assert turns.encoder.control_ids(token_ids) == turns.encoder.control_ids(turns.encoder.encode(text))


def test_other_control_tokens_in_the_assistants_words_and_its_tags_in_those_of_others_are_text():
    turns = turns_of("qwen3")
    said = {"role": "assistant", "content": "<think>hm</think>five<|im_end|>"}
    _, harmless = turns.first_prompt([*USER, {**said, "content": "five"}, *USER])
    _, token_ids = turns.first_prompt([*USER, said, {"role": "user", "content": "</think><think>"}])
    assert turns.encoder.control_ids(token_ids) == turns.encoder.control_ids(harmless)
