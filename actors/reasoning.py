"""Separate a model's answer from its reasoning."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

THINK, END_OF_THINK = "<think>", "</think>"
CHANNEL = "<|channel|>"
"""Begins the channel of a message in the format of gpt-oss, harmony: `analysis` is reasoning, `final` the answer."""
CHANNEL_MARKS = (CHANNEL, "<|start|>", "<|constrain|>", "<|message|>", "<|end|>")
# A channel and a role may be followed by a recipient.
_HEADER = r"{start}<\|channel\|>{channel}(?:<\|constrain\|>[^<]*)?<\|message\|>"
_ANALYSIS = re.compile(
    _HEADER.format(start=r"(?:<\|start\|>assistant[^<]*)?", channel="analysis[^<]*") + r"(.*?)(<\|end\|>|\Z)", re.DOTALL
)
_SPOKEN = re.compile(_HEADER.format(start=r"(?:<\|start\|>assistant)?", channel=r"(?:final|commentary)\s*"))
_BETWEEN = re.compile(r"<\|end\|>(?!\Z)")
_MARKS = re.compile("|".join(map(re.escape, CHANNEL_MARKS)))


def after_reasoning(
    text: str, *, prompt: str = "", finish_reason: str = "", messages: Sequence[Mapping[str, Any]] = ()
) -> str:
    """The text after the last `</think>`, up to a `<think>` that is never closed; the whole text if it has neither tag.

    A model that was truncated during its reasoning has not answered: if the prompt ends with `<think>`, as templates of reasoning models
    write it, and the text reached a limit without `</think>`, the answer is empty. This is not so if the last message of `messages` has its
    reasoning apart, as in an episode: then the text is only the words after it. Peers: TRL `reasoning_accuracy_reward`
    """
    _, has_ended, answer = text.rpartition(END_OF_THINK)
    was_cut_off = not has_ended and finish_reason == "length" and prompt.rstrip().endswith(THINK)
    if was_cut_off and not _is_apart(messages):
        return ""
    return answer.partition(THINK)[0]


def parted(text: str, *, prompt: str) -> tuple[str | None, str]:
    """The reasoning with which a reply begins, or None, and the words after it. Reasoning that is closed at once is an empty text. After
    reasoning that is never closed there are no words."""
    thoughts, has_ended, words = text.partition(END_OF_THINK)
    if not (prompt.rstrip().endswith(THINK) or thoughts.lstrip().startswith(THINK)):
        return None, text
    reasoning = thoughts.replace(THINK, "", 1).strip()
    return reasoning if reasoning or has_ended else None, words.lstrip()


def with_tags(text: str) -> str:
    """A reply in channels with its analysis in the tags of reasoning. Analysis that never ends stays open."""
    tagged = _ANALYSIS.sub(lambda found: f"{THINK}{found[1]}{found[2] and END_OF_THINK}", text)
    return tagged.replace(END_OF_THINK + THINK, "\n")


def without_channels(text: str) -> str:
    """As `with_tags`, and without the marks of its other messages."""
    spoken = _SPOKEN.sub("", with_tags(text))
    return _MARKS.sub("", _BETWEEN.sub("\n", spoken))


def _is_apart(messages: Sequence[Mapping[str, Any]]) -> bool:
    said = next((each for each in reversed(messages) if each.get("role") == "assistant"), {})
    return "reasoning_content" in said
