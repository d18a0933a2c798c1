"""Runs episodes of a `verifiers` environment, in the Python that has verifiers.

``verifiers_program.py`` reads a JSON object from each line of its input: first the
settings, then episodes to run or to cancel. It writes one with ``"answer"`` for each
answer. It imports nothing of this project, whose dependencies conflict with verifiers'.

Model calls of the environment go to a relay in this process, which forwards them to the
session of the episode. verifiers keeps a client for each endpoint, so it would never
forget a session's own address.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import traceback
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from functools import partial
from itertools import islice
from typing import Any
from urllib.parse import quote

import aiohttp
from aiohttp import web
from verifiers import v1 as vf
from verifiers.v1.utils.loaders import env_config_type
from yarl import URL

KEY_VARIABLE = "TORCHRL_SGLANG_NO_KEY"
HOP_HEADERS = frozenset(
    {
        *("host", "connection", "authorization", "x-api-key", "expect"),
        *("content-length", "content-encoding", "transfer-encoding"),
    }
)
"""Headers of a request that the relay sets itself, or has taken off the body."""

RELAY_SECONDS = 3600.0
MAX_BODY = 2**30


class Relay:
    """Forwards model calls of traces to the sessions of their episodes."""

    def __init__(self) -> None:
        self.targets: dict[str, tuple[str, str, str]] = {}
        """By trace: base URL and key of the session, and the name of the agent."""
        self.url = ""
        self._calls: dict[str, set[asyncio.Task[Any]]] = defaultdict(set)

    @contextlib.asynccontextmanager
    async def serving(self) -> Any:
        """Serves on a free port of this machine."""
        application = web.Application(client_max_size=MAX_BODY)
        application.router.add_route("*", "/v1/{path:.*}", self._handle)
        runner = web.AppRunner(application)
        await runner.setup()
        timeout = aiohttp.ClientTimeout(total=RELAY_SECONDS)
        connector = aiohttp.TCPConnector(limit=0)
        try:
            async with aiohttp.ClientSession(
                timeout=timeout, connector=connector
            ) as self._client:
                site = web.TCPSite(runner, "127.0.0.1", 0)
                await site.start()
                self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
                yield self
        finally:
            await runner.cleanup()

    async def end(self, trace_id: str) -> None:
        """Ends a trace, and the calls that its harness no longer waits for."""
        self.targets.pop(trace_id, None)
        if calls := self._calls.pop(trace_id, None):
            for call in calls:
                call.cancel()
            await asyncio.wait(calls)

    async def reward(self, job: dict[str, Any], agent: str, reward: float) -> None:
        """Sets the reward of an agent of a session."""
        await self._manage(job, "POST", "/reward", {"reward": reward, "agent": agent})

    async def discard(self, job: dict[str, Any], agent: str) -> None:
        """Removes the turns of an agent from a session."""
        await self._manage(job, "DELETE", f"/agents/{quote(agent, safe='')}")

    async def _manage(
        self, job: dict[str, Any], method: str, path: str, content: Any = None
    ) -> None:
        url = job["base_url"].removesuffix("/v1") + path
        headers = {"authorization": f"Bearer {job['api_key']}"}
        call = self._client.request(
            method, URL(url, encoded=True), json=content, headers=headers
        )
        async with call as answer:
            if answer.status != 200:
                raise RuntimeError(f"{url}: {await answer.text()}")

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        trace_id = request.headers.get("X-Session-ID", "")
        target = self.targets.get(trace_id)
        if target is None:
            raise web.HTTPForbidden(text="This trace has ended.")
        calls, call = self._calls[trace_id], asyncio.current_task()
        assert call is not None
        calls.add(call)
        try:
            return await self._forward(request, *target)
        finally:
            calls.discard(call)

    async def _forward(
        self, request: web.Request, base_url: str, key: str, agent: str
    ) -> web.StreamResponse:
        body = await request.read()
        if body:
            # A session tells its agents apart by the model in their requests.
            try:
                body = json.dumps({**json.loads(body), "model": agent}).encode()
            except (TypeError, ValueError) as error:
                raise web.HTTPBadRequest(text=f"No JSON object: {error}") from error
        headers = {
            name: value
            for name, value in request.headers.items()
            if name.lower() not in HOP_HEADERS
        }
        headers |= {"authorization": f"Bearer {key}", "x-api-key": key}
        url = f"{base_url}/{request.match_info['path']}"
        async with contextlib.AsyncExitStack() as stack:
            call = self._client.request(request.method, url, data=body, headers=headers)
            try:
                answer = await stack.enter_async_context(call)
            except aiohttp.ClientError as error:
                raise web.HTTPBadGateway(text=f"{url}: {error!r}") from error
            response = web.StreamResponse(status=answer.status)
            response.content_type = answer.content_type
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
            return response


class Episodes:
    """Runs episodes of one environment.

    Args:
        settings: the environment's configuration, and the number of tasks.
        relay: forwards the model calls.
    """

    def __init__(self, settings: dict[str, Any], relay: Relay) -> None:
        self.env: Any = vf.load_environment(_configuration(**settings))
        tasks = iter(self.env.taskset)
        self.tasks: list[Any] = list(islice(tasks, settings["num_tasks"]))
        self._relay = relay
        self._sets_rewards: bool = settings["sets_rewards"]
        self._later_name: str = settings["later_name"]
        self._sampling = vf.SamplingConfig.model_validate(settings["sampling"])

    async def run(self, job: dict[str, Any]) -> dict[str, Any]:
        """Runs an episode and returns rewards, metrics and errors of its traces."""
        context = vf.ModelContext(
            client=vf.EvalClientConfig(
                base_url=self._relay.url, api_key_var=KEY_VARIABLE
            ),
            model="policy",
            sampling=self._sampling,
        )
        agents: dict[str, str] = {}
        numbers: Counter[str] = Counter()

        def begin(trace: Any) -> None:
            role = trace.agent.name or "agent"
            numbers[role] += 1
            number = numbers[role]
            later = self._later_name.format(role=role, number=number)
            name = agents[trace.id] = role if number == 1 else later
            self._relay.targets[trace.id] = (job["base_url"], job["api_key"], name)

        (slot,) = self.env.slots(self.tasks[job["task"]])
        try:
            episode = await self.env.run_slot(slot, context, on_trace=begin)
        finally:
            for trace_id in agents:
                await self._relay.end(trace_id)
        # Attempts that verifiers began anew are not in the episode.
        for trace_id in agents.keys() - {trace.id for trace in episode.traces}:
            await self._relay.discard(job, agents[trace_id])
        if self._sets_rewards and len(episode.traces) > 1:
            for trace in episode.traces:
                await self._relay.reward(job, agents[trace.id], trace.reward)
        errors = [*episode.errors, *(e for t in episode.traces for e in t.errors)]
        return {
            "ok": bool(self.env.complete(episode)),
            "errors": [f"{error.type}: {error.message}" for error in errors],
            "traces": [
                {
                    "agent": agents[trace.id],
                    "role": trace.agent.name or "agent",
                    "turns": trace.num_turns,
                    "reward": trace.reward,
                    "rewards": _numbers(trace.rewards),
                    "metrics": _numbers(trace.metrics),
                    "stop": trace.stop_condition,
                }
                for trace in episode.traces
            ],
        }


def _numbers(values: dict[str, Any]) -> dict[str, float]:
    named = {name: getattr(v, "value", v) for name, v in values.items()}
    return {name: float(v) for name, v in named.items() if v is not None}


def _configuration(*, env: dict[str, Any], agent: dict[str, Any], **_: Any) -> Any:
    """Returns the environment's configuration; ``agent`` has settings of each role."""
    kind = env_config_type(env["taskset"]["id"], env.get("id", ""))
    roles = {
        name: {
            **{key: agent[key] for key in agent if key not in role.model_fields_set},
            **env.get(name, {}),
        }
        for name, field in kind.model_fields.items()
        if isinstance(role := field.default, vf.AgentConfig)
    }
    return kind.model_validate({**env, **roles})


