"""The loss's numbers of each token, for the record of learning. Shapes: B rows, T tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor

from learner.algorithms.losses.surrogates import TokenLosses
from learner.algorithms.objective.batch import Prepared


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensSeen:
    """Tensors that the loss computes anyway. Only `columns` takes time."""

    rows: Prepared
    policy_BT: Tensor
    proximal_BT: Tensor | None
    """None if π_old is the policy that sampled, or the present one."""
    corrections_BT: Tensor
    losses: TokenLosses
    entropies_BT: Tensor | None

    @torch.no_grad()
    def columns(self) -> dict[str, Tensor]:
        """[B, T] by column of the record; absent columns are left out. Arbitrary where the loss mask is false."""
        nothing_BT = torch.zeros_like(self.corrections_BT)
        found = {
            "policy_logprobs": self.policy_BT,
            "proximal_logprobs": self.proximal_BT,
            "advantages": self.rows.advantages_NT,
            "weights": torch.where(self.rows.gradient_mask_NT, self.corrections_BT, nothing_BT),
            "clipped": counted_as_clipped(self.losses, advantages_BT=self.rows.advantages_NT),
            "entropies": self.entropies_BT,
        }
        return {name: x_BT for name, x_BT in found.items() if x_BT is not None}


def counted_as_clipped(losses: TokenLosses, *, advantages_BT: Tensor) -> Tensor | None:
    """bool; None if the loss has neither a lower nor an upper bound. Tokens with advantage 0 do not count: no bound changes their loss."""
    if losses.clipped_low_BT is None and losses.clipped_high_BT is None:
        return None
    return losses.clipped_BT & (advantages_BT != 0)
