"""Where a run that waits for nodes is placed, before there is one."""

import pytest
from ray._private.thirdparty import pynvml

from cluster.contracts.errors import ConfigError
from deploy.config.loading import validated
from deploy.preflight import machine
from tests.model_shapes import write

WAITING = {"model": {"path": "m"}, "prompts": "file", "elastic": {"wait_for_nodes_s": 1800}}


def test_a_run_that_waits_is_placed_on_what_it_asks_for():
    config = validated({**WAITING, "learner": {"gpus_per_rank": 8}})
    placed = machine.place(config, frozenset(), is_local=False)
    assert placed is not None and placed.bundles[0].gpus == 8


def test_a_wait_on_a_cluster_that_no_node_joins_is_refused():
    with pytest.raises(ConfigError, match=r"^elastic\.wait_for_nodes_s=1800: no node joins .*--address"):
        machine.place(validated(WAITING), frozenset(), is_local=True)


def test_a_run_that_learns_from_recorded_trajectories_does_not_wait():
    assert machine.place(validated({**WAITING, "recorded": "runs/a"}), frozenset(), is_local=False) is None
    assert machine.place(validated({**WAITING, "recorded": "runs/a"}), frozenset(), is_local=True) is not None


def test_the_processes_of_an_engine_hold_a_share_each_and_a_copy_of_weights_that_arrive_as_one_list(tmp_path):
    """494,032,768 parameters of 2 bytes, a cache of 1 GiB and three arrays of logits, however many processes they are dealt out to."""
    path = write("Qwen/Qwen2.5-0.5B-Instruct", tmp_path)

    def worker(**sections) -> int:
        config = validated({"model": {"path": str(path)}, "prompts": "file", **sections})
        return machine.estimate(config, frozenset(), is_local=False).worker

    weights, two = 2 * 494_032_768, {"tensor_parallel_size": 2}
    engine = weights + 2**30 + 3 * 4 * 256 * 151_936
    assert worker() == engine
    assert worker(rollout={"max_concurrent_sequences": 1}) == engine - 3 * 4 * 255 * 151_936
    assert worker(rollout=two) == engine + 3 * weights
    assert worker(rollout=two, weights={"transport": "collective"}) == engine
    assert worker(rollout=two, learner={"lora": {"publish": "adapter"}}) == engine


def test_a_reference_counts_with_its_own_weights_and_a_pass(tmp_path):
    """1,777,088,000 parameters of 2 bytes, whatever the policy's size. A pass takes less than a quarter as much again."""
    policy, own = (
        write("Qwen/Qwen2.5-0.5B-Instruct", tmp_path),
        write("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", tmp_path),
    )
    settings = {
        "model": {"path": str(policy), "dtype": "bfloat16"},
        "prompts": "file",
        "reference": {"path": str(own)},
        "algorithm": {"kl": {"loss": {"coefficient": 0.1}}},
    }
    reference = machine.estimate(validated(settings), frozenset({"reference_logprobs"}), is_local=False).reference
    assert reference is not None and 2 * 1_777_088_000 < reference < 2.5 * 1_777_088_000


def test_the_version_that_the_first_rank_keeps_for_groups_counts_once_whatever_the_number_of_ranks(tmp_path):
    path = write("Qwen/Qwen2.5-0.5B-Instruct", tmp_path)

    def total(transport: str, **sections) -> int:
        settings = {"model": {"path": str(path)}, "prompts": "file", "weights": {"transport": transport}, **sections}
        return machine.estimate(validated(settings), frozenset(), is_local=False).total

    for sections in ({}, {"learner": {"num_ranks": 2}}):
        assert total("collective", **sections) - total("object_store", **sections) == 2 * 494_032_768
    assert total("collective", recorded="runs/a") == total("object_store", recorded="runs/a")


def test_deltas_take_a_copy_in_every_worker_and_a_copy_with_its_changes_on_the_first_rank(tmp_path):
    """The changes are half of the weights at most, in its memory and in the object store, or there alone for groups, which keep a version
    anyway. Of an engine in a group each process has a copy."""
    path = write("Qwen/Qwen2.5-0.5B-Instruct", tmp_path)

    def estimate(parallel: int = 1, **weights) -> machine.Memory:
        rollout = {"num_workers": 3, "tensor_parallel_size": parallel}
        settings = {"model": {"path": str(path)}, "prompts": "file", "rollout": rollout, "weights": weights}
        return machine.estimate(validated(settings), frozenset(), is_local=False)

    off, on = estimate(), estimate(deltas=True)
    assert on.worker - off.worker == 2 * 494_032_768
    assert on.total - off.total == (3 + 2) * 2 * 494_032_768
    off, on = (estimate(2, transport="collective", deltas=deltas) for deltas in (False, True))
    assert on.worker - off.worker == 2 * 2 * 494_032_768
    assert on.total - off.total == 3 * (on.worker - off.worker) + 494_032_768


@pytest.mark.parametrize(
    ("address", "variable", "is_own"),
    [(None, None, True), (None, "", True), ("", "", True), (None, "auto", False), ("auto", "", False)],
)
def test_a_run_for_which_no_cluster_is_named_starts_its_own(monkeypatch, address, variable, is_own):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if variable is not None:
        monkeypatch.setenv("RAY_ADDRESS", variable)
    assert machine.is_own_cluster(address) is is_own


@pytest.mark.parametrize(
    ("visible", "expected"), [("", 0), ("-1", 0), ("NoDevFiles", 0), ("0,1", 2), ("1,-1,0", 1), ("GPU-8c, GPU-9d", 2)]
)
def test_gpus_are_those_that_cuda_shows(monkeypatch, visible, expected):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    (node,) = machine.this_machine().nodes
    assert node.gpus == expected


class Nvml:
    """The library of NVIDIA's driver, with this many GPUs; None: it is not there."""

    def __init__(self, num_gpus: int | None) -> None:
        self._num_gpus = num_gpus

    def nvmlInit(self) -> None:
        if self._num_gpus is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    def nvmlDeviceGetCount(self) -> int | None:
        return self._num_gpus

    def nvmlShutdown(self) -> None: ...


@pytest.mark.parametrize(
    ("devices", "nvml", "expected"),
    [
        (["nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"], Nvml(9), 2),
        ([], Nvml(9), 0),
        (["dxg"], Nvml(1), 1),
        (["dxg"], Nvml(None), 0),
    ],
)
def test_without_a_choice_all_gpus_are_shown_and_on_wsl_nvml_counts_them(
    monkeypatch, tmp_path, devices, nvml, expected
):
    """Seen before: WSL2 has no device files of NVIDIA's, and every local run on its GPU was refused."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(machine, "_DEVICES", tmp_path)
    for name in ("nvmlInit", "nvmlDeviceGetCount", "nvmlShutdown"):
        monkeypatch.setattr(pynvml, name, getattr(nvml, name))
    for device in devices:
        (tmp_path / device).touch()
    (node,) = machine.this_machine().nodes
    assert node.gpus == expected
