"""Several learner ranks as one: their devices, where they meet, how the model is sharded over them (FSDP2), what they exchange.

Every rank makes the same calls in the same order. gloo on CPUs, NCCL on GPUs; what is exchanged are tensors and texts, never objects.
With one rank everything here is the identity, and no process group exists.
"""

import atexit
import contextlib
import ctypes
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import Store
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from cluster.contracts.config import LearnerConfig
from cluster.contracts.errors import ConfigError, DeadlineError, headline
from cluster.contracts.sockets import patience
from cluster.weights.process_group import address_towards, store_at, store_of
from learner.sequence_parallel import SequenceGroup

MAX_UNREDUCED_BYTES = 2 * 1024**3
"""Gradients of micro-batches are reduced once per step while whole float32 gradients fit into this; larger models reduce each time."""

_LOOK_S = 0.05
"""How often a rank that waits for the others looks whether they are there."""
_M_MMAP_THRESHOLD = -3
"""glibc's number for the size from which a block has a mapping of its own; setting it keeps it from growing."""
_LARGE_BLOCK_BYTES = 1024**2


def choose_device(config: LearnerConfig) -> torch.device:
    """Raises ConfigError when GPUs are asked for and there is none."""
    if config.gpus_per_rank == 0:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            f"learner.gpus_per_rank={config.gpus_per_rank}, but torch sees no GPU here; "
            "set it to 0, or place the learner on a GPU node"
        )
    return torch.device("cuda", torch.cuda.current_device())


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This rank among its peers."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh | None
    """None with one rank."""
    group: dist.ProcessGroup | None = None
    """Of the exchange; None is torch's default group."""
    sequence_group: SequenceGroup | None = None
    """The ranks that this one shares passes with; None where each rank has passes of its own."""

    @classmethod
    def join(
        cls,
        *,
        rank: int,
        size: int,
        rendezvous: str,
        device: torch.device,
        timeout_s: float,
        sequence_parallel_size: int = 1,
        listener: socket.socket | None = None,
        shards_alone: bool = False,
    ) -> "Ranks":
        """Returns once all ranks have come to `rendezvous` (host:port), which is the address of rank 0's `listener`.

        One rank has no process group and no mesh, unless it `shards_alone`: its model is then sharded as that of several.
        Raises ConfigError when several ranks have no such place, and DeadlineError, which names them, when some do not come in time.
        """
        if size == 1 and not shards_alone:
            if listener is not None:
                listener.close()
            return cls(rank=0, size=1, device=device, mesh=None)
        if not rendezvous or (rank == 0) != (listener is not None):
            raise ConfigError(
                f"learner.num_ranks={size} needs an address (host:port) where the ranks meet, and on rank 0 alone a socket that listens "
                f"there; rank {rank} got {rendezvous!r} and {'no socket' if listener is None else 'a socket'}"
            )
        store = _meet(rank=rank, size=size, rendezvous=rendezvous, listener=listener, timeout_s=timeout_s)
        _listen_towards(rendezvous)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=size,
            timeout=patience(timeout_s),
            device_id=device if device.type == "cuda" else None,
        )
        if device.type == "cpu":
            _return_large_blocks()
        # While Python still stands: the process group's threads are not to outlive it.
        atexit.register(leave)
        sequence_group = None
        if sequence_parallel_size > 1:
            group, _ = dist.new_subgroups(sequence_parallel_size, timeout=patience(timeout_s))
            assert isinstance(group, dist.ProcessGroup), "every rank is in one"
            place = rank % sequence_parallel_size
            sequence_group = SequenceGroup(rank=place, size=sequence_parallel_size, group=group)
        mesh = DeviceMesh(device.type, list(range(size)))
        return cls(rank=rank, size=size, device=device, mesh=mesh, sequence_group=sequence_group)

    @property
    def num_per_pass(self) -> int:
        """Ranks that share a pass; they are neighbours."""
        return 1 if self.sequence_group is None else self.sequence_group.size

    @property
    def data_parallel_size(self) -> int:
        """Parts that a mini-batch is split into, each with passes of its own."""
        return self.size // self.num_per_pass

    @property
    def data_parallel_rank(self) -> int:
        """This rank's part of them."""
        return self.rank // self.num_per_pass

    @property
    def leads(self) -> bool:
        """True on one of the ranks that share a pass, and so find the same: what is counted or recorded comes from it alone."""
        return self.rank % self.num_per_pass == 0

    def beside(self, *, timeout_s: float) -> "Ranks":
        """The same ranks with a group of their own on the CPU: a thread may use it while training exchanges. All ranks must call it.

        A rank waits for the others for at most `timeout_s`.
        """
        timeout = patience(timeout_s)
        group = None if self.mesh is None else dist.new_group(backend="gloo", timeout=timeout)
        return replace(self, device=torch.device("cpu"), group=group)

    def sum(self, tensor: Tensor) -> Tensor:
        """Over all ranks, in place."""
        if self.mesh is not None:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def stack(self, tensor: Tensor) -> list[Tensor]:
        """The tensor of every rank, in order of rank; all of one shape."""
        if self.mesh is None:
            return [tensor]
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(gathered, tensor.contiguous(), group=self.group)
        return gathered

    def texts(self, text: str) -> list[str]:
        """The text of every rank, in order of rank; any may be empty."""
        # Whatever the text is, this rank comes to the exchange: the others wait for it.
        own = torch.tensor([*text.encode(errors="backslashreplace")], dtype=torch.uint8)
        sizes = [int(size) for size in self.stack(torch.tensor(own.numel(), device=self.device))]
        padded = torch.zeros(max(1, *sizes), dtype=torch.uint8, device=self.device)
        padded[: own.numel()] = own.to(self.device)
        return [
            part[:size].cpu().numpy().tobytes().decode() for part, size in zip(self.stack(padded), sizes, strict=True)
        ]

    def from_rank_0(self, tensor: Tensor) -> Tensor:
        """Rank 0's values, in place."""
        if self.mesh is not None:
            dist.broadcast(tensor, src=0, group=self.group)
        return tensor


