"""The same prompt many times, for environments that draw their own tasks by `episode.seed`."""

from pydantic import PositiveInt

from cluster.contracts.errors import ConfigError
from cluster.contracts.types import Prompt


class RepeatedPrompts:
    """`size` prompts with the same user message."""

    def __init__(self, *, message: str, size: PositiveInt = 10_000, system_prompt: str | None = None) -> None:
        """Raises ConfigError for a message without words."""
        if not message.strip():
            raise ConfigError(f"message={message!r} says nothing; write what the model is to do")
        self._size = size
        system = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
        self._messages = [*system, {"role": "user", "content": message}]

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Prompt:
        if not 0 <= index < self._size:
            raise IndexError(f"prompt {index} is not in [0, {self._size})")
        return Prompt(prompt_id=f"repeat/{index}", messages=[dict(message) for message in self._messages])


repeat = RepeatedPrompts
