"""What Ray knows about nodes and seats. Raises our errors when its head node does not answer."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import psutil
import ray
from ray.util.placement_group import placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.remote.failures import answer_of

_ANSWER_S = 30.0
"""What a question about the cluster may take: the head node keeps the answers at hand."""

_EXIT_S = 1.0
"""What a process that was told to end gets to do so."""


async def draining_nodes() -> set[str]:
    """Ids of nodes that announced that they go away (spot termination, scale-down)."""
    from ray._private.state import state  # Ray has no public name for it

    return set(await _asked(state.get_draining_nodes))


async def is_seat_lost(placement_group: Any, seat: int) -> bool:
    """Whether the seat's node is dead or draining: Ray starts no actor there, and has not placed the seat anew yet."""
    table = await _asked(placement_group_table, placement_group)
    alive = {node["NodeID"] for node in await _asked(ray.nodes) if node["Alive"]}
    return table["bundles_to_node_id"].get(seat) not in alive - await draining_nodes()


async def kill_on_node(pid: int, node_id: str) -> None:
    """SIGKILL, if the process is still there after a moment."""
    if node_id == ray.get_runtime_context().get_node_id():
        await asyncio.to_thread(_kill_process, pid)
        return
    strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
    task = ray.remote(_kill_process).options(num_cpus=0, scheduling_strategy=strategy, max_retries=0)
    await answer_of(task.remote(pid), actor=f"node {node_id[:8]}", stage="kill", deadline_s=10.0)


def _kill_process(pid: int) -> None:
    """Waits a moment for a process that was told to end, so that Ray takes its end for intended; then kills it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        with contextlib.suppress(psutil.TimeoutExpired):
            process.wait(timeout=_EXIT_S)
        process.kill()


async def _asked(question: Callable[..., Any], *args: Any) -> Any:
    """Ray's head node may be gone, and Ray itself waits long."""
    call = asyncio.to_thread(question, *args)
    return await answer_of(call, actor="Ray's head node", stage=question.__name__, deadline_s=_ANSWER_S)
