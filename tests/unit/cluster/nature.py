"""How bad a simulated world is, drawn from one seed."""

import random
from dataclasses import dataclass

PER_GROUP = 2
NUM_PROMPTS = 40
"""Of each source."""
NUM_HELD_OUT = 5
"""Prompts of each evaluation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nature:
    """One schedule's sizes, speeds in seconds, and troubles. Ranges are (least, most)."""

    seed: int
    num_steps: int = 5
    num_workers: int = 3
    groups_per_step: int = 4
    bound: int = 1
    max_sequences: int = 8
    patience_s: float | None = None
    is_deterministic: bool = False
    sampling_s: tuple[float, ...] = (1.0, 2.0, 5.0, 200.0)
    """A group takes one of them."""
    learning_s: tuple[float, float] = (0.5, 10.0)
    loading_s: tuple[float, float] = (0.1, 2.0)
    prompt_s: float = 0.0
    failed_share: float = 0.0
    """Of groups: all their rewards fail."""
    num_accidents: int = 0
    bad_prompts: frozenset[str] = frozenset()
    """Refused by the engine."""
    killer_prompts: frozenset[str] = frozenset()
    """Each kills its worker."""

    @classmethod
    def of(cls, seed: int) -> "Nature":
        dice = random.Random(seed)
        bound = dice.randint(0, 3)
        is_deterministic = dice.random() < 0.2
        prompts = [f"{source}{number}" for number in range(NUM_PROMPTS) for source in ("p", "held-out-")]
        return cls(
            seed=seed,
            num_steps=dice.randint(2, 6),
            num_workers=dice.randint(1, 5),
            groups_per_step=dice.randint(1, 6),
            bound=bound,
            max_sequences=dice.randint(1, 5 * PER_GROUP),
            patience_s=dice.choice([None, 30.0]) if bound and not is_deterministic else None,
            is_deterministic=is_deterministic,
            loading_s=dice.choice([(0.1, 2.0), (0.1, 2.0), (5.0, 50.0)]),
            prompt_s=dice.choice([0.0, 0.0, 2.0]),
            failed_share=dice.choice([0.0, 0.1]),
            num_accidents=dice.randint(0, 5),
            bad_prompts=frozenset(dice.sample(prompts, dice.choice([0, 2, 6]))),
            killer_prompts=frozenset(dice.sample(prompts, dice.choice([0, 1, 2]))),
        )
