"""Prompts to tokens and completions to text: chat templates, at most one bos, and the stop tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

from transformers import GenerationConfig, PretrainedConfig

from actors.chat.after_turn import ASKED
from actors.chat.hub import config_and_tokenizer
from actors.chat.rendering import Message, fresh_word
from actors.chat.turns import Turns
from actors.reasoning import CHANNEL, CHANNEL_MARKS, END_OF_THINK, THINK, without_channels
from cluster.contracts.config import ModelConfig
from cluster.contracts.errors import ConfigError, DataError
from cluster.contracts.types import Prompt
from cluster.record.stored_models import local_model
from cluster.weights.model_files import refuse_unpinned_code


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedPrompt:
    """A prompt as the engine gets it."""

    text: str
    """As the template writes it, without a bos that the tokenizer adds."""
    token_ids: list[int]


class ChatFormatter:
    """One model's tokenizer and templates."""

    def __init__(
        self, tokenizer: Any, *, max_context: int, stop_token_ids: Sequence[int] = (), bos_token_id: int | None = None
    ) -> None:
        """`max_context` counts prompt and completion tokens. The tokenizer's own eos is added to `stop_token_ids`. `bos_token_id`: the
        model's, for tokenizers that name none."""
        self._tokenizer = tokenizer
        self.max_context = max_context
        eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        self.stop_token_ids: tuple[int, ...] = tuple(sorted({*stop_token_ids, *eos}))
        """Tokens that end a sequence or a turn. A completion keeps the one that ended it among its tokens."""
        self._bos = tokenizer.bos_token_id
        self.bos_token_id: int | None = bos_token_id if self._bos is None else self._bos
        """Begins a text, whether or not the tokenizer adds it. None: neither tokenizer nor model names one."""
        self._adds_bos = self._bos is not None and tokenizer("a").input_ids[:1] == [self._bos]

    @classmethod
    def load(cls, model: ModelConfig) -> Self:
        """Reads tokenizer and configuration of `model.path`. A model in an object store is downloaded first.

        Raises ConfigError when they are missing, do not fit together, or would run code from the hub without a pinned commit.
        """
        model = local_model(model, field="model")
        refuse_unpinned_code(model)
        config, tokenizer = config_and_tokenizer(
            model.path, field="model.path", revision=model.revision, trust_remote_code=model.trust_remote_code
        )
        if model.chat_template is not None:
            tokenizer.chat_template = model.chat_template
        return cls(
            tokenizer,
            max_context=_max_context(model, config),
            stop_token_ids=_stop_token_ids(model, config),
            bos_token_id=_bos_token_id(config),
        )

    @cached_property
    def _turns(self) -> Turns:
        return Turns(self._tokenizer, stop_token_ids=self.stop_token_ids)

    @cached_property
    def has_channels(self) -> bool:
        """Whether the model writes its reasoning in a channel, as gpt-oss does."""
        return CHANNEL in self._tokenizer.get_added_vocab()

    @cached_property
    def _special_tags(self) -> frozenset[int]:
        """The tags of reasoning and the marks of channels that the tokenizer calls special."""
        added = self._tokenizer.get_added_vocab()
        tags = (THINK, END_OF_THINK, *(CHANNEL_MARKS if self.has_channels else ()))
        return self._special_ids & {added[tag] for tag in tags if tag in added}

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        added = self._tokenizer.added_tokens_decoder.items()
        return frozenset(index for index, token in added if token.special)

    @property
    def num_token_ids(self) -> int:
        """Number of ids that the tokenizer knows: from 0 to one less."""
        return len(self._tokenizer)

    @property
    def has_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    def turns(self) -> Turns:
        """The model's conversations; it must have a chat template."""
        return self._turns

    def encode(self, prompt: Prompt) -> EncodedPrompt:
        """Messages pass through the chat template; a text stays as it is. A prompt with both uses its messages if the model has a template.

        Without a template, messages become plain text. If the tokenizer adds a bos, the ids begin with exactly one, even if the template
        writes one too. Raises DataError naming the prompt when it is empty, leaves no room for a completion, or the template refuses it.
        """
        return self._checked(prompt, *self._encoded(prompt))

    def encode_unasked(self, prompt: Prompt) -> EncodedPrompt:
        """As `encode`, for a prompt of an environment, whose first ask may add the user's message that the template wants: then a
        placeholder is in its place."""
        return self._checked(prompt, *self._encoded_unasked(prompt))

    def _checked(self, prompt: Prompt, text: str, token_ids: list[int]) -> EncodedPrompt:
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
        """Ids of a whole context, beginning with exactly one bos if the tokenizer adds one, even if the template wrote one too."""
        if self._adds_bos and self._bos is not None and token_ids[:1] != [self._bos]:
            return [self._bos, *token_ids]
        return token_ids

    def num_tokens(self, prompt: Prompt) -> int:
        """Tokens of the prompt as `encode_unasked` makes them, without its limit. Raises DataError for one that the template refuses."""
        return len(self._encoded_unasked(prompt)[1])

    def cut(self, text: str, num_tokens: int, *, at_start: bool) -> str:
        """`text` without `num_tokens` at its start or end; empty if it has no more. A character of several tokens is kept or cut whole."""
        spans = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True).offset_mapping
        if len(spans) <= num_tokens:
            return ""
        return text[spans[num_tokens - 1][1] :] if at_start else text[: spans[-num_tokens][0]]

    def encode_completion(self, prompt: Prompt, completion: str) -> list[int]:
        """Token ids of a given completion, as the model would have sampled them after the prompt: with the template's own text before and
        after these words, and with the reasoning closed that the prompt opens, unless the completion has these itself. The stop token of
        the turn or the sequence is added unless the completion ends with one.

        Raises DataError naming the prompt when the completion is empty, or when the two exceed the context or the template refuses them.
        """
        encoded = self.encode(prompt)
        text, end = self._around(prompt, encoded.text, completion) if completion else ("", None)
        token_ids = self._turns.encoder.encode_after(encoded.token_ids[-1], text)
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
        """A completion's text for rewards and people, without special tokens (eos, end of turn), but with its stop string and the tags of
        its reasoning, even if the tokenizer calls these special. Reasoning in a channel (gpt-oss) gets the tags."""
        if self._special_tags.isdisjoint(token_ids):
            return self.searched(token_ids)
        shown = [each for each in token_ids if each in self._special_tags or each not in self._special_ids]
        text = self._tokenizer.decode(shown, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return without_channels(text) if self.has_channels else text

    def searched(self, token_ids: Sequence[int]) -> str:
        """The text in which the engine looks for stop texts: without any special token."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def is_never_found(self, stop: str) -> bool:
        """Whether this stop text is a special token that does not end a completion by itself: `searched` leaves it out."""
        token_id = self._tokenizer.get_added_vocab().get(stop.strip())
        return token_id in self._special_ids and token_id not in self.stop_token_ids

    def shown(self, token_ids: Sequence[int]) -> tuple[str, ...]:
        """Each token as text, special tokens included."""
        return tuple(self._tokenizer.decode([token_id], clean_up_tokenization_spaces=False) for token_id in token_ids)

    def _around(self, prompt: Prompt, prompt_text: str, completion: str) -> tuple[str, int | None]:
        """The completion between the template's own text, and the first stop token after that; without one, the tokenizer's eos."""
        if not self.has_template or prompt.messages is None:
            return _begun(completion, prompt=prompt_text), self._tokenizer.eos_token_id
        # A placeholder, since the text of a completion such as `end` is also in `<|im_end|>`.
        template, controls = self._turns.template, tuple(self._turns.encoder.controls)
        placeholder = fresh_word("Zqsaid", [prompt.messages, template.source])
        dialogue = [*prompt.messages, {"role": "assistant", "content": placeholder}]
        before, found, after = _rendered(prompt, template, dialogue).partition(placeholder)
        own = before.removeprefix(prompt_text) if found and before.startswith(prompt_text) else ""
        text = _begun(completion, prompt=prompt_text, own=own, controls=controls)
        tail = self._tokenizer(after, add_special_tokens=False).input_ids
        place = next((place for place, token_id in enumerate(tail) if token_id in self.stop_token_ids), None)
        if place is None:
            return text, self._tokenizer.eos_token_id
        is_whole = completion.rstrip().endswith(controls)
        return text if is_whole else text + self._turns.encoder.decode(tail[:place]).strip(), tail[place]

    def _encoded(self, prompt: Prompt) -> tuple[str, list[int]]:
        text = self._text(prompt)
        return text, self.with_bos(list(self._tokenizer(text, add_special_tokens=False).input_ids))

    def _encoded_unasked(self, prompt: Prompt) -> tuple[str, list[int]]:
        try:
            return self._encoded(prompt)
        except DataError:
            if not (placeholder := user_placeholder(prompt)):
                raise
            return self._encoded(replace(prompt, messages=[*(prompt.messages or ()), *placeholder]))

    def _text(self, prompt: Prompt) -> str:
        if prompt.text is not None and (prompt.messages is None or not self.has_template):
            return prompt.text
        if prompt.messages is None:
            raise _refused(prompt, "has neither text nor messages")
        if not self.has_template:
            return _plain_text(prompt)
        return _rendered(prompt, self._turns.template.prompt, prompt.messages)


def user_placeholder(prompt: Prompt) -> tuple[dict[str, Any], ...]:
    """The user's message in a prompt of system messages alone, for templates that refuse one without it. Empty for other prompts."""
    is_system = prompt.messages and all(message.get("role") == "system" for message in prompt.messages)
    return (dict(ASKED),) if is_system else ()


def _begun(completion: str, *, prompt: str, own: str = "", controls: tuple[str, ...] = ()) -> str:
    """The completion as it goes on after `prompt`. `own`: the template's text between the prompt and words without reasoning."""
    words, opened = completion.lstrip(), prompt.rstrip()
    if opened.endswith(THINK):
        if words.startswith(THINK):
            return words.removeprefix(THINK).removeprefix(prompt[len(opened) :])
        if END_OF_THINK in completion:
            return completion
        return (own if END_OF_THINK in own else f"\n{END_OF_THINK}\n\n") + completion
    if words.startswith(THINK) or END_OF_THINK in completion:
        head = own.partition(THINK)[0]
        return head + words if head else completion
    # Calls come after closed reasoning, but not into another channel.
    return completion if words.startswith(controls) and own.strip() and THINK not in own else own + completion


def _rendered(prompt: Prompt, render: Callable[[Sequence[Message]], str], messages: Sequence[Message]) -> str:
    """Raises DataError naming the prompt."""
    try:
        return render(messages)
    except DataError as error:
        raise _refused(prompt, f"does not go through: {error}") from error


def _plain_text(prompt: Prompt) -> str:
    """One message becomes its content; several become lines of `role: content`, and the last line is `assistant:`."""
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
    """None also for a configuration whose bos is outside its vocabulary: some keep such a default."""
    text = config.get_text_config()
    found: int | None = getattr(text, "bos_token_id", None)
    return found if isinstance(found, int) and found < text.vocab_size else None


def _stop_token_ids(model: ModelConfig, config: PretrainedConfig) -> list[int]:
    """Reads generation_config.json first: many chat models name their end-of-turn token only there."""
    try:
        found = GenerationConfig.from_pretrained(model.path, revision=model.revision or "main").eos_token_id
    except OSError:  # the file is optional
        found = getattr(config.get_text_config(), "eos_token_id", None)
    if found is None:
        return []
    return [found] if isinstance(found, int) else list(found)
