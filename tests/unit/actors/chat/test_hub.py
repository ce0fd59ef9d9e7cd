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
    said = why_not_loaded(error, path="org/model")
    assert reason in said and "\n" not in said and "Retrying" not in said


def test_an_unknown_error_tells_its_first_line():
    assert why_not_loaded(ValueError("no tokenizer here\nlong advice"), path="org/model").startswith(
        "no tokenizer here It must be"
    )


def test_a_name_of_one_word_is_looked_for_as_a_folder_too(tmp_path, monkeypatch):
    """Seen before: `model=modle` was explained by the hub alone."""
    monkeypatch.chdir(tmp_path)
    error = LocalEntryNotFoundError.__new__(LocalEntryNotFoundError)
    assert why_not_loaded(error, path="modle").endswith(f"give the folder; there is no folder '{tmp_path}/modle'")
    (tmp_path / "modle").mkdir()
    for path in ("modle", "org/model"):
        assert why_not_loaded(error, path=path).endswith("give the folder")


def test_unpinned_code_is_refused_before_anything_is_downloaded():
    with pytest.raises(ConfigError, match=r"model\.trust_remote_code=true"):
        ChatFormatter.load(ModelConfig(path="org/model", trust_remote_code=True))
