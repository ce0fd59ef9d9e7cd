"""A rank at rest: its tensors are emptied in place, and come back to the bit. Here the host stands for the GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from learner.learner import Learner
from learner.resting import Rest
from tests.unit.learner.trajectories import make_config, make_group

CPU = torch.device("cpu")


def test_a_storage_is_emptied_in_place_and_filled_again_with_all_its_views():
    weights = torch.arange(12, dtype=torch.float32).view(3, 4)
    parameter, row, half = nn.Parameter(weights), weights[1], torch.ones(5, dtype=torch.bfloat16)
    rest = Rest(CPU, moves=True)
    rest.put_away([parameter, row, half])
    assert rest.is_resting
    assert weights.untyped_storage().nbytes() == half.untyped_storage().nbytes() == 0
    rest.bring_back()
    assert not rest.is_resting
    assert parameter.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]] and row.tolist() == [4, 5, 6, 7]
    assert half.tolist() == [1.0] * 5
    row.zero_()
    assert parameter[1].tolist() == [0, 0, 0, 0], "still the same storage"


def test_what_changed_since_the_last_rest_is_what_comes_back():
    weight, rest = torch.zeros(3), Rest(CPU, moves=True)
    for value in (1.0, 2.0):
        weight.fill_(value)
        rest.put_away([weight])
        rest.bring_back()
        assert weight.tolist() == [value] * 3


def test_a_rest_that_has_more_to_keep_than_the_last_one_finds_room():
    first, second, rest = torch.ones(2), torch.full((4,), 2.0), Rest(CPU, moves=True)
    for tensors in ([first], [first, second], [second]):
        rest.put_away(tensors)
        rest.bring_back()
    assert first.tolist() == [1.0] * 2 and second.tolist() == [2.0] * 4


def test_a_second_rest_keeps_what_the_first_put_away():
    weight, rest = torch.ones(2), Rest(CPU, moves=True)
    rest.put_away([weight])
    rest.put_away([weight])
    rest.bring_back()
    assert weight.tolist() == [1.0, 1.0]


def test_nothing_moves_on_a_cpu_and_tensors_of_another_device_stay():
    weight = torch.ones(2)
    for rest in (Rest(CPU), Rest(torch.device("meta"), moves=True)):
        rest.put_away([weight])
        assert weight.tolist() == [1.0, 1.0] and not rest.is_resting


class Cuda:
    """Stands for CUDA's own library: which addresses it holds for locked."""

    def __init__(self, *, locks: bool) -> None:
        self.locked: list[int] = []
        self._locks = locks

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if not self._locks:
            return 712
        assert address not in self.locked, "part or all of the requested memory range is already mapped"
        self.locked.append(address)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.locked.remove(address)
        return 0


@pytest.mark.parametrize("locks", [True, False])
def test_locked_memory_is_unlocked_when_it_grows_and_when_its_rest_ends(monkeypatch: pytest.MonkeyPatch, locks: bool):
    cuda = Cuda(locks=locks)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: raise_pending())
    rest = Rest(torch.device("cuda"))
    for size in (64, 128, 96):
        rest._make_room(size)
        assert cuda.locked == ([rest._host.data_ptr()] if locks else [])
    del rest
    assert cuda.locked == []


def raise_pending() -> None:
    raise RuntimeError("CUDA error: part or all of the requested memory range is already mapped")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "sections"),
    [
        ("float32", {}),
        ("bfloat16", {"algorithm": {"proximal": "ewma", "proximal_decay": 0.9}}),
        ("bfloat16", {"learner": {"lora": {"rank": 2}}}),
        ("float32", {"algorithm": {"advantage": "gae", "value": {"learning_rate": 1e-3}}}),
    ],
    ids=["float32", "bfloat16 with masters and averages", "adapters", "critic"],
)
def test_a_learner_that_rests_between_steps_learns_the_same_to_the_bit(
    model_path: Path, tmp_path: Path, dtype: str, sections: dict[str, Any]
):
    learned: list[dict[str, Any]] = []
    for moves in (False, True):
        learner = Learner(make_config(model_path, dtype=dtype, **sections))
        learner._rest = Rest(CPU, moves=moves)
        for parameter in (
            *learner.networks.parameters(),
            *learner.optimizer.masters().values(),
        ):  # on a CPU they may lie in the model's file
            parameter.data = parameter.data.clone()
        before = {id(parameter) for parameter in learner.networks.parameters()}
        for step in range(3):
            learner.update(*(make_group(i, seed=step, version=step) for i in range(2)))
            learner.rest()
            published = [*learner.publish()]
            learner.rest()
            assert learner._rest.is_resting == moves
            emptied = [p for p in learner.networks.parameters() if not p.untyped_storage().nbytes()]
            assert len(emptied) == (len([*learner.networks.parameters()]) if moves else 0)
        saved = str(tmp_path / str(moves))
        learner.save(saved, {})
        learner.finish_saving()
        learner.rest()
        manifest, _ = learner.pack()
        assert manifest["digest"] == published[-1]["digest"]
        learner.rest()
        learner.export(f"{saved}-exported", {})
        learner.rest()
        learner.restore(saved)
        assert {id(parameter) for parameter in learner.networks.parameters()} == before
        state = learner.optimizer.state() | learner.optimizer.masters()
        learned.append(
            {name: tensor.detach().clone() for name, tensor in state.items()} | {"digest": published[-1]["digest"]}
        )
        learner.close()
    awake, rested = learned
    assert awake.keys() == rested.keys() and len(awake) > 10
    for name, value in awake.items():
        if name == "digest":
            assert value == rested[name]
        else:
            assert_close(value, rested[name], rtol=0, atol=0)
