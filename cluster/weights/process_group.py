"""Both ends of a collective broadcast: `Sender` in the learner's first rank, `Receiver` in each process of an engine.

A group has its own store and backend, separate from the default process groups of learner ranks and vLLM. Each wait ends by completion, or
by BroadcastError: when a lost member's connection closes, when the group was given up, or when the broadcast has taken `timeout_s`.
"""

import contextlib
import os
import socket
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  torch documents it there
from torch.distributed import distributed_c10d as c10d

from cluster.contracts.errors import BroadcastError, LostError
from cluster.contracts.sockets import bound, patience
from cluster.contracts.types import RankGroup
from cluster.weights.delta import LoadedCopy
from cluster.weights.manifest import WeightManifest, bucket_sizes, owned, unpack_bucket, verify_bucket

T = TypeVar("T")

_CONNECT_S = 60.0
"""Timeout for connecting to a listening store, and for each of its answers."""
_BACKLOG = 1024
"""Connections waiting to be accepted."""
_LOOK_S = 0.5
"""How often a waiting member checks whether the group was given up."""
_GIVEN_UP = "given up"
_NUM_HASHED_BESIDE = 4
"""Copies of buckets in host memory that are hashed while the next ones are loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Incoming:
    """Weights that a worker's engine takes from a group, in place of tensors."""

    group: RankGroup
    first_rank: int
    """Rank of the engine's first process in the group."""
    manifest: WeightManifest
    keeps: bool = False
    """Whether each process keeps a copy in host memory, to add deltas to."""


class Member:
    """This process in one group."""

    def __init__(self, group: RankGroup, *, rank: int, device: torch.device) -> None:
        """Returns once all members have come."""
        self._group = group
        self._num_rounds, self._until = 0, 0.0
        self.begin_round()
        with self._breaking():
            connect_s = min(_CONNECT_S, group.timeout_s)
            refuse_absent = partial(_refuse_absent, group.address, within_s=connect_s)
            refuse_absent()
            store: Any = self._made(partial(store_at, group.address, within_s=connect_s), look=refuse_absent)
            self._store = c10d.PrefixStore(group.name, store)
            # Members connect only after all have come: a connection attempt waits for its other end even if that is gone.
            self._store.set(f"here {rank}", "")
            here = [f"here {each}" for each in range(group.size)]
            self._wait(lambda: self._store.check(here), longest_pause_s=0.05)
            self._refuse_given_up()  # the others may have come and left
            if group.backend == "nccl":
                self._backend: Any = _nccl(self._store, group, rank=rank, device=device)
            else:  # on a connection of its own: while gloo waits for an address, its connection answers nothing else
                own = c10d.PrefixStore(group.name, store.clone())
                self._backend = self._made(partial(_gloo, own, group, rank=rank), look=self._refuse_given_up)

    def begin_round(self) -> None:
        """Call it before each broadcast but the first."""
        self._num_rounds += 1
        self._until = time.monotonic() + self._group.timeout_s

    def start(self, bucket: torch.Tensor) -> Any:
        """Starts the broadcast of rank 0's bucket into the others' `bucket`. Returns the work for `finish`; None for an empty bucket."""
        if not bucket.numel():
            return None
        options = c10d.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        with self._breaking():
            return self._backend.broadcast([bucket], options)

    def finish(self, work: Any) -> None:
        """Returns once the bucket has been sent or received."""
        if work is None:
            return
        with self._breaking():
            self._wait(work.is_completed, longest_pause_s=0.002)
            work.wait()

    def confirm(self) -> None:
        """Tells rank 0 that this member has everything."""
        with self._breaking():
            self._store.add(f"received {self._num_rounds}", 1)

    def await_confirmations(self) -> None:
        """On rank 0: returns once all other members have everything."""
        key, num_receivers = f"received {self._num_rounds}", self._group.size - 1
        with self._breaking():
            self._wait(lambda: self._store.add(key, 0) == num_receivers, longest_pause_s=0.05)

    def leave(self) -> None:
        """Returns at once. The others' operations fail as soon as this process's have ended."""
        # In a thread: gloo cannot stop an operation that waits for a silent member, and its destructor waits for the operation.
        ending, self._backend = [self._backend], None
        threading.Thread(target=_end, args=(ending,), name="leaving a group", daemon=True).start()

    def _made(self, make: Callable[[], T], *, look: Callable[[], None]) -> T:
        # In a thread, which may outlive this call: torch tries to connect until its timeout even if the others are gone.
        making = Future[T]()
        threading.Thread(target=_resolve, args=(making, make), name="joining a group", daemon=True).start()
        self._wait(making.done, longest_pause_s=0.005, look=look)
        return making.result()

    def _wait(
        self, is_over: Callable[[], bool], *, longest_pause_s: float, look: Callable[[], None] | None = None
    ) -> None:
        """`look` raises if waiting is pointless; None checks whether the group was given up."""
        looked = time.monotonic()
        pause_s = 0.0002
        while not is_over():
            now = time.monotonic()
            if now > self._until:
                raise BroadcastError(f"group {self._group.name} was not done within {self._group.timeout_s:g} s")
            if now - looked > _LOOK_S:
                looked = now
                (look or self._refuse_given_up)()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_pause_s)

    def _refuse_given_up(self) -> None:
        if self._store.check([_GIVEN_UP]):
            raise BroadcastError(f"group {self._group.name} was given up: a member of it is lost")

    @contextlib.contextmanager
    def _breaking(self) -> Iterator[None]:
        """Turns the errors of torch (RuntimeError) and of sockets into BroadcastError."""
        try:
            yield
        except (RuntimeError, OSError) as error:
            raise BroadcastError(f"group {self._group.name} is broken: {error}") from error


