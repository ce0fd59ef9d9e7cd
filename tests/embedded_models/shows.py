"""Makes an embedded model of the shows: `python -m tests.embedded_models.shows OUT_DIR`, about six minutes on one CPU core, and with
`--small` the smaller one, two minutes.

A small Qwen3 with a small byte-level tokenizer and a chat template with tools is trained from scratch, supervised, on scripted episodes
of two environments, `guess` and `calculator`, or `note_to_self` and `grid`: first on those of good players, then on those of sloppy ones
(`players.py`). So the model can play and rarely plays well, which reinforcement learning can mend within minutes. All is seeded;
other machines differ by rounding.
"""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from random import Random

import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from actors.environments.calculator import calculate
from actors.prompts.reasoning_gym import ReasoningGymPrompts
from cluster.contracts.types import Prompt
from tests.embedded_models.players import calculating, guessing, noting, walking
from tests.embedded_models.small_models import (
    SPECIAL_TOKENS,
    Conversation,
    Draw,
    byte_level_tokenizer,
    imitate,
    small_qwen3,
)

PRODUCTS = {"task": "products", "min_terms": 2, "max_terms": 2, "min_digits": 3, "max_digits": 3}
NUM_PRODUCTS = 20_000
NUM_SLOPPY_STEPS = 200
SMALL_WIDTH = 64
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

make_tokenizer = partial(
    byte_level_tokenizer,
    vocabulary=400,
    special_tokens=(*SPECIAL_TOKENS, "<|tool|>", "<|tools|>"),
    tags=("<|call|>", "<|end_call|>"),
    chat_template=CHAT_TEMPLATE,
    max_context=512,
)


def guesses_and_products(products: Sequence[Prompt], rng: Random, sloppiness: float) -> list[Conversation]:
    """One of `guess`, one of `calculator`."""
    product = rng.choice(products)
    question, expression = (product.messages or [])[0]["content"], product.columns["metadata"]["expression"]
    return [
        (guessing(rng, sloppiness=sloppiness), []),
        (calculating(rng, question, expression, sloppiness=sloppiness), [calculate.schema]),
    ]


def walks_and_notes(rng: Random, sloppiness: float) -> list[Conversation]:
    """Both conversations of `note_to_self`, one of `grid`."""
    told = [*noting(rng, sloppiness=sloppiness), walking(rng, sloppiness=sloppiness)]
    return [(messages, []) for messages in told]


def main(out: Path, *, is_small: bool) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, tokenizer = (small if is_small else large)()
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def large() -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]:
    """For `guess` and `calculator`."""
    source = ReasoningGymPrompts(**PRODUCTS, size=NUM_PRODUCTS, seed=777)
    draw = partial(guesses_and_products, [source[index] for index in range(NUM_PRODUCTS)], Random(0))
    calls = [f'{{"name": "calculate", "arguments": {{"expression": "{n} * {n}"}}}}' for n in range(100, 1000)]
    tokenizer = make_tokenizer([*_said(draw), *calls, *["calculate(expression)"] * 100])
    model = small_qwen3(tokenizer)
    imitate(model, tokenizer, _several(draw, 32), num_good_steps=1500, num_sloppy_steps=NUM_SLOPPY_STEPS)
    return model, tokenizer


def small() -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]:
    """For `note_to_self` and `grid`."""
    draw = partial(walks_and_notes, Random(0))
    # Grids are spelt: a token is a cell.
    tokenizer = make_tokenizer([text for text in _said(draw) if "\n" not in text])
    model = small_qwen3(tokenizer, width=SMALL_WIDTH)
    imitate(model, tokenizer, _several(draw, 16), num_good_steps=700, num_sloppy_steps=NUM_SLOPPY_STEPS)
    return model, tokenizer


def _several(draw: Draw, number: int) -> Draw:
    return lambda sloppiness: [each for _ in range(number) for each in draw(sloppiness)]


def _said(draw: Draw) -> list[str]:
    """In a thousand draws, on both sides."""
    some = [messages for _ in range(1000) for messages, _ in draw(0.5)]
    return [message["content"] for messages in some for message in messages]


if __name__ == "__main__":
    main(Path(sys.argv[1]), is_small="--small" in sys.argv)