class Lines:
    """Reads objects from the input, and writes objects to the first output."""

    def __init__(self) -> None:
        # Neither prints of the environment nor its programs reach these two.
        self._input = os.fdopen(os.dup(0), "rb", buffering=0)
        self._output = os.fdopen(os.dup(1), "w", buffering=1)
        self.max_bytes = MAX_BODY
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.dup2(2, 1)

    async def read(self) -> Any:
        """Yields the objects until the input ends."""
        loop, reader = asyncio.get_running_loop(), asyncio.StreamReader(limit=MAX_BODY)
        await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), self._input
        )
        while line := await reader.readline():
            yield json.loads(line)

    def write(self, answer: dict[str, Any]) -> None:
        """Writes an answer, or why it cannot be written."""
        line = json.dumps({"answer": answer})
        if len(line) >= self.max_bytes:
            failure = f"Its answer has {len(line)} bytes, of at most {self.max_bytes}"
            number = {key: answer[key] for key in answer.keys() & {"id"}}
            line = json.dumps({"answer": {**number, "failure": failure}})
        self._output.write(line + "\n")


async def main() -> None:
    """Serves episodes until the input ends."""
    lines = Lines()
    objects = lines.read()
    async with contextlib.AsyncExitStack() as stack:
        relay = await stack.enter_async_context(Relay().serving())
        try:
            settings = await anext(objects)
            lines.max_bytes = settings["max_answer_bytes"]
            episodes = Episodes(settings, relay)
            await stack.enter_async_context(episodes.env.serving())
        except Exception as error:  # noqa: BLE001 - The environment raises anything.
            traceback.print_exc()
            lines.write({"failure": _describe(error)})
            return
        lines.write({"num_tasks": len(episodes.tasks)})
        await _serve(episodes, objects, lines)


async def _serve(episodes: Episodes, jobs: AsyncIterator[Any], lines: Lines) -> None:
    running: dict[int, asyncio.Task[None]] = {}

    async def run(job: dict[str, Any]) -> None:
        try:
            answer = await episodes.run(job)
        except Exception as error:  # noqa: BLE001 - The same.
            answer = {"failure": _describe(error)}
        lines.write({"id": job["id"], **answer})

    try:
        async for job in jobs:
            if "cancel" not in job:
                number = job["id"]
                running[number] = asyncio.create_task(run(job))
                # Also if it is cancelled before its first step.
                running[number].add_done_callback(partial(_forget, running, number))
            elif (task := running.get(job["cancel"])) is not None:
                task.cancel()
    finally:
        remaining = list(running.values())
        for task in remaining:
            task.cancel()
        await asyncio.gather(*remaining, return_exceptions=True)


def _forget(running: dict[int, Any], number: int, _: Any) -> None:
    running.pop(number, None)


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    asyncio.run(main())
