"""The longest prompt that a run takes, in tokens of its own tokenizer and chat template, and what becomes of longer ones."""

from dataclasses import replace

from actors.chat.formatter import ChatFormatter
from cluster.contracts.errors import DataError
from cluster.contracts.prompts_config import PromptsConfig
from cluster.contracts.types import Prompt


class PromptLimit:
    """`prompts.max_prompt_tokens` and `prompts.on_long_prompt`. Prompts are measured one by one, as they are asked for: a large source
    opens at once."""

    def __init__(self, config: PromptsConfig, formatter: ChatFormatter) -> None:
        assert config.max_prompt_tokens is not None, "there is a limit"
        self.max_tokens = config.max_prompt_tokens
        self._on_long = config.on_long_prompt
        self._formatter = formatter

    def __call__(self, prompt: Prompt) -> Prompt | None:
        """The prompt, shortened where that is asked for; None: it is dropped. Raises DataError for one that may not be too long, or
        cannot be shortened."""
        num_tokens = self._formatter.num_tokens(prompt)
        if num_tokens <= self.max_tokens:
            return prompt
        if self._on_long == "error":
            raise _too_long(
                prompt, num_tokens, self.max_tokens, "shorten it, raise the limit, or set prompts.on_long_prompt"
            )
        if self._on_long == "drop":
            return None
        return self._truncated(prompt, num_tokens)

    def _truncated(self, prompt: Prompt, num_tokens: int) -> Prompt:
        shorter = prompt
        # More than once where the tokens beside the cut come out otherwise.
        while num_tokens > self.max_tokens:
            text = _text(shorter)
            excess = num_tokens - self.max_tokens
            kept = self._formatter.cut(text, excess, at_start=self._on_long == "truncate_start") if text else ""
            if not kept.strip() or kept == text:
                raise _too_long(
                    prompt,
                    num_tokens,
                    self.max_tokens,
                    "its text or first user message is too short to be cut by that much",
                )
            shorter = _with_text(shorter, kept)
            num_tokens = self._formatter.num_tokens(shorter)
        return shorter


def _text(prompt: Prompt) -> str | None:
    """What may be cut; None: nothing."""
    if prompt.text is not None:
        return prompt.text
    contents = (message["content"] for message in prompt.messages or () if message.get("role") == "user")
    first = next(contents, None)
    return first if isinstance(first, str) else None


def _with_text(prompt: Prompt, text: str) -> Prompt:
    messages = [*map(dict, prompt.messages)] if prompt.messages is not None else None
    for message in messages or ():
        if message.get("role") == "user":
            message["content"] = text
            break
    return replace(prompt, text=None if prompt.text is None else text, messages=messages)


def _too_long(prompt: Prompt, num_tokens: int, most: int, way_out: str) -> DataError:
    return DataError(
        f"prompt {prompt.prompt_id!r} has {num_tokens} tokens, and prompts.max_prompt_tokens is {most}; {way_out}",
        prompt_id=prompt.prompt_id,
    )