class Sender:
    """Rank 0 of all groups: keeps the last version and its changes in host memory, and sends either. Several threads may send at a time,
    each to its own group."""

    def __init__(self, host: str, *, device: torch.device) -> None:
        """Listens at `host` for members of groups as long as it exists."""
        self.id = uuid.uuid4().hex
        self._device = device
        self._kept: dict[tuple[str, str | None], list[np.ndarray]] = {}
        """Buckets by digest and, for changes, the base's digest; None for the whole weights."""
        self._lasting: tuple[str, Member] | None = None
        self._given_up: dict[str, float] = {}
        """Groups that were given up, with the monotonic time after which no member reads their keys."""
        listener, self.address = bound(host)
        self._store = store_of(listener, within_s=_CONNECT_S)
        """The server ends with the last reference."""

    def keep(self, parts: Iterable[np.ndarray | WeightManifest]) -> WeightManifest:
        """Replaces the kept version by the buckets and the manifest that `packing` or `PublishedCopy.compared` yields."""
        self._kept = {}  # first: two versions would take twice the memory
        for name, until in list(self._given_up.items()):
            if until < time.monotonic():
                del self._given_up[name]
                self._remove_keys(name)
        *taken, manifest = (owned(part) if isinstance(part, np.ndarray) else part for part in parts)
        assert isinstance(manifest, WeightManifest)
        arrays = [each for each in taken if isinstance(each, np.ndarray)]
        digest, delta, num_buckets = manifest.digest, manifest.delta, len(manifest.bucket_digests)
        changes = {(digest, delta.base_digest): arrays[num_buckets:]} if delta else {}
        self._kept = {(digest, None): arrays[:num_buckets], **changes}
        return manifest

    def send(self, group: RankGroup) -> None:
        """Returns once all members have the buckets. Raises BroadcastError, and LostError for weights that are not kept."""
        kept = self._kept.get((group.digest, group.base_digest))
        if group.sender != self.id or kept is None:
            raise LostError(f"group {group.name}: the learner keeps other weights by now")
        member = self._member(group)
        try:
            works = deque[Any]()
            for bucket in kept:
                tensor = torch.from_numpy(bucket)
                works.append(member.start(tensor.to(self._device) if group.backend == "nccl" else tensor))
                if len(works) > 1:
                    member.finish(works.popleft())
            member.finish(works.popleft())
            member.await_confirmations()
        except BaseException:
            self._lasting = None if group.lasts else self._lasting
            member.leave()
            raise
        if not group.lasts:
            member.leave()
            self._remove_keys(group.name)

    def give_up(self, group: RankGroup) -> None:
        """Makes all members that wait in the group raise BroadcastError."""
        # A member may begin to wait as late as its call's deadline, a little after `timeout_s`, and then waits for `timeout_s` at most.
        self._given_up[group.name] = time.monotonic() + 2 * group.timeout_s + _CONNECT_S
        c10d.PrefixStore(group.name, self._store).set(_GIVEN_UP, "")

    def close(self) -> None:
        """Leaves the lasting group."""
        if self._lasting:
            self._lasting[1].leave()
        self._lasting, self._kept = None, {}

    def _remove_keys(self, name: str) -> None:
        """Removes the keys of a group in which no member waits. Each member leaves some, and the store lasts as long as the run."""
        for key in self._store.list_keys():
            if key.startswith(f"{name}/"):
                self._store.delete_key(key)

    def _member(self, group: RankGroup) -> Member:
        if not group.lasts:
            return Member(group, rank=0, device=self._device)
        if self._lasting:
            name, member = self._lasting
            if name == group.name:
                member.begin_round()
                return member
            self._lasting = None
            member.leave()
            if name not in self._given_up:  # else a member may still wait for the mark; `keep` removes the keys
                self._remove_keys(name)
        self._lasting = group.name, Member(group, rank=0, device=self._device)
        return self._lasting[1]


