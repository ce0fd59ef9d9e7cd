"""Programs through the reward service: as a run judges them."""

import pytest

from actors.reward_service.service import RewardService
from cluster.contracts.config import RewardConfig
from cluster.contracts.plugins import Plugin
from tests.unit.actors.batches import batch_of
from tests.unit.actors.sandbox.hostile import ENDED

pytestmark = pytest.mark.slow
CASES = {"cases": [{"input": "", "output": "42"}]}


async def test_hostile_programs_earn_nothing_and_none_fails_and_their_neighbours_are_unharmed():
    programs = [program for hostile, _ in ENDED.values() for program in (hostile, "print(6 * 7)")]
    limits = {"time_s": 0.5, "total_s": 1, "memory_bytes": 2**28}
    judge = Plugin(name="code_stdin", params={"sandbox": limits})
    service = RewardService(RewardConfig(judge=judge))
    try:
        completions = [f"```python\n{program}\n```" for program in programs]
        scored, _ = await service.score(batch_of(completions, columns=CASES))
    finally:
        await service.close()
    assert scored["reward_status"].to_pylist() == ["ok"] * len(programs)
    assert scored["reward"].to_pylist() == [0.0, 1.0] * len(ENDED)
