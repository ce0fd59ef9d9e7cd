"""What `treadwheel check` says of the servers that judges call."""

import asyncio
import re

import pytest

from cluster.contracts.errors import ConfigError
from cluster.contracts.reward_config import RewardConfig
from deploy.preflight.servers import server_rows
from tests.unit.actors.faulty_server import faulty_server


async def test_each_url_is_said_once_to_answer_or_not(monkeypatch):
    monkeypatch.setenv("KEY", "s3cret")
    async with faulty_server(lambda body: body) as server:
        endpoint = {"urls": [server.url, "http://127.0.0.1:9"], "key_env": "KEY"}
        config = RewardConfig(
            parts={
                "remote": {"judge": {"name": "remote", "endpoint": endpoint}},
                "same": {"judge": {"name": "code_sandbox_fusion", "url": server.url}},
            }
        )
        up, down = await asyncio.to_thread(lambda: list(server_rows(config)))
    assert up[1] == server.url and re.fullmatch(r"answers \(HTTP 405\) in \d+ ms", up[2])
    assert down[1] == "http://127.0.0.1:9" and "refused" in down[2]


def test_authorities_that_cannot_be_read_are_one_error_that_names_the_setting():
    endpoint = {"urls": ["https://127.0.0.1:9"], "ca_file": "/nowhere.pem"}
    config = RewardConfig.model_validate({"judge": {"name": "remote", "endpoint": endpoint}})
    with pytest.raises(ConfigError, match=r"reward\.judge\.endpoint\.ca_file='/nowhere.pem' cannot be read"):
        list(server_rows(config))
