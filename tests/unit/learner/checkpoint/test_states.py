import hashlib
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cluster.contracts.errors import CheckpointError
from learner.checkpoint import states as states_module
from learner.checkpoint.manifest import BLOCK_BYTES, Manifest, state_name
from learner.checkpoint.places import Place
from learner.checkpoint.states import States
from learner.checkpoint.writing import write_tensors


def _written(directory: Path, ranks: list[dict[str, Tensor]]) -> Manifest:
    names = [state_name(rank, len(ranks)) for rank in range(len(ranks))]
    files = {
        name: write_tensors(directory / name, tensors, in_blocks=True)
        for name, tensors in zip(names, ranks, strict=True)
    }
    return Manifest(
        policy_version=1, num_ranks=len(ranks), parameters_digest="p", metric=None, learner={}, extra={}, files=files
    )


def _states(directory: Path, ranks: list[dict[str, Tensor]]) -> States:
    return States(Place.of(directory), _written(directory, ranks))


def test_shards_are_put_together_in_order_of_rank(tmp_path: Path):
    shards = [torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0]]), torch.empty(0, 1)]
    states = _states(tmp_path, [{"w": part, "step": torch.tensor(7.0), "own": part.clone()} for part in shards])
    assert states.rows("w").tolist() == [[1.0], [2.0], [3.0]]
    assert states.rows("w", slice(1, 3)).tolist() == [[2.0], [3.0]]
    assert states.rows("w", slice(3, 3)).shape == (0, 1)
    assert states.is_scalar("step") and float(states.rows("step")) == 7.0
    own = states.of_rank("own", 1)
    assert own is not None and own.tolist() == [[3.0]] and states.of_rank("own", 3) is None


def test_a_file_may_end_with_its_last_block(tmp_path: Path):
    near = BLOCK_BYTES - 200
    header = write_tensors(tmp_path / "probe", {"w": torch.ones(near, dtype=torch.uint8)}).size_bytes - near
    states = _states(tmp_path, [{"w": torch.ones(BLOCK_BYTES - header, dtype=torch.uint8)}])
    assert (tmp_path / state_name(0, 1)).stat().st_size == BLOCK_BYTES
    assert int(states.rows("w").sum()) == BLOCK_BYTES - header


@given(num_rows=st.integers(1, 9), saved=st.integers(1, 4), restored=st.integers(1, 4))
def test_any_number_of_ranks_restores_what_any_number_saved(
    tmp_path_factory: pytest.TempPathFactory, num_rows: int, saved: int, restored: int
):
    whole = torch.randn(num_rows, 3)
    shards = [whole[begin : begin + -(-num_rows // saved)] for begin in _begins(num_rows, saved)]
    folder = tmp_path_factory.mktemp("states")
    states = _states(folder, [{"a": torch.ones(1), "w": part.contiguous(), "z": torch.zeros(2)} for part in shards])
    size = -(-num_rows // restored)
    parts = [states.rows("w", slice(begin, min(begin + size, num_rows))) for begin in _begins(num_rows, restored)]
    assert torch.equal(torch.cat(parts), whole)


def _begins(num_rows: int, num_ranks: int) -> list[int]:
    return [min(rank * -(-num_rows // num_ranks), num_rows) for rank in range(num_ranks)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
def test_every_type_of_tensor_comes_back(tmp_path: Path, dtype: torch.dtype):
    value = torch.arange(6).reshape(2, 3).to(dtype)
    assert torch.equal(_states(tmp_path, [{"w": value, "x": torch.ones(3)}]).rows("w"), value)


def test_a_transposed_tensor_comes_back_in_its_own_order(tmp_path: Path):
    assert _states(tmp_path, [{"w": torch.tensor([[1, 2, 3], [4, 5, 6]]).t()}]).rows("w").tolist() == [
        [1, 4],
        [2, 5],
        [3, 6],
    ]


def test_an_altered_block_is_refused_by_the_rank_whose_rows_it_holds_and_by_no_other(tmp_path: Path):
    num_rows = 4 * BLOCK_BYTES // 1024  # four blocks of float32 rows of 256, behind the header
    whole = torch.arange(num_rows * 256, dtype=torch.float32).reshape(num_rows, 256)
    states = _states(tmp_path / "step-000002", [{"w": whole}])
    _flip(tmp_path / "step-000002" / state_name(0, 1), at=3 * BLOCK_BYTES + 5)
    half = num_rows // 2
    assert torch.equal(states.rows("w", slice(0, half)), whole[:half])
    with pytest.raises(CheckpointError, match=r"step-000002 was altered: state-00000-of-00001.* from byte 25165824 to"):
        states.rows("w", slice(half, num_rows))


def test_of_many_small_tensors_each_block_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tensors = {f"{index:03d}": torch.full((BLOCK_BYTES // 40,), float(index)) for index in range(30)}
    states = _states(tmp_path, [tensors])
    read: list[bytes] = []

    def counted(block: bytes) -> "hashlib._Hash":
        read.append(block[:1])
        return hashlib.new("sha256", block)

    monkeypatch.setattr(states_module, "sha256", counted)
    assert [float(states.rows(name)[-1]) for name in states.names()] == list(map(float, range(30)))
    assert len(read) == 4  # three blocks of tensors, and what the header moves into a fourth


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda file: file.unlink(), "is torn: state-00000-of-00001.safetensors is missing"),
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), "is torn: .* has 103 bytes instead of 104"),
    ],
)
def test_a_state_file_that_is_torn_is_refused_at_once(tmp_path: Path, damage, says: str):
    manifest = _written(tmp_path, [{"w": torch.ones(2)}])
    damage(tmp_path / state_name(0, 1))
    with pytest.raises(CheckpointError, match=says):
        States(Place.of(tmp_path), manifest)


def _flip(file: Path, *, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)
