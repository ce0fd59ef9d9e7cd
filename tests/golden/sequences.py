"""Cutting token sequences at stop tokens, and finding those that never stopped. Shapes: B rows, T tokens."""

import torch
from torch import Tensor


def truncate_at_stop(token_ids_BT: Tensor, *, stop_tokens: Tensor, fill: int) -> tuple[Tensor, Tensor]:
    """Everything after the first stop token becomes `fill`; also returns the mask of those places (torchtune
    `truncate_sequence_at_first_stop_token`). The stop token itself stays. A row without one stays whole."""
    is_stop_BT = torch.isin(token_ids_BT, stop_tokens)
    is_after_BT = (is_stop_BT.cumsum(1) - is_stop_BT.long()) > 0
    return token_ids_BT.masked_fill(is_after_BT, fill), is_after_BT


def penalty_mask(
    padding_mask_BT: Tensor, *, lengths_B: Tensor, penalise_no_stop: bool = True, min_length: int | None = None
) -> Tensor:
    """Rows to punish: those that filled the width without stopping, and those below a length (torchtune `get_reward_penalty_mask`)."""
    punished_B = ~padding_mask_BT.any(1) if penalise_no_stop else torch.zeros_like(padding_mask_BT[:, 0])
    return punished_B if min_length is None else punished_B | (lengths_B < min_length)
