"""A run that passes its check, to be broken on purpose."""

import json
from pathlib import Path
from typing import Any

from cluster.contracts.config import RunConfig
from deploy.config.loading import validated

ROWS = ({"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4"})


def run(folder: Path, model: Path | str, *overrides: str, rows: tuple[dict[str, Any], ...] = ROWS) -> RunConfig:
    """Of a tiny model on a prompt file in `folder`."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {
        "run_dir": str(folder / "run"),
        "model": {"path": str(model), "dtype": "float32"},
        "prompts": {"name": "file", "path": str(prompts)},
        "sampling": {"max_tokens": 8},
        "buffer": {"groups_per_step": 4},
        "metrics": {"sinks": ["jsonl"]},
    }
    return validated(values, overrides)
