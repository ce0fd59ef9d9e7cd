import hashlib
from pathlib import Path

import pytest

from learner.checkpoint import digests


@pytest.mark.parametrize("size_bytes", [15, 16, 17, 21])
def test_digests_are_of_every_byte_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size_bytes: int):
    monkeypatch.setattr(digests, "BLOCK_BYTES", 8)
    data = bytes(range(size_bytes))
    (file := tmp_path / "file").write_bytes(data)
    whole, in_blocks = digests.entry_of(file), digests.entry_of(file, in_blocks=True)
    assert (whole.sha256, whole.blocks) == (hashlib.sha256(data).hexdigest(), ())
    blocks = [hashlib.sha256(data[start : start + 8]) for start in range(0, size_bytes, 8)]
    assert in_blocks.blocks == tuple(block.hexdigest() for block in blocks)
    assert in_blocks.sha256 == hashlib.sha256(b"".join(block.digest() for block in blocks)).hexdigest()
