"""Rewards of a completion. Each function gets the arguments that it names. Rewards from 0 to 1 keep runs comparable."""


def right(*, completion: str, columns: dict) -> float:
    """`columns` are the columns of the prompt's row. An exception is a failed reward, never a reward of 0."""
    return float(completion.strip() == str(columns["answer"]))


def short(*, completion: str, most: int) -> float:
    """`most` is a parameter, set in run.yaml."""
    return float(len(completion.strip()) <= most)
