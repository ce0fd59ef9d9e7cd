"""`python -m tests.golden [DIR]` runs every golden case below DIR; a line per case, a summary, and exit code 1 if any differs."""

import argparse
import sys
from collections import Counter
from pathlib import Path

import torch

from tests.golden import results
from tests.golden.cases import VECTORS, find_cases, run_case
from tests.golden.peers import ADAPTERS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    parser.add_argument("directory", type=Path, nargs="?", default=VECTORS, help="else the vectors beside this file")
    parser.add_argument("--quiet", action="store_true", help="print only what is not ok, and the summary")
    parser.add_argument("--record", action="store_true", help="write results.json, which docs/algorithms.md is made of")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    folders = find_cases(arguments.directory)
    if not folders:
        print(f"no case.json below {arguments.directory}; give the folder that holds the golden vectors")
        return 2
    outcomes = [run_case(folder, adapters=ADAPTERS) for folder in folders]
    for outcome in outcomes:
        if not arguments.quiet or outcome.status != "ok":
            print(outcome.line())
    if arguments.record:
        results.write(outcomes)
    counts = Counter(outcome.status for outcome in outcomes)
    passed, differ = sum(len(o.passed) for o in outcomes), sum(len(o.differs) for o in outcomes)
    unsupported, raised = sum(len(o.unsupported) for o in outcomes), sum(len(o.peer_raised) for o in outcomes)
    by_case = (
        f"{len(outcomes)} cases: {counts['ok']} ok, {counts['differs']} differ, {counts['unsupported']} unsupported"
    )
    by_variant = f"variants: {passed} ok, {differ} differ, {unsupported} unsupported, {raised} where the peer raised"
    print(f"{by_case}; {by_variant}")
    return 1 if counts["differs"] else 0


if __name__ == "__main__":
    sys.exit(main())
