"""Findings of ``doctor``: pure functions from facts to what is wrong and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion

from torchrl_sglang.cli.doctor.facts import Facts, ModelFacts

__all__ = ["Finding", "judge"]

GIB = 1 << 30
SHM_WANTED = GIB  # For tokenizer and scheduler, and NCCL without peer access.
TEMP_WANTED = GIB  # For logs of servers, which grow as long as a run lasts.
MEMORY_WANTED = 2 * GIB  # 1 GiB each for a server on CPU and a trainer.
FEW_FILES = 256  # With fewer, a server's own connections and libraries do not open.
MAX_TEMP_PATH = 56  # A socket's path has at most 107 bytes, of which a server adds 51.
PROXIES = ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")
SLOW = "weight updates were 30 times slower with it."
NCCL_VARIABLES = {
    "NCCL_CUMEM_ENABLE": "a server sets 0 unless it inherits this, and the first "
    "broadcast fails where the two sides differ.",
    # Servers that set NCCL_CUMEM_ENABLE=0 need neither of the next two.
    "NCCL_P2P_DISABLE": f"it keeps GPUs from copying to each other directly; {SLOW}",
    "NCCL_SHM_DISABLE": f"it keeps NCCL from using shared memory; {SLOW}",
    "NCCL_NVLS_ENABLE": "servers inherit it, while SGLang's own default is 0.",
}
INSTALL_ENGINE = "run `python -m torchrl_sglang.backends.launch.cpu.install`"
INSTALL_EXTRA = 'run `pip install "torchrl-sglang[sglang]"`'


class Finding(NamedTuple):
    """One line of the report."""

    level: str  # ok, warning or problem
    check: str  # what was checked, in a word or two
    message: str  # what was found; a sentence
    remedy: str = ""  # what to do; a sentence, empty if there is nothing to do


Rows = Iterator[tuple[str, ...]]


def judge(facts: Facts) -> list[Finding]:
    """Returns all findings about a machine."""
    checks = (_trainer, _engine, _gpus, _nccl, _ports, _proxies, _system, _processes)
    findings = [Finding(*row) for check in checks for row in check(facts)]
    if facts.model is not None:
        on_cpu = facts.device == "cpu"
        free_mib = max((free for _, free, _ in facts.gpus), default=0)
        free = facts.memory_free or 0 if on_cpu else free_mib << 20
        findings += [Finding(*row) for row in _model(facts.model, free)]
    return findings


def in_range(version: str, specifier: str) -> bool:
    """Returns whether a version lies in a range; any does if the range is empty.

    Examples:
        >>> in_range("2.13.0+cpu", ">=2.11,<3"), in_range("3.0", ">=2.11,<3")
        (True, False)
    """
    try:
        return SpecifierSet(specifier).contains(version, prereleases=True)
    except InvalidVersion:
        return not specifier


def _trainer(facts: Facts) -> Rows:
    python, wanted = facts.python, facts.requires_python
    if in_range(python, wanted):
        yield "ok", "python", f"Python {python}."
    else:
        remedy = "Make the trainer's environment with a Python that is."
        yield "problem", "python", f"Python {python} is not in {wanted}.", remedy
    for name, wanted in facts.requirements.items():
        version, broken = facts.packages.get(name), facts.broken.get(name)
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


def _engine(facts: Facts) -> Rows:
    python, version = facts.engine_python, facts.engine_packages.get("sglang")
    name = "Name an interpreter that has SGLang with --python"
    if facts.engine_error is not None or python is None:
        message = facts.engine_error or "There is no interpreter to run SGLang with."
        install = f", or {INSTALL_ENGINE}" if facts.device == "cpu" else ""
        yield "problem", "engine", message, f"{name}{install}."
        return
    if version is None:
        install = INSTALL_ENGINE if facts.device == "cpu" else INSTALL_EXTRA
        yield "problem", "engine", f"{python} has no sglang.", f"{name}, or {install}."
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


def _gpus(facts: Facts) -> Rows:
    if not facts.visible_gpus:
        yield from _no_gpus(facts)
        return
    free = [f"{n} {f / 1024:.0f} of {t / 1024:.0f} GiB free" for n, f, t in facts.gpus]
    about = f"{facts.visible_gpus} visible, CUDA {facts.cuda}"
    message = ", ".join([about, f"driver {facts.driver or 'unknown'}", *free])
    yield "ok", "gpu", f"{message}."
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


def _no_gpus(facts: Facts) -> Rows:
    found = f"There are {len(facts.gpus)} GPUs (driver {facts.driver}), and PyTorch"
    if facts.driver is not None and facts.cuda is None:
        remedy = "Install a CUDA build of PyTorch to use them."
        yield "warning", "gpu", f"{found} is a build for CPU.", remedy
    elif facts.driver is not None:
        remedy = "Check CUDA_VISIBLE_DEVICES, and that the driver is recent enough."
        yield "warning", "gpu", f"{found} for CUDA {facts.cuda} finds none.", remedy
    elif facts.device == "cuda":
        yield "problem", "gpu", "There is no GPU.", "Give --device cpu, or find one."
    else:
        yield "ok", "gpu", "There is no GPU; SGLang runs on the CPU."


def _nccl(facts: Facts) -> Rows:
    found = False
    for name, message in NCCL_VARIABLES.items():
        if (value := facts.environment.get(name, "0")) not in ("", "0"):
            found, level, remedy = True, "warning", f"Unset {name}."
            if name == "NCCL_CUMEM_ENABLE":
                level = "problem" if facts.visible_gpus else "warning"
                remedy = f"Unset it, or set {name}=0 before the first communicator."
            yield level, "nccl", f"{name}={value}; {message}", remedy
    for check in ("nccl", "gloo"):
        # "^" excludes interfaces, "=" asks for exact names, others are prefixes.
        variable = f"{check.upper()}_SOCKET_IFNAME"
        value = facts.environment.get(variable, "").removeprefix("=")
        names = [] if value.startswith("^") else [n.strip() for n in value.split(",")]
        missing = [n for n in names if not _has_prefix(facts.interfaces, n)]
        if missing and facts.interfaces:
            message = f"{variable} names {', '.join(missing)}, and there is no such "
            remedy = f"Unset it, or choose from {', '.join(facts.interfaces)}."
            found = True
            yield "problem", check, f"{message}network interface.", remedy
    if not found:
        yield "ok", "nccl", "No variable of NCCL is in the way."


def _has_prefix(names: tuple[str, ...], prefix: str) -> bool:
    return any(name.startswith(prefix) for name in names)


def _ports(facts: Facts) -> Rows:
    ports = f"{facts.ports.start} to {facts.ports.stop - 1}"
    free, tried = facts.ports_free, facts.ports_tried
    if free == 0:
        remedy = "End servers that nobody needs, or give --port."
        yield "problem", "ports", f"None of {tried} from {ports} is free.", remedy
    elif free < tried / 2:
        remedy = "Look for servers that nobody needs."
        yield "warning", "ports", f"{free} of {tried} from {ports} are free.", remedy
    else:
        yield "ok", "ports", f"Ports from {ports} are free."
    low, high = facts.ephemeral or (facts.ports.stop, 0)
    if low < facts.ports.stop and high >= facts.ports.start:
        message = f"Outgoing connections take ports from {low} to {high}, servers' too."
        remedy = f"Set net.ipv4.ip_local_port_range to begin at {facts.ports.stop}."
        yield "warning", "ports", message, remedy


def _proxies(facts: Facts) -> Rows:
    name = next((name for name in PROXIES if facts.environment.get(name)), None)
    exempt = facts.environment.get("no_proxy") or facts.environment.get("NO_PROXY")
    listed = [host.strip() for host in (exempt or "").split(",") if host.strip()]
    caught = [
        x for x in ("127.0.0.1", "localhost") if not {x, "*"}.intersection(listed)
    ]
    if name is None:
        yield "ok", "proxy", "No proxy stands between the trainer and its servers."
    elif not caught:
        yield "ok", "proxy", f"{name} is set, and this machine is exempt from it."
    else:
        message = (
            f"{name} is set, and no_proxy does not exempt {' and '.join(caught)}. This "
            f"package uses no proxy; SGLang, its router and other clients may."
        )
        remedy = f"Set no_proxy={','.join(listed + caught)}."
        yield "warning", "proxy", message, remedy


def _system(facts: Facts) -> Rows:
    shm, folder, temp = facts.shm_free, facts.temp_folder, facts.temp_free
    remedy = "Make it larger; with docker, give --shm-size or --ipc=host."
    if shm is None:
        yield "warning", "/dev/shm", "There is no /dev/shm for shared memory.", remedy
    elif shm < SHM_WANTED:
        yield "warning", "/dev/shm", f"{shm / GIB:.2f} GiB are free.", remedy
    else:
        yield "ok", "/dev/shm", f"{shm / GIB:.1f} GiB are free."
    yield _open_files(facts.open_files, facts.sockets_wanted)
    if temp is None:
        message = f"Nothing can be written to {folder}."
        yield "problem", "temp", message, "Set TMPDIR to another folder."
    elif temp < TEMP_WANTED:
        message = f"{temp / GIB:.2f} GiB are free in {folder}, where logs grow."
        yield "warning", "temp", message, "Set TMPDIR to a folder with more space."
    elif len(folder.encode()) > MAX_TEMP_PATH:
        remedy = f"Set TMPDIR to one of at most {MAX_TEMP_PATH} characters."
        message = f"The path {folder} is too long for sockets in it."
        yield "warning", "temp", message, remedy
    else:
        yield "ok", "temp", f"{temp / GIB:.0f} GiB are free in {folder}."
    if (memory := facts.memory_free) is not None:
        message = f"{memory / GIB:.1f} GiB are free, for {facts.cores} cores."
        if facts.device == "cpu" and memory < MEMORY_WANTED:
            remedy = "A server on CPU and a trainer need 2 GiB."
            yield "warning", "memory", message, remedy
        else:
            yield "ok", "memory", message


def _open_files(limit: int, sockets: int) -> tuple[str, ...]:
    if limit == -1 or limit >= 2 * sockets:
        shown = "unlimited" if limit == -1 else limit
        return "ok", "open files", f"The limit is {shown}."
    level = "problem" if limit < FEW_FILES else "warning"
    message = (
        f"The limit is {limit}, and an engine has up to {sockets} requests in flight, "
        f"each with a socket on both sides."
    )
    return level, "open files", message, f"Raise it with `ulimit -n {2 * sockets}`."


def _processes(facts: Facts) -> Rows:
    # A server that has no watchdog above it was left over, or started by hand.
    known = {process.pid for process in facts.processes}
    tops = [process for process in facts.processes if process.parent not in known]
    left = sorted(process.pid for process in tops if process.kind == "server")
    if left:
        pids = ", ".join(map(str, left))
        message = f"Servers of yours run that this package does not look after: {pids}."
        remedy = f"If nobody needs them, end them with `kill {pids.replace(',', '')}`."
        yield "warning", "servers", message, remedy
    else:
        yield "ok", "servers", f"None is left over; {len(tops)} in use."


def _model(model: ModelFacts, free: int) -> Rows:
    """``free`` is the memory of the emptiest device in bytes, or 0 if unknown."""
    size = model.weight_bytes
    if model.folder is None:
        message = f"{model.name} is neither a folder nor in the cache of the hub."
        remedy = "It is downloaded at the first start, if it exists; or give a folder."
        yield "warning", "model", message, remedy
        return
    if model.config_error is not None:
        message = f"{model.name} has no usable config.json: {model.config_error}."
        remedy = "Give the folder that a model was saved to."
        yield "problem", "model", message, remedy
        return
    about = f"{model.model_type or 'A model'} of dtype {model.dtype or 'unknown'}"
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
    if 0 < free < size:
        weights = f"The weights are {size / GIB:.1f} GiB"
        message = f"{weights}, and {free / GIB:.1f} GiB are free on one device."
        remedy = "Split it with tp_size, or choose a smaller one."
        yield "warning", "model size", message, remedy
