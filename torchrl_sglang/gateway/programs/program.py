"""``AgentProgram``: a command as an agent."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.gateway.programs.container import (
    WORK,
    Container,
    run_in_container,
)
from torchrl_sglang.gateway.programs.process import (
    END_SECONDS,
    ProcessTree,
    ProgramLimits,
    ProgramResult,
    TreeRunner,
    in_thread,
)
from torchrl_sglang.gateway.programs.templates import fill, task_values
from torchrl_sglang.support.blocking import BlockingCalls
from torchrl_sglang.support.checks import check_count, check_mapping, check_seconds
from torchrl_sglang.support.log import torchrl_logger

INHERITED = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TMPDIR", "TZ", "LANG", "LC_ALL"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR"),
)
"""Inherited variables of a program; no keys, and no rank of a trainer."""

TOLD_CHARACTERS = 300


Command = Sequence[str] | Callable[..., Sequence[str]]
Reward = Callable[[Any, ProgramResult], Any]


@dataclass(frozen=True, kw_only=True)
class AgentProgram:
    r"""A program as an agent, such as a coding agent's command line.

    It is given to :meth:`.Gateway.run_agents`, :class:`.AsyncLLMCollector` and
    :class:`.GRPO` as ``agent``. For each session the command is run once, with the
    session's address and key in ``OPENAI_BASE_URL``, ``OPENAI_API_KEY``,
    ``ANTHROPIC_BASE_URL`` and ``ANTHROPIC_API_KEY``. At its end, ``reward`` is called
    with its output.

    Texts of the command, of variables and of ``stdin`` have placeholders in braces: the
    task's columns, as in ``"Fix {issue}"``, or ``{task}`` if it is not a mapping, and
    ``{base_url}``, ``{url}`` (without ``/v1``), ``{api_key}`` and ``{folder}``. Braces
    around other texts than a name are kept; ``{{name}}`` is ``{name}``.

    A program leaves no process behind at its end, after a time-out, when its run is
    cancelled, or if the trainer is killed.

    Raises:
        ConfigurationError: if an argument is wrong.

    Examples:
        >>> import asyncio
        >>> program = AgentProgram(
        ...     command=["sh", "-c", "echo $(( {a} + {b} ))"],
        ...     reward=lambda task, result: float(result.stdout == "3\n"),
        ... )
        >>> with Gateway(engine) as gateway:
        ...     tasks = [{"a": 1, "b": 2}]
        ...     groups = asyncio.run(gateway.run_agents(program, tasks, group_size=2))
        >>> [session.reward for session in groups[0]]
        [1.0, 1.0]
    """

    command: Command
    """Program and arguments, or a function for them, with the signature of an agent
    plus the folder: ``(task, *, base_url, api_key, folder)``. No shell is involved, and
    users of the machine can read arguments: long texts and secrets belong into
    ``stdin`` and ``environment``."""
    reward: Reward | None
    """``(task, result)``, a function or a coroutine function for the reward; ``result``
    is a :class:`.ProgramResult`. It is called after a time-out and after an error, too.
    ``None``: rewards are set elsewhere, such as by the program with ``POST
    /sessions/{name}/reward``."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Its variables, beside the four above and the trainer's ``PATH``, ``HOME``,
    ``USER``, ``LOGNAME``, ``SHELL``, ``TMPDIR``, ``TZ``, ``LANG``, ``LC_ALL``,
    ``SSL_CERT_FILE`` and ``SSL_CERT_DIR``."""
    stdin: str | None = None
    """Its input; by default nothing."""
    folder: str | os.PathLike[str] | None = None
    """Working folder, possibly with placeholders. Defaults to a new folder, which is
    removed after the reward function."""
    prepare: Callable[[Any, Path], Any] | None = None
    """``(task, folder)``, a function or a coroutine function to fill the folder."""
    timeout: float = 1800.0
    """Timeout of the program, in seconds. It is ended then, and ``reward`` rates it."""
    max_output: int = 2**20
    """Most bytes kept of its output, and of its errors: the last bytes."""
    container: str | Container | None = None
    """Image or :class:`.Container` of the program. Defaults to none."""

    def __post_init__(self) -> None:
        if not callable(self.command):
            _check_command(self.command)
        for name in ("reward", "prepare"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise ConfigurationError(f"{name} must be a function, got {value!r}.")
        for key, text in check_mapping("environment", self.environment).items():
            if not isinstance(key, str) or not isinstance(text, str) or "=" in key:
                raise ConfigurationError(
                    f"environment must map names to texts, got {key!r}: {text!r}."
                )
        if self.stdin is not None and not isinstance(self.stdin, str):
            raise ConfigurationError(f"stdin must be a text, got {self.stdin!r}.")
        check_seconds("timeout", self.timeout)
        check_count("max_output", self.max_output)
        if isinstance(self.container, str):
            object.__setattr__(self, "container", Container(image=self.container))
        elif not isinstance(self.container, Container | None):
            raise ConfigurationError(
                f"container must be an image's name or a Container, got "
                f"{self.container!r}."
            )

    async def __call__(self, task: Any, *, base_url: str, api_key: str) -> float | None:
        """Runs the program in a session, and returns the reward.

        Raises:
            ConfigurationError: if the program or folder does not exist, or a
                placeholder has no value in the task.
            GatewayError: if no container can be created.
        """
        runner = TreeRunner()
        blocking = BlockingCalls("torchrl_sglang-functions", 1)
        call = partial(blocking.call, seconds=self.timeout)
        try:
            async with self._folder(task, runner, blocking) as (folder, temporary):
                if self.prepare is not None:
                    await call(self.prepare, task, folder)
                values = {"base_url": base_url, "api_key": api_key}
                tree = await self._tree(task, folder, temporary, values, call)
                result = await self._run(tree, runner)
                if self.reward is None:
                    return None
                # The caller checks that it is a number.
                reward: float | None = await call(self.reward, task, result)
                return reward
        finally:
            blocking.close()

    @asynccontextmanager
    async def _folder(
        self, task: Any, runner: TreeRunner, blocking: BlockingCalls
    ) -> AsyncIterator[tuple[Path, Path | None]]:
        """Yields the working folder, and the folder to remove, if any."""
        if self.folder is not None:
            path = os.fspath(self.folder)
            yield _find_folder(fill("folder", path, task_values(task))), None
            return
        temporary = Path(tempfile.mkdtemp(prefix="torchrl_sglang_program_"))
        try:
            yield temporary, temporary
        finally:
            removed = blocking.submit(partial(_remove, temporary, runner))
            # Shielded: the folder is removed even on a second cancellation.
            await asyncio.shield(asyncio.wrap_future(removed))

    async def _tree(
        self,
        task: Any,
        folder: Path,
        temporary: Path | None,
        given: dict[str, str],
        call: Callable[..., Any],
    ) -> ProcessTree:
        """Builds the task's process tree with only the explicitly given environment."""
        if isinstance(self.container, Container):
            given["base_url"] = self.container.address_of(given["base_url"])
        given["folder"] = str(folder) if self.container is None else WORK
        url = given["base_url"].removesuffix("/v1")
        values = {**task_values(task), **given, "url": url}
        if callable(self.command):
            line = await call(self.command, task, **given)
            _check_command(line)
        else:
            line = [fill("An argument", argument, values) for argument in self.command]
        return ProcessTree(
            command=list(line),
            environment=self._environment(values),
            folder=folder,
            stdin=None if self.stdin is None else fill("stdin", self.stdin, values),
            temporary=temporary,
        )

    async def _run(self, tree: ProcessTree, runner: TreeRunner) -> ProgramResult:
        """Runs the program, in its container or without."""
        limits = ProgramLimits(seconds=self.timeout, most_bytes=self.max_output)
        if isinstance(self.container, Container):
            run = partial(run_in_container, self.container, tree, limits)
            outcome = await in_thread(runner, run)
        else:
            environment = {**_inherited(), **tree.environment}
            tree = replace(tree, environment=environment)
            _check_program(tree)
            outcome = await in_thread(runner, lambda own: own.run(tree, limits))
        _tell_failure(tree.command[0], outcome, self.timeout)
        return outcome

    def _environment(self, values: Mapping[str, Any]) -> dict[str, str]:
        """Returns the variables set by this class and its user."""
        addresses = {
            "OPENAI_BASE_URL": values["base_url"],
            "OPENAI_API_KEY": values["api_key"],
            "ANTHROPIC_BASE_URL": values["url"],
            "ANTHROPIC_API_KEY": values["api_key"],
        }
        extra = {
            name: fill(f"The variable {name}", text, values)
            for name, text in self.environment.items()
        }
        return addresses | extra


