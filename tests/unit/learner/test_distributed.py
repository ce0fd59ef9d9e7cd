"""Where the learner's ranks meet: real gloo groups, a process each. A rank that does not come is named, and nobody waits without end.
Sharded networks compute without a warning."""

import itertools
import multiprocessing
import socket
import time
import warnings
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cluster.contracts.errors import ConfigError, DeadlineError
from cluster.contracts.sockets import bound
from learner import distributed
from learner.distributed import Ranks, leave, shard, whole
from learner.model.critic import Critic, Networks
from learner.model.head import Head
from learner.model.packing import lay_out
from learner.model.policy import PolicyModel, token_row

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload([__name__])


def joined(rank: int, rendezvous: str, *, listener: Any = None, size: int = 2, timeout_s: float = 240.0) -> Ranks:
    device = torch.device("cpu")
    return Ranks.join(
        rank=rank, size=size, rendezvous=rendezvous, listener=listener, device=device, timeout_s=timeout_s
    )


def meeting(pipe: Any, rank: int, rendezvous: str, listener: Any, timeout_s: float) -> None:
    """A process: says what its number and the others' add up to, and at which addresses it has connections."""
    torch.set_num_threads(1)
    ranks = joined(rank, rendezvous, listener=listener, timeout_s=timeout_s)
    total = ranks.beside(timeout_s=timeout_s).sum(ranks.sum(torch.tensor(10.0 + rank)))
    connections = psutil.Process().net_connections("tcp")
    pipe.send((total.item(), {each.laddr.ip.removeprefix("::ffff:") for each in connections}))
    leave()


def sharded_pass(pipe: Any, rendezvous: str, listener: Any) -> None:
    """A process: says what a pass of a sharded policy and critic warns of, and the gradient of the value head's bias."""
    torch.set_num_threads(1)
    device = torch.device("cpu")
    ranks = Ranks.join(
        rank=0, size=1, rendezvous=rendezvous, listener=listener, device=device, timeout_s=240.0, shards_alone=True
    )
    config = LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    policy = PolicyModel(LlamaForCausalLM(config), head=Head(), layout="padded")
    networks: Any = Networks(policy, Critic(policy, backbone=None))
    shard(networks, ranks=ranks, compute_dtype=torch.float32)
    batch = lay_out([token_row([1, 2], [3, 4])], [0], layout="padded", width=2)
    warned = gradient = None
    try:
        with warnings.catch_warnings(action="error", category=UserWarning):
            outputs, values_C = networks(batch)
            (outputs.logprobs_C.sum() + values_C.sum()).backward()
        gradient = whole(networks.critic.value_head.bias.grad).item()
    except UserWarning as warning:
        warned = str(warning)
    pipe.send((warned, gradient))
    leave()


def own_address() -> str:
    """That other machines know this one by, if there are any: the host's name may mean another."""
    addresses = (each for part in psutil.net_if_addrs().values() for each in part if each.family == socket.AF_INET)
    return next((each.address for each in addresses if not each.address.startswith("127.")), "127.0.0.1")


@pytest.mark.parametrize("timeout_s", [240.0, 1e18], ids=["minutes", "for ever"])
def test_two_ranks_meet_where_the_first_one_listens(timeout_s):
    host = own_address()
    listener, address = bound(host)
    pipe, theirs = PROCESSES.Pipe()
    # The second one comes first, and tries again until somebody listens.
    processes = [
        PROCESSES.Process(target=meeting, args=(theirs, rank, address, listener if rank == 0 else None, timeout_s))
        for rank in (1, 0)
    ]
    for process in processes:
        process.start()
    listener.close()
    told = []
    for _ in processes:
        assert pipe.poll(240), "no answer"
        told.append(pipe.recv())
    for process in processes:
        process.join()
    assert told == [(42.0, {host}), (42.0, {host})]
    assert [process.exitcode for process in processes] == [0, 0]


def test_a_sharded_critic_learns_without_a_warning():
    listener, address = bound("127.0.0.1")
    pipe, theirs = PROCESSES.Pipe()
    process = PROCESSES.Process(target=sharded_pass, args=(theirs, address, listener))
    process.start()
    listener.close()
    assert pipe.poll(240), "no answer"
    # The sum of two values moves by 2 with the head's bias.
    assert pipe.recv() == (None, 2.0)
    process.join()
    assert process.exitcode == 0


def test_a_rank_that_died_before_the_meeting_is_named_when_the_time_is_over(monkeypatch):
    """Here a minute passes at each look at the clock, and none for the store."""
    monkeypatch.setattr(
        distributed, "time", SimpleNamespace(monotonic=itertools.count(0, 60).__next__, sleep=time.sleep)
    )
    listener, address = bound("127.0.0.1")
    with pytest.raises(DeadlineError) as late:
        joined(0, address, listener=listener, size=3, timeout_s=240.0)
    assert str(late.value) == (f"learner rank 0 of 3 waited in vain (learner.timeout_s=240) at {address} for rank 1, 2")


@pytest.mark.parametrize("is_dead", [True, False], ids=["dead", "silent"])
def test_without_the_first_rank_the_others_wait_no_longer_than_they_may(is_dead):
    # A loopback address of its own: another process may get the dead rank's port, and would answer at 127.0.0.1.
    listener, address = bound("127.0.0.9" if is_dead else "127.0.0.1")
    if is_dead:
        listener.close()
    with pytest.raises(
        DeadlineError, match=rf"learner rank 1 of 2 .* at {address} for rank 0, which hosts the rendezvous: "
    ):
        joined(1, address, timeout_s=1.0)
    listener.close()


@pytest.mark.parametrize(("rank", "rendezvous"), [(0, "127.0.0.1:5000"), (1, "")])
def test_ranks_without_a_place_to_meet_are_refused(rank, rendezvous):
    with pytest.raises(ConfigError, match=rf"learner.num_ranks=2 needs an address .* rank {rank} got '{rendezvous}'"):
        joined(rank, rendezvous)


def test_an_only_rank_meets_nobody_and_keeps_no_socket():
    listener, address = bound("127.0.0.1")
    assert joined(0, address, listener=listener, size=1).mesh is None
    assert listener.fileno() == -1
