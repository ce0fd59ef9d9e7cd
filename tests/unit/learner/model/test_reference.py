"""Which model a reference is."""

from pathlib import Path

import pytest

from cluster.contracts.config import ModelConfig, ReferenceConfig
from cluster.contracts.errors import ConfigError
from learner.model.reference import reference_config

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CODED = ModelConfig(path="org/policy", revision=COMMIT, trust_remote_code=True)


def test_a_commit_of_the_policy_is_not_one_of_the_reference(tmp_path: Path):
    assert reference_config(CODED, ReferenceConfig()) == CODED
    found = reference_config(CODED, ReferenceConfig(path=str(tmp_path)))
    assert (found.path, found.revision) == (str(tmp_path), None)


def test_code_of_a_reference_from_the_hub_does_not_run():
    with pytest.raises(ConfigError, match=r"reference\.path='org/model' with model\.trust_remote_code=true"):
        reference_config(CODED, ReferenceConfig(path="org/model"))
