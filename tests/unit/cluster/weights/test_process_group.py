"""Real gloo groups: the sender in this process, every receiver in one of its own. Whoever is lost, nobody waits without end."""

import contextlib
import multiprocessing
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from typing import Any

import psutil
import pytest
import torch
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]  torch documents it there

from cluster.contracts.errors import BroadcastError, LostError, WeightsError
from cluster.contracts.sockets import bound
from cluster.contracts.types import RankGroup
from cluster.weights import process_group
from cluster.weights.delta import PublishedCopy
from cluster.weights.manifest import Canary, WeightManifest, packing
from cluster.weights.process_group import Incoming, Receiver, Sender

CPU = torch.device("cpu")
CANARY = Canary(token_ids=(1, 2), logprobs=(-1.0,), starting_logprobs=(-1.0,))
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload([__name__])


def weights(version: int) -> list[tuple[str, torch.Tensor]]:
    """Four buckets of 4,000 bytes: each number of a tensor is its own and the version's."""
    return [(f"w{i}", torch.full((1000,), float(10 * version + i))) for i in range(4)]


def kept(sender: Sender, version: int = 1) -> WeightManifest:
    return sender.keep(packing(weights(version), policy_version=version, bucket_bytes=4000, canary=lambda: CANARY))


def group_of(
    sender: Sender,
    manifest: WeightManifest,
    *,
    size: int,
    name: str = "g1",
    lasts: bool = True,
    timeout_s: float = 120.0,
    base_digest: str | None = None,
) -> RankGroup:
    return RankGroup(
        name=name,
        size=size,
        sender=sender.id,
        address=sender.address,
        backend="gloo",
        timeout_s=timeout_s,
        lasts=lasts,
        digest=manifest.digest,
        base_digest=base_digest,
    )


@pytest.fixture
def sender() -> Iterator[Sender]:
    sender = Sender("127.0.0.1", device=CPU)
    yield sender
    sender.close()


def receiving(pipe: Any) -> None:
    """A process: takes what it is told to, and says what it got. At its `dies_at`-th tensor it is gone."""
    torch.set_num_threads(1)
    receiver = Receiver()
    while (told := pipe.recv()) is not None:
        incoming, dies_at = told
        got: list[tuple[str, float]] = []
        try:
            for number, (name, tensor) in enumerate(receiver.tensors(incoming, place=0, device=CPU)):
                if number == dies_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                got.append((name, float(tensor.sum())))
            pipe.send(got)
        except (BroadcastError, WeightsError) as error:
            pipe.send(error)


