"""Where the run's own servers are, as judges are told."""

from cluster.contracts.config import SupervisionConfig
from cluster.contracts.types import ActorKind
from cluster.rollouts.judge_servers import JudgeServers
from cluster.supervision.supervisor import Supervisor
from tests.fakes import ListedEvents, actor_spec, death


class Actor:
    """One whose node has `free` for the next server."""

    pid, last_progress, is_hung, node_id = 1, None, False, "node"

    def __init__(self, spec, free, built, taken=()):
        self.name, self.spec, self._taken = spec.name, spec, taken
        self._free, self._built = free, built
        self.is_dead = False

    async def free_address(self):
        return self._free

    async def build(self, *, deadline_s, **more):
        self._built.append(more)
        if more["address"] in self._taken:
            raise death(self.name)

    async def kill(self):
        self.is_dead = True


async def test_a_server_that_is_replaced_has_its_address_again_unless_it_went_to_another_node():
    free, built = iter(["10.0.0.1:5000", "10.0.0.1:6000", "10.0.0.2:7000", "10.0.0.2:8000"]), []

    async def spawn(spec):
        return Actor(spec, next(free), built)

    specs = {"grader": [actor_spec("server-grader-0", ActorKind.JUDGE_SERVER)]}
    supervisor = Supervisor(SupervisionConfig(backoff_s=0), ListedEvents())
    servers = JudgeServers(specs, spawn=spawn, supervisor=supervisor)
    assert servers.urls() == {"grader": []}
    (place,) = servers.places()
    for expected in ("10.0.0.1:5000", "10.0.0.1:5000", "10.0.0.2:7000"):
        actor = await place.ready()
        token = built[-1]["token"]
        assert built[-1] == {"address": expected, "token": token} and len(token) > 40
        assert servers.urls() == {"grader": [f"http://:{token}@{expected}/v1"]}
        await place.replace(actor, death(place.spec.name))
    assert len({each["token"] for each in built}) == 1


async def test_a_server_whose_port_was_taken_meanwhile_comes_up_at_another():
    free, built, taken = iter(["10.0.0.1:5000", "10.0.0.1:6000", "10.0.0.1:7000"]), [], []
    actors = []

    async def spawn(spec):
        actors.append(Actor(spec, next(free), built, taken))
        return actors[-1]

    specs = {"grader": [actor_spec("server-grader-0", ActorKind.JUDGE_SERVER)]}
    supervisor = Supervisor(SupervisionConfig(backoff_s=0), ListedEvents())
    (place,) = JudgeServers(specs, spawn=spawn, supervisor=supervisor).places()
    actor = await place.ready()
    taken.append("10.0.0.1:5000")
    await place.replace(actor, death(place.spec.name))
    assert [each["address"] for each in built] == ["10.0.0.1:5000", "10.0.0.1:5000", "10.0.0.1:7000"]
    assert [each.is_dead for each in actors] == [True, True, False]
