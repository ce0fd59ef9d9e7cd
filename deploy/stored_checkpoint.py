"""Downloads a checkpoint's model from an object store for a replica of Ray Serve, and checks its digests."""

import asyncio
from typing import Any

from ray.llm._internal.common.callbacks.base import CallbackBase

from cluster.record.stored_models import local_folder


class StoredCheckpoint(CallbackBase):
    """Ray Serve calls it before the engine of a replica starts. The setting `url` in `callback_kwargs` names the model."""

    async def on_before_node_init(self) -> None:
        folder = await asyncio.to_thread(local_folder, self.kwargs["url"], field="url")
        engine: Any = self.llm_config.get_engine_config()
        engine.hf_model_id = folder
