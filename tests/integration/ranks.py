"""Learner ranks, a process each, that do one task after the other. Both ends: `Ranks` asks, `main` is what a rank runs.

A task is a line of JSON on a rank's stdin, its answer a line on its stdout; the first rank says before where it can be met. Every task has
a learner of its own.
"""

import contextlib
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import torch

from cluster.contracts.sockets import bound

ROOT = Path(__file__).parents[2]


class Ranks:
    """The asking end."""

    def __init__(self, count: int) -> None:
        self._stderr = [tempfile.TemporaryFile("w+") for _ in range(count)]  # noqa: SIM115  as long as the processes
        self._processes = [
            subprocess.Popen(
                # An abort in native code then says where it came from.
                [sys.executable, "-X", "faulthandler", "-m", __name__],
                cwd=ROOT,
                env=os.environ | _gpu_of(rank),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                bufsize=1,
            )
            for rank, stderr in enumerate(self._stderr)
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """The interpreters end: well, unless the block raised."""
        try:
            if kind is None:
                self.close()
        finally:
            self.kill()

    def do(self, name: str, *, config: dict[str, Any], **task: Any) -> list[Any]:
        """What each rank found; as many take part as `config` says, the first of them where it says one."""
        num_ranks = config["learner"]["num_ranks"]
        task |= {"name": name, "config": config}
        self._ask(0, task)
        address = self._answer(0)
        for rank in range(1, num_ranks):
            self._ask(rank, task | {"rendezvous": address})
        return [self._answer(rank) for rank in range(num_ranks)]

    def _ask(self, rank: int, task: dict[str, Any]) -> None:
        stdin = self._processes[rank].stdin
        assert stdin is not None
        stdin.write(json.dumps(task | {"rank": rank}) + "\n")

    def _answer(self, rank: int) -> Any:
        stdout = self._processes[rank].stdout
        assert stdout is not None
        line = stdout.readline()
        assert line, f"rank {rank} died:\n{self._said(rank)}"
        answer = json.loads(line)
        assert not isinstance(answer, dict) or "raised" not in answer, (
            f"rank {rank}: {answer['raised']}\n{self._said(rank)}"
        )
        return answer

    def _said(self, rank: int) -> str:
        self._stderr[rank].seek(0)
        return self._stderr[rank].read()[-3000:]

    def close(self) -> None:
        """Asserts that every rank's interpreter ends well, which threads of a group that it left behind would prevent."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        codes = [process.wait(timeout=240) for process in self._processes]
        assert not any(codes), "\n".join(map(self._said, range(len(codes))))

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


def _gpu_of(rank: int) -> dict[str, str]:
    """A GPU of its own, as Ray gives it to a rank, where there are so many."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count()))))
    gpus = [gpu for gpu in seen.split(",") if gpu]
    return {"CUDA_VISIBLE_DEVICES": gpus[rank]} if rank < len(gpus) else {}


def main() -> None:
    """The rank's end."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    for line in sys.stdin:
        task = json.loads(line)
        if task["rank"] == 0:
            task["listener"], task["rendezvous"] = bound("127.0.0.1")
            answers.write(json.dumps(task["rendezvous"]) + "\n")
        try:
            answer = {"learn": _learn, "load": _load, "take gradients": _take_gradients}[task["name"]](task)
        except Exception:  # noqa: BLE001  whatever it is, the test says it
            answer = {"raised": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")


def _learner(task: dict[str, Any]) -> Any:
    from cluster.contracts.config import RunConfig
    from deploy.cluster_up.factories import demonstrations
    from learner.distributed import Ranks
    from learner.learner import Learner

    config = RunConfig.model_validate(task["config"])
    join, compiling = Ranks.join, torch.compile
    if task.get("shards_alone"):
        Ranks.join = functools.partial(join, shards_alone=True)
    if task.get("traces_alone"):
        torch.compile = functools.partial(compiling, backend="aot_eager")
    try:
        return Learner(
            config,
            rank=task["rank"],
            rendezvous=task["rendezvous"],
            listener=task.get("listener"),
            run_dir=task.get("run_dir", ""),
            demonstrations=demonstrations(config),
        )
    finally:
        Ranks.join, torch.compile = join, compiling


def _learn(task: dict[str, Any]) -> dict[str, Any]:
    """Learns until a step, from the start or the newest checkpoint below `restore`; publishes, saves where told to, and exports.

    `beside` are steps that are learned before the save is waited for; `without_room` is a rank that has no memory for a copy, and
    `full_disk` one that can write no file.
    """
    from cluster.contracts.errors import CheckpointError
    from learner.checkpoint import saving
    from learner.distributed import local
    from learner.memory import free_bytes
    from learner.resting import Rest
    from tests.unit.learner.disk import largest_file
    from tests.unit.learner.trajectories import make_group, with_partition

    os.environ.update(task["environment"])
    learner = _learner(task)
    saving.free_bytes = (lambda device: 0) if task["without_room"] == task["rank"] else free_bytes
    restored = None
    with _reads() as read:
        if task["restore"]:
            restored = learner.restore_latest(task["restore"])
    reports, recorded, at_rest = [], [], []
    if task["rests"]:
        learner._rest = Rest(learner._ranks.device, moves=True)

    def learn(until: int) -> None:
        while learner.version < until:
            reports.append(step())
            if task["rests"]:
                learner.rest()
                kept = [*learner.networks.parameters(), *learner.optimizer.state().values()]
                at_rest.append(sum(local(each.detach()).untyped_storage().nbytes() for each in kept))

    def step() -> dict[str, float]:
        # The last step has a single trajectory: one of two ranks gets none, and still takes part.
        rewards = [(1.0,)] if learner.version == 4 else [(1.0, 0.0, 0.5)] * 3
        groups = [
            make_group(index, rewards=each, seed=learner.version, version=learner.version)
            for index, each in enumerate(rewards)
        ]
        if learner.objective.config.distillation:
            groups = [with_partition(group) for group in groups]
        metrics = learner.update(*groups).metrics
        recorded.append([row for part in learner.learned() for row in part.to_pylist()])
        return metrics

    learn(task["until"])
    published = list(learner.publish())
    error, is_beside = None, False
    if task["save"]:
        full_disk = largest_file(0) if task["full_disk"] == task["rank"] else contextlib.nullcontext()
        try:
            with full_disk:
                learner.save(task["save"], {"policy_version": learner.version})
                is_beside = learner._saver._writing is not None
                learn(task["until"] + task["beside"])
                learner.finish_saving()
        except CheckpointError as failed:
            error = str(failed)
    learner.export(task["export"], {})
    learner.close()
    return {
        "reports": reports,
        "recorded": recorded,
        "at_rest": at_rest,
        "canary": published[-1]["canary"]["logprobs"] if published else None,
        "error": error,
        "is_beside": is_beside,
        "restored": restored,
        "read": read,
    }


@contextlib.contextmanager
def _reads() -> Iterator[list[tuple[str, int, int]]]:
    """What is read of a checkpoint's files: the file, from which byte on, and how many."""
    from learner.checkpoint.places import Place

    read, real = list[tuple[str, int, int]](), Place.read_range

    def read_range(place: Place, file: str, start: int, length: int) -> Any:
        read.append((file, start, length))
        return real(place, file, start, length)

    Place.read_range = read_range
    try:
        yield read
    finally:
        Place.read_range = real


def _take_gradients(task: dict[str, Any]) -> dict[str, Any]:
    """One step in a given layout. Its last update's gradients are saved whole, as the optimizer gets them; the answer says what each
    token's log-prob was, and how many positions each pass gave to the model."""
    from safetensors.torch import save_file

    from learner.distributed import whole
    from tests.unit.learner.trajectories import make_group

    learner = _learner(task)
    learner.policy.layout = task["layout"]
    lengths: list[int] = []
    embeddings: Any = learner.policy.causal_lm.get_input_embeddings()
    embeddings.register_forward_pre_hook(lambda module, inputs: lengths.append(inputs[0].shape[1]))
    step = learner.optimizer.step

    def save_and_step(*args: Any, **kwargs: Any) -> float:
        trained = [(name, p) for name, p in learner.networks.named_parameters() if p.grad is not None]
        gradients = {name: whole(p.grad).contiguous() for name, p in trained}
        if task["rank"] == 0:
            save_file(gradients, task["save"])
        return step(*args, **kwargs)

    learner.optimizer.step = save_and_step
    routed = [bytes((4 * i + k) % 8 for i in range(4 + length) for k in (0, 1, 2, 5)) for length in task["lengths"]]
    columns = {"routed_experts": routed} if task["routed"] else {}
    groups = [make_group(index, seed=3, lengths=task["lengths"], **columns) for index in range(3)]
    metrics = learner.update(*groups).metrics
    recorded = [row for part in learner.learned() for row in part.to_pylist()]
    learner.close()
    return {"metrics": metrics, "recorded": recorded, "lengths": lengths}


def _load(task: dict[str, Any]) -> dict[str, Any]:
    """How much memory a rank needs at most to hold its part of a model."""
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401  its size is not the model's

    import learner.learner

    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here on
    before = _memory_bytes("VmRSS")
    learner = _learner(task)
    grown = _memory_bytes("VmHWM") - before
    num_parameters = sum(parameter.numel() for parameter in learner.policy.parameters())
    loading = learner.describe()["loading"]
    learner.close()
    return {"grown_bytes": grown, "whole_bytes": 4 * num_parameters, "loading": loading}


def _memory_bytes(kind: str) -> int:
    found = re.search(rf"{kind}:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found
    return 1024 * int(found[1])


if __name__ == "__main__":
    main()