def _inherited() -> dict[str, str]:
    return {name: os.environ[name] for name in INHERITED if name in os.environ}


def _remove(folder: Path, runner: TreeRunner) -> None:
    """Removes a folder after the end of its program."""
    if runner.has_begun:
        runner.done.wait(END_SECONDS)
    shutil.rmtree(folder, ignore_errors=True)


def _find_folder(path: str) -> Path:
    folder = Path(path).expanduser().absolute()
    if not folder.is_dir():
        raise ConfigurationError(
            f"The working folder {path!r} is not there; make it, or leave folder out "
            f"to have a new one."
        )
    return folder


def _check_command(command: Any) -> None:
    if isinstance(command, str):
        raise ConfigurationError(
            f"command must be a list of the program and its arguments, got the text "
            f"{command!r}; give shlex.split(...) of it, or ['sh', '-c', ...] where it "
            f"needs a shell."
        )
    if (
        not isinstance(command, Sequence)
        or not command
        or not all(isinstance(part, str) for part in command)
    ):
        raise ConfigurationError(
            f"command must be a list of texts, the program and its arguments, or a "
            f"function that returns one, got {command!r}."
        )


def _check_program(tree: ProcessTree) -> None:
    name, path = tree.command[0], tree.environment.get("PATH", os.defpath)
    is_path = os.sep in name
    if shutil.which(str(tree.folder / name) if is_path else name, path=path) is None:
        where = "" if is_path else f" in PATH, which is {path!r}"
        raise ConfigurationError(
            f"There is no program {name!r}{where}; install it, or give its path or "
            f"environment={{'PATH': ...}}."
        )


def _tell_failure(name: str, ended: ProgramResult, timeout: float) -> None:
    """Logs the failure of a program; the reward function rates it."""
    if not ended.status and not ended.timed_out:
        return
    failure = (
        f"was ended after timeout={timeout:g} s"
        if ended.timed_out
        else f"ended with status {ended.status}"
    )
    message = ended.stderr.strip()[-TOLD_CHARACTERS:]
    torchrl_logger.warning(f"The program {name!r} {failure}. {message}".rstrip())
