"""Findings about the machine: pure, facts in and findings out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torchrl_sglang.cli.doctor.facts import GpuFacts, SystemFacts
from torchrl_sglang.cli.doctor.findings import GIB, Finding, ok, problem, warning

__all__ = [
    "judge_gpus",
    "judge_nccl",
    "judge_ports",
    "judge_processes",
    "judge_proxies",
    "judge_system",
]

SHM_WANTED = GIB
"""Tokenizer and scheduler, and NCCL without peer access, talk through it."""

TEMP_WANTED = GIB
"""Logs of servers go there, and they grow for as long as a run lasts."""

MEMORY_WANTED = 2 * GIB
"""A server on CPU takes 1 GiB before its model, and so does a trainer."""

FEW_FILES = 256
"""With fewer, a server's own connections and libraries do not open."""

MAX_TEMP_PATH = 56
"""The path of a socket has at most 107 bytes; a server's folder and name add 51."""

LOOPBACK = ("127.0.0.1", "localhost")


def judge_gpus(gpus: GpuFacts, device: str) -> Iterator[Finding]:
    """Looks at the accelerators."""
    if not gpus.visible:
        if gpus.driver is not None and gpus.cuda is None:
            yield warning(
                "gpu",
                f"There are {len(gpus.names)} GPUs, and PyTorch is a build for CPU.",
                "Install a CUDA build of PyTorch to use them.",
            )
        elif gpus.driver is not None:
            yield warning(
                "gpu",
                f"There are {len(gpus.names)} GPUs (driver {gpus.driver}), and PyTorch "
                f"for CUDA {gpus.cuda} finds none.",
                "Check CUDA_VISIBLE_DEVICES, and that the driver is recent enough.",
            )
        elif device == "cuda":
            yield problem(
                "gpu", "There is no GPU.", "Use --device cpu, or another machine."
            )
        else:
            yield ok("gpu", "There is no GPU; SGLang runs on the CPU.")
        return
    free = ", ".join(
        f"{name} {unused / 1024:.0f} of {total / 1024:.0f} GiB free"
        for name, unused, total in zip(
            gpus.names, gpus.free_mib, gpus.total_mib, strict=False
        )
    )
    yield ok(
        "gpu",
        f"{gpus.visible} visible, CUDA {gpus.cuda}, driver {gpus.driver or 'unknown'}"
        f"{': ' + free if free else ''}.",
    )
    full = [
        str(index)
        for index, (unused, total) in enumerate(
            zip(gpus.free_mib, gpus.total_mib, strict=False)
        )
        if unused < total / 2
    ]
    if full:
        yield warning(
            "gpu memory",
            f"More than half of the memory of GPU {', '.join(full)} is in use.",
            "End what uses it, choose others with --cuda-devices, or lower "
            "mem_fraction_static.",
        )
    if gpus.visible > 1 and gpus.peers is False:
        yield warning(
            "gpu links",
            "The GPUs cannot all copy to each other directly.",
            "Weight updates go through the memory of the machine, about ten times "
            "slower; see `nvidia-smi topo -m`.",
        )
    elif gpus.visible > 1 and gpus.peers:
        yield ok("gpu links", "Each GPU reaches each other one directly.")


def judge_nccl(system: SystemFacts, gpus: int) -> Iterator[Finding]:
    """Looks at the variables that NCCL and gloo read."""
    environment = system.environment
    wrong = problem if gpus else warning
    before = "before the trainer's first NCCL communicator"
    found = []
    if environment.get("NCCL_CUMEM_ENABLE", "0") != "0":
        found.append(
            wrong(
                "nccl",
                f"NCCL_CUMEM_ENABLE={environment['NCCL_CUMEM_ENABLE']}; a server sets "
                f"0 unless it inherits this, and the first broadcast fails where the "
                f"two sides differ.",
                f"Set NCCL_CUMEM_ENABLE=0 {before}, or leave it unset.",
            )
        )
    found += [
        warning(
            "nccl",
            f"{name}={environment[name]} keeps NCCL from the fast way between GPUs; "
            f"weight updates were 30 times slower with it.",
            f"Unset {name}; it is not needed with NCCL_CUMEM_ENABLE=0.",
        )
        for name in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE")
        if environment.get(name, "0") not in ("", "0")
    ]
    if environment.get("NCCL_NVLS_ENABLE", "0") not in ("", "0"):
        found.append(
            warning(
                "nccl",
                f"NCCL_NVLS_ENABLE={environment['NCCL_NVLS_ENABLE']}; servers inherit "
                f"it, while SGLang's own default is 0.",
                "Unset it, unless all sides are meant to use NVLink multicast.",
            )
        )
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        missing = _missing_interfaces(environment.get(name, ""), system.interfaces)
        if missing:
            found.append(
                problem(
                    "nccl" if name.startswith("NCCL") else "gloo",
                    f"{name} names {', '.join(missing)}, and there is no such network "
                    f"interface.",
                    f"Unset it, or choose from {', '.join(system.interfaces)}.",
                )
            )
    yield from found or [ok("nccl", "No setting of NCCL stands in the way.")]


