import torch

from tests.benchmarks import peers_whole
from tests.benchmarks.peers_whole import EndsAt


def test_models_have_the_shapes_that_the_rows_say():
    with torch.device("meta"):
        llama, gemma = peers_whole.llama_of_5m(), peers_whole.gemma_of_270m()
    layer = 4 * 256 * 256 + 3 * 256 * 1024 + 2 * 256
    assert llama.num_parameters() == 2 * 512 * 256 + 4 * layer + 256
    assert gemma.num_parameters() == 268_098_176, "as google/gemma-3-270m"


def test_steps_of_all_cases_have_the_issues_tokens():
    fixed, drawn, large = peers_whole.CASES
    assert fixed.tokens_per_step == 16 * 8 * 64
    assert sorted(drawn.lengths) == [4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 52, 56, 60, 64]
    assert drawn.tokens_per_step == 16 * 8 * 34
    assert large.tokens_per_step == 4 * 8 * 32


def test_prompts_differ_and_have_the_cases_tokens():
    prompts = [row["prompt"] for row in peers_whole._prompts(peers_whole.CASES[1])]
    assert {len(prompt) for prompt in prompts} == {19}
    assert len({prompt[:2] for prompt in prompts}) == 16


def test_each_row_of_a_generation_ends_at_its_own_length_and_never_before_and_has_no_padding():
    eos, ends_at = 1, EndsAt(eos_token_id=1, pad_token_id=3)
    scores = [0.0, 9.0, 1.0, 9.0]
    for _ in range(2):
        ends_at.begin([1, 3])
        likeliest = [ends_at(torch.zeros(2, 1), torch.tensor([scores] * 2)).argmax(1).tolist() for _ in range(3)]
        assert likeliest == [[eos, 2], [2, 2], [2, eos]]
