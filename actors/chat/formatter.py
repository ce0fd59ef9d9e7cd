"""Prompts to tokens and completions to text: chat templates, one bos at most, and the ids that end a completion."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PretrainedConfig

from actors.chat.encoding import TextEncoder
from actors.chat.hub import refuse_empty_tokenizer, why_not_loaded
from actors.chat.rendering import ChatTemplate, Message, fresh_word
from actors.chat.turns import Turns
from cluster.contracts.config import ModelConfig
from cluster.contracts.errors import ConfigError, DataError
from cluster.contracts.types import Prompt
from cluster.record.stored_models import local_model
from cluster.weights.model_files import refuse_unpinned_code


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedPrompt:
    """A prompt as the engine gets it."""

    text: str
    """After the template, without a bos that the tokenizer adds."""
    token_ids: list[int]


class ChatFormatter:
    """One model's tokenizer and templates."""

    def __init__(
        self, tokenizer: Any, *, max_context: int, stop_token_ids: Sequence[int] = (), bos_token_id: int | None = None
    ) -> None:
        """`max_context` counts prompt and completion tokens; `stop_token_ids` are added to the tokenizer's own eos.

        `bos_token_id` is the model's, for tokenizers that name none.
        """
        self._tokenizer = tokenizer
        self.max_context = max_context
        eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        self.stop_token_ids: tuple[int, ...] = tuple(sorted({*stop_token_ids, *eos}))
        """End of sequence and end of turn; a completion that ends with one keeps it among its tokens."""
        self._bos = tokenizer.bos_token_id
        self.bos_token_id: int | None = bos_token_id if self._bos is None else self._bos
        """Begins a text, whether or not the tokenizer adds it; None where neither tokenizer nor model names one."""
        self._adds_bos = self._bos is not None and tokenizer("a").input_ids[:1] == [self._bos]

    @classmethod
    def load(cls, model: ModelConfig) -> Self:
        """Reads tokenizer and configuration of `model.path`, which is downloaded first if it is in an object store.

        Raises ConfigError when they are missing, do not fit together, or would run code from the hub that no commit pins.
        """
        model = local_model(model, field="model")
        refuse_unpinned_code(model)
        options = {"revision": model.revision, "trust_remote_code": model.trust_remote_code}
        try:
            config = AutoConfig.from_pretrained(model.path, **options)
            tokenizer = AutoTokenizer.from_pretrained(model.path, **options)
        except (OSError, ValueError) as error:
            raise ConfigError(f"model.path={model.path!r} does not load: {why_not_loaded(error)}") from error
        refuse_empty_tokenizer(tokenizer, path=model.path, field="model.path")
        if model.chat_template is not None:
            tokenizer.chat_template = model.chat_template
        stop_token_ids = _stop_token_ids(model, config)
        return cls(
            tokenizer,
            max_context=_max_context(model, config),
            stop_token_ids=stop_token_ids,
            bos_token_id=_bos_token_id(config),
        )

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(self._tokenizer)

    @cached_property
    def _encoder(self) -> TextEncoder:
        return TextEncoder(self._tokenizer, template=self._template.source)

    @property
    def num_token_ids(self) -> int:
        """That the tokenizer knows: 0 to one less."""
        return len(self._tokenizer)

    @property
    def has_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    def turns(self) -> Turns:
        """Of a model with a chat template."""
        return Turns(self._tokenizer, stop_token_ids=self.stop_token_ids)

    def encode(self, prompt: Prompt) -> EncodedPrompt:
        """Messages through the chat template, text as it is. A prompt with both gets the template where the model has one.

        Messages without a template become plain text. Exactly one bos stands in front where the tokenizer adds one, whether or not
        the template writes it too. Raises DataError naming the prompt when it is empty, leaves no room for a completion, or does not
        go through the template.
        """
        text, token_ids = self._encoded(prompt)
        if not token_ids:
            raise _refused(prompt, "is empty; give it a text or messages")
        if len(token_ids) >= self.max_context:
            raise _refused(
                prompt,
                f"has {len(token_ids)} tokens, and the context takes {self.max_context} with the completion; shorten or drop the "
                "prompt, or raise model.max_context",
            )
        return EncodedPrompt(text=text, token_ids=token_ids)

    def with_bos(self, token_ids: list[int]) -> list[int]:
        """Of a text that begins here: exactly one where the tokenizer adds one, whether or not the template wrote it."""
        if self._adds_bos and self._bos is not None and token_ids[:1] != [self._bos]:
            return [self._bos, *token_ids]
        return token_ids

    def num_tokens(self, prompt: Prompt) -> int:
        """As `encode` makes them, however many. Raises DataError for a prompt that does not go through the template."""
        return len(self._encoded(prompt)[1])

    def cut(self, text: str, num_tokens: int, *, at_start: bool) -> str:
        """`text` without so many tokens at one side; empty where it has no more. A character of several tokens stays or goes as a whole."""
        spans = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True).offset_mapping
        if len(spans) <= num_tokens:
            return ""
        return text[spans[num_tokens - 1][1] :] if at_start else text[: spans[-num_tokens][0]]

    def encode_completion(self, prompt: Prompt, completion: str) -> list[int]:
        """A given completion as the model would have sampled it after the prompt: its tokens, then the one that ends the turn or the
        sequence, unless it has one.

        Raises DataError naming the prompt when the completion is empty, or the two do not fit the context or the template.
        """
        encoded = self.encode(prompt)
        space, end = self._around(prompt, encoded.text, completion)
        token_ids = self._encoder.encode_after(encoded.token_ids[-1], space + completion)
        if not token_ids:
            raise _refused(prompt, "has an empty completion; leave the row out")
        if end is not None and token_ids[-1] not in self.stop_token_ids:
            token_ids = [*token_ids, end]
        num_tokens = len(encoded.token_ids) + len(token_ids)
        if num_tokens > self.max_context:
            raise _refused(
                prompt,
                f"has {num_tokens} tokens with its completion, and the context takes {self.max_context}; shorten or drop it, "
                "or raise model.max_context",
            )
        return token_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """A completion's text for rewards and people. Special tokens (eos, end of turn) are left out; a stop string stays."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def shown(self, token_ids: Sequence[int]) -> tuple[str, ...]:
        """Each token as text, special ones as they are written."""
        return tuple(self._tokenizer.decode([token_id], clean_up_tokenization_spaces=False) for token_id in token_ids)

    def _around(self, prompt: Prompt, prompt_text: str, completion: str) -> tuple[str, int | None]:
        """White space that the template writes before this completion, and the first token after it that ends one; the tokenizer's eos
        where the template writes none."""
        if not completion or not self.has_template or prompt.messages is None:
            return "", self._tokenizer.eos_token_id
        # A completion such as `end` stands in `<|im_end|>` too.
        words = fresh_word("Zqsaid", [prompt.messages, self._template.source])
        dialogue = [*prompt.messages, {"role": "assistant", "content": words}]
        rendered = _rendered(prompt, self._template, dialogue)
        before, _, after = rendered.rpartition(words)
        space = before.removeprefix(prompt_text)
        tail = self._tokenizer(after, add_special_tokens=False).input_ids
        ends = (token_id for token_id in tail if token_id in self.stop_token_ids)
        return "" if space.strip() else space, next(ends, self._tokenizer.eos_token_id)

    def _encoded(self, prompt: Prompt) -> tuple[str, list[int]]:
        text = self._text(prompt)
        return text, self.with_bos(list(self._tokenizer(text, add_special_tokens=False).input_ids))

    def _text(self, prompt: Prompt) -> str:
        if prompt.text is not None and (prompt.messages is None or not self.has_template):
            return prompt.text
        if prompt.messages is None:
            raise _refused(prompt, "has neither text nor messages")
        if not self.has_template:
            return _plain_text(prompt)
        return _rendered(prompt, self._template.prompt, prompt.messages)


def _rendered(prompt: Prompt, render: Callable[[Sequence[Message]], str], messages: Sequence[Message]) -> str:
    """Raises DataError naming the prompt."""
    try:
        return render(messages)
    except DataError as error:
        raise _refused(prompt, f"does not go through: {error}") from error


def _plain_text(prompt: Prompt) -> str:
    """One message is its content; a dialogue is lines of `role: content` that end where the assistant is to speak."""
    messages = prompt.messages or []
    for message in messages:
        if not isinstance(message.get("content"), str):
            kind = type(message.get("content")).__name__
            raise _refused(
                prompt, f"has a message whose content is {kind}; without a chat template it must be a string"
            )
        if "role" not in message and len(messages) > 1:
            raise _refused(prompt, "has a message without a role; a dialogue needs one for each")
    if len(messages) == 1:
        return messages[0]["content"]
    return "".join(f"{message['role']}: {message['content']}\n" for message in messages) + "assistant:"


def _refused(prompt: Prompt, why: str) -> DataError:
    return DataError(f"prompt {prompt.prompt_id!r} {why}", prompt_id=prompt.prompt_id)


def _max_context(model: ModelConfig, config: PretrainedConfig) -> int:
    own: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    wanted = model.max_context
    if wanted is None:
        if own is None:
            raise ConfigError(f"model.path={model.path!r} does not say how long its context is; set model.max_context")
        return own
    if own is not None and wanted > own:
        raise ConfigError(f"model.max_context={wanted} is beyond the model's own {own}; use at most {own}")
    return wanted


def _bos_token_id(config: PretrainedConfig) -> int | None:
    """Some configurations keep a default that their vocabulary does not hold."""
    text = config.get_text_config()
    found: int | None = getattr(text, "bos_token_id", None)
    return found if isinstance(found, int) and found < text.vocab_size else None


def _stop_token_ids(model: ModelConfig, config: PretrainedConfig) -> list[int]:
    """Chat models often name an end-of-turn token in generation_config.json alone."""
    try:
        found = GenerationConfig.from_pretrained(model.path, revision=model.revision or "main").eos_token_id
    except OSError:  # the file is optional
        found = getattr(config.get_text_config(), "eos_token_id", None)
    if found is None:
        return []
    return [found] if isinstance(found, int) else list(found)
