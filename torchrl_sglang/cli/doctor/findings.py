"""Checks of ``doctor``: pure functions from facts to what is wrong and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import NamedTuple

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion

from torchrl_sglang.backends.launch.ports import PORTS
from torchrl_sglang.cli.doctor.facts import PORTS_TRIED

GIB = 1 << 30
SOCKETS_WANTED = 2048  # Default of max_in_flight.
FEW_FILES = 256  # With fewer, a server's own connections and libraries do not open.
MAX_TEMP_PATH = 56  # A socket's path has at most 107 bytes, of which a server adds 51.
PROXIES = ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")
CUMEM = "NCCL_CUMEM_ENABLE"
SLOW = "weight updates are many times slower with it."
NCCL_VARIABLES = {
    CUMEM: "a server sets 0 unless it inherits this, and the first broadcast fails "
    "where the two sides differ.",
    # Servers that set NCCL_CUMEM_ENABLE=0 need neither of the next two.
    "NCCL_P2P_DISABLE": f"it keeps GPUs from copying to each other directly; {SLOW}",
    "NCCL_SHM_DISABLE": f"it keeps NCCL from using shared memory; {SLOW}",
    "NCCL_NVLS_ENABLE": "servers inherit it, while SGLang's own default is 0.",
}
INSTALL = {
    "cpu": "run `python -m torchrl_sglang.backends.launch.cpu.install`",
    "cuda": 'install it there, `pip install "sglang[all]>=0.5.15,<0.6"`',
}


class Finding(NamedTuple):
    """One line of the report."""

    level: str  # ok, warning or problem
    check: str  # what was checked, in a word or two
    message: str  # what was found; a sentence
    remedy: str = ""  # what to do; a sentence, empty if there is nothing to do


Rows = Iterator[tuple[str, ...]]


def judge(facts: SimpleNamespace) -> list[Finding]:
    """Returns all findings about the facts of :func:`.gather`."""
    checks = (_packages, _engine, _gpus, _nccl, _network, _resources, _servers)
    findings = [Finding(*row) for check in (*checks, _model) for row in check(facts)]
    return [each._replace(remedy="") if each[0] == "ok" else each for each in findings]


def in_range(version: str, specifier: str) -> bool:
    """Returns whether a version lies in a range; any does if the range is empty."""
    try:
        return SpecifierSet(specifier).contains(version, prereleases=True)
    except InvalidVersion:
        return not specifier


def _packages(facts: SimpleNamespace) -> Rows:
    if in_range(facts.python, facts.requires_python):
        yield "ok", "python", f"Python {facts.python}."
    else:
        message = f"Python {facts.python} is not in {facts.requires_python}."
        remedy = "Make the trainer's environment with a Python that is."
        yield "problem", "python", message, remedy
    for name, wanted, version, broken in facts.packages:
        remedy = f'Run `pip install "{name}{wanted}"`.'
        if version is None:
            yield "problem", name, f"{name} is not installed.", remedy
        elif broken is not None:
            remedy = f"Install it again ({name}{wanted}) without SGLang's packages."
            message = f"{name} {version} cannot be imported: {broken}."
            yield "problem", name, message, remedy
        elif not in_range(version, wanted):
            yield "problem", name, f"{name} {version} is not in {wanted}.", remedy
        else:
            yield "ok", name, f"{name} {version}."


def _engine(facts: SimpleNamespace) -> Rows:
    python, version = facts.engine_python, facts.engine_packages.get("sglang")
    if version is None:
        message = facts.engine_error or f"{python} has no sglang."
        install = f", or {INSTALL[facts.device]}"
        if facts.engine_error and facts.device == "cuda":
            install = ""
        remedy = f"Name an interpreter that has SGLang with --python{install}."
        yield "problem", "engine", message, remedy
        return
    if in_range(version, facts.engine_required):
        versions = ", ".join([version, *facts.engine_generations])
        yield "ok", "engine", f"SGLang {versions} for {facts.device} in {python}."
    else:
        message = f"SGLang {version} in {python} is not in {facts.engine_required}."
        remedy = "Install a version that is, or run the tests with this one."
        yield "warning", "engine", message, remedy
    if router := facts.engine_packages.get("sglang-router"):
        yield "ok", "router", f"sglang-router {router}."
    else:
        message = f"{python} has no sglang-router, which several servers share."
        remedy = "Install sglang-router there, or start one server at a time."
        yield "warning", "router", message, remedy


def _gpus(facts: SimpleNamespace) -> Rows:
    count, driver = facts.visible_gpus, facts.driver or "unknown"
    if not count:
        found = f"There are {len(facts.gpus)} GPUs (driver {driver}), and PyTorch"
        if facts.driver is not None and facts.cuda is None:
            remedy = "Install a CUDA build of PyTorch to use them."
            yield "warning", "gpu", f"{found} is a build for CPU.", remedy
        elif facts.driver is not None:
            remedy = "Check CUDA_VISIBLE_DEVICES, and that the driver is recent enough."
            yield "warning", "gpu", f"{found} for CUDA {facts.cuda} finds none.", remedy
        else:
            level = "problem" if facts.device == "cuda" else "ok"
            yield level, "gpu", "There is no GPU.", "Give --device cpu, or find one."
        return
    free = [f"{n} {f / 1024:.0f} of {t / 1024:.0f} GiB free" for n, f, t in facts.gpus]
    about = [f"{count} visible", f"CUDA {facts.cuda}", f"driver {driver}", *free]
    yield "ok", "gpu", f"{', '.join(about)}."
    full = [str(index) for index, (_, f, t) in enumerate(facts.gpus) if f < t / 2]
    if full:
        message = f"More than half of the memory of GPU {', '.join(full)} is in use."
        remedy = "End what uses it, or give --cuda-devices or less mem_fraction_static."
        yield "warning", "gpu memory", message, remedy
    if facts.peers:
        yield "ok", "gpu links", "Each GPU reaches each other one directly."
    elif facts.peers is False:
        message = "The GPUs cannot all copy to each other directly."
        remedy = "See `nvidia-smi topo -m`; weight updates are about ten times slower."
        yield "warning", "gpu links", message, remedy


def _nccl(facts: SimpleNamespace) -> Rows:
    found = False
    for name, message in NCCL_VARIABLES.items():
        if (value := facts.environment.get(name, "0")) not in ("", "0"):
            found, level, remedy = True, "warning", f"Unset {name}."
            if name == CUMEM:
                level = "problem" if facts.visible_gpus else "warning"
                remedy = f"Unset it, or set {name}=0 before the first communicator."
            yield level, "nccl", f"{name}={value}; {message}", remedy
    for check in ("nccl", "gloo"):
        # "^" excludes interfaces, "=" asks for exact names, others are prefixes.
        variable = f"{check.upper()}_SOCKET_IFNAME"
        value = facts.environment.get(variable, "").removeprefix("=")
        names = [] if value.startswith("^") else [n.strip() for n in value.split(",")]
        there = facts.interfaces
        missing = [n for n in names if not any(i.startswith(n) for i in there)]
        if missing and there:
            found = True
            message = f"{variable} names {', '.join(missing)}, and there is no such "
            remedy = f"Unset it, or choose from {', '.join(there)}."
            yield "problem", check, f"{message}network interface.", remedy
    if not found:
        yield "ok", "nccl", "No variable of NCCL is in the way."


def _network(facts: SimpleNamespace) -> Rows:
    free, last = facts.ports_free, PORTS.stop - 1
    level = "ok" if free >= PORTS_TRIED / 2 else "warning" if free else "problem"
    message = f"{free} of {PORTS_TRIED} from {PORTS.start} to {last} are free."
    yield level, "ports", message, "End servers that nobody needs, or give --port."
    low, high = facts.ephemeral or (PORTS.stop, 0)
    if low < PORTS.stop and high >= PORTS.start:
        message = f"Outgoing connections take ports from {low} to {high}, servers' too."
        remedy = f"Set net.ipv4.ip_local_port_range to begin at {PORTS.stop}."
        yield "warning", "ports", message, remedy
    name = next((name for name in PROXIES if facts.environment.get(name)), None)
    exempt = facts.environment.get("no_proxy") or facts.environment.get("NO_PROXY", "")
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


def _resources(facts: SimpleNamespace) -> Rows:
    # Tokenizer and scheduler share memory, and NCCL without peer access.
    shm, folder, temp = facts.shm_free or 0, facts.temp_folder, facts.temp_free
    remedy = "Make it larger; with docker, give --shm-size or --ipc=host."
    level = "warning" if shm < GIB else "ok"
    yield level, "/dev/shm", f"{shm / GIB:.2f} GiB are free.", remedy
    limit, wanted = facts.open_files, 2 * SOCKETS_WANTED
    level = "ok" if limit >= wanted else "warning" if limit >= FEW_FILES else "problem"
    message = f"The limit is {limit}; {SOCKETS_WANTED} requests in flight have a socket"
    remedy = f"Raise it with `ulimit -n {wanted}`."
    yield level, "open files", f"{message} on both sides.", remedy
    remedy = f"Set TMPDIR to a larger folder, of at most {MAX_TEMP_PATH} characters."
    if temp is None:
        yield "problem", "temp", f"Nothing can be written to {folder}.", remedy
    elif len(folder.encode()) > MAX_TEMP_PATH:
        message = f"The path {folder} is too long for sockets in it."
        yield "warning", "temp", message, remedy
    else:
        level = "warning" if temp < GIB else "ok"
        message = f"{temp / GIB:.2f} GiB are free in {folder}, where logs grow."
        yield level, "temp", message, remedy
    if facts.memory_free is not None:
        level = "ok"
        if facts.device == "cpu" and facts.memory_free < 2 * GIB:
            level = "warning"
        message = (
            f"{facts.memory_free / GIB:.1f} GiB are free, for {facts.cores} cores."
        )
        yield level, "memory", message, "A server on CPU and a trainer need 2 GiB."


def _servers(facts: SimpleNamespace) -> Rows:
    in_use, left = facts.servers
    if left:
        pids = ", ".join(map(str, left))
        message = f"Servers of yours run that this package does not look after: {pids}."
        remedy = f"If nobody needs them, end them with `kill {pids.replace(',', '')}`."
        yield "warning", "servers", message, remedy
    else:
        yield "ok", "servers", f"None is left over; {len(in_use)} in use."


def _model(facts: SimpleNamespace) -> Rows:
    model = facts.model
    if model is None:
        return
    if model.folder is None:
        message = f"{model.name} is neither a folder nor in the cache of the hub."
        remedy = "It is downloaded at the first start, if it exists; or give a folder."
        yield "warning", "model", message, remedy
        return
    if model.config_error is not None:
        message = f"{model.name} has no usable config.json: {model.config_error}."
        yield "problem", "model", message, "Give the folder that a model was saved to."
        return
    size = model.weight_bytes
    about = f"{model.model_type} of dtype {model.dtype}"
    yield "ok", "model", f"{about}, {size / 1e9:.3g} GB of weights, in {model.folder}."
    if model.missing_files or not size:
        names = ", ".join(model.missing_files[:3]) or "*.safetensors"
        remedy = "Complete the download, or give load_format=dummy for random ones."
        yield "problem", "weights", f"Weights are missing: {names}.", remedy
    elif model.pointer_files:
        message = f"{', '.join(model.pointer_files[:3])} is a reference to Git LFS."
        yield "problem", "weights", message, "Run `git lfs pull` in the folder."
    if not model.has_tokenizer:
        remedy = "Give token ids, start with skip_tokenizer_init, or add the files."
        yield "warning", "tokenizer", "There is no tokenizer.", remedy
    elif not model.has_chat_template:
        remedy = "Conversations need one; texts and tokens do not."
        yield "warning", "chat template", "The tokenizer has no chat template.", remedy
    else:
        yield "ok", "tokenizer", "There is one, with a chat template."
    free = max((free << 20 for _, free, _ in facts.gpus), default=0)
    if facts.device == "cpu":
        free = facts.memory_free or 0
    if 0 < free < size:
        weights = f"The weights are {size / GIB:.1f} GiB"
        message = f"{weights}, and {free / GIB:.1f} GiB are free on one device."
        remedy = "Split it with tp_size, or choose a smaller one."
        yield "warning", "model size", message, remedy
