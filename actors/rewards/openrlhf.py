"""Calls an unchanged `reward_func(queries, prompts, labels)` written for OpenRLHF, with lists of one trajectory."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import ImportString

from cluster.contracts.errors import ConfigError, DataError


class OpenRlhfReward:
    """The function returns the reward as a tensor, list or number, or a dict with `rewards`. `scores` become a component, `extra_logs` are
    ignored.

    Source: OpenRLHF, examples/python/reward_func.py
    """

    def __init__(
        self,
        *,
        function: ImportString[Callable[..., Any]],
        label_column: str | None = "label",
        tokenizer: str | None = None,
    ) -> None:
        """`function` is an import path, `my_package.rewards:reward_func`. `label_column: null` gives empty labels, as OpenRLHF without
        `--data.label_key`. `tokenizer` is that of the policy, a folder or a name on the hub: queries then have the completion's special
        tokens, as in OpenRLHF. Without it they lack them, also the end of the turn. Raises DataError for a prompt without the column."""
        self._function = self.identity = function
        self._label_column = label_column
        self._tokenizer = None if tokenizer is None else _loaded(tokenizer)

    def __call__(self, *, prompt: str, completion: str, token_ids: Sequence[int], columns: Mapping[str, Any]) -> Any:
        if self._label_column is not None and self._label_column not in columns:
            raise DataError(
                f"label_column={self._label_column!r} is not a column of this prompt, which has: {', '.join(sorted(columns)) or 'none'}; "
                "name another one, or write label_column: null for empty labels"
            )
        label = "" if self._label_column is None else columns[self._label_column]
        # Positional arguments, as in OpenRLHF: the function may name them differently.
        given = self._function([self._query(prompt, completion, token_ids)], [prompt], [label])
        if not isinstance(given, Mapping):
            return _only(given)
        reward, score = _only(given["rewards"]), _only(given.get("scores"))
        return reward if score is None else {"reward": reward, "score": score}

    def _query(self, prompt: str, completion: str, token_ids: Sequence[int]) -> str:
        if self._tokenizer is None:
            return prompt + completion
        asked: list[int] = self._tokenizer(prompt, add_special_tokens=False).input_ids
        return self._tokenizer.decode([*asked, *token_ids], skip_special_tokens=False)


def _loaded(tokenizer: str) -> Any:
    from transformers import AutoTokenizer  # its import takes a process seconds

    try:
        return AutoTokenizer.from_pretrained(tokenizer)
    except (OSError, ValueError) as error:
        raise ConfigError(f"tokenizer={tokenizer!r} does not load; give the path of the policy: {error}") from error


def _only(value: Any) -> Any:
    """The entry of a list of one. A tensor of one is a number already."""
    return value[0] if isinstance(value, list | tuple) and len(value) == 1 else value


openrlhf = OpenRlhfReward
