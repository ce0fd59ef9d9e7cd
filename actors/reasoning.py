"""Where a model's reasoning ends and its answer begins."""

_BEGINS, _ENDS = "<think>", "</think>"


def after_reasoning(text: str, *, prompt: str = "", finish_reason: str = "") -> str:
    """What follows the last `</think>`, up to a `<think>` that nothing ends; all of a text that has neither.

    A model that was cut off while it reasoned has not answered. Where the prompt ends with `<think>`, as chat templates of reasoning models
    write it, a text that met a limit without a `</think>` is all reasoning. Peers: TRL `reasoning_accuracy_reward`
    """
    _, has_ended, answer = text.rpartition(_ENDS)
    if not has_ended and finish_reason == "length" and prompt.rstrip().endswith(_BEGINS):
        return ""
    return answer.partition(_BEGINS)[0]