class Process:
    def __init__(self) -> None:
        self._pipe, theirs = PROCESSES.Pipe()
        self._process = PROCESSES.Process(target=receiving, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def take(self, group: RankGroup, rank: int, manifest: WeightManifest, *, dies_at: int | None = None) -> None:
        self._pipe.send((Incoming(group=group, first_rank=rank, manifest=manifest), dies_at))

    def answer(self) -> Any:
        assert self._pipe.poll(240), "no answer"
        return self._pipe.recv()

    def signal(self, number: signal.Signals) -> None:
        assert self._process.pid
        os.kill(self._process.pid, number)

    def await_end(self) -> None:
        self._process.join(240)
        assert self._process.exitcode is not None, "it lives on"

    def close(self) -> None:
        self._process.kill()
        self._process.join()


@pytest.fixture
def processes() -> Iterator[list[Process]]:
    made = [Process() for _ in range(3)]
    yield made
    for process in made:
        process.close()


def sums(version: int) -> list[tuple[str, float]]:
    return [(name, float(tensor.sum())) for name, tensor in weights(version)]


def test_every_process_gets_every_version_over_one_group(sender, processes):
    for version in (1, 2):
        manifest = kept(sender, version)
        group = group_of(sender, manifest, size=4)
        for rank, process in enumerate(processes, 1):
            process.take(group, rank, manifest)
        sender.send(group)
        assert [process.answer() for process in processes] == [sums(version)] * 3


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_death_in_mid_broadcast_is_seen_by_all_and_the_living_get_it_again(sender, processes, victim):
    manifest = kept(sender)
    group = group_of(sender, manifest, size=4)
    for rank, process in enumerate(processes, 1):
        process.take(group, rank, manifest, dies_at=1 if rank - 1 == victim else None)
    with in_thread(sender.send, group) as sending:
        processes[victim].await_end()
        sender.give_up(
            group
        )  # as the driver does: the dead one may be a leaf of the tree, whose end its parent alone sees
        with pytest.raises(BroadcastError):
            sending.result(240)
    living = [process for number, process in enumerate(processes) if number != victim]
    # A broadcast goes through a tree: one whose branch was whole may have all of it.
    assert all(isinstance(found, BroadcastError) or found == sums(1) for found in (each.answer() for each in living))
    again = group_of(sender, manifest, size=3, name="g2")
    for rank, process in enumerate(living, 1):
        process.take(again, rank, manifest)
    sender.send(again)
    assert [process.answer() for process in living] == [sums(1)] * 2


def test_a_member_that_is_silent_costs_the_others_no_more_than_the_call_to_give_up(sender, processes):
    silent, *others = processes
    manifest = kept(sender)
    group = group_of(sender, manifest, size=4)
    for rank, process in enumerate(processes, 1):
        process.take(group, rank, manifest)
    sender.send(group)  # all have joined
    for process in processes:
        process.answer()
    silent.signal(signal.SIGSTOP)
    for rank, process in enumerate(processes, 1):
        process.take(group, rank, manifest)
    with in_thread(sender.send, group) as sending:
        sender.give_up(group)
        with pytest.raises(BroadcastError, match="given up"):
            sending.result(240)
    assert [type(process.answer()) for process in others] == [BroadcastError] * 2


def test_a_member_that_never_comes_is_waited_for_until_the_groups_limit(sender, monkeypatch):
    """A hundred seconds, which are over when the sender waits for it."""
    group = group_of(sender, kept(sender), size=2, timeout_s=100.0)
    store, began = PrefixStore(group.name, sender._store), time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: began + (101.0 if store.check(["here 0"]) else 0.0))
    with pytest.raises(BroadcastError, match=r"not done within 100 s"):
        sender.send(group)


def test_a_member_that_comes_when_the_group_was_given_up_waits_for_nobody(sender):
    """All others had come, and left. It took the group's whole limit to connect to them."""
    manifest = kept(sender)
    group = group_of(sender, manifest, size=3, timeout_s=60.0)
    with in_thread(sender.send, group) as sending, in_thread(received, group, manifest) as receiving:
        sender.give_up(group)
        for each in (sending, receiving):
            with pytest.raises(BroadcastError, match="given up"):
                each.result(240)
    with pytest.raises(BroadcastError, match="given up"):
        list(Receiver().tensors(Incoming(group=group, first_rank=2, manifest=manifest), place=0, device=CPU))


def test_members_that_connect_to_one_that_is_gone_by_then_wait_until_the_group_is_given_up(sender, monkeypatch):
    """It said that it is here, and never connects. Gloo alone would wait for the group's whole limit."""
    manifest, connect, connecting = kept(sender), process_group._gloo, list[int]()

    def connect_noted(*args, rank):
        connecting.append(rank)
        return connect(*args, rank=rank)

    monkeypatch.setattr(process_group, "_gloo", connect_noted)
    group = group_of(sender, manifest, size=3, timeout_s=60.0)
    PrefixStore(group.name, sender._store).set("here 2", "")
    with in_thread(sender.send, group) as sending, in_thread(received, group, manifest) as receiving:
        until(lambda: sorted(connecting) == [0, 1])
        sender.give_up(group)
        for each in (sending, receiving):
            with pytest.raises(BroadcastError, match="given up"):
                each.result(240)


