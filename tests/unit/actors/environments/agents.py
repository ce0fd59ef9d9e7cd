"""Environments that speak with the model through OpenAI's client, as agents of others do."""

import asyncio
import contextlib
import json
import urllib.request
from random import Random
from typing import Any

import openai
import psutil

from cluster.contracts.episodes import BlockingEpisode, Episode
from cluster.contracts.errors import DataError
from tests.unit.actors.environments.environments import first_int

CALCULATE = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Value of an arithmetic expression.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}
KEPT: list[Any] = []


def client_of(episode: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key)


async def guess(episode: Episode, *, top: int = 20):
    secret = Random(episode.seed).randint(1, top)
    messages: list[Any] = [*episode.messages]
    async with client_of(episode) as client:
        for turn in range(6):
            answer = await client.chat.completions.create(model="any", messages=messages)
            message = answer.choices[0].message
            if (number := first_int(message.content or "")) == secret:
                return 1.0 - 0.1 * turn
            messages.append(message.model_dump())
            text = "?" if number is None else "higher" if number < secret else "lower"
            messages.append({"role": "user", "content": text})
    return 0.0


def guess_blocking(episode: BlockingEpisode, *, top: int = 20):
    secret = Random(episode.seed).randint(1, top)
    messages: list[Any] = [*episode.messages]
    with openai.OpenAI(base_url=episode.base_url, api_key=episode.api_key) as client:
        for turn in range(6):
            answer = client.chat.completions.create(model="any", messages=messages)
            text = answer.choices[0].message.content or ""
            if (number := first_int(text)) == secret:
                return 1.0 - 0.1 * turn
            messages.append({"role": "assistant", "content": [{"type": "text", "text": text}]})
            text = "?" if number is None else "higher" if number < secret else "lower"
            messages.append({"role": "user", "content": text})
    return 0.0


async def say(episode: Episode, client: openai.AsyncOpenAI):
    """Sends the requests of the prompt's column `requests`, and logs what came back, as JSON."""
    for request in episode.columns["requests"]:
        api: Any = client.completions if "prompt" in request else client.chat.completions
        try:
            answer = await api.create(**{"model": "any", **request})
        except openai.APIStatusError as error:
            episode.log("error", json.dumps([error.status_code, error.body]))
        else:
            if request.get("stream"):
                pieces = [piece.model_dump(exclude_unset=True) async for piece in answer]
                episode.log("pieces", json.dumps(pieces))
            else:
                episode.log("answer", answer.model_dump_json(exclude_unset=True))


async def agent(episode: Episode):
    """Does what the prompt's column `do` says."""
    messages: list[Any] = [*episode.messages]
    async with client_of(episode) as client:
        match episode.columns["do"]:
            case "say":
                await say(episode, client)
            case "tools":
                while True:
                    answer = await client.chat.completions.create(model="any", messages=messages, tools=[CALCULATE])  # type: ignore[list-item]
                    message = answer.choices[0].message
                    messages.append(message.model_dump(exclude_none=True))
                    if not message.tool_calls:
                        return float(message.content or "nan")
                    for call in message.tool_calls:
                        value = eval(json.loads(call.function.arguments)["expression"])
                        messages.append({"role": "tool", "tool_call_id": call.id, "content": str(value)})
            case "stream":
                stream = await client.chat.completions.create(
                    model="any",
                    messages=messages,
                    stream=True,
                    stream_options={"include_usage": True},
                )
                pieces = [piece.model_dump(exclude_none=True) async for piece in stream]
                episode.log("pieces", json.dumps(pieces))
            case "parallel":
                patient = client.with_options(max_retries=0)  # else it would hide that a request was refused
                asks = [
                    patient.chat.completions.create(
                        model="any", messages=[*messages, {"role": "user", "content": str(i)}]
                    )
                    for i in range(4)
                ]
                answers = await asyncio.gather(*asks)
                episode.log("texts", json.dumps(sorted(str(answer.choices[0].message.content) for answer in answers)))
            case "wrong key":
                try:
                    await client.with_options(api_key="sk-other").chat.completions.create(
                        model="any", messages=messages
                    )
                except openai.AuthenticationError as error:
                    episode.log("code", str(error.code))
            case "key that is not UTF-8":
                request = urllib.request.Request(episode.base_url + "/models", headers={"Authorization": "Bearer \xe9"})
                status, body = await asyncio.to_thread(_status_of, request)
                episode.log("error", f"{status} {json.loads(body)['error']['code']}")
            case "for ever":
                while True:
                    answer = await client.chat.completions.create(model="any", messages=messages)
                    messages.append({"role": "assistant", "content": answer.choices[0].message.content})
                    messages.append({"role": "user", "content": "More."})
            case "until over":
                with contextlib.suppress(openai.BadRequestError):
                    while True:
                        answer = await client.chat.completions.create(model="any", messages=messages)
                        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
                        messages.append({"role": "user", "content": "More."})
                return 0.5
            case "keep":
                KEPT.append((episode.base_url, episode.api_key))
            case "kept":
                base_url, api_key = KEPT[-1]
                async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as other:
                    try:
                        await other.models.list()
                    except openai.APIStatusError as error:
                        episode.log("error", f"{error.status_code} {error.code}")
            case "models":
                async for model in client.models.list():
                    episode.log("model", model.id)
            case "ask after a raw prompt":
                await client.completions.create(model="any", prompt="Guess.")
                try:
                    await episode.ask("Go on.")
                except DataError as error:
                    episode.log("error", str(error))
                episode.rewrite(messages)
                await episode.ask("Go on.")
            case "elsewhere":
                for path in ("/embeddings", "/../../999/v1/models"):
                    request = urllib.request.Request(episode.base_url + path)
                    status, body = await asyncio.to_thread(_status_of, request)
                    episode.log("error", f"{status} {json.loads(body)['error']['type']}")
            case "responses":
                try:
                    await client.responses.create(model="any", input="Guess.")
                except openai.NotFoundError as error:
                    episode.log("error", error.message.partition("/v1")[2])
            case "give up":
                asking = asyncio.create_task(client.chat.completions.create(model="any", messages=messages))
                while not episode.is_asking:  # type: ignore[attr-defined]
                    await asyncio.sleep(0.01)
                asking.cancel()
                await asyncio.wait([asking])
                try:
                    await client.chat.completions.create(model="any", messages=messages)
                except openai.APIStatusError as error:
                    episode.log("error", f"{error.status_code} {error.code}")
            case "leave a client":
                left = client_of(episode)
                KEPT.append(left)
                await left.chat.completions.create(model="any", messages=messages)
            case "count descriptors":
                await client.models.list()
                process = psutil.Process()
                listening = [each for each in process.net_connections() if each.status == psutil.CONN_LISTEN]
                return {"reward": float(process.num_fds()), "ports": float(len(listening))}
            case "hang":
                await client.chat.completions.create(model="any", messages=messages)
    return 1.0


def _status_of(request: urllib.request.Request) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(request) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()
