import json
from pathlib import Path

ROWS = [json.loads(line) for line in Path("prompts.jsonl").read_text().splitlines()]


def test_every_prompt_has_what_the_judge_reads():
    assert ROWS
    for row in ROWS:
        assert row["messages"] and row["answer"] not in (None, "")