def test_a_member_whose_sender_is_gone_asks_nobody_again_and_again(sender):
    manifest = kept(sender)
    listener, address = bound("127.0.0.1")  # nobody will listen
    with listener, pytest.raises(BroadcastError, match="refused"):
        received(replace(group_of(sender, manifest, size=2), address=address), manifest)


def test_each_broadcast_of_a_lasting_group_may_take_the_groups_limit(sender, monkeypatch):
    """An hour passes between two broadcasts of a group whose limit is 100 s."""
    receiver, manifest, clock = Receiver(), kept(sender), time.monotonic
    group = group_of(sender, manifest, size=2, timeout_s=100.0)
    incoming = Incoming(group=group, first_rank=1, manifest=manifest)
    for hours in range(2):
        monkeypatch.setattr(time, "monotonic", lambda hours=hours: clock() + 3600 * hours)
        with in_thread(sender.send, group) as sending:
            assert len(list(receiver.tensors(incoming, place=0, device=CPU))) == 4
            assert sending.result(240) is None
    receiver.leave()


@pytest.mark.parametrize("timeout_s", [1e10, 1e300])
def test_a_group_may_take_for_ever(sender, timeout_s):
    """Seen before: a limit of three centuries, as for "never", was over at once, and a longer one no number of torch's."""
    manifest = kept(sender)
    group = group_of(sender, manifest, size=2, lasts=False, timeout_s=timeout_s)
    with in_thread(sender.send, group) as sending:
        assert received(group, manifest) == sums(1)
        assert sending.result(240) is None


def group_names(sender: Sender) -> set[str]:
    """Of the groups that have keys in the sender's store."""
    return {key.partition("/")[0] for key in sender._store.list_keys()}


def test_a_group_leaves_nothing_in_the_senders_store(sender, processes, monkeypatch):
    manifest = kept(sender)
    for name, lasts in (("fleet1", True), ("fleet2", True), ("fleet", False)):
        group = group_of(sender, manifest, size=2, name=name, lasts=lasts)
        processes[0].take(group, 1, manifest)
        sender.send(group)
        assert processes[0].answer() == sums(1)
    assert group_names(sender) == {"fleet2"}
    sender.give_up(group_of(sender, manifest, size=2, name="lost", timeout_s=100.0))
    kept(sender)
    assert group_names(sender) == {"fleet2", "lost"}, "a member of it may still wait"
    now = time.monotonic()
    for later_s, names in ((250, {"fleet2", "lost"}), (300, {"fleet2"})):  # twice the group's limit, and a minute
        monkeypatch.setattr(time, "monotonic", lambda later_s=later_s: now + later_s)
        kept(sender)
        assert group_names(sender) == names


def test_a_lasting_group_that_was_given_up_keeps_its_mark_when_the_next_one_begins(sender, processes):
    manifest = kept(sender)
    given_up, following = (group_of(sender, manifest, size=2, name=each) for each in ("fleet1", "fleet2"))
    for group in (given_up, following):
        processes[0].take(group, 1, manifest)
        sender.send(group)
        assert processes[0].answer() == sums(1)
        if group is given_up:
            sender.give_up(group)
    with pytest.raises(BroadcastError, match="given up"):
        received(given_up, manifest)


def test_a_late_member_gets_what_is_kept_in_a_group_of_its_own_while_others_are_sent_to(sender):
    manifest = kept(sender)
    groups = [group_of(sender, manifest, size=2, name=f"joins {number}", lasts=False) for number in range(2)]
    with contextlib.ExitStack() as stack:
        sending = [stack.enter_context(in_thread(sender.send, group)) for group in groups]
        for group in groups:
            assert received(group, manifest) == sums(1)
        assert [each.result(240) for each in sending] == [None, None]


