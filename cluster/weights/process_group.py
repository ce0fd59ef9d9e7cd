"""Both ends of a collective broadcast: `Sender` in the learner's first rank, `Receiver` in each process of an engine.

A group is made of its own store and backend and is no process's default one: learner ranks and vLLM have theirs. Every wait ends: with a
lost member's closed connection, with the mark of a group that was given up, or when the broadcast has taken the group's `timeout_s`; all
raise BroadcastError.
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
"""To reach a store that listens already, and for each of its answers."""
_BACKLOG = 1024
"""Connections that wait to be accepted."""
_LOOK_S = 0.5
"""How often a member that waits looks whether the group was given up."""
_GIVEN_UP = "given up"
_NUM_HASHED_BESIDE = 4
"""Copies of buckets in host memory that are hashed while the next ones are loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Incoming:
    """Weights that a worker's engine is to take from a group: what an engine loads in place of tensors."""

    group: RankGroup
    first_rank: int
    """In the group, of the engine's processes."""
    manifest: WeightManifest
    keeps: bool = False
    """Whether each process keeps a copy in the host's memory, for changes to be added to."""


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
            # Only when all are here do they connect: a connection waits for its other end, whatever becomes of that.
            self._store.set(_here(rank), "")
            here = [_here(each) for each in range(group.size)]
            self._wait(lambda: self._store.check(here), longest_pause_s=0.05)
            self._refuse_given_up()  # all others may have come, and left
            if group.backend == "nccl":
                self._backend: Any = _nccl(self._store, group, rank=rank, device=device)
            else:  # over a connection of its own: on this one nobody else is answered while gloo waits for another's address
                own = c10d.PrefixStore(group.name, store.clone())
                self._backend = self._made(partial(_gloo, own, group, rank=rank), look=self._refuse_given_up)

    def begin_round(self) -> None:
        """To be called before each broadcast but the first."""
        self._num_rounds += 1
        self._until = time.monotonic() + self._group.timeout_s

    def start(self, bucket: torch.Tensor) -> Any:
        """Rank 0's bucket is on its way to all others, into this one's place. What it returns goes to `finish`. An empty one is there."""
        if not bucket.numel():
            return None
        options = c10d.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        with self._breaking():
            return self._backend.broadcast([bucket], options)

    def finish(self, work: Any) -> None:
        """Returns once the bucket has been sent, or is here."""
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
        # gloo stops no operation that waits for a silent member, and its end waits for the operation: not here.
        ending, self._backend = [self._backend], None
        threading.Thread(target=_end, args=(ending,), name="leaving a group", daemon=True).start()

    def _made(self, make: Callable[[], T], *, look: Callable[[], None]) -> T:
        # Torch tries to connect for the whole time, whatever has become of the others. It may go on with that, in a thread.
        making = Future[T]()
        threading.Thread(target=_bring_about, args=(making, make), name="joining a group", daemon=True).start()
        self._wait(making.done, longest_pause_s=0.005, look=look)
        return making.result()

    def _wait(
        self, is_over: Callable[[], bool], *, longest_pause_s: float, look: Callable[[], None] | None = None
    ) -> None:
        """`look` raises when there is nothing to wait for any more; None looks whether the group was given up."""
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
        """Raises BroadcastError for torch's errors, which are RuntimeErrors, and for a socket's."""
        try:
            yield
        except (RuntimeError, OSError) as error:
            raise BroadcastError(f"group {self._group.name} is broken: {error}") from error


