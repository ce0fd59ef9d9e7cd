"""A model's place: a local folder or a hub name. Why it does not load, in one sentence, and whether its own code may run."""

import re
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from cluster.contracts.config import ModelConfig
from cluster.contracts.errors import ConfigError, headline

_COMMIT = re.compile(r"[0-9a-f]{40}")
_REASONS: tuple[tuple[type[Exception], str], ...] = (
    # The first that fits: a gated repository is one that is not found, too.
    (GatedRepoError, "its terms must be accepted on the hub first, and HF_TOKEN set to a token of that account"),
    (RepositoryNotFoundError, "the hub has no such model, or it is private: mend the name, or set HF_TOKEN"),
    (RevisionNotFoundError, "the hub's model has no such model.revision: give a branch, tag or commit that it has"),
    (HFValidationError, "it is neither a folder nor a hub name such as org/model"),
    (
        LocalEntryNotFoundError,
        "the hub cannot be reached and it is not in the local cache: download it, and give the folder",
    ),
)


def why_not_loaded(error: BaseException) -> str:
    """One sentence for people, by the type of what lies behind `error`; the first line of its message where that is unknown."""
    behind = [*_causes(error)]
    for kind, reason in _REASONS:
        if any(isinstance(each, kind) for each in behind):
            return reason
    return f"{headline(error)} It must be a Hugging Face folder with config.json and a tokenizer, or a hub name"


def refuse_unpinned_code(model: ModelConfig) -> None:
    """Raises ConfigError for code from the hub that may change between two loads: only a commit names one text for ever."""
    if not model.trust_remote_code or Path(model.path).expanduser().is_dir():
        return
    if model.revision is None or not _COMMIT.fullmatch(model.revision):
        raise ConfigError(
            f"model.trust_remote_code=true with model.revision={model.revision!r} runs whatever code {model.path!r} has on the day it is "
            "loaded; set model.revision to the commit that you have read (40 hexadecimal digits), or give a local folder"
        )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
