"""Shortens Ray's paragraphs about an actor's death to one sentence. For people only: no code decides by it."""

import os
import re

_MEMORY = re.compile(r"was ([\d.]+ ?[KMGT]?i?B) ?/ ?([\d.]+ ?[KMGT]?i?B)")
_PID = re.compile(r"\bpid: (\d+)")
_DETAIL = re.compile(r"Worker exit detail: (.+)", re.DOTALL)
_LONGEST = 200


def how_it_died(text: str) -> str:
    """For example `its process ended without a word: ...`. For an unknown kind of death, Ray's first sentence."""
    report = " ".join(text.split())
    if "running low on memory" in report or "NODE_OUT_OF_MEMORY" in report:
        full = _MEMORY.search(report)
        return (
            f"Ray ended it because its machine's memory was nearly full{f' ({full[1]} of {full[2]})' if full else ''}"
        )
    if "its node has died" in report:
        return "its node has died"
    if "killed by `ray.kill`" in report:
        return "it was ended through Ray"
    if "INTENDED_USER_EXIT" in report:
        return "its process left by itself, as after sys.exit"
    if "connection error code" in report:
        return (
            "its process ended without a word: it was killed from outside (kill -9, or the system when memory ran out), "
            "or it crashed (a segmentation fault)"
        )
    detail = _DETAIL.search(report)
    return _first_sentence(detail[1] if detail else report)


def where_it_printed(text: str) -> str:
    """Where Ray keeps the dead process's output; empty if Ray does not name the process."""
    pid = _PID.search(text)
    return (
        f"What it printed: worker-*-{pid[1]}.out and .err in session_latest/logs of Ray's folder on its node (by default "
        f"/tmp/ray-{os.getuid()}/ray if the run started Ray, else /tmp/ray)."
        if pid
        else ""
    )


def _first_sentence(report: str) -> str:
    sentence = report.partition(". ")[0].rstrip(".")
    return sentence if len(sentence) <= _LONGEST else f"{sentence[:_LONGEST]}..."
