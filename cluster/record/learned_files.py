"""Files of the record of learning: named as the trajectories that they are of, in a folder of their own.

So a driver that was taken for dead writes into no file of the next one, and a step that is learned again takes the place of its record.
"""

from cluster.contracts.learned import Learned, read_learned
from cluster.record.storage import Storage

LEARNED = "learned"


def learned_name(trajectories: str) -> str:
    """Of the record that belongs to a file of trajectories, `trajectories/step-000012.arrow`."""
    return f"{LEARNED}/{trajectories.rpartition('/')[2]}"


def learned_of(files: Storage, trajectories: str) -> Learned | None:
    """The record that belongs to a file of trajectories; None where the step has none. Raises DataError as `read_learned`."""
    name = learned_name(trajectories)
    return read_learned(files.read_file(name)) if files.exists(name) else None
