"""Containers of Docker or Podman, each for a run of a program."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from yarl import URL

from torchrl_sglang.errors import ConfigurationError, GatewayError
from torchrl_sglang.gateway.programs.process import (
    ProcessTree,
    ProgramLimits,
    ProgramResult,
    TreeRunner,
)
from torchrl_sglang.support.urls import is_loopback

RUNTIMES = ("docker", "podman")
WORK = "/work"
"""Working folder in all containers, for equal prompts."""
LABEL = "torchrl_sglang"

CLIENT_LIMITS = ProgramLimits(seconds=120.0, most_bytes=2**16)
"""Limits of creating and removing a container; its image is present."""

TOLD_CHARACTERS = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class Container:
    """The container of a program.

    Its working folder is ``/work``, which is ``HOME``, too, and it has the image's
    other variables and the program's. It is removed when the program ends, after a
    time-out, and if the trainer is killed.

    Raises:
        ConfigurationError: without Docker and Podman, or if an argument is wrong.

    Examples:
        >>> Container(image="agent:1", options=("--memory=4g",))  # doctest: +SKIP
    """

    image: str
    """Image, which has to be present: nothing is pulled."""
    runtime: str | None = None
    """``"docker"`` or ``"podman"``; by default the first installed."""
    network: str = "host"
    """Network. ``"host"``, the default, is the machine's own, where a gateway on
    127.0.0.1 is directly reachable."""
    address: str | None = None
    """Name or address of the gateway's machine in another network, such as
    ``"host.docker.internal"``; the gateway then listens on an address of this network,
    with ``Gateway(engine, host=..., api_key=...)``."""
    options: Sequence[str] = ()
    """Further options of ``docker create``."""

    def __post_init__(self) -> None:
        if not isinstance(self.image, str) or not self.image:
            raise ConfigurationError(
                f"image must be the name of an image, got {self.image!r}."
            )
        if isinstance(self.options, str):
            raise ConfigurationError(
                f"options must be a list of texts, got {self.options!r}; give "
                f"[{self.options!r}]."
            )
        object.__setattr__(self, "runtime", find_runtime(self.runtime))

    def address_of(self, base_url: str) -> str:
        """Returns a gateway's address from inside the container.

        Raises:
            ConfigurationError: if it cannot.
        """
        url = URL(base_url)
        if self.address is not None:
            return str(url.with_host(self.address))
        if self.network != "host" and is_loopback(url.host or ""):
            raise ConfigurationError(
                f"A container in the network {self.network!r} cannot reach a gateway "
                f"on {url.host}: leave network at 'host', or make the gateway with "
                f"host=... and api_key=..., and give the container the address=... of "
                f"that machine."
            )
        return base_url


def find_runtime(wanted: str | None) -> str:
    """Returns the path of Docker or Podman."""
    if wanted is not None and Path(wanted).name not in RUNTIMES:
        raise ConfigurationError(
            f"runtime={wanted!r} is not one of {', '.join(map(repr, RUNTIMES))}."
        )
    for name in RUNTIMES if wanted is None else (wanted,):
        if (path := shutil.which(name)) is not None:
            return path
    missing = "neither docker nor podman is" if wanted is None else f"{wanted!r} is not"
    raise ConfigurationError(
        f"A container needs Docker or Podman, and {missing} in PATH; install one of "
        f"them, or leave container out to run the program on this machine."
    )


def create_command(
    container: Container, name: str, variables: Path, tree: ProcessTree
) -> list[str]:
    """Returns the command to create a container for a program."""
    runtime = str(container.runtime)
    # Files of a container's root belong to root; rootless Podman's root is the user.
    user = [f"--user={os.getuid()}:{os.getgid()}"] if _is_docker(runtime) else []
    return [
        *(runtime, "create", "--pull=never", f"--name={name}", f"--label={LABEL}"),
        *(f"--network={container.network}", f"--env-file={variables}"),
        *(f"--volume={tree.folder}:{WORK}", f"--workdir={WORK}", *user),
        *(["--interactive"] * (tree.stdin is not None)),
        *container.options,
        container.image,
        *tree.command,
    ]


def remove_command(runtime: str, name: str) -> list[str]:
    """Returns the command to end and remove a container."""
    # Podman would wait for its program to end by itself; Docker does not.
    at_once = [] if _is_docker(runtime) else ["--time=0"]
    return [runtime, "rm", "--force", "--volumes", *at_once, name]


def _is_docker(runtime: str) -> bool:
    return Path(runtime).name == "docker"


def run_in_container(
    container: Container, tree: ProcessTree, limits: ProgramLimits, runner: TreeRunner
) -> ProgramResult:
    """Runs a program in a container of its own."""
    runtime, name = str(container.runtime), f"torchrl_sglang-{secrets.token_hex(8)}"
    remove = remove_command(runtime, name)
    interactive = ["--interactive"] * (tree.stdin is not None)
    start = [runtime, "start", "--attach", *interactive, name]
    try:
        _create(container, name, tree, runner)
        # The watchdog removes it, also if the trainer is killed.
        started = replace(
            _of_client(tree.folder, start),
            stdin=tree.stdin,
            temporary=tree.temporary,
            cleanup=remove,
        )
        return runner.run(started, limits)
    except BaseException:
        # Nothing else ends this process tree.
        TreeRunner().run(_of_client(tree.folder, remove), CLIENT_LIMITS)
        raise


def _create(
    container: Container, name: str, tree: ProcessTree, runner: TreeRunner
) -> None:
    with _variables({"HOME": WORK} | dict(tree.environment)) as file:
        command = create_command(container, name, file, tree)
        client = replace(_of_client(tree.folder, command), temporary=file.parent)
        done = runner.run(client, CLIENT_LIMITS)
    if done.status or done.timed_out:
        raise _refused(container, done)


def _of_client(folder: Path, command: Sequence[str]) -> ProcessTree:
    """Returns a command of Docker or Podman, with the user's own settings."""
    return ProcessTree(command=command, environment=dict(os.environ), folder=folder)


@contextmanager
def _variables(environment: Mapping[str, str]) -> Iterator[Path]:
    """Yields a file of variables, in a folder open only to the user."""
    for name, value in environment.items():
        if "\n" in value:
            raise ConfigurationError(
                f"The variable {name} has several lines, which a container cannot be "
                f"given; write it into a file in prepare=..."
            )
    lines = [f"{name}={value}\n" for name, value in environment.items()]
    with tempfile.TemporaryDirectory(prefix="torchrl_sglang_variables_") as hidden:
        file = Path(hidden, "variables")
        file.write_text("".join(lines))
        yield file


def _refused(container: Container, done: ProgramResult) -> GatewayError:
    message = done.stderr.strip()[-TOLD_CHARACTERS:]
    runtime = Path(str(container.runtime)).name
    remedy = ""
    if "connect to the Docker daemon" in message:
        remedy = " Start its daemon, or give runtime='podman' where there is Podman."
    elif "No such image" in message or "image not known" in message:
        remedy = f" `{runtime} pull {container.image}` fetches it."
    return GatewayError(
        f"{runtime} has created no container of {container.image!r}: "
        f"{message or f'it ended with status {done.status}'}{remedy}"
    )
