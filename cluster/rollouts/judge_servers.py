"""Servers of language models that judges ask: where they are, and the token that opens them."""

import secrets
from collections.abc import Mapping, Sequence

from cluster.remote.actor import ActorSpec, RemoteActor
from cluster.supervision.supervisor import Start, SupervisedActor, Supervisor


class JudgeServers:
    """Servers by name, several of a name being equal.

    vLLM's command takes a host and a port, and no socket: its server binds what was free a moment before. Where another process was
    faster the server ends, which is a death of its actor, and the next one gets another port.

    The token is of this process and goes through Ray's calls and the judges' pipes alone: into no file, no argument and no message.
    """

    def __init__(self, specs: Mapping[str, Sequence[ActorSpec]], *, spawn: Start, supervisor: Supervisor) -> None:
        """`spawn` starts an actor with nothing in it: its server listens where the actor's node has a free port."""
        self._spawn = spawn
        self._start_s = supervisor.config.start_s
        self._token = secrets.token_urlsafe(32)
        self._addresses: dict[str, str] = {}
        """host:port by the name of the actor, which may be down."""
        self._before: dict[str, str] = {}
        """Addresses of the actors that came up at their last start."""
        self._places = {
            name: [SupervisedActor(spec, start=self._start, supervisor=supervisor) for spec in each]
            for name, each in specs.items()
        }

    def places(self) -> list[SupervisedActor]:
        return [place for each in self._places.values() for place in each]

    def urls(self) -> dict[str, list[str]]:
        """Of all that came up once: a request to one that is being replaced is the judge's to try again."""
        addresses = {
            name: [self._addresses.get(place.spec.name) for place in each] for name, each in self._places.items()
        }
        return {
            name: [f"http://:{self._token}@{address}/v1" for address in each if address]
            for name, each in addresses.items()
        }

    async def _start(self, spec: ActorSpec) -> RemoteActor:
        actor = await self._spawn(spec)
        try:
            free = await actor.free_address()
            # The same address on the same node: judges that wait for the server know it. It is tried once, for another process may
            # have taken it.
            before = self._before.pop(spec.name, free)
            address = before if before.rpartition(":")[0] == free.rpartition(":")[0] else free
            await actor.build(deadline_s=self._start_s, address=address, token=self._token)
        except BaseException:
            await actor.kill()
            raise
        self._addresses[spec.name] = self._before[spec.name] = address
        return actor
