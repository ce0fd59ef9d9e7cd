"""Several learner ranks as one: their devices, their rendezvous, sharding of the model over them (FSDP2), and their exchanges.

Every rank makes the same calls in the same order. gloo on CPUs, NCCL on GPUs. Ranks exchange tensors and texts, never objects.
With one rank every exchange is the identity, and no process group exists.
"""

import atexit
import contextlib
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
from cluster.freed_memory import return_large_blocks
from cluster.weights.process_group import address_towards, store_at, store_of
from learner.sequence_parallel import SequenceGroup

MAX_UNREDUCED_BYTES = 2 * 1024**3
"""Limit of a model's float32 gradients up to which ranks reduce them once per update. Larger models reduce after each micro-batch."""

_LOOK_S = 0.05
"""Seconds between two looks of a rank that waits for the others."""


def choose_device(config: LearnerConfig) -> torch.device:
    """Raises ConfigError if the config asks for GPUs and there is none."""
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
    """The group that exchanges; None is torch's default group."""
    sequence_group: SequenceGroup | None = None
    """The ranks that this one shares passes with; None if each rank makes its own passes."""

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
        """Returns once all ranks have reached `rendezvous` (host:port), the address of rank 0's `listener`.

        A single rank has no process group and no mesh, unless it `shards_alone`: its model is then sharded like that of several ranks.
        Raises ConfigError if several ranks have no rendezvous, and DeadlineError, which names the missing ranks, after `timeout_s`.
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
            # Every pass gathers and frees layers, partly in the process group's threads. glibc would keep these blocks in each thread's
            # arena: 700 MB more on a rank that holds half of a 400 MB model.
            return_large_blocks()
        # Before Python shuts down: the process group's threads must not outlive it.
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
        """Parts that a mini-batch is split into, each with its own passes."""
        return self.size // self.num_per_pass

    @property
    def data_parallel_rank(self) -> int:
        """The part of this rank."""
        return self.rank // self.num_per_pass

    @property
    def leads(self) -> bool:
        """True on one of the ranks that share a pass. They compute the same results, so only this one counts and records them."""
        return self.rank % self.num_per_pass == 0

    def beside(self, *, timeout_s: float) -> "Ranks":
        """The same ranks with a second group, on the CPU, which a thread may use while training exchanges. All ranks must call it.

        A rank waits for the others for at most `timeout_s`.
        """
        timeout = patience(timeout_s)
        group = None if self.mesh is None else dist.new_group(backend="gloo", timeout=timeout)
        return replace(self, device=torch.device("cpu"), group=group)

    def sum(self, tensor: Tensor) -> Tensor:
        """Sums over all ranks, in place."""
        if self.mesh is not None:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def stack(self, tensor: Tensor) -> list[Tensor]:
        """The tensor of every rank, in order of rank; all of the same shape."""
        if self.mesh is None:
            return [tensor]
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(gathered, tensor.contiguous(), group=self.group)
        return gathered

    def texts(self, text: str) -> list[str]:
        """The text of every rank, in order of rank; any may be empty."""
        # An encoding error must not keep this rank from the exchange: the others wait for it.
        own = torch.tensor([*text.encode(errors="backslashreplace")], dtype=torch.uint8)
        sizes = [int(size) for size in self.stack(torch.tensor(own.numel(), device=self.device))]
        padded = torch.zeros(max(1, *sizes), dtype=torch.uint8, device=self.device)
        padded[: own.numel()] = own.to(self.device)
        return [
            part[:size].cpu().numpy().tobytes().decode() for part, size in zip(self.stack(padded), sizes, strict=True)
        ]

    def from_rank_0(self, tensor: Tensor) -> Tensor:
        """Copies rank 0's values to all ranks, in place."""
        if self.mesh is not None:
            dist.broadcast(tensor, src=0, group=self.group)
        return tensor


