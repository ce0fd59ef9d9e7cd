"""Keeps updates that are not finite from the weights."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from cluster.contracts.errors import NumericsError
from learner.assemble import Batch
from learner.distributed import Ranks
from learner.forward_backward import MiniBatch


def are_finite(gradient_norms: Mapping[str, Tensor]) -> bool:
    """Whether the norms of all models are finite; the same on every rank."""
    return all(bool(norm.isfinite()) for norm in gradient_norms.values())


class NonFiniteGuard:
    """Refuses updates whose loss or gradient is not finite, saves their trajectories, and ends a run that has too many."""

    def __init__(self, *, max_in_a_row: int, ranks: Ranks, folder: Path | None) -> None:
        """`folder` takes the trajectories of such updates, for inspection; None saves none."""
        self._max_in_a_row, self._ranks, self._folder = max_in_a_row, ranks, folder
        self.num_in_a_row = 0

    def admits(
        self,
        batch: Batch,
        mini_batch: MiniBatch,
        *,
        losses: Tensor,
        gradient_norms: Mapping[str, Tensor],
        place: tuple[int, int],
    ) -> bool:
        """Whether the update may be made. All ranks must call it and get the same answer.

        `losses` are those of this rank's micro-batches, `place` is the policy version and the update's number in its step. Raises
        NumericsError after more than `max_in_a_row` refused updates in a row.
        """
        is_bad = ~losses.isfinite() & self._ranks.leads
        num_bad = int(self._ranks.sum(is_bad.sum()))
        if num_bad == 0 and are_finite(gradient_norms):
            self.num_in_a_row = 0
            return True
        self.num_in_a_row += 1
        # If only the gradient is not finite, any micro-batch of any rank may be the cause.
        found = zip(mini_batch.micro_batches, is_bad.tolist(), strict=True)
        mine = [m for m, bad in found if self._ranks.leads and (bad or num_bad == 0)]
        suspects = sorted(row for m in mine for row in mini_batch.in_batch(m))
        saved = self._save(batch, suspects, place=place)
        if self.num_in_a_row > self._max_in_a_row:
            policy, *critic = map(float, gradient_norms.values())
            norms = f"{policy}, the critic's {critic[0]}" if critic else f"{policy}"
            raise NumericsError(
                f"loss or gradient was not finite in {self.num_in_a_row} updates in a row, the last at policy version {place[0]} "
                f"(gradient norm {norms}, {num_bad} micro-batches with a loss that is not finite); {saved}"
            )
        return False

    def state_dict(self) -> dict[str, int]:
        return {"num_in_a_row": self.num_in_a_row}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.num_in_a_row = state["num_in_a_row"]

    def _save(self, batch: Batch, rows: list[int], *, place: tuple[int, int]) -> str:
        """Writes these trajectories of this rank. Returns, as text, where they are or why they were not saved."""
        if not rows:
            return "its trajectories are with another rank"
        if self._folder is None:
            return "its trajectories were not saved (no local run directory)"
        version, update = place
        path = self._folder / f"version-{version:06d}-update-{update}-rank-{self._ranks.rank}.arrow"
        try:
            batch.write_rows(rows, path)
        except OSError as error:
            # They are only for inspection: a full disk must not end the run.
            return f"its trajectories were not saved ({error})"
        return f"its trajectories are in {path}"
