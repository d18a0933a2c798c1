"""Clients of a gateway, each in an environment and a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import aiohttp
from aiohttp import web
from yarl import URL

from helpers.scripted_server import Reply, ScriptedServer, Writer, log_prob
from helpers.tool_template import TOOL_TEMPLATE
from torchrl_sglang import AsyncSGLang, Gateway
from torchrl_sglang.gateway.session import Session
from torchrl_sglang.support.event_loop import run_sync

ROOT = Path(__file__).parents[2]
CLIENTS = ROOT / "test/agents/clients"
ENVIRONMENTS = ROOT / ".agents"

JOB_SECONDS = 180.0
"""A client that takes longer hangs. Its first imports take most of a minute."""
CLIENT_TIMEOUT = 6.0
"""Time-out of a client whose request hangs."""
LONG_TIMEOUT = 60.0
CONTEXT = 2**17
WORD = " rain"

HELLO, MORE, LAST = "What is the weather in Rome?", "And now?", "And then?"
BOTH = "What is the weather in Rome and in Oslo?"
ROME, OSLO = ("get_weather", {"city": "Rome"}), ("get_weather", {"city": "Oslo"})
WEATHER = {"city": "Rome", "degrees": 21}
SUNNY = "It is sunny, and 21 degrees."
REWARD = 0.5


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What a user says, what the model writes, and how it ends."""

    messages: Sequence[str]
    """What the user says."""
    script: Sequence[Reply]
    """What the model writes."""
    answer: Any = None
    """The client's answer; ``None``: it ends with an error."""
    called: Sequence[Any] = ()
    """Cities that the tool was called with."""
    kept: int | None = None
    """Responses that are recorded. Defaults to all that do not hang."""
    job: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the client's job."""
    gateway: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the gateway."""
    context: int = CONTEXT
    """Context of the model, in tokens."""
    status: int | None = None
    """Status of the answer that ends it; the client asks no more after that."""


THINKING = Reply(reasoning="They want to know.", text="I look.", calls=[ROME])
SCENARIOS = {
    "turns": Scenario(
        messages=[HELLO, MORE, LAST],
        script=[Reply(text="It rains."), Reply(text="It snows."), Reply(text=SUNNY)],
        answer=SUNNY,
    ),
    "tools": Scenario(
        messages=[HELLO, MORE],
        script=[THINKING, Reply(text="It is 21."), THINKING, Reply(text=SUNNY)],
        answer=SUNNY,
        called=["Rome", "Rome"],
    ),
    "parallel": Scenario(
        messages=[BOTH],
        script=[Reply(text="Both.", calls=[ROME, OSLO]), Reply(text=SUNNY)],
        answer=SUNNY,
        called=["Oslo", "Rome"],
    ),
    "stream": Scenario(
        messages=[HELLO, MORE],
        script=[THINKING, Reply(text="It is 21."), THINKING, Reply(text=SUNNY)],
        answer=SUNNY,
        called=["Rome", "Rome"],
        job={"stream": True},
    ),
    "structured": Scenario(
        messages=[HELLO],
        script=[Reply(answer=WEATHER)],
        answer=WEATHER,
        job={"structured": True},
    ),
    "refused": Scenario(
        messages=[HELLO],
        script=[
            Reply(text="I look.", calls=[("get_weather", {"town": "Rome"})]),
            Reply(calls=[ROME]),
            Reply(text=SUNNY),
        ],
        answer=SUNNY,
        called=["Rome"],
    ),
    "limit": Scenario(
        messages=[HELLO, MORE],
        script=[Reply(text="It rains.")],
        gateway={"max_turns": 1},
        status=403,
    ),
    "overflow": Scenario(
        messages=[HELLO, WORD * CONTEXT],
        script=[Reply(text="It rains.")],
        status=400,
    ),
    "timeout": Scenario(
        messages=[HELLO, MORE],
        script=[Reply(text="It rains."), Reply(hangs=True)],
        job={"timeout": CLIENT_TIMEOUT, "retries": 0},
    ),
    "retry": Scenario(
        messages=[HELLO],
        script=[Reply(hangs=True), Reply(text=SUNNY)],
        answer=SUNNY,
        job={"timeout": CLIENT_TIMEOUT},
    ),
}


ERROR = b'"error":{'
"""What each dialect's event of an error has, and what no text of a model has."""


