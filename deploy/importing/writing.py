"""Writes an imported run as a run file, in which a comment names the source of each setting."""

import textwrap
from collections.abc import Iterator
from typing import Any

from deploy.config.yaml_text import dumped, flow
from deploy.importing.table import Imported, Peer

_WIDTH = 130


def run_file(imported: Imported, peer: Peer, *, source: str) -> str:
    """YAML with a comment above the settings of each source."""
    lines = [f"# Imported from {source}, with the settings of {peer.title} {peer.version}."]
    lines += _comment("Resources are not imported: `rollout`, `learner` and `reference` keep treadwheel's defaults.")
    for note in imported.notes:
        lines += _comment(note)
    for reason, names in imported.dropped.items():
        lines += _comment(f"Dropped ({reason}): {', '.join(names)}")
    return "\n".join([*lines, *_settings(imported)]) + "\n"


def _settings(imported: Imported) -> Iterator[str]:
    sections = dict.fromkeys(name.partition(".")[0] for name in imported.settings)
    for section in sections:
        yield ""
        if section not in imported.settings:
            yield f"{section}:"
        last = ""
        for name, value in imported.settings.items():
            if name.partition(".")[0] == section:
                indent = "" if name == section else "  "
                if imported.comments[name] != last:
                    last = imported.comments[name]
                    yield from _comment(last, indent)
                yield _setting(f"{indent}{name.rpartition('.')[2]}:", value, indent=indent)


def _setting(start: str, value: Any, *, indent: str) -> str:
    line = f"{start} {flow(value)}"
    if len(line) <= _WIDTH or not isinstance(value, dict):
        return line
    return f"{start}\n{textwrap.indent(dumped(value).rstrip(), indent + '  ')}"


def _comment(text: str, indent: str = "") -> list[str]:
    start = f"{indent}# "
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=start,
        subsequent_indent=f"{start}  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
