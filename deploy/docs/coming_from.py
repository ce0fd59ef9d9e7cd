"""docs/coming_from.md: settings of other systems and their equivalents here, from the importers' tables."""

from deploy.docs import filled, rows
from deploy.importing import PEERS
from deploy.importing.table import Peer, Row


def page() -> str:
    """The whole of docs/coming_from.md."""
    tables = {system: _tables(peer) for system, peer in PEERS.items()}
    versions = {f"{system}_version": peer.version for system, peer in PEERS.items()}
    return filled("coming_from", **tables, **versions)


def _tables(peer: Peer) -> str:
    made = [row for row in peer.rows if row.ours]
    checked = [row for row in peer.rows if not row.ours]
    return "\n\n".join(
        [
            _table(
                ("here", f"of {peer.title}, with its default", "note"),
                [(_names(row.ours), _settings(row, peer), row.note) for row in made],
            ),
            "Refused at another value:",
            _table((peer.title, "what to do"), [(_settings(row, peer), row.note) for row in checked]),
            "Dropped:",
            _table((peer.title, "reason"), [(_names(names), why) for why, names in peer.dropped.items()]),
        ]
    )


def _settings(row: Row, peer: Peer) -> str:
    shown = {name: peer.defaults[name] for name in row.of.split()}
    return ", ".join(f"`{name}`" + (f" = {value}" if value is not None else "") for name, value in shown.items())


def _names(names: str) -> str:
    return ", ".join(f"`{name}`" for name in names.split())


def _table(head: tuple[str, ...], body: list[tuple[str, ...]]) -> str:
    return rows([head, tuple("---" for _ in head), *body])