class Relay:
    """Passes requests on to a gateway, and keeps their statuses.

    It lives longer than its clients, some of which connect anew after they hung up.
    """

    def __init__(self) -> None:
        self._target = URL()
        self.seen: list[tuple[str, str, int]] = []
        """Method, path and status of each request, in the order of their answers."""
        self.refused: list[tuple[bytes, bytes]] = []
        """Bodies and answers of those that were refused."""
        self.failed_streams = 0
        """Streams that had begun when they were refused, and tell of it themselves."""
        self._runner = run_sync(self._start())
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    def point_at(self, target: str) -> None:
        """Passes requests on to this gateway from now on, and forgets the others."""
        self._target = URL(target)
        self.seen, self.refused, self.failed_streams = [], [], 0

    def statuses(self) -> list[int]:
        """Returns the statuses of requests for responses."""
        return [
            status
            for method, path, status in self.seen
            if method == "POST" and "count_tokens" not in path
        ]

    def close(self) -> None:
        run_sync(self._runner.cleanup())

    async def _start(self) -> web.AppRunner:
        app = web.Application(client_max_size=2**30)
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(
            app, access_log=None, shutdown_timeout=0, handler_cancellation=True
        )
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        dropped = ("host", "content-length", "transfer-encoding", "accept-encoding")
        headers = {k: v for k, v in request.headers.items() if k.lower() not in dropped}
        url = self._target.join(URL(request.raw_path, encoded=True))
        async with (
            aiohttp.ClientSession() as client,
            client.request(request.method, url, data=body, headers=headers) as answer,
        ):
            self.seen.append((request.method, request.path, answer.status))
            kept = {k: v for k, v in answer.headers.items() if k.lower() not in dropped}
            response = web.StreamResponse(status=answer.status, headers=kept)
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                if answer.status >= 400:
                    self.refused.append((body, chunk))
                elif ERROR in chunk:
                    self.failed_streams += 1
                await response.write(chunk)
            await response.write_eof()
            return response


