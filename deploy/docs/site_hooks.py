"""Hooks of mkdocs: the viewer's icon, and links to files outside docs/, for which the site has no page."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

_LEAVING = re.compile(r"\[(?P<text>[^\]]+)\]\(\.\./(?P<path>[^)#]+)[^)]*\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    icon = Path("deploy/viewer/static/icon.svg").read_text(encoding="utf-8")
    files.append(File.generated(config, "assets/icon.svg", content=icon))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    return _LEAVING.sub(lambda link: _as_path(link["text"], link["path"]), markdown)


def _as_path(text: str, path: str) -> str:
    """Replacement of a link: its text, unless that is the file's name, and the file's path in the repository."""
    return f"`{path}`" if path.endswith(text.strip("`")) else f"{text} (`{path}`)"
