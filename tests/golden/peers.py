"""The peers that golden vectors come from, and how their functions translate into ours."""

import importlib
from collections.abc import Mapping

from tests.golden.cases import Adapter

PEERS = ("lightrft", "openrlhf", "tapeagents", "tapeagents_seed", "torchrl", "torchrl_seed", "torchtune", "trl", "verl")


def _load(peer: str) -> Mapping[str, Adapter]:
    return importlib.import_module(f"tests.golden.{peer}").ADAPTERS


ADAPTERS: dict[str, Mapping[str, Adapter]] = {peer: _load(peer) for peer in PEERS}
