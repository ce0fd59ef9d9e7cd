"""Files of the record of learning. Each has the name of its trajectories' file, in another folder.

So a driver that was taken for dead writes into no file of the next one, and a step that is learned again replaces its record.
"""

from cluster.contracts.learned import Learned, read_learned
from cluster.record.storage import Storage

LEARNED = "learned"


def learned_name(trajectories: str) -> str:
    """Name of the record for a file of trajectories such as `trajectories/step-000012.arrow`."""
    return f"{LEARNED}/{trajectories.rpartition('/')[2]}"


def learned_of(files: Storage, trajectories: str) -> Learned | None:
    """The record for a file of trajectories; None if the step has none. Raises DataError as `read_learned`."""
    name = learned_name(trajectories)
    return read_learned(files.read_file(name)) if files.exists(name) else None
