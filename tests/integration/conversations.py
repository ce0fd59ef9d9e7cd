"""An environment for runs on random models: what it says depends on what they say, and on nothing else."""

import asyncio

from cluster.contracts.episodes import Episode

TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}A:{{ message['content'] }}<eos>"
    "{% else %}U:{{ message['content'] }}\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
)
"""For the tokenizer of `tests.models`."""
ENVIRONMENT = f"{__name__}:digits_wanted"


async def digits_wanted(episode: Episode, *, turns: int = 3) -> float:
    """Pays for digits, turn by turn. Every second episode of a group has its history rewritten once, and waits longer; every fourth
    writes its prompts itself."""
    if episode.index % 4 == 2:
        return await _by_raw_prompts(episode, turns=turns)
    said = await episode.ask()
    for turn in range(1, turns):
        episode.earn(_share(said.text), "digits")
        await asyncio.sleep(0.005 * (1 + episode.index))
        if turn == 1 and episode.index % 2:
            episode.rewrite([{"role": "user", "content": f"{len(said.text)} so far"}])
        said = await episode.ask(f"more than {sum(map(str.isdigit, said.text))}")
    episode.log("last", _share(said.text))
    return _share(said.text)


async def _by_raw_prompts(episode: Episode, *, turns: int) -> float:
    prompt, text = f"U:{episode.prompt}\nA:", ""
    from openai import AsyncOpenAI  # a second of processor time, which no other environment's process needs

    async with AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key) as client:
        for turn in range(turns):
            if turn:
                episode.earn(_share(text), "digits")
                prompt += f"U:more than {sum(map(str.isdigit, text))}\nA:"
            (choice,) = (await client.completions.create(model="any", prompt=prompt)).choices
            text = choice.text
            prompt += text + ("<eos>" if choice.finish_reason == "stop" else "")
    return _share(text)


def _share(text: str) -> float:
    return sum(map(str.isdigit, text)) / max(len(text), 1)