class Client:
    """The process of a client, which runs one job after the other.

    Args:
        command: starts it.
        home: folder of its files.
    """

    def __init__(self, command: Sequence[str], home: Path) -> None:
        self._log = home / "client.log"
        self._reports: Queue[str] = Queue()
        self._home = home
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=home,
                env=_environment(home),
                start_new_session=True,
                text=True,
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def run(self, job: Any, timeout: float = JOB_SECONDS) -> Any:
        """Returns the report of a job, or those of a list of jobs.

        Raises:
            TimeoutError: if there is none; the process is killed then.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        try:
            line = self._reports.get(timeout=timeout)
        except Empty:
            # A Python says where it hangs. Its children are ended with it.
            pid = self._process.pid
            os.kill(pid, signal.SIGABRT)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            os.killpg(pid, signal.SIGKILL)
            self.close()
            raise TimeoutError(f"The client hangs. It wrote: {self.log()}") from None
        if not line:
            raise RuntimeError(f"The client has ended. It wrote: {self.log()}")
        return json.loads(line)

    def log(self) -> str:
        """Returns the last that it wrote."""
        return self._log.read_text(errors="replace")[-3000:]

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        if self.is_running:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._reports.put(line)
        self._reports.put("")


def _environment(home: Path) -> dict[str, str]:
    """Returns a client's variables: nothing of ours, and no telemetry."""
    quiet = {
        "ANONYMIZED_TELEMETRY": "false",
        "CREWAI_DISABLE_TELEMETRY": "true",
        "CREWAI_TRACING_ENABLED": "false",
        "DISABLE_TELEMETRY": "1",
        "DO_NOT_TRACK": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "PYTHONFAULTHANDLER": "1",
        "MSWEA_SILENT_STARTUP": "1",
        "OPENAI_AGENTS_DISABLE_TRACING": "1",
        "OTEL_SDK_DISABLED": "true",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    return {**kept, **quiet, "HOME": str(home), "TMPDIR": str(home)}


@dataclass(kw_only=True)
class Outcome:
    """What became of a conversation."""

    report: dict[str, Any]
    """The client's report."""
    server: ScriptedServer
    """What the model read and wrote."""
    relay: Relay
    """What the client asked."""
    branches: list[str]
    """Why rows begin."""
    rows: Any
    """What is exported; ``None`` where there is nothing."""


def job_of(session: Session, messages: list[str], **more: Any) -> dict[str, Any]:
    """Returns a client's job in a session."""
    about = {"url": session.url, "base_url": session.base_url, "key": session.key}
    return {**about, "messages": messages, **more}


def hold(
    client: Client,
    scenario: Scenario,
    *,
    relay: Relay,
    folder: Path,
    tokenizer: Any,
    home: Path,
    **arguments: Any,
) -> Outcome:
    """Has a client hold a conversation; returns what became of it."""
    with (
        ScriptedServer(
            folder, tokenizer, scenario.script, context=scenario.context, **arguments
        ) as server,
        AsyncSGLang.connect(server.url) as engine,
        Gateway(
            engine,
            chat_template=TOOL_TEMPLATE,
            tool_call_parser="qwen25",
            reasoning_parser="qwen3",
            **scenario.gateway,
        ) as gateway,
    ):
        relay.point_at(gateway.url)
        session = gateway.session()
        url = session.url.replace(gateway.url, relay.url)
        given = {"timeout": LONG_TIMEOUT, **scenario.job, "folder": str(home)}
        job = job_of(session, list(scenario.messages), **given)
        report = client.run({**job, "url": url, "base_url": f"{url}/v1"})
        gateway.set_reward(session, REWARD)
        rows = gateway.to_tensordict([session]) if session.turns else None
        branches = [turn.branch.text for turn in session.turns if turn.branch]
        return Outcome(
            report=report, server=server, relay=relay, branches=branches, rows=rows
        )


def check_rows(
    rows: Any, generated: Sequence[tuple[list[int], list[int]]], reward: float
) -> None:
    """Compares rows with what the model read and wrote.

    Each response is trained once and whole, behind its own prompt; nothing else is.
    """
    trained: Counter[int] = Counter()
    for row in rows:
        ids, mask = row["tokens", "full"].tolist(), row["masks", "all_assistant_mask"]
        expected = [False] * len(ids)
        for number, (prompt, said) in enumerate(generated):
            begin, end = len(prompt), len(prompt) + len(said)
            if ids[:end] == [*prompt, *said] and mask[begin:end].any():
                trained[number] += 1
                expected[begin:end] = [True] * len(said)
        assert mask.tolist() == expected
        found = row["log_probs", "full"]
        assert found.isfinite().tolist() == expected
        for token, value in zip(row["tokens", "full"][mask], found[mask], strict=True):
            assert abs(float(value) - log_prob(int(token))) < 1e-5
        assert float(row["next", "reward"].sum()) == reward
    assert trained == Counter(range(len(generated)))
    done = rows["next", "done"].flatten().tolist()
    assert done == [False] * (len(done) - 1) + [True]


def describe(outcome: Outcome) -> str:
    """Returns what a failed test should say."""
    said = {**outcome.report, "statuses": outcome.relay.statuses()}
    refused = [answer.decode()[:500] for _, answer in outcome.relay.refused]
    said["branches"] = outcome.branches
    return f"{said} {refused} {[asdict(each) for each in outcome.server.script]}"


@dataclass(frozen=True, kw_only=True)
class Program:
    """A client of the table."""

    file: str
    """Its file in ``test/agents/clients``."""
    environment: str
    """Its environment in ``.agents``; empty: the tests' own."""
    variant: str = ""
    """Its argument."""
    errors: Mapping[str, str]
    """How it calls an overflow, a limit and a time-out: a type, or a base of it."""
    rows: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    """Scenarios that become more than one row, how many, and why."""
    repeats: Mapping[str, str] = field(default_factory=dict)
    """Scenarios in which it repeats what was refused before it ends, and how."""
    without: Mapping[str, str] = field(default_factory=dict)
    """Scenarios that it does not have, and why."""
    instead: Mapping[str, Scenario] = field(default_factory=dict)
    """Scenarios that it has in another form."""
    writer: Writer | None = None
    """How the model writes for it, where it is not by tool calls."""


def scenario_of(program: Program, name: str) -> Scenario:
    """Returns a scenario as a client has it."""
    return program.instead.get(name, SCENARIOS[name])


def check(outcome: Outcome, program: Program, name: str) -> None:
    """Checks what became of a scenario: the client's answer, and what is exported."""
    scenario, report = scenario_of(program, name), outcome.report
    if scenario.answer is None:
        assert program.errors[name] in report["errors"]
    else:
        assert report["error"] is None
        assert report["answer"] == scenario.answer
    assert sorted(report["called"]) == sorted(scenario.called)
    assert outcome.server.script == []
    assert outcome.server.missing == 0
    statuses = outcome.relay.statuses()
    if scenario.status is not None:
        refused = [status for status in statuses if status != 200]
        late = outcome.relay.failed_streams
        # A stream begins within a second, whatever its prompt takes on a busy machine.
        assert late or statuses[-1] == scenario.status
        assert set(refused) <= {scenario.status}
        # It ends at once; where a stream broke off, some ask once more without one.
        assert max(len(refused), late) == 1 or name in program.repeats
    rows, _ = program.rows.get(name, (1, ""))
    assert (0 if outcome.rows is None else len(outcome.rows)) == rows
    if rows:
        check_rows(outcome.rows, outcome.server.generated, REWARD)
