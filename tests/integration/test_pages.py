"""README and documentation, followed by a reader who types what stands there. The convention: `tests/pages.py`."""

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.page_folder import Folder, runs_found
from tests.pages import PAGES, ROOT, Block, blocks_of

pytestmark = [
    pytest.mark.ray,
    pytest.mark.engine,
    pytest.mark.acceptance,
    pytest.mark.timeout(1800),
]
STARTERS = ROOT / "deploy/starters"


def is_run(block: Block) -> bool:
    return block.not_run is None and (block.language == "bash" or (block.language == "python" and block.file is None))


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> Path:
    """A short run of the quickstart, of which pages get copies."""
    folder = Folder(tmp_path_factory.mktemp("mine"))
    trained = folder.bash("treadwheel train my_run.yaml")
    assert trained.returncode == 0, trained.stdout
    return folder.path / "runs/mine"


def marked(page: str) -> Any:
    """Pages of starters have the same commands: one does for all. test_package.py begins with another, docs/quickstart.md with a third."""
    twins = (f"deploy/starters/{kind}/README.md" for kind in ("code", "judge", "math", "tools"))
    return pytest.param(page, marks=pytest.mark.exhaustive if page in twins else ())


@pytest.mark.parametrize("page", [marked(page) for page in PAGES if any(map(is_run, blocks_of(page)))])
def test_a_page_does_what_it_says(page, tmp_path, request):
    folder, blocks = Folder(tmp_path), blocks_of(page)
    for name in runs_found(blocks):
        shutil.copytree(request.getfixturevalue("finished"), tmp_path / name)
    if STARTERS in (ROOT / page).parents:
        # The page of a folder that `init` writes is read there.
        follow(folder, f"{page}: treadwheel init", f"treadwheel init begun --kind {Path(page).parent.name}")
        folder.path /= "begun"
    for block in blocks:
        if block.not_run is not None:
            continue
        if block.before is not None:
            follow(folder, f"before {block.place}", block.before)
        if block.file is not None:
            folder.write(block.file, block.text)
        elif block.language == "bash":
            follow(folder, block.place, block.text)
        elif block.language == "python":
            script = folder.write(f"line_{block.line}.py", block.text)
            follow(folder, block.place, f"python {script.name}")


def follow(folder: Folder, place: str, commands: str) -> None:
    ended = folder.bash(commands)
    if ended.returncode != 0:
        pytest.fail(f"{place} ended with {ended.returncode}:\n{commands}\n{ended.stdout}", pytrace=False)
    sys.stdout.write(ended.stdout)
