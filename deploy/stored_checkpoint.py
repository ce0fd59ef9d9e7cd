"""The model of a checkpoint in an object store, where a replica of Ray Serve is: downloaded, and its digests checked."""

import asyncio
from typing import Any

from ray.llm._internal.common.callbacks.base import CallbackBase

from cluster.record.stored_models import local_folder


class StoredCheckpoint(CallbackBase):
    """Ray Serve calls it before the engine of a replica starts, with `callback_kwargs` as settings: `url`, of the model."""

    async def on_before_node_init(self) -> None:
        folder = await asyncio.to_thread(local_folder, self.kwargs["url"], field="url")
        engine: Any = self.llm_config.get_engine_config()
        engine.hf_model_id = folder