def _meet(*, rank: int, size: int, rendezvous: str, listener: socket.socket | None, timeout_s: float) -> Store:
    """The ranks' store, which lives in rank 0's process, once all of them have come to it. Raises DeadlineError."""
    until = time.monotonic() + timeout_s
    here = [f"here {each}" for each in range(size)]
    in_vain = f"learner rank {rank} of {size} waited in vain (learner.timeout_s={timeout_s:g}) at {rendezvous} for rank"
    try:
        store = store_at(rendezvous, within_s=timeout_s) if listener is None else store_of(listener, within_s=timeout_s)
        store.set(here[rank], "")
        # Only when all are here do they connect: a connection waits for its other end, whatever becomes of that.
        while not store.check(here) and time.monotonic() < until:
            time.sleep(_LOOK_S)
        missing = [each for each in range(size) if not store.check([here[each]])]
    except RuntimeError as error:  # torch's own kinds are of this one
        raise DeadlineError(f"{in_vain} 0, which keeps the place: {headline(error)}") from error
    if missing:
        raise DeadlineError(f"{in_vain} {', '.join(map(str, missing))}")
    return store


def _listen_towards(rendezvous: str) -> None:
    """Has gloo, in this process, listen where the others reach it, unless the user names an interface. By itself it takes the address of
    the host's name, which many machines know as one of their own alone (127.0.1.1)."""
    own = address_towards(rendezvous)
    for interface, addresses in psutil.net_if_addrs().items():
        if any(each.address == own for each in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def _return_large_blocks() -> None:
    """Has glibc give freed blocks back to the system; other C libraries do as they do.

    Layers are gathered and freed in every pass, partly by the process group's own threads. glibc would keep them in each thread's
    arena: of a model of 400 MB, whose half a rank holds, 700 MB more.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK_BYTES)


def leave() -> None:
    """Ends this process's part in torch's process group, if it has one; its threads end with the last sharded tensor."""
    if not dist.is_initialized():
        return
    dist.destroy_process_group()
    # What DTensor remembers of its operations holds the process group too, some of it past the interpreter's end, where threads abort.
    # These are torch's own ways to forget, but not promised ones: a version without them only keeps the threads.
    with contextlib.suppress(ImportError, AttributeError):
        from torch.distributed.tensor._collective_utils import MeshTopoInfo
        from torch.distributed.tensor._redistribute import _gen_transform_infos, clear_redistribute_planner_cache
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()
        clear_redistribute_planner_cache()
        _gen_transform_infos.cache_clear()
        MeshTopoInfo.build_from_mesh.cache_clear()


def shard(module: nn.Module, *, ranks: Ranks, compute_dtype: torch.dtype) -> None:
    """Shards a module around transformers' models over the ranks: each decoder layer, then the rest. Its parameters need no memory yet.

    Afterwards parameters are float32 shards, gathered in `compute_dtype`, and gradients are means over ranks in float32.
    """
    assert ranks.mesh is not None, "one rank is not sharded"
    # Inputs stay as they are, as on one rank: to cast them, torch would build a pass's segments anew before every layer, and what balances
    # experts, which is float32, would be bfloat16.
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    # Inner ones first, where such a layer is within another: what is sharded already stays apart.
    for layer in reversed(decoder_layers(module)):
        fully_shard(layer, mesh=ranks.mesh, mp_policy=policy)
    fully_shard(module, mesh=ranks.mesh, mp_policy=policy)


def decoder_layers(module: nn.Module) -> list[nn.Module]:
    """Of every transformers model in it, sharded or not."""
    models = [part for part in module.modules() if isinstance(part, PreTrainedModel)]
    names = {name for model in models for name in model._no_split_modules or ()}
    # Torch puts this before the name of a sharded layer's class.
    return [part for part in module.modules() if type(part).__name__.removeprefix("FSDP") in names]


def reshard(module: nn.Module) -> None:
    """To be called before weights change outside an update: a pass without gradients leaves the root gathered, and shards change."""
    if isinstance(module, FSDPModule):
        module.reshard()


def own_rows(parameter: DTensor) -> slice:
    """The rows of the whole that this rank holds: FSDP2 splits the first dimension as `torch.chunk` does."""
    num_rows, mesh = parameter.shape[0], parameter.device_mesh
    start = min(-(-num_rows // mesh.size()) * mesh.get_local_rank(), num_rows)
    return slice(start, start + parameter.to_local().shape[0])


@torch.no_grad()
def fill(parameter: Tensor, value: Tensor) -> None:
    """Copies a whole tensor into a parameter; into its local shard where it is sharded."""
    if isinstance(parameter, DTensor):
        # Without a source rank nothing is sent: every rank has the whole value and keeps its part.
        part = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.to_local().copy_(part.to_local())
    else:
        parameter.copy_(value)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """The whole of a sharded tensor, on every rank; all ranks must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def reduce_once(module: nn.Module, num_passes: int) -> Iterator[int]:
    """0 ... num_passes - 1; gradients are reduced over ranks in the last pass only, where memory allows."""
    size_bytes = 4 * sum(p.numel() for p in module.parameters())
    waits = hasattr(module, "set_requires_gradient_sync") and size_bytes <= MAX_UNREDUCED_BYTES
    for index in range(num_passes):
        if waits:
            module.set_requires_gradient_sync(index == num_passes - 1)  # pyright: ignore[reportCallIssue]
        yield index
