"""Manifests as text: Kubernetes reads it with Go's YAML."""

import pytest
import yaml

from cluster.contracts.errors import ConfigError
from deploy.manifests.text import dump, read


@pytest.mark.parametrize(
    "text",
    [
        "1e5",
        "12e03",
        "1.5e3",
        "0o17",
        "0x1f",
        "1_000",
        "0B1",
        "0XAB",
        "0O17",
        "1e1_0",
        "0_x1F",
        "y",
        "N",
        "yes",
        "null",
        "2026-01-01",
    ],
)
def test_a_text_that_go_reads_as_another_value_is_quoted(text):
    """A variable of 1e5, or a pool that is called y: the API server takes texts alone."""
    assert dump([{"value": text}]) == f"value: '{text}'\n"


def test_other_texts_stand_as_they_are():
    assert dump([{"value": "spot-y1", "file": "a: 1\nb: 2\n"}]) == "value: spot-y1\nfile: |\n  a: 1\n  b: 2\n"


def test_a_rare_line_end_stays_in_a_text():
    assert yaml.safe_load(dump([{"value": "a\x85b", "file": "a\u2028b\nc\n"}])) == {
        "value": "a\x85b",
        "file": "a\u2028b\nc\n",
    }


def test_a_key_that_is_given_twice_is_refused_as_the_api_server_refuses_it(tmp_path):
    file = tmp_path / "edited.yaml"
    file.write_text("base: &base {cpu: 1}\nspec: {<<: *base, cpu: 2}\n")
    assert read(str(file)) == [{"base": {"cpu": 1}, "spec": {"cpu": 2}}]
    file.write_text("spec:\n  maxReplicas: 1\n  maxReplicas: 9\n")
    with pytest.raises(ConfigError, match=r"edited\.yaml cannot be read as YAML: 'maxReplicas' is given twice"):
        read(str(file))


@pytest.mark.parametrize(
    "text", ["when: 2026-13-45", "number: !!int x", "time: !!timestamp x", "switch: !!bool x", "[" * 2000]
)
def test_what_is_no_yaml_is_one_clear_error(text, tmp_path):
    file = tmp_path / "edited.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"edited\.yaml cannot be read as YAML"):
        read(str(file))
