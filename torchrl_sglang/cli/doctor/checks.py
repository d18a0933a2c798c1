"""The checks of a machine, each a function and its row in :data:`CHECKS`."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import math
import os
import platform
import re
import resource
import secrets
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion

from torchrl_sglang.backends.launch import cpu
from torchrl_sglang.backends.launch.ports import PORTS
from torchrl_sglang.backends.launch.watchdog import descendants
from torchrl_sglang.cli.doctor.machine import (
    Machine,
    Rows,
    find_model,
    missing_files,
    read,
    read_json,
)

GIB = 1 << 30
PORTS_TRIED = 200
SOCKETS_WANTED = 2048  # Default of max_in_flight.
FEW_FILES = 256  # With fewer, a server's own connections and libraries do not open.
MAX_TEMP_PATH = 56  # A socket's path has at most 107 bytes, of which a server adds 51.
PROXIES = ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")
CUMEM = "NCCL_CUMEM_ENABLE"
SLOW = "weight updates are many times slower with it."
NCCL_VARIABLES = {
    CUMEM: "a server sets 0 unless it inherits this, and the first broadcast fails "
    "where the two sides differ.",
    # Servers with NCCL_CUMEM_ENABLE=0 need neither of the next two.
    "NCCL_P2P_DISABLE": f"it keeps GPUs from copying to each other directly; {SLOW}",
    "NCCL_SHM_DISABLE": f"it keeps NCCL from using shared memory; {SLOW}",
    "NCCL_NVLS_ENABLE": "servers inherit it, while SGLang's own default is 0.",
}
INSTALL = {
    "cpu": f"run `{cpu.INSTALL_COMMAND}`",
    "cuda": 'install it there, `pip install "sglang[all]>=0.5.15,<0.6"`',
}
WATCHDOG = "torchrl_sglang/backends/launch/watchdog.py"
SERVERS = re.compile(
    r"torchrl_sglang/backends/launch/(cpu/launch|router_launch)\.py"
    r"|sglang\.launch_server|sglang::"
)
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tiktoken.model")
WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")
LFS_POINTER = "version https://git-lfs"


class Finding(NamedTuple):
    """One line of the report."""

    level: str  # ok, warning or problem
    check: str  # its subject, in a word or two
    message: str  # state of the machine; a sentence
    remedy: str = ""  # what to do; a sentence, or empty


def run_checks(checks: Iterable[Callable[[Any], Rows]], subject: Any) -> list[Finding]:
    """Returns the findings of all checks of a machine, or of a cluster."""
    rows = [Finding(*row) for check in checks for row in check(subject)]
    return [row._replace(remedy="") if row.level == "ok" else row for row in rows]


def in_range(version: str, specifier: str) -> bool:
    """Returns whether a version lies in a range; any does if the range is empty."""
    try:
        return SpecifierSet(specifier).contains(version, prereleases=True)
    except InvalidVersion:
        return not specifier


def _python(machine: Machine) -> Rows:
    version, required = platform.python_version(), machine.required.python
    if in_range(version, required):
        yield "ok", "python", f"Python {version}."
    else:
        remedy = "Make the trainer's environment with a Python that is."
        yield "problem", "python", f"Python {version} is not in {required}.", remedy


def _packages(machine: Machine) -> Rows:
    for name, specifier in machine.required.packages.items():
        remedy = f'Run `pip install "{name}{specifier}"`.'
        try:
            distribution, version = _installed(name)
            importlib.import_module(name)
        except importlib.metadata.PackageNotFoundError:
            yield "problem", name, f"{name} is not installed.", remedy
        except Exception as error:  # noqa: BLE001 - A broken package may raise anything.
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            message = f"{distribution} {version} cannot be imported: {reason}."
            remedy = f"Install it again ({name}{specifier}) without SGLang's packages."
            yield "problem", name, message, remedy
        else:
            message = f"{distribution} {version}"
            if in_range(version, specifier):
                yield "ok", name, f"{message}."
            elif distribution == name:
                yield "problem", name, f"{message} is not in {specifier}.", remedy
            else:
                remedy = f"Run the tests with it, or replace it by {name}{specifier}."
                yield "warning", name, f"{message} is not in {specifier}.", remedy


def _installed(package: str) -> tuple[str, str]:
    """Returns the installed distribution, which may be a nightly, and its version."""
    nightly = f"{package}-nightly"
    for name in (package, nightly):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return name, importlib.metadata.version(name)
    raise importlib.metadata.PackageNotFoundError(package)


def _engine(machine: Machine) -> Rows:
    python, packages, error = machine.engine
    required, version = machine.required.sglang, packages.get("sglang")
    if version is None:
        install = f", or {INSTALL[machine.device]}"
        if error and (machine.device == "cuda" or cpu.INSTALL_COMMAND in error):
            install = ""
        remedy = f"Name an interpreter that has SGLang with --python{install}."
        yield "problem", "engine", error or f"{python} has no sglang.", remedy
        return
    if in_range(version, required):
        folder = Path(python).parent.parent
        beside = [v for v in cpu.VERSIONS if (folder / f"sglang-{v}").is_dir()]
        versions = ", ".join([version, *(beside if machine.device == "cpu" else ())])
        yield "ok", "engine", f"SGLang {versions} for {machine.device} in {python}."
    else:
        message = f"SGLang {version} in {python} is not in {required}."
        remedy = "Install a version that is, or run the tests with this one."
        yield "warning", "engine", message, remedy
    if router := packages.get("sglang-router"):
        yield "ok", "router", f"sglang-router {router}."
    else:
        message = f"{python} has no sglang-router, which several servers share."
        remedy = "Install sglang-router there, or start one server at a time."
        yield "warning", "router", message, remedy


def _gpus(machine: Machine) -> Rows:
    gpus, memory = machine.gpus, machine.gpus.memory
    driver = gpus.driver or "unknown"
    if not gpus.visible:
        message = f"There are {len(memory)} GPUs (driver {driver}), and PyTorch"
        if gpus.driver is not None and gpus.cuda is None:
            remedy = "Install a CUDA build of PyTorch to use them."
            yield "warning", "gpu", f"{message} is a build for CPU.", remedy
        elif gpus.driver is not None:
            remedy = "Check CUDA_VISIBLE_DEVICES, and that the driver is recent enough."
            message = f"{message} for CUDA {gpus.cuda} finds none."
            yield "warning", "gpu", message, remedy
        else:
            level = "problem" if machine.device == "cuda" else "ok"
            yield level, "gpu", "There is no GPU.", "Give --device cpu, or find one."
        return
    free = [f"{n} {f / 1024:.0f} of {t / 1024:.0f} GiB free" for n, f, t in memory]
    about = [f"{gpus.visible} visible", f"CUDA {gpus.cuda}", f"driver {driver}", *free]
    yield "ok", "gpu", f"{', '.join(about)}."
    full = [str(index) for index, (_, f, t) in enumerate(memory) if f < t / 2]
    if full:
        message = f"More than half of the memory of GPU {', '.join(full)} is in use."
        remedy = (
            "End programs on it, or give --cuda-devices or less mem_fraction_static."
        )
        yield "warning", "gpu memory", message, remedy
    if gpus.peers:
        yield "ok", "gpu links", "Each GPU reaches each other one directly."
    elif gpus.peers is False:
        message = "The GPUs cannot all copy to each other directly."
        remedy = "See `nvidia-smi topo -m`; weight updates are about ten times slower."
        yield "warning", "gpu links", message, remedy


def _nccl(machine: Machine) -> Rows:
    ok = True
    for name, message in NCCL_VARIABLES.items():
        if (value := machine.environment.get(name, "0")) not in ("", "0"):
            ok, level, remedy = False, "warning", f"Unset {name}."
            if name == CUMEM:
                level = "problem" if machine.gpus.visible else "warning"
                remedy = f"Unset it, or set {name}=0 before the first communicator."
            yield level, "nccl", f"{name}={value}; {message}", remedy
    interfaces = [name for _, name in socket.if_nameindex()]
    for check in ("nccl", "gloo"):
        # "^" excludes interfaces, "=" is before exact names, others are prefixes.
        variable = f"{check.upper()}_SOCKET_IFNAME"
        value = machine.environment.get(variable, "").removeprefix("=")
        names = [] if value.startswith("^") else [n.strip() for n in value.split(",")]
        missing = [n for n in names if not any(i.startswith(n) for i in interfaces)]
        if missing and interfaces:
            ok = False
            message = f"{variable} names {', '.join(missing)}, and there is no such "
            remedy = f"Unset it, or choose from {', '.join(interfaces)}."
            yield "problem", check, f"{message}network interface.", remedy
    if ok:
        yield "ok", "nccl", "No variable of NCCL is in the way."


def _ports(machine: Machine) -> Rows:
    free = sum(_is_free(secrets.choice(PORTS)) for _ in range(PORTS_TRIED))
    level = "ok" if free >= PORTS_TRIED / 2 else "warning" if free else "problem"
    message = (
        f"{free} of {PORTS_TRIED} from {PORTS.start} to {PORTS.stop - 1} are free."
    )
    yield level, "ports", message, "End servers that nobody needs, or give --port."
    outgoing = read(machine.proc / "sys/net/ipv4/ip_local_port_range").split()
    low, high = map(int, outgoing if len(outgoing) == 2 else (PORTS.stop, 0))
    if low < PORTS.stop and high >= PORTS.start:
        message = f"Outgoing connections take ports from {low} to {high}, servers' too."
        remedy = f"Set net.ipv4.ip_local_port_range to begin at {PORTS.stop}."
        yield "warning", "ports", message, remedy


def _is_free(port: int) -> bool:
    with socket.socket() as probe, contextlib.suppress(OSError):
        probe.bind(("127.0.0.1", port))
        return True
    return False


def _proxy(machine: Machine) -> Rows:
    environment = machine.environment
    name = next((name for name in PROXIES if environment.get(name)), None)
    exempt = environment.get("no_proxy") or environment.get("NO_PROXY", "")
    listed = [host.strip() for host in exempt.split(",") if host.strip()]
    local = ("127.0.0.1", "localhost")
    caught = [host for host in local if not {host, "*"}.intersection(listed)]
    if name is None:
        yield "ok", "proxy", "No proxy stands between the trainer and its servers."
    elif not caught:
        yield "ok", "proxy", f"{name} is set, and this machine is exempt from it."
    else:
        message = (
            f"{name} is set, and no_proxy does not exempt {' and '.join(caught)}. This "
            f"package uses no proxy; SGLang, its router and other clients may."
        )
        yield "warning", "proxy", message, f"Set no_proxy={','.join(listed + caught)}."


def _shared_memory(_: Machine) -> Rows:
    # Tokenizer and scheduler share memory, and NCCL without peer access.
    free = _free_bytes("/dev/shm")
    remedy = "Make it larger; with docker, give --shm-size or --ipc=host."
    level = "warning" if free < GIB else "ok"
    yield level, "/dev/shm", f"{free / GIB:.2f} GiB are free.", remedy


def _free_bytes(folder: str) -> int:
    with contextlib.suppress(OSError):
        return shutil.disk_usage(folder).free
    return 0


def _open_files(_: Machine) -> Rows:
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = math.inf if soft == resource.RLIM_INFINITY else soft
    recommended = 2 * SOCKETS_WANTED
    level = (
        "ok" if limit >= recommended else "warning" if limit >= FEW_FILES else "problem"
    )
    message = f"The limit is {limit}; {SOCKETS_WANTED} requests in flight have a socket"
    remedy = f"Raise it with `ulimit -n {recommended}`."
    yield level, "open files", f"{message} on both sides.", remedy


def _temp(_: Machine) -> Rows:
    folder = tempfile.gettempdir()
    free = _free_bytes(folder)
    remedy = f"Set TMPDIR to a larger folder, of at most {MAX_TEMP_PATH} characters."
    if not os.access(folder, os.W_OK):
        yield "problem", "temp", f"Nothing can be written to {folder}.", remedy
    elif len(folder.encode()) > MAX_TEMP_PATH:
        message = f"The path {folder} is too long for sockets in it."
        yield "warning", "temp", message, remedy
    else:
        level = "warning" if free < GIB else "ok"
        message = f"{free / GIB:.2f} GiB are free in {folder}, where logs grow."
        yield level, "temp", message, remedy


def _memory(machine: Machine) -> Rows:
    if (free := machine.memory_free()) is not None:
        level = "warning" if machine.device == "cpu" and free < 2 * GIB else "ok"
        cores = len(os.sched_getaffinity(0))
        message = f"{free / GIB:.1f} GiB are free, for {cores} cores."
        yield level, "memory", message, "A server on CPU and a trainer need 2 GiB."


def _servers(_: Machine) -> Rows:
    processes: dict[int, bool] = {}  # Whether it is the watchdog of a server.
    for pid in filter(str.isdigit, os.listdir("/proc")):
        folder = Path("/proc") / pid
        words = read(folder / "cmdline").split("\0")[:4]
        watchdog = any(word.endswith(WATCHDOG) for word in words)
        if watchdog or any(map(SERVERS.search, words)):
            user = re.search(r"^Uid:\s*(\d+)", read(folder / "status"), re.MULTILINE)
            if user and int(user[1]) == os.getuid():
                processes[int(pid)] = watchdog
    # A server without a watchdog above it was left over, or started by hand.
    tops = processes.keys() - {child for pid in processes for child in descendants(pid)}
    leftovers = [str(pid) for pid in sorted(tops) if not processes[pid]]
    if leftovers:
        pids = ", ".join(leftovers)
        message = f"Servers of yours run that this package does not look after: {pids}."
        remedy = f"If nobody needs them, end them with `kill {' '.join(leftovers)}`."
        yield "warning", "servers", message, remedy
    else:
        yield "ok", "servers", f"None is left over; {len(tops)} in use."


def _model(machine: Machine) -> Rows:
    name = machine.model
    if name is None:
        return
    if (folder := find_model(name)) is None:
        if name.startswith((".", "/", "~")):
            remedy = "Give an existing folder, which all machines share, or a hub name."
            yield "problem", "model", f"There is no folder {name}.", remedy
            return
        message = f"{name} is neither a folder nor in the cache of the hub."
        remedy = "It is downloaded at the first start, if it exists; or give a folder."
        yield "warning", "model", message, remedy
        return
    try:
        config = read_json(folder / "config.json")
    except (OSError, ValueError) as error:
        message = f"{name} has no usable config.json: {error}."
        yield "problem", "model", message, "Give the folder that a model was saved to."
        return
    text = config.get("text_config")
    configs = [config, text] if isinstance(text, dict) else [config]
    dtypes = [c.get(key) for c in configs for key in ("dtype", "torch_dtype")]
    dtype = next((str(dtype) for dtype in dtypes if dtype), "unknown")
    about = f"{config.get('model_type') or 'A model'} of dtype {dtype}"
    size = sum(file.stat().st_size for file in _weights(folder))
    yield "ok", "model", f"{about}, {size / 1e9:.3g} GB of weights, in {folder}."
    yield from _model_files(folder)
    free = max((free << 20 for _, free, _ in machine.gpus.memory), default=0)
    if machine.device == "cpu":
        free = machine.memory_free() or 0
    if 0 < free < size:
        weights = f"The weights are {size / GIB:.1f} GiB"
        message = f"{weights}, and {free / GIB:.1f} GiB are free on one device."
        remedy = "Split it with tp_size, or choose a smaller one."
        yield "warning", "model size", message, remedy


def _weights(folder: Path) -> list[Path]:
    return [f for f in sorted(folder.iterdir()) if f.suffix in WEIGHTS and f.is_file()]


def _model_files(folder: Path) -> Rows:
    files, missing = _weights(folder), missing_files(folder)
    pointers = [f.name for f in files if read(f, len(LFS_POINTER)) == LFS_POINTER]
    if missing or not any(file.stat().st_size for file in files):
        names = ", ".join(missing[:3]) or "*.safetensors"
        remedy = "Complete the download, or give load_format=dummy for random ones."
        yield "problem", "weights", f"Weights are missing: {names}.", remedy
    elif pointers:
        message = f"{', '.join(pointers[:3])} is a reference to Git LFS."
        yield "problem", "weights", message, "Run `git lfs pull` in the folder."
    settings = dict[str, object]()
    with contextlib.suppress(OSError, ValueError):
        settings = read_json(folder / "tokenizer_config.json")
    if not any((folder / file).is_file() for file in TOKENIZERS):
        remedy = "Give token ids, start with skip_tokenizer_init, or add the files."
        yield "warning", "tokenizer", "There is no tokenizer.", remedy
    elif not (any(folder.glob("chat_template.*")) or settings.get("chat_template")):
        remedy = "Conversations need one; texts and tokens do not."
        yield "warning", "chat template", "The tokenizer has no chat template.", remedy
    else:
        yield "ok", "tokenizer", "There is one, with a chat template."


CHECKS: tuple[Callable[[Machine], Rows], ...] = (
    *(_python, _packages, _engine, _gpus, _nccl, _ports, _proxy),
    *(_shared_memory, _open_files, _temp, _memory, _servers, _model),
)
"""The checks of a machine, in the order of the report."""
