"""What a newcomer looks for on the page of all settings."""

import json

from deploy.docs.configuration import configuration, schema


def test_a_preset_is_a_documented_setting():
    row = next(line for line in configuration().splitlines() if line.startswith("| `preset` |"))
    assert "'dapo'" in row and "'torchtune_ppo'" in row
    properties = json.loads(schema())["$defs"]["AlgorithmConfig"]["properties"]
    assert "dapo" in properties["preset"]["anyOf"][0]["enum"] and "advantage" in properties


def test_every_setting_has_a_meaning():
    rows = [line for line in configuration().splitlines() if line.startswith("| `")]
    assert len(rows) > 150
    assert [row for row in rows if not row.split("|")[-2].strip()] == [], "write a docstring below the field"
