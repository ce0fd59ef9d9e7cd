"""What the embedded models share: a small tokenizer, a small Qwen3, and lessons from players who are good at first and sloppy then."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

_LEARNING_RATE = 3e-3


def byte_level_tokenizer(
    texts: list[str],
    *,
    vocabulary: int,
    special_tokens: Sequence[str],
    end_of_turn: str,
    chat_template: str,
    max_context: int,
    tags: Sequence[str] = (),
) -> PreTrainedTokenizerFast:
    """Byte-level BPE that knows the phrases of `texts` and spells everything else. The first special token pads; `tags` are tokens of their
    own too, but part of what is said.

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
        pad_token=special_tokens[0],
        eos_token=end_of_turn,
        additional_special_tokens=[each for each in special_tokens[1:] if each != end_of_turn],
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
    model: Qwen3ForCausalLM, loss_of: Callable[[float], torch.Tensor], *, num_good_steps: int, num_sloppy_steps: int
) -> None:
    """Supervised steps. `loss_of` takes the sloppiness of the players, 0 or 1, and returns the loss of a batch of theirs."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.05)
    for step in range(num_good_steps + num_sloppy_steps):
        is_sloppy = step >= num_good_steps
        for group in optimizer.param_groups:
            group["lr"] = _LEARNING_RATE * min(1, step / 50) * (0.3 if is_sloppy else 1 - 0.7 * step / num_good_steps)
        loss = loss_of(float(is_sloppy))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 99:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
