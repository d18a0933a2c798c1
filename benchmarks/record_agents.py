"""Records agents' sessions, whose rows `benchmarks/tree.py --recorded` trains on.

Agents use tools with a gateway in front of a tiny model. All have the same
instructions, those of a group the same task; each turn adds a reply and a tool's result
of random lengths. Half of the sessions go back some turns once, and go on in another
branch.

    python benchmarks/record_agents.py --output agents.jsonl
    python benchmarks/record_agents.py --sessions 16 --turns 4 --output agents.jsonl
"""

from __future__ import annotations

import asyncio
import random
import string
import tempfile
from pathlib import Path
from typing import Any

import aiohttp

from script import print_row, read_options
from torchrl_sglang import Gateway
from torchrl_sglang.cli.bench.models import start_engine
from torchrl_sglang.testing.tiny_model import save_tiny_model

Message = dict[str, str]

CONTEXT = 16_384
"""Most tokens of a session."""


def make_text(source: random.Random, length: int) -> str:
    """Returns random words, of about one token for each character."""
    return "".join(source.choices(string.ascii_lowercase + " ", k=length))


class Agent:
    """Converses for some turns; what tools return depends on the session's number."""

    def __init__(self, arguments: Any) -> None:
        self._arguments = arguments
        self._instructions = make_text(random.Random(0), arguments.instructions)
        self._started = 0

    async def __call__(self, task: str, *, base_url: str, api_key: str) -> float:
        """Runs a session, and returns a reward."""
        number = self._started = self._started + 1
        source = random.Random(number)
        turns = self._arguments.turns
        messages = [
            {"role": "system", "content": self._instructions},
            {"role": "user", "content": task},
        ]
        headers = {"Authorization": f"Bearer {api_key}"}
        async with aiohttp.ClientSession(headers=headers) as client:
            for turn in range(turns):
                await self._take_turn(client, base_url, messages, source)
                if turn == turns // 2 and number % 2:
                    del messages[-2 * source.randint(1, turn + 1) :]
        return source.random()

    async def _take_turn(
        self,
        client: aiohttp.ClientSession,
        url: str,
        messages: list[Message],
        source: random.Random,
    ) -> None:
        tokens = source.randint(16, self._arguments.reply)
        body = {"messages": messages, "max_tokens": tokens, "temperature": 1.0}
        async with client.post(
            f"{url}/chat/completions", json={"model": "any", **body}
        ) as answer:
            answer.raise_for_status()
            reply = (await answer.json())["choices"][0]["message"]["content"]
        result = make_text(source, source.randint(16, self._arguments.result))
        messages += [
            {"role": "assistant", "content": reply},
            {"role": "user", "content": result},
        ]


def make_model(folder: str) -> str:
    """Saves a tiny model whose context takes long sessions."""
    return str(save_tiny_model(f"{folder}/model", max_position_embeddings=CONTEXT))


def main() -> None:
    """Writes the rows of the sessions."""
    arguments = read_options(
        __doc__,
        device="cpu|cuda",
        sessions=64,
        group_size=8,
        turns=8,
        instructions=1024,
        reply=256,
        result=256,
        output="agents.jsonl",
    )
    source = random.Random(1)
    tasks = [
        make_text(source, 128)
        for _ in range(arguments.sessions // arguments.group_size)
    ]
    noise = {"ignore_eos": True}
    with (
        tempfile.TemporaryDirectory() as folder,
        start_engine(make_model(folder), device=arguments.device) as engine,
        Gateway(engine, default_sampling_params=noise) as gateway,
    ):
        work = gateway.run_agents(
            Agent(arguments), tasks, group_size=arguments.group_size
        )
        groups = asyncio.run(work)
        sessions = [session for group in groups for session in group]
        rows = gateway.to_dataset(sessions)
        rows.to_json(arguments.output)
    tokens = sum(len(r["prompt_ids"]) + len(r["completion_ids"]) for r in rows)
    print_row("sessions", "rows", "tokens", "MB")
    size = Path(arguments.output).stat().st_size / 1e6
    print_row(len(sessions), len(rows), tokens, size)


if __name__ == "__main__":
    main()
