"""Faster imports of large libraries: without garbage collection, or postponed.

Torch, transformers and vLLM create hundreds of thousands of objects that live as long as their process. Python walks all of them again and
again while they are created, which is a fifth of the time of an import, and half a second for every later full collection.
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
    """Disables garbage collection in the block. At its end all objects move to the oldest generation, which is rarely collected.
    transformers also gets its lists of all installed packages and of all its models in a fraction of the time."""
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
        gc.unfreeze()  # moves all objects to the oldest generation
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def importing_for_good() -> Generator[None]:
    """As `importing`, and exempts all objects at its end from collections: for processes that hold no objects of a user yet."""
    with importing():
        yield
    gc.freeze()


def tokenizers_alone() -> None:
    """From now on, transformers' tokenizers and configurations import without torch's compiler, in a third of the time. Models later import
    what they need.

    The tokenizers need a table of `auto_factory`. That module imports text generation for one function, which it adds to models with code
    from the hub.
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
    """Makes imports of the module fail in the block, for libraries that can do without it. No effect if it was imported before."""
    if module in sys.modules:
        yield
        return
    sys.modules[module] = None  # pyright: ignore[reportArgumentType]
    try:
        yield
    finally:
        del sys.modules[module]


class _QuickLists:
    """Speeds up the module with which transformers lists its models: at its import it reads all of their 2,500 files."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name == "transformers.utils.import_utils" else None
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _ListsQuickly(name, spec.loader.path)
        return spec


class _ListsQuickly(SourceFileLoader):
    def exec_module(self, module: Any) -> None:
        """Executes the module, and then lets `fetch__all__`, which reads a file line by line, begin at the file's last `__all__`."""
        super().exec_module(module)
        slow = module.fetch__all__

        def quick(text: str) -> list[str]:
            return slow(text[text.rfind("\n__all__") + 1 :])

        module.fetch__all__ = quick


class _Postponed(types.ModuleType):
    """Stands for a module until one of its attributes is used."""

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__") and attribute != "__path__":  # tools that inspect all modules do not use this one
            raise AttributeError(attribute)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), attribute)


def postpone(module: str) -> None:
    """Postpones `import module` until an attribute of the module is used."""
    sys.modules.setdefault(module, _Postponed(module))


def packages_distributions() -> dict[str, list[str]]:
    """As `importlib.metadata.packages_distributions` of Python 3.11, which creates 35,000 paths from an installation's records."""
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
