"""`treadwheel init`: writes a folder to start from. It trains as it is, on a small included model."""

from pathlib import Path

from cluster.contracts.errors import ConfigError, StorageError
from deploy.config.yaml_text import flow

_HERE = Path(__file__).parent
_STARTERS = _HERE / "starters"
KINDS = tuple(sorted(folder.name for folder in _STARTERS.iterdir() if folder.is_dir()))
_MODELS = {"MODEL": _HERE / "quickstart/model", "SHOWS": _HERE / "shows/model"}
"""Path of the model by its placeholder in a starter's run file."""


def start(folder: str, *, kind: str) -> list[str]:
    """Writes the files of a kind and returns their names. Raises ConfigError for an unknown kind and for a folder that is not empty."""
    if kind not in KINDS:
        raise ConfigError(f"--kind={kind!r} does not exist; choose {', '.join(KINDS)}")
    target = Path(folder)
    try:
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise ConfigError(f"{folder!r} is not an empty folder; name a new one")
        target.mkdir(parents=True, exist_ok=True)
        files = sorted(file for file in (_STARTERS / kind).iterdir() if file.is_file())
        for file in files:
            text = file.read_text(encoding="utf-8")
            if file.name == "run.yaml":
                for name, model in _MODELS.items():
                    text = text.replace(f"path: {name} ", f"path: {flow(str(model))} ")
            (target / file.name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{folder!r} cannot be written: {error.strerror}") from error
    return [file.name for file in files]
