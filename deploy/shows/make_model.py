"""Makes an embedded model of the shows: `python -m deploy.shows.make_model OUT_DIR`, about five minutes on one CPU core, and with
`--small` the smaller one, two minutes.

A small Qwen3 with a small byte-level tokenizer and a chat template with tools is trained from scratch, supervised, on scripted episodes
of two environments, `guess` and `calculator`, or `note_to_self` and `grid`: first on those of good players, then on those of sloppy ones
(`deploy.shows.players`). So the model can play and rarely plays well, which reinforcement learning can mend within minutes. All is seeded;
other machines differ by rounding.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from actors.environments.calculator import calculate
from actors.prompts.reasoning_gym import ReasoningGymPrompts
from deploy.quickstart.small_models import byte_level_tokenizer, imitate, small_qwen3
from deploy.shows.players import Messages, calculating, guessing, noting, walking

PRODUCTS = {"task": "products", "min_terms": 2, "max_terms": 2, "min_digits": 3, "max_digits": 3}
NUM_PRODUCTS = 20_000
NUM_SLOPPY_STEPS = 200
TOGETHER = 32
"""Conversations that are computed at once."""
SMALL_WIDTH = 64
MAX_CONTEXT = 512
VOCABULARY = 400

SPECIAL_TOKENS = ["<|pad|>", "<|user|>", "<|assistant|>", "<|end|>", "<|tool|>", "<|tools|>"]
CALL_TAGS = ["<|call|>", "<|end_call|>"]
"""Tokens of their own too, but part of what is said."""
PAD_ID, ASSISTANT_ID, END_ID = 0, 2, 3
CHAT_TEMPLATE = """\
{#- Each tool as its name and parameters, first of all. Only the assistant's turns are closed. Calls as JSON in tags. -#}
{%- if tools %}<|tools|>
{%- for tool in tools %}{{ tool.function.name }}({{ tool.function.parameters.properties | join(', ') }}){% endfor %}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}<|assistant|>{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}<|call|>{"name": "{{ call.function.name }}", "arguments":{{ ' ' }}
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}}<|end_call|>
{%- endfor %}<|end|>
{%- elif message.role == 'tool' %}<|tool|>{{ message.content }}
{%- else %}<|user|>{{ message.content }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""


Conversation = tuple[Messages, list[Any]]
"""With its tools."""
Draw = Callable[[float], list[Conversation]]
"""Some conversations of players as sloppy as this, from 0 to 1."""


class Episodes:
    """Scripted ones, endless."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        source = ReasoningGymPrompts(**PRODUCTS, size=NUM_PRODUCTS, seed=777)
        self._products = [source[index] for index in range(NUM_PRODUCTS)]

    def draw(self, sloppiness: float) -> list[Conversation]:
        """One of `guess`, one of `calculator`."""
        product = self._rng.choice(self._products)
        question, expression = (product.messages or [])[0]["content"], product.columns["metadata"]["expression"]
        return [
            (guessing(self._rng, sloppiness=sloppiness), []),
            (calculating(self._rng, question, expression, sloppiness=sloppiness), [calculate.schema]),
        ]


def walks_and_notes(rng: Random, sloppiness: float) -> list[Conversation]:
    """Both conversations of `note_to_self`, one of `grid`."""
    told = [*noting(rng, sloppiness=sloppiness), walking(rng, sloppiness=sloppiness)]
    return [(messages, []) for messages in told]


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Knows the phrases of these texts."""
    return byte_level_tokenizer(
        texts,
        vocabulary=VOCABULARY,
        special_tokens=SPECIAL_TOKENS,
        end_of_turn=SPECIAL_TOKENS[END_ID],
        chat_template=CHAT_TEMPLATE,
        max_context=MAX_CONTEXT,
        tags=CALL_TAGS,
    )


def train(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, draw: Draw, *, num_draws: int, num_good_steps: int
) -> None:
    """Each step imitates so many draws."""

    def loss_of(sloppiness: float) -> torch.Tensor:
        return _loss(model, tokenizer, [each for _ in range(num_draws) for each in draw(sloppiness)])

    imitate(model, loss_of, num_good_steps=num_good_steps, num_sloppy_steps=NUM_SLOPPY_STEPS)


def _loss(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, conversations: list[Conversation]
) -> torch.Tensor:
    """Mean over all learnt tokens. Conversations are computed with others of about their length."""
    pairs = sorted((encode(tokenizer, *each) for each in conversations), key=lambda pair: len(pair[0]))
    losses, num_learnt = [], 0
    for start in range(0, len(pairs), TOGETHER):
        together = pairs[start : start + TOGETHER]
        length = len(together[-1][0])
        rows = torch.tensor([tokens + [PAD_ID] * (length - len(tokens)) for tokens, _ in together])
        labels = torch.tensor([learnt + [-100] * (length - len(learnt)) for _, learnt in together])[:, 1:]
        hidden = model.model(input_ids=rows[:, :-1]).last_hidden_state
        is_learnt = labels != -100
        logits = model.lm_head(hidden[is_learnt])
        losses.append(functional.cross_entropy(logits, labels[is_learnt], reduction="sum"))
        num_learnt += int(is_learnt.sum())
    return torch.stack(losses).sum() / num_learnt


def encode(tokenizer: PreTrainedTokenizerFast, messages: Messages, tools: list[Any]) -> tuple[list[int], list[int]]:
    """Token ids of an episode, and what is learnt of them: the assistant's turns with their ends; -100 elsewhere."""
    text = str(tokenizer.apply_chat_template(messages, tools=tools or None, tokenize=False))
    tokens = tokenizer.encode(text, add_special_tokens=False)
    learnt, is_speaking = [], False
    for token in tokens:
        learnt.append(token if is_speaking else -100)
        is_speaking = token == ASSISTANT_ID or (is_speaking and token != END_ID)
    return tokens, learnt


def main(out: Path, *, is_small: bool) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, tokenizer = (small if is_small else large)()
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def large() -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]:
    """For `guess` and `calculator`."""
    episodes = Episodes(Random(0))
    calls = [f'{{"name": "calculate", "arguments": {{"expression": "{n} * {n}"}}}}' for n in range(100, 1000)]
    tokenizer = make_tokenizer([*_said(episodes.draw), *calls, *["calculate(expression)"] * 100])
    model = small_qwen3(tokenizer)
    train(model, tokenizer, episodes.draw, num_draws=32, num_good_steps=1500)
    return model, tokenizer


def small() -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]:
    """For `note_to_self` and `grid`."""
    draw = partial(walks_and_notes, Random(0))
    # Grids are spelt: a token is a cell.
    tokenizer = make_tokenizer([text for text in _said(draw) if "\n" not in text])
    model = small_qwen3(tokenizer, width=SMALL_WIDTH)
    train(model, tokenizer, draw, num_draws=16, num_good_steps=700)
    return model, tokenizer


def _said(draw: Draw) -> list[str]:
    """In a thousand draws, on both sides."""
    some = [messages for _ in range(1000) for messages, _ in draw(0.5)]
    return [message["content"] for messages in some for message in messages]


if __name__ == "__main__":
    main(Path(sys.argv[1]), is_small="--small" in sys.argv)
