"""The documentation site beyond mkdocs.yml: the viewer's icon, and links that leave docs/, where the site has no page."""

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
    """What stood there as a link: the file's path in the repository, after the text that says more than its name."""
    return f"`{path}`" if path.endswith(text.strip("`")) else f"{text} (`{path}`)"
