"""What trackers keep offline, read with their own formats and readers."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from swanlab.converter.wb.wbdatastore import DataStoreTruncatedError, WBDataStoreReader
from swanlab.proto.swanlab.record.v1 import record_pb2
from swanlab.sdk.internal.core_python.store import DataStoreReader
from wandb.proto import wandb_internal_pb2


def wandb_records(folder: Path) -> Iterator[Any]:
    """Of every driver, in order."""
    for file in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        with WBDataStoreReader() as reader:
            reader.open(file)
            try:
                while (data := reader.scan()) is not None:
                    yield wandb_internal_pb2.Record.FromString(data)
            except DataStoreTruncatedError:  # its driver was killed
                continue


def wandb_rows(folder: Path) -> list[dict[str, Any]]:
    return [
        {
            (item.nested_key[0] if item.nested_key else item.key): json.loads(item.value_json)
            for item in record.history.item
        }
        for record in wandb_records(folder)
        if record.WhichOneof("record_type") == "history"
    ]


def swanlab_records(folder: Path) -> Iterator[Any]:
    for file in sorted(folder.glob("swanlab/run-*/run-*.swanlab")):
        reader = DataStoreReader()
        reader.open(file)
        yield from (record_pb2.Record.FromString(data) for data in reader)
        reader.close()


def swanlab_numbers(folder: Path, metric: str) -> dict[int, float]:
    """By step, of every driver: the later count."""
    scalars = (record.scalar for record in swanlab_records(folder) if record.HasField("scalar"))
    return {scalar.step: scalar.value.number for scalar in scalars if scalar.key == metric}
