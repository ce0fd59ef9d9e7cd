"""The picture of the house in docs/architecture.md shows the imports as they are."""

import re
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[2]
_ROW = re.compile(r"^   [\d ] {6}(?P<room>\w+)[./]\S* .*? {2,}(?P<below>(?:\w+, )*\w+)$", re.MULTILINE)
"""A room of `cluster` that looks down on others, in the picture."""


def test_every_arrow_between_rooms_of_cluster_is_drawn_and_no_other():
    picture = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    drawn = {row["room"]: set(row["below"].split(", ")) for row in _ROW.finditer(picture)}
    assert drawn == _arrows("cluster"), "draw the arrow in docs/architecture.md, or do without it"


def test_nodes_are_asked_for_by_actors_alone():
    """What `request_resources` asks for stays when its process ends, and no node goes again."""
    code = [
        file
        for package in ("treadwheel", "cluster", "actors", "learner", "deploy")
        for file in (ROOT / package).rglob("*.py")
    ]
    assert code
    assert [file for file in code if "request_resources" in file.read_text(encoding="utf-8")] == []


def _arrows(package: str) -> dict[str, set[str]]:
    """Room to the rooms that it imports from."""
    graph = grimp.build_graph(package, cache_dir=None)
    found: dict[str, set[str]] = {}
    for importer in graph.modules - {package}:
        room = importer.split(".")[1]
        for imported in graph.find_modules_directly_imported_by(importer) - {package}:
            if imported.split(".")[1] != room:
                found.setdefault(room, set()).add(imported.split(".")[1])
    return found
