"""What goes over the pipes of a host process: after a first line each way, lines of [episode, kind, body].

To the process: `start` an EpisodeTask; `said` a Said; `over` a limit and a message, or `refused` a message, in place of it; `stop` a limit,
or null for an episode that nobody wants any more. From it: `ask` an Asked; `gave_up` where nobody waits for its answer any more; `end` an
EpisodeEnd, and whether the process gets no other episode.
"""

from dataclasses import dataclass

from pydantic import TypeAdapter

from cluster.contracts.episodes import Asked, EpisodeEnd, EpisodeTask, Said

MAX_LINE_BYTES = 16 * 1024**2
"""Of what a process writes: a longer one is refused where it is made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """Of a process, its first line."""

    is_async: bool
    """Its episodes run side by side; else one at a time."""


FACTS = TypeAdapter(HostFacts)
ASKED = TypeAdapter(Asked)
SAID = TypeAdapter(Said)
END = TypeAdapter(EpisodeEnd)
TASK = TypeAdapter(EpisodeTask)
