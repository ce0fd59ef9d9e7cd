"""The text of each token, by the run's tokenizer, which is read from local files and never from a network.

A token that is part of a character has no text: its bytes are shown, ⟨E2⟩⟨82⟩, and the character is listed separately.
"""

import functools
import json
import os
import posixpath
from collections.abc import Sequence
from dataclasses import dataclass

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from tokenizers import Tokenizer

from cluster.contracts.errors import DamagedError
from cluster.record.run_directory import CHECKPOINT_MANIFEST, CHECKPOINTS, RunDirectory
from cluster.record.storage import Storage
from deploy.viewer.runs import Run

_FILE = "tokenizer.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """Texts of a sequence of tokens."""

    texts: list[str]
    broken: list[int]
    """Places of tokens that are shown as bytes."""
    characters: dict[int, str]
    """By such a place: the characters that the token is part of. No entry if the bytes are no character."""
    special: list[int]
    """Places of special tokens, such as the end of a turn or the beginning of a sequence."""


class TokenTexts:
    """One tokenizer."""

    def __init__(self, tokenizer_json: str) -> None:
        """`tokenizer_json` is the content of a tokenizer.json."""
        self._tokenizer = Tokenizer.from_str(tokenizer_json)
        self._added = self._tokenizer.get_added_tokens_decoder()
        self._is_byte_level = '"ByteLevel"' in json.dumps(json.loads(tokenizer_json)["decoder"])

    def shown(self, token_ids: Sequence[int]) -> Shown:
        by_id = {token_id: self._bytes_of(token_id) for token_id in set(token_ids)}
        pieces = [by_id[token_id] for token_id in token_ids]
        texts = {piece: _text(piece) for piece in by_id.values()}
        broken = [place for place, piece in enumerate(pieces) if piece.decode(errors="ignore").encode() != piece]
        special = {token_id for token_id, token in self._added.items() if token.special}
        return Shown(
            texts=[texts[piece] for piece in pieces],
            broken=broken,
            characters=_characters(pieces, broken),
            special=[place for place, token_id in enumerate(token_ids) if token_id in special],
        )

    def _bytes_of(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].content.encode()
        piece = self._tokenizer.id_to_token(token_id)
        if piece is None:  # an embedding that no token has
            return f"⟨{token_id}⟩".encode()
        if self._is_byte_level:
            table = _byte_of_letter()
            return b"".join(bytes([table[letter]]) if letter in table else letter.encode() for letter in piece)
        if len(piece) == 6 and piece.startswith("<0x"):
            return bytes.fromhex(piece[3:5])
        return piece.replace("▁", " ").encode()


def token_texts(run: Run) -> TokenTexts | None:
    """Uses the tokenizer in the run's newest checkpoint, in the model's folder, or in the hub's cache; None if there is none. Raises
    DamagedError for a tokenizer that cannot be read, such as a pointer to a file that was not downloaded."""
    directory = run.directory
    for name in reversed(directory.checkpoints().values()):
        folder = _model_in(directory, f"{CHECKPOINTS}/{name}")
        if version := directory.versions(folder).get(_FILE):
            return _read(directory.path(folder), version)
    model = run.config().get("model") or {}
    path = str(model.get("path"))
    local = os.path.join(os.path.expanduser(path), _FILE)
    file = local if os.path.isfile(local) else _in_cache(path, model.get("revision"))
    if file is None:
        return None
    folder = os.path.dirname(file)
    return _read(folder, Storage(folder).versions()[_FILE])


@functools.lru_cache(maxsize=8)
def _read(folder: str, version: str) -> TokenTexts:
    """Cached by path and `version` of the file: a run that was started over may have another tokenizer at the same path."""
    files = Storage(folder)
    content = files.read_file(_FILE).to_pybytes()
    try:
        return _parsed(content.decode())
    except Exception as error:  # the tokenizer's library raises nothing narrower
        raise DamagedError(f"{files.path(_FILE)} is no tokenizer: {error}; bring it back from a copy") from error


@functools.lru_cache(maxsize=2)
def _parsed(text: str) -> TokenTexts:
    """Cached by content: all checkpoints of a run have the same."""
    return TokenTexts(text)


def _model_in(directory: RunDirectory, folder: str) -> str:
    """Folder of a checkpoint's model. In an object store its manifest names the folder of its files."""
    manifest = {} if directory.is_local else directory.read_json(f"{folder}/{CHECKPOINT_MANIFEST}")
    return posixpath.join(folder, manifest.get("folder", ""), "model")


def _in_cache(name: str, revision: str | None) -> str | None:
    try:
        found = try_to_load_from_cache(name, _FILE, revision=revision)
    except HFValidationError:  # a path, and no name of the hub
        return None
    return found if isinstance(found, str) else None


def _text(piece: bytes) -> str:
    """The text, with bytes that are no text as ⟨E2⟩."""
    decoded = piece.decode(errors="surrogateescape")
    return "".join(f"⟨{ord(letter) - 0xDC00:02X}⟩" if "\udc80" <= letter <= "\udcff" else letter for letter in decoded)


def _characters(pieces: Sequence[bytes], broken: Sequence[int]) -> dict[int, str]:
    """By place in `broken`: the characters that the token is part of. Only neighbours can share a character."""
    found: dict[int, str] = {}
    owners: list[int] = []
    content = b""
    for place in [*broken, -1]:
        if owners and place != owners[-1] + 1:
            for start, character in _split(content):
                for owner in dict.fromkeys(owners[start : start + len(character.encode())]):
                    found[owner] = found.get(owner, "") + character
            owners, content = [], b""
        if place >= 0:
            owners += [place] * len(pieces[place])
            content += pieces[place]
    return found


def _split(content: bytes) -> list[tuple[int, str]]:
    """(place of the first byte, character) of the characters of more than one byte."""
    found: list[tuple[int, str]] = []
    start = 0
    for letter in content.decode(errors="surrogateescape"):
        length = len(letter.encode(errors="surrogateescape"))
        if length > 1:
            found.append((start, letter))
        start += length
    return found


@functools.cache
def _byte_of_letter() -> dict[str, int]:
    """GPT-2's letters for bytes: a printable byte is its own letter, the others are numbered from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + at): byte for at, byte in enumerate(others)}