def _missing_interfaces(value: str, interfaces: tuple[str, ...]) -> list[str]:
    # NCCL takes "^" for all but these, "=" for these exactly, and prefixes otherwise.
    if not value or value.startswith("^") or not interfaces:
        return []
    names = [name.strip() for name in value.removeprefix("=").split(",")]
    return [
        name
        for name in names
        if name and not any(other.startswith(name) for other in interfaces)
    ]


def judge_ports(system: SystemFacts) -> Iterator[Finding]:
    """Looks at the ports that servers listen on."""
    ports = f"{system.ports.start} to {system.ports.stop - 1}"
    if system.ports_free == 0:
        yield problem(
            "ports",
            f"None of {system.ports_tried} ports from {ports} is free.",
            "End servers that nobody needs, or give --port.",
        )
    elif system.ports_free < system.ports_tried / 2:
        yield warning(
            "ports",
            f"{system.ports_free} of {system.ports_tried} ports tried from {ports} "
            f"are free.",
            "Look for servers that nobody needs.",
        )
    else:
        yield ok("ports", f"Ports from {ports} are free.")
    low, high = system.ephemeral_from, system.ephemeral_to
    if low is None or high is None:
        return
    if low < system.ports.stop and high >= system.ports.start:
        yield warning(
            "ports",
            f"Outgoing connections take ports from {low} to {high}, and so might take "
            f"a server's while it loads.",
            f"Set net.ipv4.ip_local_port_range to begin at {system.ports.stop}.",
        )


def judge_proxies(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Looks for a proxy that would take requests for this machine."""
    names = [
        name
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")
        if environment.get(name)
    ]
    exempt = environment.get("no_proxy") or environment.get("NO_PROXY") or ""
    listed = {name.strip() for name in exempt.split(",")}
    caught = [host for host in LOOPBACK if not listed & {host, "*"}]
    if not names:
        yield ok("proxy", "No proxy stands between the trainer and its servers.")
    elif caught:
        yield warning(
            "proxy",
            f"{names[0]} is set, and no_proxy does not exempt {' and '.join(caught)}. "
            f"This package asks no proxy; SGLang, its router and other clients may.",
            f"Set no_proxy={','.join([exempt] * bool(exempt) + caught)}.",
        )
    else:
        yield ok("proxy", f"{names[0]} is set, and this machine is exempt from it.")


def judge_system(system: SystemFacts, device: str) -> Iterator[Finding]:
    """Looks at shared memory, open files, temporary files and memory."""
    if system.shm_free is None:
        yield warning(
            "/dev/shm",
            "There is no /dev/shm, which servers share memory through.",
            "Mount one; with docker, give --shm-size or --ipc=host.",
        )
    elif system.shm_free < SHM_WANTED:
        yield warning(
            "/dev/shm",
            f"{system.shm_free / GIB:.2f} GiB are free.",
            "Make it larger; with docker, give --shm-size or --ipc=host.",
        )
    else:
        yield ok("/dev/shm", f"{system.shm_free / GIB:.1f} GiB are free.")
    yield _open_files(system)
    if system.temp_free is None:
        yield problem(
            "temp",
            f"Nothing can be written to {system.temp_folder}.",
            "Set TMPDIR to a folder with room.",
        )
    elif system.temp_free < TEMP_WANTED:
        yield warning(
            "temp",
            f"{system.temp_free / GIB:.2f} GiB are free in {system.temp_folder}, where "
            f"the logs of servers grow.",
            "Set TMPDIR to a folder with more room.",
        )
    elif len(system.temp_folder.encode()) > MAX_TEMP_PATH:
        yield warning(
            "temp",
            f"The path {system.temp_folder} is too long for sockets in it.",
            f"Set TMPDIR to one of at most {MAX_TEMP_PATH} characters.",
        )
    else:
        yield ok(
            "temp",
            f"{system.temp_free / GIB:.0f} GiB are free in {system.temp_folder}.",
        )
    if system.memory_free is not None:
        text = f"{system.memory_free / GIB:.1f} GiB are free, for {system.cores} cores."
        if device == "cpu" and system.memory_free < MEMORY_WANTED:
            yield warning("memory", text, "A server on CPU and a trainer need 2 GiB.")
        else:
            yield ok("memory", text)


def _open_files(system: SystemFacts) -> Finding:
    limit, wanted = system.open_files, 2 * system.sockets_wanted
    if limit == -1 or limit >= wanted:
        told = "unlimited" if limit == -1 else str(limit)
        return ok("open files", f"The limit is {told}.")
    return (problem if limit < FEW_FILES else warning)(
        "open files",
        f"The limit is {limit}, and an engine has up to {system.sockets_wanted} "
        f"requests under way, each with a socket on both sides.",
        f"Raise it with `ulimit -n {wanted}`.",
    )


def judge_processes(system: SystemFacts) -> Iterator[Finding]:
    """Looks for servers that nobody looks after."""
    table = {process.pid: process for process in system.processes}
    left: list[int] = []
    trees = 0
    for process in system.processes:
        if process.parent in table:
            continue
        if process.kind == "watchdog":
            trees += 1
        else:
            left.append(process.pid)
    if left:
        pids = ", ".join(map(str, sorted(left)))
        yield warning(
            "servers",
            f"Servers of yours run that this package does not look after: {pids}.",
            f"If nobody needs them, end them with `kill {pids.replace(',', '')}`.",
        )
    else:
        yield ok("servers", f"None is left over; {trees} in use.")
