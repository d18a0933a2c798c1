"""Starts of Python programs that take a second or less instead of half a minute.

Nearly all of a start is imports. Within :func:`forked_starts`, the first server on CPU
that is started leaves behind a process that has everything imported and has run
nothing, and every later server is a fork of it. So is every trainer that is started
with :func:`trainer_python`::

    test ── watchdog.py ── interpreter.py ···· preloaded.py ── server ── scheduler ...
    test ── interpreter.py ···· preloaded.py ── trainer ── watchdog.py ...
            (killed with)      (one for each SGLang, and one for trainers)

``interpreter.py`` takes the place of Python. It hands its arguments, its environment,
its streams and the signals that it gets over, lives exactly as long as the program
does, and takes it along when it is killed.

What differs from a true start: the program is no descendant of the process that started
it, and leads a session of its own (:func:`forked_process`). Resource limits are those
of the test session. A test about process trees starts its server with
:func:`true_interpreter`. One test of each way in which a user starts a trainer does so
truly: ``torchrun``, a script on standard input, the command ``serve``.

For tests alone: a server that is to last belongs to a process tree of its own.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from helpers.forked_starts.starter import Kind, Starter
from torchrl_sglang.backends.launch import cpu, loaders
from torchrl_sglang.backends.launch.watchdog import descendants

__all__ = [
    "forked_process",
    "forked_starts",
    "processes_below",
    "trainer_python",
    "true_interpreter",
]

TRAINER_VARIABLE = "FORKED_STARTS_TRAINER"
"""Names the interpreter that forks trainers, for the workers of pytest."""

_LIBRARIES = ("HF_", "HOME", "LD_", "OMP_", "TORCH_", "TRANSFORMERS_")
"""How variables begin that libraries of both kinds read when they are imported."""

_FOLDER = Path(__file__).parent


@contextmanager
def forked_starts() -> Iterator[Path]:
    """Forks the servers on CPU that are started meanwhile, here and in subprocesses.

    Sets ``TORCHRL_SGLANG_PYTHON``, so a start that names another interpreter with
    ``python=`` is a true one. :func:`trainer_python` returns an interpreter that forks.

    Yields:
        The interpreter that forks servers.

    Raises:
        ConfigurationError: if SGLang's environment for CPU is not installed.

    Example of a fixture, in a ``conftest.py``::

        @pytest.fixture(scope="session", autouse=True)
        def quick_starts():
            with forked_starts():
                yield
    """
    kinds = {
        cpu.PYTHON_VARIABLE: servers(cpu.engine_python()),
        TRAINER_VARIABLE: trainers(Path(sys.executable)),
    }
    before = {name: os.environ.get(name) for name in kinds}
    with tempfile.TemporaryDirectory(prefix="forked_") as name:
        made = {
            variable: _make_interpreter(Path(name, Path(kind.module).stem), kind.python)
            for variable, kind in kinds.items()
        }
        with Starter({made[name].parents[1]: kind for name, kind in kinds.items()}):
            os.environ.update({name: str(path) for name, path in made.items()})
            try:
                yield made[cpu.PYTHON_VARIABLE]
            finally:
                for variable, value in before.items():
                    del os.environ[variable]
                    if value is not None:
                        os.environ[variable] = value


def trainer_python() -> str:
    """Returns an interpreter that forks its programs within :func:`forked_starts`.

    What it imports for them is in ``trainers.py``. Elsewhere it is ``sys.executable``.
    """
    return os.environ.get(TRAINER_VARIABLE, sys.executable)


def true_interpreter(interpreter: Path) -> Path:
    """Returns the interpreter that one which forks stands in for."""
    return (interpreter.parents[1] / "python").readlink()


def forked_process(pid: int) -> int:
    """Returns the id of the process that was forked for one, or of itself."""
    with suppress(OSError):
        word, _, number = Path(f"/proc/{pid}/comm").read_text().partition(" ")
        if word == "forked":
            return int(number)
    return pid


def processes_below(pid: int) -> list[int]:
    """Returns the living descendants of a process, with the programs forked for them.

    The process may be one for which a program was forked, too.
    """
    found = []
    for below in (pid, *descendants(pid)):
        if below != pid:
            found.append(below)
        if (forked := forked_process(below)) != below:
            found += [forked, *processes_below(forked)]
    return found


def servers(python: Path) -> Kind:
    """Returns how servers are forked, with at most six environments of imports."""
    return Kind(
        python=python,
        module="servers.py",
        module_arguments=(str(Path(cpu.__file__).with_name("launch.py")),),
        accepts=lambda arguments: Path(arguments[0]).name == "launch.py",
        read_by_imports=(*_LIBRARIES, "CUDA_", "PYTHONPATH", "SGLANG_", "TRITON_"),
        applied_later=frozenset(
            {
                "OMP_NUM_THREADS",
                "SGLANG_CPU_OMP_THREADS_BIND",
                "SGLANG_RETURN_ORIGINAL_LOGPROB",
            }
        ),
        added_later=frozenset({str(loaders.FOLDER)}),
        most=6,
    )


def trainers(python: Path) -> Kind:
    """Returns how programs are forked that import the package, as tests do."""
    return Kind(
        python=python,
        module="trainers.py",
        accepts=lambda arguments: (
            not arguments[0].startswith("-") or arguments[0] in ("-c", "-m")
        ),
        read_by_imports=(*_LIBRARIES, "LANG", "LC_", "PYTHON"),
        # Ray sets the second one in a process that has used it, and torchrun the last
        # one for its ranks.
        applied_later=frozenset(
            {
                "OMP_NUM_THREADS",
                "PYTHONBREAKPOINT",
                "PYTHONPATH",
                "TORCH_NCCL_ASYNC_ERROR_HANDLING",
            }
        ),
        environments=(dict(os.environ),),
        most=1,
    )


def _make_interpreter(folder: Path, python: Path) -> Path:
    """Makes a folder that looks like the environment of ``python``; returns its own."""
    interpreter = folder / "bin" / "python"
    interpreter.parent.mkdir(parents=True)
    # Isolated and without site-packages, it starts in 15 ms.
    source = (_FOLDER / "interpreter.py").read_text()
    interpreter.write_text(f"#!{sys.executable} -IS\n{source}")
    interpreter.chmod(0o755)
    (folder / "python").symlink_to(python)
    for older in python.parent.parent.glob("sglang-*"):
        (folder / older.name).symlink_to(older)
    return interpreter
