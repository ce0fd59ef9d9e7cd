"""What a newcomer looks for on the page of all settings."""

import json

from deploy.docs.configuration import configuration, schema


def test_a_preset_is_a_documented_setting():
    row = next(line for line in configuration().splitlines() if line.startswith("| `preset` |"))
    assert "'dapo'" in row and "'torchtune_ppo'" in row
    properties = json.loads(schema())["$defs"]["AlgorithmConfig"]["properties"]
    assert "dapo" in properties["preset"]["anyOf"][0]["enum"] and "advantage" in properties
