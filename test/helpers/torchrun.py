"""Programs on several ranks, as torchrun starts them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from helpers.forked_starts import trainer_python


def run_ranks(
    program: Path,
    *arguments: object,
    ranks: int = 2,
    timeout: float = 180.0,
    python: str | None = None,
    folder: Path | None = None,
    **environment: str,
) -> str:
    """Runs a program on ranks of this machine, or alone, and returns what it printed.

    Args:
        program: file to run.
        arguments: of the program.
        ranks: number of processes; one is started without torchrun.
        timeout: seconds that all of them have.
        python: interpreter; by default one that has imported a trainer's packages.
        folder: working directory.
        environment: variables beside this process's.
    """
    python = python or trainer_python()
    command = [python]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
        # Ports that are free, of this machine alone.
        command += ["--master-port", "0", "--rdzv-backend", "c10d"]
        command += ["--rdzv-endpoint", "localhost:0"]
        # Otherwise the ranks are started with Python itself, and import everything.
        command += ["--no-python", python]
    done = subprocess.run(
        [*command, str(program), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=folder,
        env={
            **os.environ,
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            **environment,
        },
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout
