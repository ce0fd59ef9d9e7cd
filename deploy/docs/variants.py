"""docs/variants.md: judges, prompt sources, sinks and transports, both the built-in ones and the interface for the user's own."""

import inspect
from typing import Any

from cluster.contracts.protocols import PromptSource, Transport
from cluster.metrics import Sink
from deploy.docs import filled, rows
from deploy.listing import KINDS, described, overview


def page() -> str:
    """The whole of docs/variants.md."""
    tables = {word: _table(word) for word in ("rewards", "prompts", "sinks", "transports")}
    protocols = {"source": _protocol(PromptSource), "sink": _protocol(Sink), "transport": _protocol(Transport)}
    names = "\n".join(f"* {line}" for line in overview() if "(algorithm." in line)
    return filled("variants", **tables, **protocols, mathematics=names)


def _table(word: str) -> str:
    kind = KINDS[word]
    head = f"`{kind.setting}` may name:\n\n| name | parameters | meaning |\n|---|---|---|\n"
    return head + rows(
        (
            f"`{each.name}`",
            "<br>".join(f"`{parameter}`" for parameter in each.parameters) or "none",
            each.meaning,
        )
        for each in described(kind)
    )


def _protocol(protocol: type[Any]) -> str:
    """The methods that an implementation needs."""
    methods = [(name, item) for name, item in vars(protocol).items() if inspect.isfunction(item) and item.__doc__]
    lines = [" ".join((inspect.getdoc(protocol) or "").split()), ""]
    for name, item in methods:
        arguments = ", ".join(each for each in inspect.signature(item).parameters if each != "self")
        lines.append(f"* `{name}({arguments})`: {' '.join((item.__doc__ or '').split())}")
    return "\n".join(lines)
