"""The limit of a run's prompts, in tokens of its own tokenizer and chat template, and the treatment of longer ones."""

from dataclasses import replace
from typing import TYPE_CHECKING

from cluster.contracts.errors import DataError
from cluster.contracts.prompts_config import PromptsConfig
from cluster.contracts.types import Prompt

if TYPE_CHECKING:
    from actors.chat.formatter import ChatFormatter  # imports transformers


class PromptLimit:
    """Applies `max_prompt_tokens` and `on_long_prompt` of `field`. Without a limit, prompts stay as they are. Each prompt is measured when
    it is read, so a large source opens at once."""

    def __init__(self, config: PromptsConfig, formatter: "ChatFormatter", *, field: str) -> None:
        self._field = field
        self.max_tokens = config.max_prompt_tokens
        self._on_long = config.on_long_prompt
        self._formatter = formatter

    def __call__(self, prompt: Prompt) -> Prompt | None:
        """The prompt, truncated if `on_long_prompt` says so; None if it is dropped. A prompt that the chat template refuses has no length
        and stays as it is. Raises DataError for a long prompt if `on_long_prompt` is `error`, or if it cannot be truncated."""
        most = self.max_tokens
        if most is None:
            return prompt
        try:
            num_tokens = self._formatter.num_tokens(prompt)
        except DataError:
            # A worker refuses it too, and drops its group alone.
            return prompt
        if num_tokens <= most:
            return prompt
        if self._on_long == "error":
            way_out = f"shorten it, raise the limit, or set {self._field}.on_long_prompt"
            raise self._too_long(prompt, num_tokens, way_out)
        if self._on_long == "drop":
            return None
        return self._truncated(prompt, num_tokens, most)

    def _truncated(self, prompt: Prompt, num_tokens: int, most: int) -> Prompt:
        shorter = prompt
        # More than once if the tokens next to the cut change.
        while num_tokens > most:
            text = self._text(shorter)
            excess = num_tokens - most
            kept = self._formatter.cut(text, excess, at_start=self._on_long == "truncate_start") if text else ""
            if not kept.strip() or kept == text:
                why = (
                    "its text or first user message is too short to be cut by that much: raise the limit, or set "
                    f"{self._field}.on_long_prompt: drop; a run that trains on truncated prompts keeps both settings: name another run_dir"
                )
                raise self._too_long(prompt, num_tokens, why)
            shorter = _with(kept, shorter, instead_of=text)
            num_tokens = self._formatter.num_tokens(shorter)
        return shorter

    def _text(self, prompt: Prompt) -> str | None:
        """The text that may be cut: the prompt's text or its first user message, whichever is encoded. None: nothing may be cut."""
        if prompt.text is not None and (prompt.messages is None or not self._formatter.has_template):
            return prompt.text
        contents = (message["content"] for message in prompt.messages or () if message.get("role") == "user")
        first = next(contents, None)
        return first if isinstance(first, str) else None

    def _too_long(self, prompt: Prompt, num_tokens: int, way_out: str) -> DataError:
        limit = f"{self._field}.max_prompt_tokens is {self.max_tokens}"
        return DataError(
            f"prompt {prompt.prompt_id!r} has {num_tokens} tokens, and {limit}; {way_out}", prompt_id=prompt.prompt_id
        )


def _with(shorter: str, prompt: Prompt, *, instead_of: str | None) -> Prompt:
    """Replaces `instead_of` by `shorter` in the prompt's text and in its first user message, if they equal it."""
    messages = [*map(dict, prompt.messages)] if prompt.messages is not None else None
    for message in messages or ():
        if message.get("role") == "user":
            message["content"] = shorter if message["content"] == instead_of else message["content"]
            break
    return replace(prompt, text=shorter if prompt.text == instead_of else prompt.text, messages=messages)
