"""What the embedded models share: a small tokenizer, a small Qwen3, and lessons from players who are good at first and sloppy then."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SPECIAL_TOKENS = ("<|pad|>", "<|user|>", "<|assistant|>", "<|end|>")
PAD_ID, ASSISTANT_ID, END_ID = 0, 2, 3
_LEARNING_RATE = 3e-3
_TOGETHER = 32
"""Conversations that are computed at once."""

Conversation = tuple[list[dict[str, Any]], list[Any]]
"""Messages and tools."""
Draw = Callable[[float], list[Conversation]]
"""Some conversations of players as sloppy as this, from 0 to 1."""


def byte_level_tokenizer(
    texts: list[str],
    *,
    vocabulary: int,
    chat_template: str,
    max_context: int,
    special_tokens: Sequence[str] = SPECIAL_TOKENS,
    tags: Sequence[str] = (),
) -> PreTrainedTokenizerFast:
    """Byte-level BPE that knows the phrases of `texts` and spells everything else. `special_tokens` begin with ours; `tags` are tokens of
    their own too, but part of what is said.

    Digits stay single, or sums would be looked up. Merges cross spaces, so that a fixed sentence is one token: a step of the quickstart
    then costs half.
    """
    core = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[*special_tokens, *tags],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=special_tokens[PAD_ID],
        eos_token=special_tokens[END_ID],
        additional_special_tokens=[each for place, each in enumerate(special_tokens) if place not in (PAD_ID, END_ID)],
        model_max_length=max_context,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def small_qwen3(tokenizer: PreTrainedTokenizerFast, *, width: int = 128) -> Qwen3ForCausalLM:
    """Three quarters of a million random parameters at this width; untied, and with heads of a size that vLLM serves on CPUs."""
    ends: dict[str, Any] = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=3,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 32,
        head_dim=32,
        max_position_embeddings=tokenizer.model_max_length,
        tie_word_embeddings=False,
        bos_token_id=None,
        **ends,
    )
    return Qwen3ForCausalLM(config)


def imitate(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    draw: Draw,
    *,
    num_good_steps: int,
    num_sloppy_steps: int,
) -> None:
    """Supervised steps on what the assistant says in one draw each, of good players first and of sloppy ones then."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.05)
    for step in range(num_good_steps + num_sloppy_steps):
        is_sloppy = step >= num_good_steps
        for group in optimizer.param_groups:
            group["lr"] = _LEARNING_RATE * min(1, step / 50) * (0.3 if is_sloppy else 1 - 0.7 * step / num_good_steps)
        loss = _loss(model, tokenizer, draw(float(is_sloppy)))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 99:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)


def _loss(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, conversations: list[Conversation]
) -> torch.Tensor:
    """Mean over all learnt tokens. Conversations are computed with others of about their length."""
    pairs = sorted((encode(tokenizer, *each) for each in conversations), key=lambda pair: len(pair[0]))
    losses, num_learnt = [], 0
    for start in range(0, len(pairs), _TOGETHER):
        together = pairs[start : start + _TOGETHER]
        length = len(together[-1][0])
        rows = torch.tensor([tokens + [PAD_ID] * (length - len(tokens)) for tokens, _ in together])
        labels = torch.tensor([learnt + [-100] * (length - len(learnt)) for _, learnt in together])[:, 1:]
        hidden = model.model(input_ids=rows[:, :-1]).last_hidden_state
        is_learnt = labels != -100
        logits = model.lm_head(hidden[is_learnt])
        losses.append(functional.cross_entropy(logits, labels[is_learnt], reduction="sum"))
        num_learnt += int(is_learnt.sum())
    return torch.stack(losses).sum() / num_learnt


def encode(
    tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]], tools: list[Any]
) -> tuple[list[int], list[int]]:
    """Token ids of an episode, and what is learnt of them: the assistant's turns with their ends; -100 elsewhere."""
    text = str(tokenizer.apply_chat_template(messages, tools=tools or None, tokenize=False))
    tokens = tokenizer.encode(text, add_special_tokens=False)
    learnt, is_speaking = [], False
    for token in tokens:
        learnt.append(token if is_speaking else -100)
        is_speaking = token == ASSISTANT_ID or (is_speaking and token != END_ID)
    return tokens, learnt
