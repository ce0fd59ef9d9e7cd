"""Which model a reference is."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from cluster.contracts.algorithm_config import ValueConfig
from cluster.contracts.config import ModelConfig, ReferenceConfig
from cluster.contracts.errors import ConfigError
from learner.model.reference import reference_models

COMMIT, OTHER = "0123456789abcdef0123456789abcdef01234567", "f" * 40


def reference_config(model: ModelConfig, reference: ReferenceConfig) -> ModelConfig:
    return reference_models(model, reference)[None]


CODED = ModelConfig(path="org/policy", revision=COMMIT, trust_remote_code=True)


def test_without_a_path_the_reference_is_the_policys_model_in_all():
    assert reference_config(CODED, ReferenceConfig()) == CODED


def test_a_reference_has_a_revision_and_a_trust_of_its_own(tmp_path: Path):
    found = reference_config(CODED, ReferenceConfig(path="org/model", revision=OTHER, trust_remote_code=True))
    assert (found.path, found.revision, found.trust_remote_code) == ("org/model", OTHER, True)
    plain = reference_config(CODED, ReferenceConfig(path=str(tmp_path)))
    assert (plain.path, plain.revision, plain.trust_remote_code) == (str(tmp_path), None, False)


def test_code_of_a_reference_from_the_hub_needs_a_commit_of_the_reference():
    with pytest.raises(ConfigError, match=r"reference\.trust_remote_code=true with reference\.revision=None"):
        reference_config(CODED, ReferenceConfig(path="org/model", trust_remote_code=True))


@pytest.mark.parametrize("own", [{"revision": COMMIT}, {"trust_remote_code": True}])
def test_what_belongs_to_a_path_is_refused_without_one(own):
    for section in (ReferenceConfig, ValueConfig):
        with pytest.raises(ValidationError, match="without path"):
            section(**own)


def test_a_head_on_the_policys_hidden_states_has_no_path():
    with pytest.raises(ValidationError, match=r"backbone='shared'.*set backbone to own, or leave path out"):
        ValueConfig(backbone="shared", path="org/model")


def test_each_source_has_a_model_without_the_policys_code_and_all_others_the_path():
    found = reference_models(CODED, ReferenceConfig(by_source={"math": "org/math"}))
    assert found[None] == CODED
    assert (found["math"].path, found["math"].revision, found["math"].trust_remote_code) == ("org/math", None, False)
