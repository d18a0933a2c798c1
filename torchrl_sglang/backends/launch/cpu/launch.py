"""Entry module of an SGLang server on a machine without an accelerator.

A script for the Python of the engine environment. ``torchrl_sglang`` is not installed
there, so the file stands alone. Its arguments are SGLang's own::

    <engine python> launch.py --model-path ... --device cpu ...

SGLang spawns its schedulers with :mod:`multiprocessing`, which imports this file again
as ``__mp_main__``. So every process of the tree runs :func:`prepare_process` at import.
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
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

PARENT_PID_VARIABLE = "TORCHRL_SGLANG_PARENT_PID"

KERNEL_PACKAGE = "sgl_kernel"
"""SGLang's compiled kernels; there is no wheel for CPU."""


def die_with_parent() -> None:
    """Makes the kernel kill this process when its parent dies.

    Linux sends the signal when the parent *thread* of this process ends. The pid in the
    environment shows whether the parent died before the request.
    """
    if not sys.platform.startswith("linux"):
        return
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL, 0, 0, 0)
    expected = os.environ.get(PARENT_PID_VARIABLE)
    if expected is not None and int(expected) != os.getppid():
        sys.exit(f"The process that started this server, {expected}, is gone.")
    os.environ[PARENT_PID_VARIABLE] = str(os.getpid())


class _MissingKernel(ModuleType):
    """A module or kernel with every public attribute, which raises when called."""

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(
            f"{self.__name__} is a compiled kernel of SGLang, and there is none for "
            "this CPU. The model or flag that needs it cannot run without an "
            "accelerator."
        )

    def __getattr__(self, name: str) -> _MissingKernel:
        # Python itself looks for these.
        if name.startswith("__"):
            raise AttributeError(f"{self.__name__} has no attribute {name}")
        return _MissingKernel(f"{self.__name__}.{name}")


class _KernelFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports ``sgl_kernel`` and anything below it as a :class:`_MissingKernel`."""

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != KERNEL_PACKAGE:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _MissingKernel(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Runs nothing: attributes are made on access."""


def stand_in_for_kernels() -> None:
    """Makes ``import sgl_kernel`` succeed where no such package is installed.

    Many modules of SGLang import kernels; a dense text model on CPU calls none.
    """
    if importlib.util.find_spec(KERNEL_PACKAGE) is None:
        sys.meta_path.append(_KernelFinder())
        _stand_in_for_operators()


def _stand_in_for_operators() -> None:
    """Makes operators such as ``torch.ops.sgl_kernel.name`` importable.

    Some models, and with them the processors of all vision models, bind an operator to
    a name at import. Functions test with :func:`hasattr` which operators exist, and use
    alternatives; for functions, none exists.
    """
    import torch

    operators: Any = torch.ops
    namespace = type(operators.sgl_kernel)

    class Operators(namespace):  # type: ignore[misc,valid-type]
        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                # Imported code runs under this name.
                if sys._getframe(1).f_code.co_name != "<module>":
                    raise
            return _MissingKernel(f"torch.ops.{KERNEL_PACKAGE}.{name}")

    setattr(operators, KERNEL_PACKAGE, Operators(KERNEL_PACKAGE))


def define_torchvision_operators() -> None:
    """Defines the operators of ``torchvision`` where its library does not load.

    The library is built for a single build of PyTorch. With another build, such as a
    build for CPU, ``import torchvision`` fails where it registers fake kernels for the
    operators.
    """
    import torch

    package = importlib.util.find_spec("torchvision")
    if package is None or package.origin is None:
        return
    operators: Any = torch.ops
    try:
        # torchvision does the same; the second time has no effect.
        operators.load_library(str(Path(package.origin).with_name("_C.so")))
    except OSError:
        library: Any = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
        for name in ("nms", "qnms"):
            library.define(
                f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            )
        # A library's definitions disappear when it is collected.
        globals()["_torchvision_library"] = library


def drop_pinned_memory() -> None:
    """Makes ``pin_memory`` do nothing without an accelerator, where PyTorch refuses it.

    SGLang's LoRA code pins memory on CPU, too, and a server with expert routing output
    requests a pinned CUDA buffer.
    """
    import torch

    if torch.accelerator.is_available():
        return
    for name in ("tensor", "empty", "zeros", "ones", "full", "empty_like"):
        setattr(torch, name, _without_pinning(getattr(torch, name)))
    tensor_type: Any = torch.Tensor
    tensor_type.pin_memory = lambda tensor, device=None: tensor
    success = 0
    cuda: Any = torch.cuda
    cuda.cudart = lambda: SimpleNamespace(
        cudaHostRegister=lambda *place: success,
        cudaHostUnregister=lambda *place: success,
    )


def _without_pinning(constructor: Any) -> Any:
    @functools.wraps(constructor)
    def wrapper(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        return constructor(*args, **kwargs)

    return wrapper


def keep_stores_on_loopback() -> None:
    """Makes a store of this machine's ranks listen on loopback, not everywhere."""
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
    make_store = rendezvous.TCPStore

    def make(*, host_name: str, port: int, is_master: bool, **options: Any) -> Any:
        if is_master and host_name in ("127.0.0.1", "localhost"):
            listener = socket.create_server((host_name, port))
            # The store closes it at its end.
            options["master_listen_fd"] = listener.detach()
        return make_store(
            host_name=host_name, port=port, is_master=is_master, **options
        )

    rendezvous.TCPStore = make


def prepare_process() -> None:
    """Prepares a process of the server's tree before SGLang is imported."""
    die_with_parent()
    # With Python's 700, collections take a fifth of the time of some 6,500 imports.
    gc.set_threshold(50_000)
    stand_in_for_kernels()
    define_torchvision_operators()
    drop_pinned_memory()
    keep_stores_on_loopback()


def main(arguments: list[str]) -> None:
    """Runs SGLang's HTTP server until it ends, and leaves no process behind."""
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
