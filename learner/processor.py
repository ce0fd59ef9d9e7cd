"""What this machine's processor is, as the system tells it. It needs no torch."""

import functools
from collections.abc import Collection
from pathlib import Path

_FACTS = Path("/proc/cpuinfo")


@functools.cache
def cpu_facts() -> tuple[frozenset[str], str]:
    """Flags and vendor; empty where the system does not say."""
    try:
        lines = _FACTS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset(), ""
    found = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return frozenset(found.get("flags", "").split()), found.get("vendor_id", "")


def multiplies_bfloat16_fast(flags: Collection[str]) -> bool:
    """Whether a processor of this vendor with these flags multiplies bfloat16 faster than float32: with AMX, or with AMD's AVX512-BF16.

    Intel's AVX512-BF16 alone gains nothing over its float32: torch's products of bfloat16 took 1.6 times as long there. AMD's, which
    are not measured, are trusted.
    """
    return "amx_bf16" in flags or ("avx512_bf16" in flags and cpu_facts()[1] == "AuthenticAMD")
