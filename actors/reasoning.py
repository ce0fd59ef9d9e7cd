"""Separate a model's answer from its reasoning."""

_BEGINS, _ENDS = "<think>", "</think>"


def after_reasoning(text: str, *, prompt: str = "", finish_reason: str = "") -> str:
    """The text after the last `</think>`, up to a `<think>` that is never closed; the whole text if it has neither tag.

    A model that was truncated during its reasoning has not answered: if the prompt ends with `<think>`, as templates of reasoning models
    write it, and the text reached a limit without `</think>`, the answer is empty. Peers: TRL `reasoning_accuracy_reward`
    """
    _, has_ended, answer = text.rpartition(_ENDS)
    if not has_ended and finish_reason == "length" and prompt.rstrip().endswith(_BEGINS):
        return ""
    return answer.partition(_BEGINS)[0]


def parted(text: str, *, prompt: str) -> tuple[str | None, str]:
    """The reasoning with which a reply begins, or None, and the words after it. After reasoning that is never closed there are none."""
    thoughts, _, words = text.partition(_ENDS)
    if not (prompt.rstrip().endswith(_BEGINS) or thoughts.lstrip().startswith(_BEGINS)):
        return None, text
    return thoughts.replace(_BEGINS, "", 1).strip() or None, words.lstrip()
