"""Entry module of an SGLang server on a machine without an accelerator.

Run as a script by the Python of the engine environment, never imported by the trainer;
``torchrl_sglang`` is not installed there, so this file stands alone. Its arguments are
those of SGLang's own launcher::

    <engine python> launch.py --model-path ... --device cpu ...

SGLang starts its schedulers with :mod:`multiprocessing`'s ``spawn`` method, which
imports this file again, as ``__mp_main__``, before it runs anything else. Whatever the
whole process tree needs is therefore done at import, in :func:`prepare_process`, and
only the launcher itself is behind the ``__main__`` test.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import signal
import socket
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

PARENT_PID_VARIABLE = "TORCHRL_SGLANG_PARENT_PID"
"""Names the process that is about to start one of these: its death must be ours."""

PR_SET_PDEATHSIG = 1
"""From ``linux/prctl.h``."""

KERNEL_PACKAGE = "sgl_kernel"
"""SGLang's compiled kernels, which have no CPU wheel."""

TORCHVISION_OPERATORS = ("nms", "qnms")
"""The operators for which ``torchvision`` registers a fake kernel as it is imported."""

LOOPBACK = ("127.0.0.1", "localhost")
"""Where the ranks of a server on one machine meet."""

GC_THRESHOLD = 50_000
"""Allocations between garbage collections; Python's own 700 makes imports slower."""

PINNING_CONSTRUCTORS = ("tensor", "empty", "zeros", "ones", "full", "empty_like")
"""The functions of ``torch`` that SGLang calls with ``pin_memory=True``."""


def die_with_parent() -> None:
    """Have the kernel kill this process when the one that started it dies.

    A killed trainer, or a killed launcher, runs no clean-up of its own, and a scheduler
    left behind holds its memory and its port. Linux delivers the signal when the
    *thread* that started this process ends, so starters use a thread that lasts. The
    signal cannot come for a parent that died before it was asked for; its pid, left in
    the environment, tells.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    expected = os.environ.get(PARENT_PID_VARIABLE)
    if expected is not None and int(expected) != os.getppid():
        sys.exit(f"The process that started this server, {expected}, is gone.")
    os.environ[PARENT_PID_VARIABLE] = str(os.getpid())


class _MissingKernel:
    """A kernel that can be imported and passed around, and says so when called."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(
            f"{self._name} is a compiled kernel of SGLang, and there is none for this "
            "CPU. The model or flag that needs it cannot run without an accelerator."
        )

    def __getattr__(self, name: str) -> _MissingKernel:
        return _attribute_of(self._name, name)

    def __repr__(self) -> str:
        return f"<missing kernel {self._name}>"


class _KernelModule(ModuleType):
    """A module that has every public attribute, each a :class:`_MissingKernel`."""

    def __getattr__(self, name: str) -> _MissingKernel:
        return _attribute_of(self.__name__, name)


def _attribute_of(owner: str, name: str) -> _MissingKernel:
    """Invent an attribute, except those that Python itself looks for."""
    if name.startswith("__"):
        raise AttributeError(f"{owner} has no attribute {name}")
    return _MissingKernel(f"{owner}.{name}")


class _KernelFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports ``sgl_kernel`` and anything below it as a :class:`_KernelModule`."""

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != KERNEL_PACKAGE:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _KernelModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run: the attributes are made as they are asked for."""


def stand_in_for_kernels() -> None:
    """Let ``import sgl_kernel`` succeed where no such package is installed.

    SGLang imports its kernels by name at the top of many modules; the path of a dense
    text model on CPU calls none of them.
    """
    if importlib.util.find_spec(KERNEL_PACKAGE) is None:
        sys.meta_path.append(_KernelFinder())


def define_torchvision_operators() -> None:
    """Give ``torchvision`` the operator schemas that its compiled library defines.

    SGLang and transformers import ``torchvision``. Its library is built for one build
    of PyTorch. Beside that one it loads, and defines its operators. Beside another one,
    such as a build for CPU, it does not load, and importing ``torchvision`` fails where
    it registers fake kernels for them; there they are defined here.
    """
    import torch

    package = importlib.util.find_spec("torchvision")
    if package is None or package.origin is None:
        return
    operators: Any = torch.ops
    try:
        # What torchvision does first, and does again without effect.
        operators.load_library(str(Path(package.origin).with_name("_C.so")))
    except OSError:
        library: Any = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
        for operator in TORCHVISION_OPERATORS:
            library.define(
                f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            )
        # A library takes its definitions along when it is collected.
        globals()["_torchvision_library"] = library


def drop_pinned_memory() -> None:
    """Make ``pin_memory`` a no-operation where there is no accelerator.

    Pinned memory is a promise to a device's copy engine; without a device PyTorch has
    no allocator for it and refuses. SGLang's LoRA path asks for it on CPU too.
    """
    import torch

    if torch.accelerator.is_available():
        return
    for name in PINNING_CONSTRUCTORS:
        setattr(torch, name, _without_pinning(getattr(torch, name)))
    tensor_type: Any = torch.Tensor
    tensor_type.pin_memory = lambda tensor, device=None: tensor


def _without_pinning(constructor: Any) -> Any:
    @functools.wraps(constructor)
    def wrapper(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        return constructor(*args, **kwargs)

    return wrapper


def collect_garbage_rarely() -> None:
    """Import faster: nothing that an import allocates is garbage.

    Each process of the tree imports some 6,500 modules, and the collector, run every
    few hundred allocations, takes a fifth of that time.
    """
    gc.set_threshold(GC_THRESHOLD)


def keep_stores_on_loopback() -> None:
    """Have a store of this machine's ranks listen on loopback alone.

    PyTorch's listens on every address, and asks nobody for a key.
    """
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
    make_store = rendezvous.TCPStore

    def make(*, host_name: str, port: int, is_master: bool, **options: Any) -> Any:
        if is_master and host_name in LOOPBACK:
            # The store closes it at its end.
            options["master_listen_fd"] = socket.create_server(
                (host_name, port)
            ).detach()
        return make_store(
            host_name=host_name, port=port, is_master=is_master, **options
        )

    rendezvous.TCPStore = make


def prepare_process() -> None:
    """Do what every process of the server's tree needs before SGLang is imported."""
    die_with_parent()
    collect_garbage_rarely()
    stand_in_for_kernels()
    define_torchvision_operators()
    drop_pinned_memory()
    keep_stores_on_loopback()


def main(arguments: list[str]) -> None:
    """Run SGLang's HTTP server until it ends, and leave no process behind."""
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    try:
        run_server(prepare_server_args(arguments))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ in ("__main__", "__mp_main__"):
    prepare_process()
if __name__ == "__main__":
    main(sys.argv[1:])
