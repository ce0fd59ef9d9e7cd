"""Servers of the language models that judges ask: their addresses and their access token."""

import secrets
from collections.abc import Mapping, Sequence

from cluster.remote.actor import ActorSpec, RemoteActor
from cluster.supervision.supervisor import Start, SupervisedActor, Supervisor


class JudgeServers:
    """Servers by name. Servers of one name are interchangeable.

    vLLM's command takes a host and a port, not a socket, so its server binds a port that was free a moment before. If another process takes
    the port first, the server ends, its actor counts as dead, and the next one gets another port.

    This process makes the token. It travels only in Ray's calls and the judges' pipes, never in a file, an argument or a message.
    """

    def __init__(self, specs: Mapping[str, Sequence[ActorSpec]], *, spawn: Start, supervisor: Supervisor) -> None:
        """`spawn` starts an empty actor. Its server then listens at a free port of the actor's node."""
        self._spawn = spawn
        self._start_s = supervisor.config.start_s
        self._token = secrets.token_urlsafe(32)
        self._addresses: dict[str, str] = {}
        """host:port by actor name. The actor may be down."""
        self._before: dict[str, str] = {}
        """host:port by name of each actor whose last start succeeded."""
        self._places = {
            name: [SupervisedActor(spec, start=self._start, supervisor=supervisor) for spec in each]
            for name, each in specs.items()
        }

    def places(self) -> list[SupervisedActor]:
        return [place for each in self._places.values() for place in each]

    def urls(self) -> dict[str, list[str]]:
        """URLs of all servers that ever came up. A judge retries a request to a server that is being replaced."""
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
            # Try the old address on the same node, which waiting judges know. Only once: another process may have taken it.
            before = self._before.pop(spec.name, free)
            address = before if before.rpartition(":")[0] == free.rpartition(":")[0] else free
            await actor.build(deadline_s=self._start_s, address=address, token=self._token)
        except BaseException:
            await actor.kill()
            raise
        self._addresses[spec.name] = self._before[spec.name] = address
        return actor
