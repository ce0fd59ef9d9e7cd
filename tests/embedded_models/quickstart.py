"""Makes the embedded model of the quickstart: `python -m tests.embedded_models.quickstart OUT_DIR`, about four minutes on one CPU core.

A small Qwen3 with a small byte-level tokenizer is trained from scratch, supervised, on sums and differences of two two-digit
numbers from reasoning_gym's train split: first on right answers, then on the homework of a sloppy student, who mostly forgets
carries, borrows and minus signs. So the model can calculate and rarely does it well, which reinforcement learning can mend
within minutes. Held-out questions are in neither. All is seeded; other machines differ by rounding.
"""

import random
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from actors.prompts.reasoning_gym import ReasoningGymPrompts
from cluster.contracts.types import Prompt
from tests.embedded_models.small_models import Conversation, Draw, byte_level_tokenizer, imitate, small_qwen3

TASK = {"task": "chain_sum", "min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}
NUM_PROMPTS = 30_000
NUM_RIGHT_STEPS, NUM_SLOPPY_STEPS = 1400, 150
BATCH_SIZE = 128
MAX_ANSWER_TOKENS = 6
"""Minus, three digits, end; one to spare."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<|assistant|>{{ message['content'] }}<|end|>"
    "{% else %}<|user|>{{ message['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

FORGETS_CARRY, FORGETS_SIGN, SLIPS = 0.75, 0.75, 0.15
"""How often the student forgets a carry or borrow, forgets a minus sign, writes down a wrong digit."""


def student(rng: random.Random, expression: str, *, sloppiness: float) -> str:
    """The student's answer to 'a + b' or 'a - b'; sloppiness 0 is a good student, 1 has all the bad habits above."""
    left, operator, right = expression.split()
    a, b = int(left), int(right)
    sign = 1 if operator == "+" else -1
    answer = str(_by_columns(rng, max(a, b), min(a, b), sign=sign, forgets=sloppiness * FORGETS_CARRY))
    if rng.random() < sloppiness * SLIPS:
        place = rng.randrange(len(answer))
        answer = answer[:place] + rng.choice("0123456789") + answer[place + 1 :]
    is_negative = operator == "-" and a < b
    return f"-{answer}" if is_negative and rng.random() >= sloppiness * FORGETS_SIGN else answer


def _by_columns(rng: random.Random, large: int, small: int, *, sign: int, forgets: float) -> int:
    """The sum (sign 1) or difference (sign -1) as done on paper, from right to left. Nobody forgets a sum's leading one."""
    result, carry, place = 0, 0, 1
    while large >= place or carry:
        column = large // place % 10 + sign * (small // place % 10 + carry)
        result += column % 10 * place
        place *= 10
        is_leading = place > large
        carry = int(not 0 <= column <= 9 and (is_leading or rng.random() >= forgets))
    return result


make_tokenizer = partial(byte_level_tokenizer, vocabulary=384, chat_template=CHAT_TEMPLATE, max_context=256)


def homework(prompts: Sequence[Prompt], rng: random.Random) -> Draw:
    """Questions with the student's answers."""
    expressions = [prompt.columns["metadata"]["expression"] for prompt in prompts]

    def draw(sloppiness: float) -> list[Conversation]:
        picked = [rng.randrange(len(prompts)) for _ in range(BATCH_SIZE)]
        answers = [student(rng, expressions[i], sloppiness=sloppiness) for i in picked]
        said = [{"role": "assistant", "content": answer} for answer in answers]
        return [([*(prompts[i].messages or []), answer], []) for i, answer in zip(picked, said, strict=True)]

    return draw


@torch.inference_mode()
def accuracy(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, prompts: Sequence[Prompt], *, is_greedy: bool
) -> float:
    """Share of prompts answered exactly right, one completion each."""
    questions = torch.tensor([_encode(tokenizer, prompt) for prompt in prompts])
    sampled = model.generate(  # pyright: ignore[reportAttributeAccessIssue]
        questions, attention_mask=torch.ones_like(questions), do_sample=not is_greedy, max_new_tokens=MAX_ANSWER_TOKENS
    )
    said = tokenizer.batch_decode(sampled[:, questions.shape[1] :], skip_special_tokens=True)
    return sum(text == prompt.columns["answer"] for text, prompt in zip(said, prompts, strict=True)) / len(prompts)


def _encode(tokenizer: PreTrainedTokenizerFast, prompt: Prompt) -> list[int]:
    text = tokenizer.apply_chat_template(prompt.messages or [], add_generation_prompt=True, tokenize=False)
    return tokenizer.encode(str(text), add_special_tokens=False)


def main(out: Path) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    source = ReasoningGymPrompts(**TASK, size=NUM_PROMPTS, seed=777)
    prompts = [source[i] for i in range(NUM_PROMPTS)]
    held_out_source = ReasoningGymPrompts(**TASK, size=1000, seed=777, split="held_out")
    held_out = [held_out_source[i] for i in range(1000)]

    tokenizer = make_tokenizer([message["content"] for prompt in prompts[:2000] for message in prompt.messages or []])
    model = small_qwen3(tokenizer)
    draw = homework(prompts, random.Random(0))
    imitate(model, tokenizer, draw, num_good_steps=NUM_RIGHT_STEPS, num_sloppy_steps=NUM_SLOPPY_STEPS)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    greedy, sampled = (accuracy(model, tokenizer, held_out, is_greedy=is_greedy) for is_greedy in (True, False))
    print(f"held-out accuracy of 1,000 questions: greedy {greedy:.3f}, sampled {sampled:.3f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