def test_a_late_member_that_is_lost_leaves_the_lasting_group_as_it_is(sender):
    receiver, manifest = Receiver(), kept(sender)
    lasting = group_of(sender, manifest, size=2, timeout_s=60.0)
    joining = group_of(sender, manifest, size=2, name="joins", lasts=False)
    for _ in range(2):
        with in_thread(sender.send, lasting) as sending:
            incoming = Incoming(group=lasting, first_rank=1, manifest=manifest)
            assert len(list(receiver.tensors(incoming, place=0, device=CPU))) == 4
            assert sending.result(240) is None
        with in_thread(sender.send, joining) as sending, pytest.raises(BroadcastError):
            incoming = Incoming(group=joining, first_rank=1, manifest=manifest)
            lost: Any = Receiver().tensors(incoming, place=0, device=CPU)
            next(lost)
            lost.close()
            sender.give_up(joining)
            sending.result(240)
        joining = replace(joining, name="joins again")
    receiver.leave()


def test_both_ends_leave_each_group_that_is_over_once(sender, monkeypatch):
    """Fleets that others follow, a late member's group, one whose weights were altered, and the last one."""
    left, leave = list[str](), process_group.Member.leave

    def noted(member: process_group.Member) -> None:
        left.append(member._group.name)
        leave(member)

    monkeypatch.setattr(process_group.Member, "leave", noted)
    receiver = Receiver()

    def bring(name: str, *, lasts: bool = True, alters: bool = False) -> None:
        manifest = kept(sender)
        sender._kept[manifest.digest, None][1][7] ^= alters
        group = group_of(sender, manifest, size=2, name=name, lasts=lasts)
        with in_thread(sender.send, group) as sending:
            try:
                list(receiver.tensors(Incoming(group=group, first_rank=1, manifest=manifest), place=0, device=CPU))
            except WeightsError:
                sender.give_up(group)
                raise
        sending.result()

    bring("fleet1")
    bring("fleet2")
    bring("joins", lasts=False)
    assert left.count("joins") == 2
    with pytest.raises(WeightsError):
        bring("altered", alters=True)
    assert left.count("altered") == 2
    bring("fleet3")
    sender.close()
    receiver.leave()
    assert Counter(left) == dict.fromkeys(("fleet1", "fleet2", "joins", "altered", "fleet3"), 2)


def test_a_member_that_connects_when_its_sender_ends_is_told_so(sender):
    listener, address = bound("127.0.0.1")
    listener.listen()
    group = replace(group_of(sender, kept(sender), size=2), address=address)
    with in_thread(received, group, kept(sender)) as receiving:
        with listener:
            listener.accept()[0].close()  # it looks whether the sender is there, and connects next
        with pytest.raises(BroadcastError, match="is broken"):
            receiving.result(240)


def test_the_version_before_is_let_go_while_the_next_one_is_packed(sender):
    manifest = kept(sender)

    def packed() -> Iterator[Any]:
        assert not sender._kept
        yield from packing(weights(2), policy_version=2, bucket_bytes=4000, canary=lambda: CANARY)

    assert sender.keep(packed()).digest != manifest.digest


def test_a_bucket_that_is_altered_on_the_way_is_refused_before_its_tensors_are_given_out(sender):
    manifest = kept(sender)
    sender._kept[manifest.digest, None][1][7] ^= 1
    group = group_of(sender, manifest, size=2)
    got: list[str] = []
    with in_thread(sender.send, group), pytest.raises(WeightsError, match="bucket 1 of 4"):
        try:
            incoming = Incoming(group=group, first_rank=1, manifest=manifest)
            got.extend(name for name, _ in Receiver().tensors(incoming, place=0, device=CPU))
        finally:
            sender.give_up(group)
    assert got == ["w0"]