def _meet(*, rank: int, size: int, rendezvous: str, listener: socket.socket | None, timeout_s: float) -> Store:
    """The ranks' store in rank 0's process, once all ranks have reached it. Raises DeadlineError."""
    until = time.monotonic() + timeout_s
    here = [f"here {each}" for each in range(size)]
    in_vain = f"learner rank {rank} of {size} waited in vain (learner.timeout_s={timeout_s:g}) at {rendezvous} for rank"
    try:
        store = store_at(rendezvous, within_s=timeout_s) if listener is None else store_of(listener, within_s=timeout_s)
        store.set(here[rank], "")
        # Ranks connect only once all are here: a connection waits for its other end even if that dies.
        while not store.check(here) and time.monotonic() < until:
            time.sleep(_LOOK_S)
        missing = [each for each in range(size) if not store.check([here[each]])]
    except RuntimeError as error:  # the base class of torch's own errors
        raise DeadlineError(f"{in_vain} 0, which hosts the rendezvous: {headline(error)}") from error
    if missing:
        raise DeadlineError(f"{in_vain} {', '.join(map(str, missing))}")
    return store


def _listen_towards(rendezvous: str) -> None:
    """Makes gloo listen on the interface that reaches the other ranks, unless the user names one. By default gloo uses the address of the
    host's name, which on many machines is only local (127.0.1.1)."""
    own = address_towards(rendezvous)
    for interface, addresses in psutil.net_if_addrs().items():
        if any(each.address == own for each in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def leave() -> None:
    """Leaves torch's process group, if there is one; its threads end with the last sharded tensor."""
    if not dist.is_initialized():
        return
    dist.destroy_process_group()
    # DTensor's caches hold the process group too, some past the end of the interpreter, where its threads abort. Clearing them uses
    # private functions of torch: a version without them only keeps the threads.
    with contextlib.suppress(ImportError, AttributeError):
        from torch.distributed.tensor._collective_utils import MeshTopoInfo
        from torch.distributed.tensor._redistribute import _gen_transform_infos, clear_redistribute_planner_cache
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()
        clear_redistribute_planner_cache()
        _gen_transform_infos.cache_clear()
        MeshTopoInfo.build_from_mesh.cache_clear()


def shard(module: nn.Module, *, ranks: Ranks, compute_dtype: torch.dtype) -> None:
    """Shards a module that contains transformers models over the ranks: each decoder layer, then the rest. Parameters may be on `meta`.

    Afterwards parameters are float32 shards, gathered in `compute_dtype`, and gradients are means over ranks in float32.
    """
    assert ranks.mesh is not None, "one rank is not sharded"
    # Inputs are not cast, as on one rank: casting would rebuild a pass's segments before every layer, and round the float32 numbers that
    # balance experts to bfloat16.
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    # Inner layers first: where one lies within another, a layer that is already sharded stays separate.
    for layer in reversed(decoder_layers(module)):
        fully_shard(layer, mesh=ranks.mesh, mp_policy=policy)
    fully_shard(module, mesh=ranks.mesh, mp_policy=policy)


def decoder_layers(module: nn.Module) -> list[nn.Module]:
    """The decoder layers of all transformers models in the module, sharded or not."""
    models = [part for part in module.modules() if isinstance(part, PreTrainedModel)]
    names = {name for model in models for name in model._no_split_modules or ()}
    # Torch prefixes the class name of a sharded layer with this.
    return [part for part in module.modules() if type(part).__name__.removeprefix("FSDP") in names]


def reshard(module: nn.Module) -> None:
    """Frees gathered weights. Call it before weights change outside an update: a pass without gradients leaves the root gathered, while
    changes are made to shards."""
    if isinstance(module, FSDPModule):
        module.reshard()


def own_rows(parameter: DTensor) -> slice:
    """This rank's rows of the whole parameter: FSDP2 splits the first dimension as `torch.chunk` does."""
    num_rows, mesh = parameter.shape[0], parameter.device_mesh
    start = min(-(-num_rows // mesh.size()) * mesh.get_local_rank(), num_rows)
    return slice(start, start + parameter.to_local().shape[0])


@torch.no_grad()
def fill(parameter: Tensor, value: Tensor) -> None:
    """Copies a whole tensor into a parameter, or into its local shard if it is sharded."""
    if isinstance(parameter, DTensor):
        # Without a source rank nothing is sent: every rank has the whole value and takes its part.
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
    """Yields 0 ... num_passes - 1. Gradients are reduced over ranks in the last pass only, if memory allows."""
    size_bytes = 4 * sum(p.numel() for p in module.parameters())
    waits = hasattr(module, "set_requires_gradient_sync") and size_bytes <= MAX_UNREDUCED_BYTES
    for index in range(num_passes):
        if waits:
            module.set_requires_gradient_sync(index == num_passes - 1)  # pyright: ignore[reportCallIssue]
        yield index
