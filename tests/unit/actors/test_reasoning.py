import pytest

from actors.reasoning import after_reasoning, parted, without_channels
from tests.unit.actors.chat.families import report_of, turns_of
from tests.unit.actors.chat.test_calls import parser_of

QUESTION = {"role": "user", "content": "2 + 2?"}


def message_of(said):
    """The message of an episode in which the model's template begins the reasoning."""
    prompt = turns_of("qwen35").template.prompt([QUESTION], tools=[])
    return parser_of("qwen35").parser(said, prompt=prompt, tools=[]).as_message(), prompt


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("Twice 2.\n</think>\n\nIt is 4. Let me expl", "It is 4. Let me expl"),
        ("</think>\n\nIt is 4. Let me expl", "It is 4. Let me expl"),
        ("\n\n</think>\n\nIt is 4. Let me expl", "It is 4. Let me expl"),
        ("Twice 2. Is it 4?", ""),
        ("", ""),
    ],
)
def test_the_last_message_of_an_episode_is_an_answer_unless_the_model_was_cut_off_while_it_thought(said, answer):
    """The answer counted as a thought: its `</think>` was no longer there."""
    message, prompt = message_of(said)
    assert prompt.endswith(report_of("qwen35").generation_prompt) and prompt.endswith("<think>\n")
    given = {"prompt": prompt, "finish_reason": "length"}
    assert after_reasoning(message["content"], messages=[QUESTION, message], **given) == answer
    assert after_reasoning(said, messages=[QUESTION, {"role": "assistant", "content": said}], **given).strip() == answer


def test_the_reasoning_of_an_earlier_turn_says_nothing_about_the_last():
    """A message that holds its thoughts, as after a prompt that an agent wrote."""
    messages = [
        QUESTION,
        {"role": "assistant", "content": "It is 4.", "reasoning_content": "Twice 2."},
        QUESTION,
        {"role": "assistant", "content": "4?"},
    ]
    assert after_reasoning("4?", prompt="<think>\n", finish_reason="length", messages=messages) == ""


def said_in(*messages):
    """After a prompt that ends with `<|start|>assistant`."""
    return "<|end|><|start|>assistant".join(messages)


THOUGHT, ANSWERED = "<|channel|>analysis<|message|>2 and 2", "<|channel|>final<|message|>4"


@pytest.mark.parametrize(
    ("said", "text", "reasoning", "answer"),
    [
        (said_in(THOUGHT, ANSWERED), "<think>2 and 2</think>4", "2 and 2", "4"),
        (said_in(THOUGHT, THOUGHT, ANSWERED), "<think>2 and 2\n2 and 2</think>4", "2 and 2\n2 and 2", "4"),
        (said_in("<|channel|>analysis<|message|>", ANSWERED), "<think></think>4", "", "4"),
        (THOUGHT, "<think>2 and 2", "2 and 2", ""),
        (ANSWERED, "4", None, "4"),
        (f"{ANSWERED}<|end|>", "4", None, "4"),
        ("<|channel|>final <|constrain|>json<|message|>{}", "{}", None, "{}"),
        (said_in(THOUGHT, "<|channel|>commentary<|message|>Well.", ANSWERED), "<think>2 and 2</think>Well.\n4", "2 and 2", "Well.\n4"),
        (said_in(THOUGHT, " to=python<|channel|>analysis code<|message|>2+2"), "<think>2 and 2\n2+2", "2 and 2\n2+2", ""),
        (
            said_in(THOUGHT, '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 2}'),
            '<think>2 and 2</think>assistantcommentary to=functions.add json{"a": 2}',
            "2 and 2",
            'assistantcommentary to=functions.add json{"a": 2}',
        ),
        ("4", "4", None, "4"),
    ],
)  # fmt: skip
def test_the_analysis_channel_is_reasoning_and_the_final_one_the_answer(said, text, reasoning, answer):
    assert without_channels(said) == text
    assert parted(text, prompt="<|start|>assistant") == (reasoning, answer)
    assert after_reasoning(text, finish_reason="length") == answer
