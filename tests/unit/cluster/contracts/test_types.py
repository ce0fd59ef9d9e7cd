from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.contracts.sampling_config import SamplingConfig
from cluster.contracts.types import Prompt, Ticket, sample_seed


def test_a_group_is_named_for_its_place_in_the_start_order():
    ticket = Ticket(
        index=42,
        prompt=Prompt(prompt_id="p"),
        num_trajectories=8,
        seed=1,
        policy_version=0,
        sampling=SamplingConfig(max_tokens=4),
    )
    assert ticket.group_id == "00000042"


@settings(derandomize=True)  # of random pairs one in 2**31 is equal
@given(seed=st.integers(0, 2**63 - 1), index=st.integers(0, 10_000))
def test_seeds_of_samples_fit_31_bits_and_differ_from_their_neighbours(seed, index):
    mine = sample_seed(seed, index)
    assert 0 <= mine < 2**31
    assert mine == sample_seed(seed, index)
    assert mine != sample_seed(seed, index + 1)


def test_a_column_named_messages_is_not_taken_for_the_prompts_messages():
    row, asked = (
        {"answer": "4", "messages": [{"role": "assistant", "content": "4"}]},
        [{"role": "user", "content": "?"}],
    )
    assert Prompt(prompt_id="p", messages=asked, columns=row).info() == {"answer": "4", "messages": asked}
    assert Prompt(prompt_id="p", text="?", columns=row).info() == {"answer": "4"}
