"""A harness of verifiers.v1 that says the same in some turns, without a process."""

from __future__ import annotations

import os
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI
from verifiers.v1.runtimes import ProgramResult

__all__ = ["TalkingHarness"]


class TalkingConfig(vf.HarnessConfig):
    turns: int = 4


class TalkingHarness(vf.Harness[TalkingConfig]):
    NEEDS_CONTAINER = False
    EXECUTES_CODE = False

    async def launch(
        self,
        ctx: Any,
        trace: vf.Trace,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
        tool_interception_url: str | None = None,
    ) -> ProgramResult:
        if os.environ.get("READS_INPUT"):
            # As a program that inherits the input of this process.
            data = data.model_copy(update={"prompt": f"{len(os.read(0, 9))} bytes"})
        messages: list[Any] = []
        async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            for _ in range(self.config.turns):
                messages.append({"role": "user", "content": data.prompt})
                answer = await client.chat.completions.create(
                    model=ctx.model, messages=messages
                )
                text = answer.choices[0].message.content
                messages.append({"role": "assistant", "content": text})
        return ProgramResult(0, text or "", "")
