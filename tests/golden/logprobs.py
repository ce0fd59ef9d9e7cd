"""Log-probs and entropies from dense logits: the reference that the chunked head must agree with. Shapes: B rows, T tokens, V vocabulary.

Logits are divided by the sampling temperature, so that log-probs mean the same for learner and engine. Half precision is computed in
float32.
"""

import torch
from torch import Tensor

from learner.algorithms.masks import at_least_float32, masked, masked_mean, masked_sum


def token_logprobs(logits_BTV: Tensor, *, token_ids_BT: Tensor, temperature: float = 1.0) -> Tensor:
    """log softmax(logits/temperature) of the given tokens; logits at t predict token t (already shifted)."""
    scaled_BTV = at_least_float32(logits_BTV) / temperature
    chosen_BT = scaled_BTV.gather(-1, token_ids_BT[..., None]).squeeze(-1)
    return chosen_BT - scaled_BTV.logsumexp(-1)


def entropies(logits_BTV: Tensor, *, temperature: float = 1.0) -> Tensor:
    """−Σ_v p log p = log Σ exp(z) − Σ p·z, in nats."""
    scaled_BTV = at_least_float32(logits_BTV) / temperature
    # A forbidden token (logit −inf) adds 0, not 0·−inf.
    finite_BTV = scaled_BTV.masked_fill(scaled_BTV.isneginf(), 0.0)
    return scaled_BTV.logsumexp(-1) - (scaled_BTV.softmax(-1) * finite_BTV).sum(-1)


def next_token_logprobs(logits_BTV: Tensor, *, token_ids_BT: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probs of each token given those before it, same length as the tokens: the first, which nothing predicts, is 0."""
    shifted_BT = token_logprobs(logits_BTV[:, :-1], token_ids_BT=token_ids_BT[:, 1:], temperature=temperature)
    return torch.nn.functional.pad(shifted_BT, (1, 0))


def completion_logits(logits_BTV: Tensor, *, prompt_length: int) -> Tensor:
    """The logits that predict the tokens after a prompt of that length (torchtune `truncate_sequence_for_logprobs`)."""
    return logits_BTV[:, prompt_length - 1 : -1]


def sequence_logprobs(logprobs_BT: Tensor, *, loss_mask_BT: Tensor, average: bool = False) -> Tensor:
    """One log-prob per row: the sum of its tokens', or their mean; 0 for a row with nothing unmasked (torchtune `get_batch_log_probs`)."""
    reduce = masked_mean if average else masked_sum
    return reduce(logprobs_BT, mask_BT=loss_mask_BT, dim=1)


def of_role(logprobs_BT: Tensor, *, role_mask_BT: Tensor) -> Tensor:
    """Log-probs of one role's tokens (the assistant's), 0 elsewhere: the length stays (torchrl 0.14.1 RetrieveLogProb)."""
    return masked(logprobs_BT, mask_BT=role_mask_BT)


def of_role_only(logprobs_T: Tensor, *, role_mask_T: Tensor) -> Tensor:
    """Log-probs of one role's tokens alone, the others dropped (torchrl's RetrieveLogProb of 2025): positions are lost."""
    return logprobs_T[role_mask_T]
