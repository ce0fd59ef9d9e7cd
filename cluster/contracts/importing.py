"""Imports of large libraries, spared the garbage collector, or left for later.

Hundreds of thousands of objects of torch, transformers and vLLM live as long as their process. Python walks all of them again and again
while more come, a fifth of the time of an import, and half a second for every full collection afterwards.
"""

import contextlib
import gc
import importlib
import importlib.metadata
import re
import sys
import types
from collections import defaultdict
from collections.abc import Generator, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from typing import Any


@contextlib.contextmanager
def importing() -> Generator[None]:
    """No garbage is collected in the block. What lives at its end is old at once: collections rarely look at it. transformers gets its
    lists of all installed packages and of all its own models in a fraction of the time."""
    was_enabled, slow = gc.isenabled(), importlib.metadata.packages_distributions
    gc.disable()
    importlib.metadata.packages_distributions = packages_distributions
    sys.meta_path.insert(0, quick := _QuickLists())
    try:
        yield
    finally:
        sys.meta_path.remove(quick)
        importlib.metadata.packages_distributions = slow
        gc.freeze()
        gc.unfreeze()  # into the oldest generation
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def importing_for_good() -> Generator[None]:
    """As `importing`, and no collection ever looks at what lives at the end: for processes that hold nothing of a user's yet."""
    with importing():
        yield
    gc.freeze()


def tokenizers_alone() -> None:
    """What is imported of transformers' tokenizers and configurations from now on comes without torch's compiler, and takes a third of the
    time. Models then import what they need.

    The tokenizers need a table of `auto_factory`, which imports the generation of text for one function: it adds that to models whose code
    comes from the hub.
    """
    name = "transformers.models.auto.auto_factory"
    if name in sys.modules:
        return
    utils: Any = importlib.import_module("transformers.utils")
    for imported in ("transformers.generation", "transformers.models.auto.configuration_auto"):
        importlib.import_module(imported)
    has_torch, utils.is_torch_available = utils.is_torch_available, lambda: False
    try:
        factory: Any = importlib.import_module(name)
    finally:
        utils.is_torch_available = has_torch
    add = factory.add_generation_mixin_to_remote_model

    def added(model_class: type) -> type:
        factory.GenerationMixin = importlib.import_module("transformers.generation").GenerationMixin
        return add(model_class)

    factory.add_generation_mixin_to_remote_model = added


@contextlib.contextmanager
def hidden(module: str) -> Generator[None]:
    """In the block the module's import fails, for those who take that; nothing where it was imported before."""
    if module in sys.modules:
        yield
        return
    sys.modules[module] = None  # pyright: ignore[reportArgumentType]
    try:
        yield
    finally:
        del sys.modules[module]


class _QuickLists:
    """Finds what transformers lists its models with: it reads all their 2,500 files when it is imported."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name == "transformers.utils.import_utils" else None
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _ListsQuickly(name, spec.loader.path)
        return spec


class _ListsQuickly(SourceFileLoader):
    def exec_module(self, module: Any) -> None:
        """As ever; then what it looks through of a file, line by line, begins at the last `__all__`, which is what it looks for."""
        super().exec_module(module)
        slow = module.fetch__all__

        def quick(text: str) -> list[str]:
            return slow(text[text.rfind("\n__all__") + 1 :])

        module.fetch__all__ = quick


class _Postponed(types.ModuleType):
    """Stands for a module until something of it is used."""

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__") and attribute != "__path__":  # who looks at all modules uses none
            raise AttributeError(attribute)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), attribute)


def postpone(module: str) -> None:
    """An `import module` from now on imports it when something of it is first used."""
    sys.modules.setdefault(module, _Postponed(module))


def packages_distributions() -> dict[str, list[str]]:
    """As `importlib.metadata.packages_distributions` in Python 3.11, which makes 35,000 paths of an installation's records for it."""
    found = defaultdict[str, list[str]](list)
    for distribution in importlib.metadata.distributions():
        name = re.search(r"^Name: *(.+?) *$", distribution.read_text("METADATA") or "", re.MULTILINE)
        for package in _packages_of(distribution):
            found[package].append(name[1] if name else distribution.metadata["Name"])
    return dict(found)


def _packages_of(distribution: importlib.metadata.Distribution) -> set[str]:
    if listed := (distribution.read_text("top_level.txt") or "").split():
        return set(listed)
    files = (line.partition(",")[0] for line in (distribution.read_text("RECORD") or "").splitlines())
    return {file.partition("/")[0].removesuffix(".py") for file in files if file.endswith(".py")}
