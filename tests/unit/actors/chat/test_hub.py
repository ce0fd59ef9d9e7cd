import pytest
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from actors.chat.formatter import ChatFormatter
from actors.chat.hub import why_not_loaded
from cluster.contracts.config import ModelConfig
from cluster.contracts.errors import ConfigError


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (GatedRepoError, "terms must be accepted"),
        (RepositoryNotFoundError, "no such model, or it is private"),
        (RevisionNotFoundError, "no such model.revision"),
        (LocalEntryNotFoundError, "cannot be reached"),
    ],
)
def test_an_error_of_the_hub_is_one_sentence(kind, reason):
    error = OSError("We could not do it.\nSee https://... for help.\nRetrying.")
    error.__cause__ = kind.__new__(kind)
    said = why_not_loaded(error)
    assert reason in said and "\n" not in said and "Retrying" not in said


def test_an_unknown_error_tells_its_first_line():
    assert why_not_loaded(ValueError("no tokenizer here\nlong advice")).startswith("no tokenizer here It must be")


def test_unpinned_code_is_refused_before_anything_is_downloaded():
    with pytest.raises(ConfigError, match=r"model\.trust_remote_code=true"):
        ChatFormatter.load(ModelConfig(path="org/model", trust_remote_code=True))
