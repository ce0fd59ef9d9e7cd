"""Finds checkpoints, reads their manifests, and verifies their files."""

import json
import os
from functools import partial
from pathlib import Path

from pydantic import ValidationError

from cluster.contracts.errors import CheckpointError, StorageError
from cluster.record.local_files import naming
from cluster.record.run_directory import checkpoint_step, checkpoints_of
from cluster.record.storage import Storage
from learner.checkpoint.digests import is_as_saved
from learner.checkpoint.manifest import FORMAT, MANIFEST, MODEL, OURS, FileEntry, Manifest
from learner.checkpoint.places import Place


def checkpoints(root: Storage, *, newest: int | None = None) -> list[Place]:
    """All checkpoints below `root`, or those up to version `newest`, oldest first."""
    found = checkpoints_of(root, folder="").items()
    return [Place(root, name) for version, name in found if newest is None or version <= newest]


def read_manifest(place: Place, *, expected_parameters: str | None = None, expected_base: str = "") -> Manifest:
    """Raises CheckpointError for a manifest that is missing, unreadable or altered.

    `expected_parameters` is for a checkpoint to restore: it must have this format, these parameters and, if both name a base, this base.
    """
    text = "{}"
    try:
        text = place.read_text(MANIFEST)
        manifest = Manifest.model_validate_json(text)
    except StorageError as error:
        if not place.exists(MANIFEST):
            raise CheckpointError(f"{place} is not a checkpoint: it has no {MANIFEST}{_offer(place)}") from error
        raise CheckpointError(f"checkpoint {place} cannot be read: {error}{_offer(place)}") from error
    except (UnicodeDecodeError, ValidationError) as error:
        if (other := _format_in(text)) not in (None, FORMAT):  # its manifest may have other fields
            raise _of_another_version(
                place, other, way_out="copy its folder model elsewhere and begin with that"
            ) from error
        raise unfit(place, f"has a {MANIFEST} that cannot be read or was altered") from error
    if manifest.digest != manifest.own_digest():
        raise unfit(place, f"was altered: {MANIFEST} has another digest")
    if expected_parameters is not None:
        _refuse_foreign(place, manifest, expected_parameters, expected_base)
    return manifest


def check_newest(root: Storage) -> None:
    """Raises CheckpointError if the manifest of the newest checkpoint, or on a disk the size of one of its files, says that it cannot be
    restored. Reads no other file."""
    for place in checkpoints(root)[-1:]:
        manifest = read_manifest(place)
        _refuse_other_format(place, manifest)
        for name, entry in manifest.files.items() if root.is_local else ():
            check_size(place, name, entry)


def verify(place: Place, *, below: str = "") -> Manifest:
    """Checks size and digest of every file whose path begins with `below`, and returns the manifest.

    Raises CheckpointError naming the checkpoint, the file, and the checkpoint before it.
    """
    manifest = read_manifest(place)
    place = place.holding(manifest)
    for name, entry in manifest.files.items():
        if not name.startswith(below):
            continue
        check_size(place, name, entry)
        if not is_as_saved(partial(place.read_range, name), entry):
            raise unfit(place, f"was altered: {name} has another digest")
    return manifest


def verify_model(folder: Path) -> None:
    """Verifies a model folder that is part of a checkpoint of ours. Any other folder passes. Raises StorageError for a manifest that cannot
    be read."""
    folder = Path(os.path.expanduser(folder)).resolve()
    manifest = folder.parent / MANIFEST
    with naming(str(manifest)):
        is_ours = folder.name == MODEL and manifest.is_file() and OURS.encode() in manifest.read_bytes()
    if is_ours:
        verify(Place.of(folder.parent), below=f"{MODEL}/")


def check_size(place: Place, name: str, entry: FileEntry) -> None:
    """Raises CheckpointError for a file that is missing or has the wrong size."""
    size_bytes = place.size_bytes(name)
    if size_bytes is None:
        raise unfit(place, f"is torn: {name} is missing")
    if size_bytes != entry.size_bytes:
        raise unfit(place, f"is torn: {name} has {size_bytes} bytes instead of {entry.size_bytes}")


def superfluous(root: Storage, *, keep_last: int, keep_best: bool) -> list[Place]:
    """All checkpoints but the newest `keep_last` and, with `keep_best`, the best. Raises StorageError if a metric cannot be read now.

    A resumed run may use another evaluation: the best checkpoint of each evaluation is kept, since their metrics are not comparable.
    Manifests without `rated_by` are compared with each other.
    """
    found = checkpoints(root)
    kept = {place.name for place in found[-keep_last:]}
    if keep_best:
        rated = [(*rating, index) for index, place in enumerate(found) if (rating := _rating(place)) is not None]
        kept |= {found[index].name for index in {rated_by: index for rated_by, _, index in sorted(rated)}.values()}
    return [place for place in found if place.name not in kept]


def unfit(place: Place, problem: str) -> CheckpointError:
    return CheckpointError(f"checkpoint {place} {problem}{_offer(place)}")


def _refuse_other_format(place: Place, manifest: Manifest) -> None:
    if manifest.format != FORMAT:
        way_out = f"begin another run_dir with its weights: model.path={place.path(MODEL)}"
        raise _of_another_version(place, manifest.format, way_out=way_out)


def _refuse_foreign(place: Place, manifest: Manifest, expected_parameters: str, expected_base: str) -> None:
    _refuse_other_format(place, manifest)
    if manifest.parameters_digest != expected_parameters:
        raise unfit(place, "is foreign: its parameters are not those of this run's model")
    settings = ("model.path", "algorithm.value.path")
    # Checkpoints of older versions lack the critic's, which is then not compared.
    for setting, saved, present in zip(settings, manifest.base.split("+"), expected_base.split("+"), strict=False):
        if saved and present and saved != present:
            raise unfit(place, f"is foreign: its adapters were trained on other weights than {setting} has now")


def _format_in(manifest: str) -> str | None:
    """The format of a manifest of ours, whatever its other fields; None for any other text."""
    try:
        found = json.loads(manifest)["format"]
    except (ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, str) and found.startswith(f"{OURS}-") else None


def _of_another_version(place: Place, other: str | None, *, way_out: str) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {place} was written by another version of treadwheel, in format {other!r} instead of {FORMAT!r}; "
        f"go on with that version, or {way_out}"
    )


def _offer(place: Place) -> str:
    """How to continue without this checkpoint."""
    step = checkpoint_step(place.name) or 0
    before = [each for each in checkpoints(place.root, newest=step - 1) if each.exists(MANIFEST)]
    if before:
        return f"; the one before it is {before[-1]}: move {place.name} away to resume from there"
    return "; there is none before it: move it away to start anew"


def _rating(place: Place) -> tuple[str, float] | None:
    """`rated_by` and the metric; None without a metric or for a damaged manifest."""
    try:
        manifest = read_manifest(place)
        return None if manifest.metric is None else (manifest.rated_by, manifest.metric)
    except CheckpointError as error:  # damage to another checkpoint must not fail the save that prunes
        if isinstance(error.__cause__, StorageError) and place.exists(MANIFEST):
            raise error.__cause__ from None  # the storage failed for a moment: this may be the best checkpoint
        return None