class Receiver:
    """One process of an engine, in one group at a time."""

    def __init__(self) -> None:
        self._joined: tuple[str, Member] | None = None
        self._copy = LoadedCopy()

    def tensors(self, incoming: Incoming, *, place: int, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields names and tensors as they arrive. `place`: this process's index in the engine. Tensors share their bucket's memory.

        Raises BroadcastError, and WeightsError for a bucket that is not the manifest's. On the CPU a bucket is hashed before its tensors
        are yielded. With NCCL they are on `device` and yielded at once; copies are hashed on the host meanwhile, all before this ends.
        Changes are added to the host's copy, whose buckets are hashed and yielded. If this does not complete, the copy is lost.
        """
        manifest, group = incoming.manifest, incoming.group
        added = self._copy.base_of(manifest) if group.base_digest else None
        sizes = manifest.delta.sizes_bytes if added and manifest.delta else bucket_sizes(manifest)
        self._copy, kept = LoadedCopy(), list[np.ndarray]()
        device = device if group.backend == "nccl" else torch.device("cpu")
        member = self._member(group, rank=incoming.first_rank + place, device=device)
        try:
            with ThreadPoolExecutor(_NUM_HASHED_BESIDE, thread_name_prefix="hash") as hashing:
                beside = deque[Future[None]]()
                for index, bucket in enumerate(_arriving(member, sizes, device=device)):
                    content = bucket.cpu().numpy()
                    if added:
                        content = added(index, content)
                        bucket = torch.from_numpy(content)
                    elif device.type == "cpu":
                        verify_bucket(manifest, index, content)
                    else:
                        beside.append(hashing.submit(verify_bucket, manifest, index, content))
                    if incoming.keeps:
                        kept.append(content)
                    yield from unpack_bucket(manifest, index, bucket)
                    if len(beside) == _NUM_HASHED_BESIDE:
                        beside.popleft().result()
                for each in beside:
                    each.result()
            if incoming.keeps:
                self._copy.keep(manifest, kept)
            member.confirm()
        except BaseException:
            self.leave()
            raise
        if not group.lasts:
            self.leave()

    def leave(self) -> None:
        """Leaves the group if it is in one."""
        if self._joined:
            self._joined[1].leave()
            self._joined = None

    def _member(self, group: RankGroup, *, rank: int, device: torch.device) -> Member:
        if self._joined and self._joined[0] == group.name:
            self._joined[1].begin_round()
            return self._joined[1]
        self.leave()
        self._joined = group.name, Member(group, rank=rank, device=device)
        return self._joined[1]


def _arriving(member: Member, sizes: Sequence[int], *, device: torch.device) -> Iterator[torch.Tensor]:
    """Yields buckets (uint8). While the caller uses one, the next one travels."""
    started: tuple[torch.Tensor, Any] | None = None
    for size in sizes:
        # New memory for each: a vLLM layer holds its tensors until it has all of them.
        bucket = torch.empty(size, dtype=torch.uint8, device=device)
        previous, started = started, (bucket, member.start(bucket))
        if previous:
            member.finish(previous[1])
            yield previous[0]
    assert started is not None, "a manifest has a bucket"
    member.finish(started[1])
    yield started[0]


def _resolve(result: Future[T], make: Callable[[], T]) -> None:
    try:
        result.set_result(make())
    except BaseException as error:  # noqa: BLE001  raised again in the waiting thread
        result.set_exception(error)


def _refuse_absent(address: str, *, within_s: float) -> None:
    """Raises OSError if nothing listens at `address`: torch would retry until its timeout."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host, int(port)), timeout=within_s).close()


def store_of(listener: socket.socket, *, within_s: float) -> TCPStore:
    """A store that listens at the socket and owns it from now on. `within_s`: timeout of each answer to this process."""
    host, port, *_ = listener.getsockname()
    listener.listen(_BACKLOG)
    return TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        timeout=patience(within_s),
    )


def store_at(address: str, *, within_s: float) -> TCPStore:
    """The store that listens at host:port. `within_s`: timeout for connecting, and for each of its answers. Raises torch's RuntimeError."""
    host, _, port = address.rpartition(":")
    return TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=patience(within_s))


def _gloo(store: c10d.Store, group: RankGroup, *, rank: int) -> Any:
    gloo: Any = c10d.ProcessGroupGloo  # Any: its stubs lack these options
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=address_towards(group.address))]
    options._timeout = patience(group.timeout_s)
    return gloo(store, rank, group.size, options)


def _nccl(store: c10d.Store, group: RankGroup, *, rank: int, device: torch.device) -> Any:
    torch.cuda.set_device(device)
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = patience(group.timeout_s)
    # By default torch ends the process when a collective fails; 2 ends only the communicator. torch reads this when a group is made.
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ[name] = "2"
    try:
        return c10d.ProcessGroupNCCL(store, rank, group.size, options)
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def address_towards(address: str) -> str:
    """This machine's own address on the route to `address` (host:port), by which others reach it. Sends nothing."""
    host, _, port = address.rpartition(":")
    family = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as route:
        route.connect((host, int(port)))
        return route.getsockname()[0]


def _end(ending: list[Any]) -> None:
    if (backend := ending.pop()) is not None and backend.name() == "nccl":
        backend.abort()
