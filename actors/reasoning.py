"""Where a model's reasoning ends and its answer begins."""


def after_reasoning(text: str) -> str:
    """What follows the last `</think>`; all of the text where there is none."""
    return text.rpartition("</think>")[2]
