"""The learner's checkpoints: what goes in, when it is written, how it comes back. `learner.checkpoint.files` knows the files.

One rank copies its state and writes beside the training (`checkpoint.asynchronous`), except after the last step; several ranks write
their own parts at the same time, and wait for each other.
"""

import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoTokenizer

from cluster.contracts.errors import CheckpointError
from cluster.weights.adapter import write_adapter
from learner.checkpoint import files as checkpoint
from learner.checkpoint.files import FileEntry, Manifest
from learner.distributed import fill
from learner.model.lora import adapter_of
from learner.publishing import exported, exported_adapter

if TYPE_CHECKING:
    from learner.learner import Learner

_WEIGHT = "weight/"
_MOMENT = "moment/"
_RNG = "rng/"
ADAPTER = "adapter"
"""The adapter alone, as a peft folder, beside the model that has it merged in."""


class Saver:
    """Saves and restores one rank."""

    def __init__(self, learner: "Learner") -> None:
        self._learner = learner
        self._writing: threading.Thread | None = None
        self._error: CheckpointError | None = None

    def save(self, directory: Path, extra: Mapping[str, Any]) -> None:
        """Raises CheckpointError when this save, or the one before it that was written beside the training, failed."""
        earlier = self.wait()
        config = self._learner.config
        asynchronous = config.checkpoint.asynchronous and self._learner.group.size == 1
        if not asynchronous or self._learner.version >= config.num_steps:
            self._write(directory, self._manifest(extra), self._state(), self._model(), self._adapter())
        else:
            # To the CPU at once: a second copy on the device may not fit.
            state = {name: _local(tensor).detach().to("cpu", copy=True) for name, tensor in self._state().items()}
            model, adapter = (
                [(name, tensor.clone()) for name, tensor in kind] for kind in (self._model(), self._adapter())
            )
            arguments = (directory, self._manifest(extra), state, model, adapter)
            self._writing = threading.Thread(target=self._write_beside, args=arguments, name="checkpoint")
            self._writing.start()
        if earlier is not None:
            raise earlier

    def restore(self, directory: Path) -> dict[str, Any]:
        """The learner as it was when it saved. Raises CheckpointError naming a checkpoint that is torn, altered or foreign."""
        self.wait()
        learner = self._learner
        manifest = checkpoint.verify(directory, expected_parameters=self._parameters_digest())
        states = checkpoint.read_states(directory, manifest)
        names = states.names()
        masters = learner.optimizer.masters()
        for name in names:
            if name.startswith(_WEIGHT):
                fill(masters[name.removeprefix(_WEIGHT)], states.tensor(name).to(learner.group.device))
        learner.optimizer.copy_masters()
        moments: dict[str, Tensor] = {}
        for name in names:
            if name.startswith(_MOMENT):
                key = name.removeprefix(_MOMENT)
                moments[key] = _like(masters[key.partition("/")[2]], states.tensor(name))
        learner.optimizer.load_state(moments)
        generator = states.of_rank(f"{_RNG}cpu", learner.group.rank)
        if generator is not None:
            torch.set_rng_state(generator)
        learner.version = manifest.policy_version
        learner.objective.load_state_dict(manifest.learner["objective"])
        return manifest.extra

    def newest(self, root: Path) -> Path | None:
        self.wait()
        found = checkpoint.checkpoints(root)
        return found[-1] if found else None

    def export(self, directory: Path) -> None:
        """Raises CheckpointError when the disk is full."""
        earlier = self.wait()
        model = self._model()
        try:
            if self._learner.group.rank == 0:
                self._write_export(directory, model)
        finally:
            _exhaust(model)
        if earlier is not None:
            raise earlier

    def _write_export(self, directory: Path, model: Iterable[tuple[str, Tensor]]) -> None:
        aside = checkpoint.begin(directory)
        try:
            self._write_model(aside, model, directory=directory)
            if directory.exists():
                raise CheckpointError(f"{directory} exists; export into another folder")
            aside.rename(directory)
        finally:
            checkpoint.discard(aside)

    def wait(self) -> CheckpointError | None:
        """Waits for a save under way. Its error, if it had one, once."""
        if self._writing is not None:
            self._writing.join()
        self._writing = None
        error, self._error = self._error, None
        return error

    def _write_beside(self, *arguments: Any) -> None:
        try:
            self._write(*arguments)
        except CheckpointError as error:
            self._error = error
        except Exception as error:  # noqa: BLE001 - whatever it is, a thread's end must not pass for a save
            self._error = CheckpointError(f"checkpoint {arguments[0]} was not saved: {type(error).__name__}: {error}")

    def _write(
        self,
        directory: Path,
        manifest: Manifest,
        state: dict[str, Tensor],
        model: Iterable[tuple[str, Tensor]],
        adapter: Iterable[tuple[str, Tensor]],
    ) -> None:
        """Everything of this rank; rank 0 also the model, its adapter apart, and, once all ranks are done, the manifest.

        All ranks go through `model` and `adapter`, which gather as they go.
        """
        group, config = self._learner.group, self._learner.config.checkpoint
        aside = checkpoint.aside_of(directory)
        error: CheckpointError | None = None
        files: dict[str, FileEntry] = {}
        name = checkpoint.state_name(group.rank, group.size)
        try:
            if group.rank == 0:
                checkpoint.begin(directory)
        except CheckpointError as failed:
            # The others wait: what fails is said once all have met.
            error = failed
        self._meet()
        try:
            if error is not None:
                raise error
            local = {key: _local(tensor).cpu() for key, tensor in state.items()}
            files[name] = checkpoint.write_tensors(aside / name, local, directory=directory)
            if group.rank == 0:
                written = self._write_model(aside / checkpoint.MODEL, model, directory=directory)
                files |= {f"{checkpoint.MODEL}/{path}": entry for path, entry in written.items()}
                files |= self._write_adapter(aside, adapter, directory=directory)
        except CheckpointError as failed:
            error = failed
        _exhaust(model)
        _exhaust(adapter)
        entries = self._entries_of_ranks(None if error else files[name])
        try:
            if error is not None:
                raise error
            if any(entry is None for entry in entries):
                raise CheckpointError(
                    f"checkpoint {directory} was not saved: another rank could not write its part; the last good one stands"
                )
            if group.rank == 0:
                files |= {
                    checkpoint.state_name(rank, group.size): entry
                    for rank, entry in enumerate(entries)
                    if entry is not None
                }
                checkpoint.commit(aside, directory, manifest.model_copy(update={"files": files}))
                checkpoint.prune(directory.parent, keep_last=config.keep_last, keep_best=config.keep_best)
        finally:
            self._meet()
            if group.rank == 0:
                checkpoint.discard(aside)

    def _write_model(
        self, folder: Path, model: Iterable[tuple[str, Tensor]], *, directory: Path
    ) -> dict[str, FileEntry]:
        entries = checkpoint.write_model(folder, model, directory=directory)
        causal_lm, config = self._learner.policy.causal_lm, self._learner.config.model
        hf_config = type(causal_lm.config).from_dict(causal_lm.config.to_dict())
        hf_config.dtype = config.dtype
        try:
            hf_config.architectures = [type(causal_lm).__name__]
            hf_config.save_pretrained(folder)
            if causal_lm.generation_config is not None:
                causal_lm.generation_config.save_pretrained(folder)
            tokenizer = AutoTokenizer.from_pretrained(
                config.path, revision=config.revision, trust_remote_code=config.trust_remote_code
            )
            tokenizer.save_pretrained(folder)
            for path in sorted(folder.rglob("*")):
                if path.is_file() and path.relative_to(folder).as_posix() not in entries:
                    entries[path.relative_to(folder).as_posix()] = checkpoint.seal(path)
        except OSError as error:
            raise CheckpointError(f"checkpoint {directory} was not saved: {error}; the last good one stands") from error
        return entries

    def _write_adapter(
        self, aside: Path, adapter: Iterable[tuple[str, Tensor]], *, directory: Path
    ) -> dict[str, FileEntry]:
        """A peft folder beside the merged model; nothing without LoRA."""
        config = self._learner.config
        if config.learner.lora is None:
            return {}
        folder = aside / ADAPTER
        described = adapter_of(self._learner.policy.causal_lm, lora=config.learner.lora)
        try:
            write_adapter(folder, adapter, adapter=described, base_model=config.model.path)
            return {f"{ADAPTER}/{path.name}": checkpoint.seal(path) for path in sorted(folder.iterdir())}
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"checkpoint {directory} was not saved: {error}; the last good one stands") from error

    def _state(self) -> dict[str, Tensor]:
        optimizer = self._learner.optimizer
        state: dict[str, Tensor] = {f"{_WEIGHT}{name}": master.detach() for name, master in optimizer.masters().items()}
        state |= {f"{_MOMENT}{name}": value for name, value in optimizer.state().items()}
        return state | {f"{_RNG}cpu": torch.get_rng_state()}

    def _model(self) -> Iterator[tuple[str, Tensor]]:
        """Whole weights, gathered one at a time as they are asked for: all ranks must go through them."""
        named = exported(self._learner.policy.causal_lm, dtype=self._learner.compute_dtype)
        return ((name, tensor.cpu()) for name, tensor in named)

    def _adapter(self) -> Iterator[tuple[str, Tensor]]:
        """Whole adapter matrices, as `_model`; none without LoRA."""
        named = exported_adapter(self._learner.policy.causal_lm, dtype=self._learner.compute_dtype)
        return ((name, tensor.cpu()) for name, tensor in named)

    def _manifest(self, extra: Mapping[str, Any]) -> Manifest:
        learner = self._learner
        return Manifest(
            policy_version=learner.version,
            num_ranks=learner.group.size,
            parameters_digest=self._parameters_digest(),
            metric=extra.get("metric"),
            learner={"objective": learner.objective.state_dict()},
            extra=dict(extra),
            files={},
        )

    def _parameters_digest(self) -> str:
        return checkpoint.parameters_digest(
            {name: master.shape for name, master in self._learner.optimizer.masters().items()}
        )

    def _meet(self) -> None:
        self._learner.group.sum(torch.zeros(1, device=self._learner.group.device))

    def _entries_of_ranks(self, own: FileEntry | None) -> list[FileEntry | None]:
        """Every rank's state file, None where it could not be written. Travels as 40 bytes."""
        packed = torch.zeros(5, dtype=torch.int64)
        if own is not None:
            digest = torch.frombuffer(bytearray.fromhex(own.sha256), dtype=torch.uint8).view(torch.int64)
            packed = torch.cat([torch.tensor([own.size_bytes]), digest])
        entries: list[FileEntry | None] = []
        for part in self._learner.group.stack(packed.to(self._learner.group.device)):
            numbers = part.cpu()
            size = int(numbers[0])
            sha256 = numbers[1:].contiguous().view(torch.uint8).numpy().tobytes().hex()
            entries.append(FileEntry(size_bytes=size, sha256=sha256) if size else None)
        return entries


def _exhaust(gathered: Iterable[Any]) -> None:
    """What rank 0 did not take, or could not, the others still gather with it."""
    for _ in gathered:
        pass


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _like(master: Tensor, value: Tensor) -> Tensor:
    """A whole value in the master's placement; scalars (step counts) whole, on its device."""
    if value.ndim == 0 or not isinstance(master, DTensor):
        return value.to(master.device)
    placed = torch.zeros_like(master)
    fill(placed, value.to(placed.device))
    return placed
