"""The settings that a peer's function was called with, and a record of which of them an adapter has read."""

import ast
from collections.abc import Iterator, Mapping
from typing import Any


class Settings(Mapping[str, Any]):
    """A peer's configuration that remembers what was asked of it; nested mappings remember too. Iterating reads nothing."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = {key: Settings(item) if isinstance(item, Mapping) else item for key, item in values.items()}
        self._read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self._read.add(name)
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def unread(self) -> list[str]:
        """Names of settings that nobody asked for, those of a nested mapping behind its name and a dot."""
        found: list[str] = []
        for name, value in self._values.items():
            if name not in self._read:
                found.append(name)
            elif isinstance(value, Settings):
                found += [f"{name}.{inner}" for inner in value.unread()]
        return found


def settings_of(function: str, config: Mapping[str, Any]) -> Settings:
    """The recorded configuration, and the plain keyword arguments that stand in the function's own text:
    `PolicyLoss(token_level_loss=False)`. Other text in brackets explains the configuration and adds nothing."""
    try:
        call = ast.parse(function, mode="eval").body
    except SyntaxError:
        return Settings(config)
    keywords = call.keywords if isinstance(call, ast.Call) else []
    written = {each.arg: each.value.value for each in keywords if each.arg and isinstance(each.value, ast.Constant)}
    return Settings(written | dict(config))
