"""``VerifiersAgent``: environments of `verifiers` as an agent."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import math
import os
import shutil
import subprocess
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Self

from torchrl_sglang.errors import ConfigurationError, UserFunctionError
from torchrl_sglang.gateway.agents import AgentResult
from torchrl_sglang.gateway.programs.process import (
    END_SECONDS,
    ProcessTree,
    end_tree,
    start_tree,
)
from torchrl_sglang.gateway.programs.program import INHERITED
from torchrl_sglang.objectives.roles import LATER_NAME
from torchrl_sglang.support.blocking import BlockingCalls
from torchrl_sglang.support.checks import check_count, check_mapping, check_seconds

TASK = "task"
"""Column of a task: its number in the taskset."""

ROLE = "agent"
"""Role of verifiers' environments that have a single one."""

PROGRAM = Path(__file__).with_name("verifiers_program.py")

LOG_LINES = 30
LOG_LINE_BYTES = 2**12
"""Longer lines of its errors are cut."""

MAX_ANSWER_BYTES = 2**26
"""Most of an answer of its program, and of a line that is no answer."""

REWARD_SECONDS = 3600.0
"""Timeout of a function for the reward; the collector's own is usually shorter."""


class VerifiersAgent:
    """An environment of `verifiers` (0.4 and later, ``verifiers.v1``) as an agent.

    A taskset with its harness and runtime runs in a process with a Python of its own,
    since verifiers and SGLang need different versions of packages. Its model calls
    go to the gateway's session, and its rewards come back. The process starts at the
    first use, is shared by all episodes, and ends with :meth:`close`, the object or the
    trainer.

    An episode with several traces, such as of ``best-of-n`` or of an environment with
    several roles, has a session with an agent for each trace: the role's name, then
    ``role-2`` and so on. Each gets its own trace's reward. ``trained="solver.*"`` of
    the gateway trains only some roles.

    Args:
        taskset (str): id of a taskset: an installed package, or one of verifiers' own,
            such as ``"harbor"`` and ``"openenv"``.

    Keyword Args:
        python: interpreter with verifiers and the taskset, such as
            ``"~/envs/verifiers/bin/python"``. Defaults to ``python3`` of ``PATH``.
        options: settings of the taskset, such as ``{"split": "train"}``.
        harness: id of the program that holds the conversation, such as ``"bash"`` or
            ``"codex"``, or its settings with ``"id"``. Defaults to the taskset's.
        runtime: where the harness runs: ``"subprocess"`` (the default), ``"docker"``,
            ``"apptainer"`` and others, or its settings with ``"type"``.
        env: further settings of the environment, such as ``{"id": "best-of-n"}``, or
            of a role, ``{"agent": {"max_turns": 4}}``, where a harness and a runtime
            have priority over the two above.
        sampling: sampling parameters in its requests. Defaults to none: the
            gateway's count.
        reward: ``(task, episode)``, a function or a coroutine function for the
            session's reward instead. ``episode["traces"]`` has for each trace
            ``"agent"``, ``"role"``, ``"reward"``, ``"rewards"`` and ``"metrics"`` by
            name, ``"turns"`` and ``"stop"``.
        num_tasks (int): most tasks. It bounds an infinite taskset. Defaults to 10,000.
        environment: variables of the process, beside ``PATH``, ``HOME`` and others.
        start_timeout (float): seconds for the start. Defaults to 300.

    Raises:
        ConfigurationError: if an argument is wrong.

    Examples:
        >>> agent = VerifiersAgent(  # doctest: +SKIP
        ...     "reverse-text", harness="null", python="~/envs/verifiers/bin/python"
        ... )
        >>> run = GRPO(  # doctest: +SKIP
        ...     "Qwen/Qwen3-4B", prompts=agent.prompts(), agent=agent
        ... )
    """

    def __init__(
        self,
        taskset: str,
        *,
        python: str | os.PathLike[str] = "python3",
        options: Mapping[str, Any] | None = None,
        harness: str | Mapping[str, Any] | None = None,
        runtime: str | Mapping[str, Any] = "subprocess",
        env: Mapping[str, Any] | None = None,
        sampling: Mapping[str, Any] | None = None,
        reward: Callable[[Mapping[str, Any], dict[str, Any]], Any] | None = None,
        num_tasks: int = 10_000,
        environment: Mapping[str, str] | None = None,
        start_timeout: float = 300.0,
    ) -> None:
        if not isinstance(taskset, str) or not taskset:
            raise ConfigurationError(
                f"taskset must be the id of a taskset of verifiers.v1, got {taskset!r}."
            )
        if reward is not None and not callable(reward):
            raise ConfigurationError(f"reward must be a function, got {reward!r}.")
        check_count("num_tasks", num_tasks)
        self._start_timeout = check_seconds("start_timeout", start_timeout)
        self._taskset = taskset
        self._python = _find_python(python)
        self._environment = dict(check_mapping("environment", environment or {}))
        agent = {"runtime": _named("runtime", runtime, "type")}
        if harness is not None:
            agent["harness"] = _named("harness", harness, "id")
        self._settings = {
            "env": {
                **check_mapping("env", env or {}),
                "taskset": {**check_mapping("options", options or {}), "id": taskset},
            },
            "agent": agent,
            "sampling": dict(check_mapping("sampling", sampling or {})),
            "num_tasks": num_tasks,
            "sets_rewards": reward is None,
            "later_name": LATER_NAME,
            "max_answer_bytes": MAX_ANSWER_BYTES,
        }
        self._reward = reward
        try:
            json.dumps(self._settings)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(
                f"options, env, harness, runtime and sampling travel as JSON to the "
                f"process of verifiers: {error}."
            ) from error
        self._lock = threading.Lock()
        self._process: _Process | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._taskset!r})"

    def __getstate__(self) -> dict[str, Any]:
        """A copy, such as in a Ray actor, starts a process of its own."""
        return {**self.__dict__, "_lock": None, "_process": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """Id of the process above verifiers'; ``None``: there is none."""
        with self._lock:
            return None if self._process is None else self._process.pid

    def close(self) -> None:
        """Ends the process, and fails its running episodes. The next use starts one."""
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.close()

    def prompts(self) -> list[dict[str, int]]:
        """Returns the tasks: ``{"task": number}`` for each of the taskset's.

        Raises:
            ConfigurationError: if the environment cannot be loaded.
        """
        return [{TASK: number} for number in range(self._started().num_tasks)]

    async def __call__(
        self, task: Mapping[str, Any], *, base_url: str, api_key: str
    ) -> AgentResult:
        """Runs an episode in a session and returns its reward and metrics.

        Returns:
            AgentResult: the reward of its trace, or ``None`` if there are several,
            which have their own; ``NAME`` of its metrics and ``reward/NAME`` of its
            rewards, means over the traces of a role, after ``ROLE/`` unless the role is
            ``"agent"``, that of environments with a single one.

        Raises:
            ConfigurationError: if the task does not exist, or the environment cannot be
                loaded.
            UserFunctionError: if the episode fails.
        """
        process = await asyncio.to_thread(self._started)
        number = task.get(TASK) if isinstance(task, Mapping) else None
        if not isinstance(number, int) or not 0 <= number < process.num_tasks:
            raise ConfigurationError(
                f"{task!r} is no task of {self!r}, which has {process.num_tasks}; give "
                f"prompts=agent.prompts()."
            )
        job = {TASK: number, "base_url": base_url, "api_key": api_key}
        answer = await process.run(job)
        if "failure" in answer or not answer["ok"]:
            reasons = [answer["failure"]] if "failure" in answer else answer["errors"]
            raise UserFunctionError(
                f"Task {number} of {self!r} failed: "
                f"{'; '.join(reasons) or 'no reason is given'}."
            )
        traces = answer["traces"]
        reward = traces[0]["reward"] if len(traces) == 1 else None
        if self._reward is not None:
            blocking = BlockingCalls("torchrl_sglang-rewards", 1)
            try:
                reward = await blocking.call(
                    self._reward, task, answer, seconds=REWARD_SECONDS
                )
            finally:
                blocking.close()
        return AgentResult(reward=reward, metrics=_metrics(traces))

    def _started(self) -> _Process:
        with self._lock:
            process = self._process
            # An environment that cannot be loaded is not loaded again for each task.
            if process is None or (process.has_ended and process.num_tasks):
                process = self._process = _Process(
                    self._python, self._environment, self._settings, repr(self)
                )
                weakref.finalize(self, process.close)
        process.wait_ready(self._start_timeout)
        return process


class _Process:
    """The process of an environment: requests and answers by their numbers."""

    def __init__(
        self,
        python: str,
        environment: Mapping[str, str],
        settings: Mapping[str, Any],
        owner: str,
    ) -> None:
        inherited = {name: os.environ[name] for name in INHERITED if name in os.environ}
        # The interpreter's folder has programs of its environment, such as uv.
        path = f"{Path(python).parent}{os.pathsep}{inherited.get('PATH', os.defpath)}"
        self._popen = start_tree(
            ProcessTree(
                command=[python, "-u", str(PROGRAM)],
                environment={**inherited, "PATH": path, **environment},
                folder=Path.cwd(),
                stdin="",
            )
        )
        self.num_tasks = 0
        self._owner = owner
        self._ready: Future[None] = Future()
        self._answers: dict[int, Future[dict[str, Any]]] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._log: deque[str] = deque(maxlen=LOG_LINES)
        self._is_over = False
        # A program that does not read must not block its callers' event loop.
        self._lines: SimpleQueue[bytes | None] = SimpleQueue()
        for work in (self._read_log, self._read_answers, self._write_lines):
            threading.Thread(
                target=work, name=f"torchrl_sglang{work.__name__}", daemon=True
            ).start()
        # Also at the interpreter's exit.
        self.close = weakref.finalize(self, _end, self._popen, self._lines)
        self._write(settings)

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def has_ended(self) -> bool:
        return self._popen.poll() is not None

    def wait_ready(self, seconds: float) -> None:
        """Waits until tasks are loaded.

        Raises:
            ConfigurationError: if the environment fails to load, or takes longer.
        """
        try:
            self._ready.result(seconds)
        except FutureTimeoutError as error:
            self.close()
            raise ConfigurationError(
                f"{self._owner} has not started within start_timeout={seconds} s. Its "
                f"last lines:\n{self._tail()}"
            ) from error

    async def run(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the answer to a job; cancels the job if the caller is cancelled."""
        number, answer = next(self._numbers), Future[dict[str, Any]]()
        with self._lock:
            if self._is_over:
                raise self._failure()
            self._answers[number] = answer
        try:
            self._write({"id": number, **job})
            return await asyncio.wrap_future(answer)
        except asyncio.CancelledError:
            self._write({"cancel": number})
            raise
        finally:
            with self._lock:
                self._answers.pop(number, None)

    def _write(self, value: Mapping[str, Any]) -> None:
        self._lines.put((json.dumps(value) + "\n").encode())

    def _write_lines(self) -> None:
        assert self._popen.stdin is not None
        # At the end of the process, its answers end.
        with suppress(OSError), io.BufferedWriter(self._popen.stdin) as pipe:
            while (line := self._lines.get()) is not None:
                pipe.write(line)
                pipe.flush()

    def _read_log(self) -> None:
        for line in _lines(self._popen.stderr, LOG_LINE_BYTES):
            self._log.append(line.decode(errors="replace").rstrip())

    def _read_answers(self) -> None:
        for line in _lines(self._popen.stdout, MAX_ANSWER_BYTES):
            try:
                answer = json.loads(line)["answer"]
                if answer.keys().isdisjoint(("id", "num_tasks", "failure")):
                    raise ValueError
            except (ValueError, LookupError, TypeError, AttributeError):
                # A library printed it while verifiers was imported.
                printed = line[:LOG_LINE_BYTES].decode(errors="replace")
                self._log.append(printed.rstrip())
            else:
                self._take(answer)
        self._popen.wait()
        self._lines.put(None)
        failure = self._failure()
        with self._lock:
            self._is_over = True
            waiting = list(self._answers.values())
        if not self._ready.done():
            self._ready.set_exception(ConfigurationError(str(failure)))
        for future in waiting:
            # Its caller may be cancelled at this moment.
            with suppress(InvalidStateError):
                future.set_exception(failure)

    def _take(self, answer: dict[str, Any]) -> None:
        if "num_tasks" in answer:
            self.num_tasks = answer["num_tasks"]
            with suppress(InvalidStateError):
                self._ready.set_result(None)
        elif "id" not in answer:
            self._ready.set_exception(
                ConfigurationError(
                    f"{self._owner} cannot be loaded: {answer['failure']}"
                )
            )
        else:
            with self._lock:
                future = self._answers.get(answer["id"])
            if future is not None:
                with suppress(InvalidStateError):
                    future.set_result(answer)

    def _failure(self) -> UserFunctionError:
        return UserFunctionError(
            f"The process of {self._owner} ended with status "
            f"{self._popen.poll()}. Its last lines:\n{self._tail()}"
        )

    def _tail(self) -> str:
        return "\n".join(self._log)


def _end(process: subprocess.Popen[bytes], lines: SimpleQueue[bytes | None]) -> None:
    """Lets the process clean up its episodes, and ends it if that takes too long."""
    lines.put(None)
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        end_tree(process)


def _lines(pipe: Any, most: int) -> Iterator[bytes]:
    """Yields the lines of a pipe, at most so many bytes, and closes it at its end."""
    with io.BufferedReader(pipe) as lines:
        while line := lines.readline(most):
            yield line


def _metrics(traces: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns means of finite rewards and metrics over the traces of each role.

    A name is the same in every episode, whatever other traces and names there are.
    """
    values = defaultdict(list)
    for trace in traces:
        prefix = "" if trace["role"] == ROLE else f"{trace['role']}/"
        rewards = {f"reward/{name}": v for name, v in trace["rewards"].items()}
        for name, value in {**trace["metrics"], **rewards}.items():
            if math.isfinite(value):
                values[prefix + name].append(value)
    return {name: sum(numbers) / len(numbers) for name, numbers in values.items()}


def _find_python(python: str | os.PathLike[str]) -> str:
    path = os.path.expanduser(os.fspath(python))
    program = shutil.which(path)
    if program is None:
        raise ConfigurationError(
            f"python={path!r} is no program; give the interpreter of an environment "
            f"with verifiers: python -m venv DIR; DIR/bin/pip install 'verifiers>=0.4'."
        )
    return os.path.abspath(program)


def _named(name: str, value: str | Mapping[str, Any], key: str) -> dict[str, Any]:
    """Returns settings from a name or from settings with a name."""
    if isinstance(value, str):
        return {key: value}
    settings = dict(check_mapping(name, value))
    if key not in settings:
        raise ConfigurationError(f"{name}={settings!r} needs {key!r}.")
    return settings
