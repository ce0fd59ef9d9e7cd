"""Bytes of trajectories that wait in the object store, and the number of further groups that fit."""

_DECAY = 0.99
"""Decay of the expected size, per group: a single huge group stops counting after some hundred groups."""


class ByteBudget:
    """Sizes of sampled groups by index, with their sum, so that every query takes constant time."""

    def __init__(self, max_size_bytes: int) -> None:
        self.max_size_bytes = max_size_bytes
        self._sizes: dict[int, int] = {}
        self._largest_bytes = 1.0
        self.size_bytes = 0

    def hold(self, index: int, size_bytes: int) -> None:
        """Group `index` takes `size_bytes` from now on, instead of its former size."""
        self.release(index)
        self._sizes[index] = size_bytes
        self.size_bytes += size_bytes
        self._largest_bytes = max(float(size_bytes), self._largest_bytes * _DECAY, 1.0)

    def release(self, index: int) -> None:
        """Frees the bytes of group `index`, if it held any."""
        self.size_bytes -= self._sizes.pop(index, 0)

    def num_that_fit(self, *, num_live: int) -> int:
        """Groups that may start in addition to `num_live` live ones. Each unsampled group counts as the largest of the recent groups."""
        num_unsampled = max(num_live - len(self._sizes), 0)
        room = self.max_size_bytes - self.size_bytes - num_unsampled * self._largest_bytes
        return int(room // self._largest_bytes)
