"""Prompts from any procedural task of reasoning_gym: unlimited, offline, and with a verifier (`actors.rewards.reasoning_gym`).

Train and held-out prompts never overlap, for two reasons: their seeds come from different halves of the seed space, and each question
belongs to one split by a digest of its text. Disjoint seeds alone would not suffice: two-digit sums repeat within a run.
"""

import dataclasses
import functools
import hashlib
import json
from typing import Any, Literal

from actors.gym import DATASETS, gym
from cluster.contracts.errors import ConfigError, DataError
from cluster.contracts.types import Prompt

_SPLIT_SEEDS = 2**30
"""Seeds per split: train has [0, 2^30), held-out has [2^30, 2^31). NumPy, which some tasks use, accepts at most 32 bits."""
_HELD_OUT_OF = 4
"""One in this many questions is held out."""
_MAX_ATTEMPTS = 256
"""Seeds to try for one prompt until a question of its split appears."""


class ReasoningGymPrompts:
    """`size` prompts of one task. The same `seed`, task and parameters give the same prompts on every machine."""

    def __init__(
        self,
        *,
        task: str,
        size: int = 10_000,
        seed: int = 0,
        split: Literal["train", "held_out"] = "train",
        system_prompt: str | None = None,
        **config: Any,
    ) -> None:
        """`config`: the task's own parameters (`min_digits: 2`). Raises ConfigError for an unknown task or parameter."""
        if size < 1 or size > _SPLIT_SEEDS // 2:
            raise ConfigError(f"size={size} is not in [1, {_SPLIT_SEEDS // 2}]")
        if seed < 0:
            raise ConfigError(f"seed={seed} is negative; use 0 or more")
        self._task = task
        self._size = size
        self._seed = seed
        self._is_held_out = split == "held_out"
        self._system_prompt = system_prompt
        self._config = config
        self._dataset = functools.lru_cache(maxsize=_MAX_ATTEMPTS)(self._make_dataset)
        self._dataset(0)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Prompt:
        if not 0 <= index < self._size:
            raise IndexError(f"prompt {index} is not in [0, {self._size})")
        question, columns = self._entry(index)
        messages = [{"role": "user", "content": question}]
        if self._system_prompt is not None:
            messages.insert(0, {"role": "system", "content": self._system_prompt})
        split = "held_out" if self._is_held_out else "train"
        return Prompt(
            prompt_id=f"reasoning_gym/{self._task}/{split}/{self._seed}/{index}", messages=messages, columns=columns
        )

    def _entry(self, index: int) -> tuple[str, dict[str, Any]]:
        for attempt in range(_MAX_ATTEMPTS):
            entry = self._dataset(attempt)[index]
            if is_held_out(entry["question"]) == self._is_held_out:
                columns = {
                    "answer": entry["answer"],
                    "metadata": entry["metadata"],
                    "task": self._task,
                    "task_config": self._config,
                }
                # Through JSON, as in the trajectory's info: a judge sees the same values here and from disk.
                return entry["question"], json.loads(json.dumps(columns, default=str))
        raise DataError(
            f"task={self._task!r} has too few distinct questions for prompt {index} of the "
            f"{'held-out' if self._is_held_out else 'train'} split: {_MAX_ATTEMPTS} seeds gave none; widen the task's parameters"
        )

    def _make_dataset(self, attempt: int) -> Any:
        # A task draws entry i from seed + i: steps of `size` keep the attempts apart, and the remainder keeps them in their split's half.
        offset = (self._seed * 1_000_003 + attempt * self._size) % (_SPLIT_SEEDS - self._size)
        return make_task(
            self._task, size=self._size, seed=_SPLIT_SEEDS * self._is_held_out + offset, config=self._config
        )


reasoning_gym = ReasoningGymPrompts


def make_task(task: str, *, size: int, seed: int, config: dict[str, Any]) -> Any:
    """A reasoning_gym dataset. Raises ConfigError naming an unknown task, or a parameter that is unknown or refused."""
    if task not in DATASETS:
        raise ConfigError(f"task={task!r} is not a reasoning_gym task; it has: {', '.join(sorted(DATASETS))}")
    known = {field.name for field in dataclasses.fields(DATASETS[task][1])} - {"size", "seed"}
    unknown = sorted(set(config) - known)
    if unknown:
        name = unknown[0]
        raise ConfigError(
            f"{name}={config[name]!r} is not a parameter of {task!r}; it takes: {', '.join(sorted(known))}"
        )
    try:
        return gym.create_dataset(task, size=size, seed=seed, **config)
    except (AssertionError, TypeError, ValueError, KeyError, AttributeError) as error:
        raise ConfigError(f"task={task!r} refuses {config}: {type(error).__name__}: {error}") from error


def is_held_out(question: str) -> bool:
    """Whether this question belongs to the held-out split, whatever its seed."""
    return hashlib.sha256(question.encode()).digest()[0] % _HELD_OUT_OF == 0