class Deltas:
    """A sender and a receiver that have version 1, and the changes from there to version 2, which are in bucket 2 of 4."""

    def __init__(self, sender: Sender) -> None:
        self.sender, self.receiver, self._published = sender, Receiver(), PublishedCopy()
        self._names = (f"g{number}" for number in count())
        self.tensors = weights(1)
        self.bring(self.keep(1))
        self.tensors[2][1][7] = 5.0
        self.manifest = self.keep(2)
        assert self.manifest.delta and self.manifest.delta.sizes_bytes == (0, 0, 16, 0)
        self.base = self.manifest.delta.base_digest

    def keep(self, version: int) -> WeightManifest:
        parts = packing(self.tensors, policy_version=version, bucket_bytes=4000, canary=lambda: CANARY)
        return self.sender.keep(self._published.compared(parts))

    def bring(self, manifest: WeightManifest, *, base_digest: str | None = None) -> list[str]:
        """Names of the tensors that it gives out, which are right to the last bit."""
        group = group_of(self.sender, manifest, size=2, lasts=False, base_digest=base_digest, name=next(self._names))
        wanted, got = dict(self.tensors), list[str]()
        with in_thread(self.sender.send, group):
            incoming = Incoming(group=group, first_rank=1, manifest=manifest, keeps=True)
            try:
                for name, tensor in self.receiver.tensors(incoming, place=0, device=CPU):
                    assert torch.equal(tensor, wanted[name])
                    got.append(name)
            except WeightsError:
                self.sender.give_up(group)
                raise
        return got


def test_changes_are_added_to_what_a_process_got_before_and_buckets_without_any_do_not_travel(sender):
    deltas = Deltas(sender)
    assert deltas.bring(deltas.manifest, base_digest=deltas.base) == ["w0", "w1", "w2", "w3"]
    deltas.tensors[0][1][0] = -1.0
    manifest = deltas.keep(3)
    assert deltas.bring(manifest, base_digest=deltas.manifest.digest) == ["w0", "w1", "w2", "w3"]


def test_changes_that_are_altered_on_the_way_are_refused_and_the_process_needs_the_whole(sender):
    deltas = Deltas(sender)
    sender._kept[deltas.manifest.digest, deltas.base][2][0] ^= 1
    with pytest.raises(WeightsError, match="bucket 2 of 4"):
        deltas.bring(deltas.manifest, base_digest=deltas.base)
    with pytest.raises(WeightsError, match="this worker has none; it needs the whole weights"):
        deltas.bring(deltas.manifest, base_digest=deltas.base)
    assert len(deltas.bring(deltas.manifest)) == 4


def test_a_restarted_learner_has_nothing_of_what_was_packed_before(sender):
    manifest = kept(sender)
    after = Sender("127.0.0.1", device=CPU)
    for group in (group_of(after, manifest, size=2), group_of(sender, manifest, size=2)):
        with pytest.raises(LostError, match="keeps other weights"):
            after.send(group)


def test_weights_in_whose_place_newer_ones_are_kept_are_not_sent(sender):
    """A worker that joins may have its turn late. It was sent the newer ones, which are not those of its manifest."""
    group = group_of(sender, kept(sender, 1), size=2)
    kept(sender, 2)
    with pytest.raises(LostError, match="keeps other weights"):
        sender.send(group)


def test_the_store_listens_at_its_own_host_alone(sender):
    host, _, port = sender.address.rpartition(":")
    listening = [each.laddr for each in psutil.Process().net_connections() if each.status == psutil.CONN_LISTEN]
    assert [each.ip for each in listening if each.port == int(port)] == [host] == ["127.0.0.1"]
    with socket.create_connection((host, int(port))):
        pass


def received(group: RankGroup, manifest: WeightManifest) -> list[tuple[str, float]]:
    incoming = Incoming(group=group, first_rank=1, manifest=manifest)
    return [(name, float(tensor.sum())) for name, tensor in Receiver().tensors(incoming, place=0, device=CPU)]


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 50  # less than the groups' limits
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextlib.contextmanager
def in_thread(function: Any, *args: Any) -> Iterator[Future[Any]]:
    with ThreadPoolExecutor(1) as thread:
        yield thread.submit(function, *args)