class Sender:
    """Rank 0 of all groups: keeps the last version in host memory, with what changed in it, and sends either. Several threads may send at a
    time, to a group each."""

    def __init__(self, host: str, *, device: torch.device) -> None:
        """Listens at `host` for members of groups, as long as it lives."""
        self.id = uuid.uuid4().hex
        self._device = device
        self._kept: dict[tuple[str, str | None], list[np.ndarray]] = {}
        """By digest, and that of the base for changes."""
        self._lasting: tuple[str, Member] | None = None
        listener, self.address = bound(host)
        self._store = store_of(listener, within_s=_CONNECT_S)
        """Ends with the last reference."""

    def keep(self, parts: Iterable[np.ndarray | WeightManifest]) -> WeightManifest:
        """Takes the buckets and the manifest that `packing` yields, or `PublishedCopy.compared`, in place of what it kept."""
        self._kept = {}  # two versions at a time would take twice the memory
        *taken, manifest = (owned(part) if isinstance(part, np.ndarray) else part for part in parts)
        assert isinstance(manifest, WeightManifest)
        arrays = [each for each in taken if isinstance(each, np.ndarray)]
        digest, delta, num_buckets = manifest.digest, manifest.delta, len(manifest.bucket_digests)
        changes = {(digest, delta.base_digest): arrays[num_buckets:]} if delta else {}
        self._kept = {(digest, None): arrays[:num_buckets], **changes}
        return manifest

    def send(self, group: RankGroup) -> None:
        """Returns once all members have the buckets. Raises BroadcastError, and LostError for weights that it does not keep."""
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

    def give_up(self, group: RankGroup) -> None:
        """All members that wait in the group raise BroadcastError."""
        c10d.PrefixStore(group.name, self._store).set(_GIVEN_UP, "")

    def close(self) -> None:
        """Ends its part in the group that lasts."""
        if self._lasting:
            self._lasting[1].leave()
        self._lasting, self._kept = None, {}

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
        self._lasting = group.name, Member(group, rank=0, device=self._device)
        return self._lasting[1]


class Receiver:
    """A process of an engine, in one group at a time."""

    def __init__(self) -> None:
        self._joined: tuple[str, Member] | None = None
        self._copy = LoadedCopy()

    def tensors(self, incoming: Incoming, *, place: int, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and tensors as they come; `place` is this process's among the engine's. A bucket's memory is free when its tensors are.

        Raises BroadcastError, and WeightsError for a bucket that is not the manifest's. On the CPU a bucket is hashed before its tensors
        are given out. With NCCL they are on `device` and given out at once; copies are hashed on the host meanwhile, all before this ends.
        Changes are added to the host's copy, which is hashed and given out bucket by bucket. It is gone when this does not end.
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
        """Leaves the group, if it is in one."""
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
    """Buckets (uint8). While one is used the next one travels."""
    coming: tuple[torch.Tensor, Any] | None = None
    for size in sizes:
        # New memory for each: a layer of vLLM's holds its tensors until it has all of them.
        bucket = torch.empty(size, dtype=torch.uint8, device=device)
        here, coming = coming, (bucket, member.start(bucket))
        if here:
            member.finish(here[1])
            yield here[0]
    assert coming is not None, "a manifest has a bucket"
    member.finish(coming[1])
    yield coming[0]


def _bring_about(result: Future[T], make: Callable[[], T]) -> None:
    try:
        result.set_result(make())
    except BaseException as error:  # noqa: BLE001  it goes on in those that wait
        result.set_exception(error)


def _refuse_absent(address: str, *, within_s: float) -> None:
    """Raises OSError where nobody listens: torch would ask again until the time is over."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host, int(port)), timeout=within_s).close()


def _here(rank: int) -> str:
    return f"here {rank}"


def store_of(listener: socket.socket, *, within_s: float) -> TCPStore:
    """Listens at the socket, which is the store's from now on; `within_s` is for each of its answers to this process."""
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
    """The one that answers at host:port; `within_s` is to reach it, and for each of its answers. Raises torch's RuntimeError."""
    host, _, port = address.rpartition(":")
    return TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=patience(within_s))


def _gloo(store: c10d.Store, group: RankGroup, *, rank: int) -> Any:
    gloo: Any = c10d.ProcessGroupGloo  # torch's own way to give it a device; its stubs have another name for it
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=address_towards(group.address))]
    options._timeout = patience(group.timeout_s)
    return gloo(store, rank, group.size, options)


def _nccl(store: c10d.Store, group: RankGroup, *, rank: int, device: torch.device) -> Any:
    torch.cuda.set_device(device)
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = patience(group.timeout_s)
    # torch ends the process when a collective fails, unless told to end the communicator alone. It reads this when a group is made.
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
    """This machine's address on the way to `address` (host:port): what the others reach it by. Nothing is sent."""
    host, _, port = address.rpartition(":")
    family = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as way:
        way.connect((host, int(port)))
        return way.getsockname()[0]


def _end(ending: list[Any]) -> None:
    if (backend := ending.pop()) is not None and backend.name() == "nccl":
        backend.abort()
