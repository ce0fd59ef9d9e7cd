"""Load a model's configuration and tokenizer, or explain in one sentence why they do not load."""

import os
from collections.abc import Iterator
from typing import Any

from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from transformers import AutoConfig, AutoTokenizer

from cluster.contracts.errors import ConfigError, headline

_REASONS: tuple[tuple[type[Exception], str], ...] = (
    # The first match counts: a GatedRepoError is also a RepositoryNotFoundError.
    (GatedRepoError, "its terms must be accepted on the hub first, and HF_TOKEN set to a token of that account"),
    (RepositoryNotFoundError, "the hub has no such model, or it is private: mend the name, or set HF_TOKEN"),
    (RevisionNotFoundError, "the hub's model has no such model.revision: give a branch, tag or commit that it has"),
    (HFValidationError, "it is neither a folder nor a hub name such as org/model"),
    (
        LocalEntryNotFoundError,
        "the hub cannot be reached and it is not in the local cache: download it, and give the folder",
    ),
)


def config_and_tokenizer(path: str, *, field: str, **options: Any) -> tuple[Any, Any]:
    """As transformers loads them with these options. Raises ConfigError naming `field` when they do not load, or the tokenizer
    `is_empty`."""
    try:
        config = AutoConfig.from_pretrained(path, **options)
        tokenizer = AutoTokenizer.from_pretrained(path, **options)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{field}={path!r} does not load: {why_not_loaded(error, path=path)}") from error
    if is_empty(tokenizer):
        raise ConfigError(
            f"{field}={path!r} has no tokenizer; copy the files of the model's own there, tokenizer.json and tokenizer_config.json, or "
            "save it with the tokenizer's save_pretrained"
        )
    return config, tokenizer


def why_not_loaded(error: BaseException, *, path: str) -> str:
    """One sentence by the type of the error's causes; for an unknown type, the first line of its message. A path of one word is
    more likely a folder than a name on the hub: if there is no such folder, that is said too."""
    is_absent = "/" not in path and not os.path.exists(path)
    absent = f"; there is no folder {os.path.abspath(path)!r}" if is_absent else ""
    return f"{_reason(error)}{absent}"


def _reason(error: BaseException) -> str:
    behind = [*_causes(error)]
    for kind, reason in _REASONS:
        if any(isinstance(each, kind) for each in behind):
            return reason
    return f"{headline(error)} It must be a Hugging Face folder with config.json and a tokenizer, or a hub name"


def is_empty(tokenizer: Any) -> bool:
    """Whether all tokens but one at most are special: transformers makes such a tokenizer from a folder without its files."""
    return len(tokenizer) - len(tokenizer.all_special_ids) < 2


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
