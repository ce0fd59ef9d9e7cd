"""What a completion is worth. Each function is called with the arguments that it names; numbers from 0 to 1 keep runs comparable."""


def right(*, completion: str, columns: dict) -> float:
    """`columns` are those of the prompt's row. To raise is a failed reward, never a zero."""
    return float(completion.strip() == str(columns["answer"]))


def short(*, completion: str, most: int) -> float:
    """`most` is a parameter: run.yaml gives it."""
    return float(len(completion.strip()) <= most)
