"""The protocol on the pipes of a host process: after one first line each way, lines of [episode, kind, body].

To the process: `start` with an EpisodeTask. `said` with a Said, or in its place `over` with a limit and a message, or `refused` or
`too_long` with a message. `stop` with a limit, or with null if the episode is no longer needed. From the process: `ask` with an Asked.
`gave_up` if the answer is no longer awaited. `end` with an EpisodeEnd, followed by whether the process must get no further episode.
"""

from dataclasses import dataclass

from pydantic import TypeAdapter

from cluster.contracts.episodes import Asked, EpisodeEnd, EpisodeTask, Said

MAX_LINE_BYTES = 16 * 1024**2
"""The longest line that a process may write. A longer one is refused by the process itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """The first line of a process."""

    is_async: bool
    """Its episodes run concurrently. False: one at a time."""


FACTS = TypeAdapter(HostFacts)
ASKED = TypeAdapter(Asked)
SAID = TypeAdapter(Said)
END = TypeAdapter(EpisodeEnd)
TASK = TypeAdapter(EpisodeTask)
