"""A data set in a folder, as `datasets` saves one. Where the package is not installed, a stand-in writes and reads it."""

import sys
from types import ModuleType
from typing import Any

import pyarrow as pa
import pyarrow.parquet


def save(
    folder: Any,
    rows: list[dict[str, Any]],
    monkeypatch: Any,
    *,
    split: str | None = None,
    **splits: list[dict[str, Any]],
) -> None:
    """`rows` as one split, named `split` or without a name, or `splits`."""
    try:
        import datasets
    except ImportError:
        monkeypatch.setitem(sys.modules, "datasets", _stand_in())
        folder.mkdir()
        for name, each in (splits or {"alone": rows}).items():
            named = f"{name}.{split}" if split else name
            pyarrow.parquet.write_table(pa.Table.from_pylist(each), folder / f"{named}.parquet")
        return
    if splits:
        datasets.DatasetDict({name: datasets.Dataset.from_list(each) for name, each in splits.items()}).save_to_disk(
            folder
        )
    else:
        datasets.Dataset.from_list(rows, split=split).save_to_disk(folder)


class _Split:
    def __init__(self, table: pa.Table, split: str | None) -> None:
        self._table = table
        self.split = split

    def with_format(self, kind: str) -> pa.Table:
        assert kind == "arrow"
        return self._table


def _stand_in() -> ModuleType:
    from pathlib import Path

    def load_from_disk(path: str) -> Any:
        splits: dict[str, _Split] = {}
        for each in Path(path).glob("*.parquet"):
            name, _, split = each.stem.partition(".")
            splits[name] = _Split(pyarrow.parquet.read_table(each), split or None)
        if not splits:
            raise FileNotFoundError(f"Directory {path} is neither a `Dataset` directory nor a `DatasetDict` directory.")
        return splits.get("alone", splits)

    module = ModuleType("datasets")
    module.load_from_disk = load_from_disk  # type: ignore[attr-defined]
    return module
