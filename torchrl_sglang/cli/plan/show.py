"""Output of ``plan``: memory in lines, and the command to run."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

from torchrl_sglang.cli.plan.arrange import Arrangement, Cluster, NothingFits
from torchrl_sglang.cli.plan.memory import (
    GIB,
    Workload,
    host_memory,
    trainer_memory,
)
from torchrl_sglang.cli.plan.shapes import Shape
from torchrl_sglang.cli.plan.speed import Speed, estimate
from torchrl_sglang.objectives.tree import TREES_PAY

WIDTH = 36

THIN = 0.075
"""Share of a peak below which a margin is thin: a measured step took as much more."""


def grpo_arguments(found: Arrangement) -> dict[str, Any]:
    """Returns the arguments of ``GRPO`` for an arrangement.

    On several machines, servers are started separately, so the engine's arguments are
    omitted.
    """
    work = found.work
    arguments: dict[str, Any] = {
        "group_size": work.group_size,
        "groups_per_batch": work.groups_per_batch,
        "max_tokens_per_pass": found.tokens_per_pass,
    }
    if not work.checkpointing:
        arguments["gradient_checkpointing"] = False
    if work.lora is not None:
        arguments["lora"] = {"r": work.lora}
    if work.reference:
        arguments["kl_to_ref_coeff"] = 0.001
    if found.place == "colocated":
        arguments["colocated"] = True
    else:
        # Batches of earlier weights than the trainer's.
        arguments |= {"max_staleness": 1, "correction": "decoupled_token_is"}
    if not found.spans_nodes:
        arguments["engine"] = {
            "num_replicas": found.replicas,
            "tp_size": found.tp_size,
            "mem_fraction_static": found.share,
        }
    return arguments


def command_of(shape: Shape, found: Arrangement) -> str:
    """Returns the command line of a run with a YAML file of its other arguments."""
    words = ["run.yaml", f"model={shape.name}", *_dotted(grpo_arguments(found))]
    if found.spans_nodes:
        per_node = found.cluster.per_node
        start = [
            f"TRAINER_NODES={found.ranks // per_node}",
            f"TP_SIZE={found.tp_size}",
            f"sbatch --nodes={found.cluster.nodes} --gpus-per-node={per_node}",
            "examples/cluster/grpo.sbatch",
        ]
    elif found.ranks > 1:
        start = [f"torchrun --nproc-per-node {found.ranks} examples/grpo/train.py"]
    else:
        start = ["python examples/grpo/train.py"]
    return " ".join([*start, *map(shlex.quote, words)])


def _dotted(arguments: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in arguments.items():
        if isinstance(value, Mapping):
            yield from _dotted(value, f"{prefix}{name}.")
        else:
            text = str(value).lower() if isinstance(value, bool) else value
            yield f"{prefix}{name}={text}"


def call_of(shape: Shape, found: Arrangement) -> str:
    """Returns the same as a call in Python."""
    arguments = grpo_arguments(found)
    if found.spans_nodes:
        arguments["engine"] = {"urls": ["http://NODE:30000"]}
    lines = [f"    {name}={value!r}," for name, value in arguments.items()]
    begin = [f"GRPO({shape.name!r}, prompts=..., rewards=...,"]
    return "\n".join([*begin, *lines, ").train()"])


def to_text(shape: Shape, found: Arrangement) -> str:
    """Returns an arrangement as text for a person."""
    return "\n".join(
        [
            *_head(shape, found.cluster, found.work),
            "",
            *_trainer_lines(shape, found),
            *_margin_lines(shape, found),
            "",
            *_server_lines(found),
            *_notes(found),
            "",
            *_speed_lines(shape, found),
            "",
            "Run it, with prompts and rewards in run.yaml:",
            "",
            f"  {command_of(shape, found)}",
            "",
            "or in Python:",
            "",
            *(f"  {line}" for line in call_of(shape, found).splitlines()),
        ]
    )


def nothing_text(
    shape: Shape, cluster: Cluster, work: Workload, found: NothingFits
) -> str:
    """Returns the reasons and alternatives as text for a person."""
    lines = [*_head(shape, cluster, work), "", "Nothing fits.", *found.reasons]
    return "\n".join([*lines, "", "What would:", *found.remedies])


def _head(shape: Shape, cluster: Cluster, work: Workload) -> Iterator[str]:
    count = shape.parameters
    size = f"{count / 1e9:.2f}B" if count > 1e8 else f"{count / 1e6:.2f}M"
    gpus = "1 GPU" if cluster.gpus == 1 else f"{cluster.gpus} GPUs"
    nodes = "" if cluster.nodes == 1 else f" on {cluster.nodes} machines"
    trained = "all weights" if work.lora is None else f"an adapter of rank {work.lora}"
    usable = f"{cluster.usable / GIB:.1f} GiB of each for tensors"
    yield (
        f"{shape.name}: {size} parameters, {shape.layers} layers, {shape.vocabulary:,} "
        f"tokens; {trained} trained."
    )
    yield f"{gpus} of {cluster.memory / GIB:.1f} GiB{nodes}, {usable}."
    yield (
        f"Batches of {work.groups_per_batch} x {work.group_size} responses of at most "
        f"{work.sequence:,} tokens with their prompts."
    )
    if work.prompt is not None:
        yield (
            f"A step has {work.tree_ratio:.2f} times as many tokens as distinct ones, "
            f"which are computed once with packing='tree', and with 'auto' from "
            f"{TREES_PAY:g} on."
        )
    if work.group_size == 1:
        yield (
            "A group of one response has no other to be compared with: its advantage "
            "is 0, and nothing is learnt. Take a --group-size of 2 or more."
        )


def _trainer_lines(shape: Shape, found: Arrangement) -> Iterator[str]:
    where = "on the servers' GPUs" if found.place == "colocated" else "of its own"
    ranks = "1 GPU" if found.ranks == 1 else f"{found.ranks} GPUs, FSDP2,"
    yield f"Trainer: {ranks} {where}; GiB of each"
    memory = found.trainer
    for name, size in memory.kept.items():
        yield _line(name, size)
    for phase in ("training", "stepping", "updating"):
        for name, size in getattr(memory, phase).items():
            if size:
                yield _line(f"{phase}: {name}", size)
    for phase, size in memory.peaks.items():
        mark = " <- peak" if size == memory.peak else ""
        yield _line(f"most while {phase}", size) + mark
    yield _line("left at the peak, beside the reserve", found.margin)
    host = host_memory(shape, found.work)
    yield _line("of the first machine, while loading", host)
    work = replace(found.work, checkpointing=not found.work.checkpointing)
    other = trainer_memory(
        shape, work, ranks=found.ranks, tokens=found.tokens_per_pass
    ).peak
    name = "without" if found.work.checkpointing else "with"
    yield _line(f"peak {name} checkpointing", other)


def _server_lines(found: Arrangement) -> Iterator[str]:
    server, work = found.server, found.work
    count = "1 server" if found.replicas == 1 else f"{found.replicas} servers"
    yield f"Servers: {count} of tp_size={found.tp_size}; GiB of each GPU"
    yield _line("weights", server.weights)
    yield _line(f"KV cache, of {server.token / 1024:.1f} KiB a token", server.cache)
    yield _line(f"outside of mem_fraction_static={found.share:g}", server.unreserved)
    yield (
        f"  Together they hold {found.sequences:,} responses of {work.sequence:,} "
        f"tokens at once."
    )


def _margin_lines(shape: Shape, found: Arrangement) -> Iterator[str]:
    """Yields lines on a thin margin and its remedy."""
    peak = found.trainer.peak
    if found.margin < THIN * peak:
        yield (
            f"  A thin margin: the peak leaves {found.margin / GIB:.1f} GiB, and a "
            f"measured step took {THIN:.1%} more than its formula, here "
            f"{THIN * peak / GIB:.1f} GiB."
        )
        tokens = found.tokens_per_pass // 2
        less = trainer_memory(shape, found.work, ranks=found.ranks, tokens=tokens).peak
        margin = found.margin + peak - less
        remedy = "Shorter sequences or more trainer ranks leave more."
        if margin > found.margin:
            remedy = f"max_tokens_per_pass={tokens} leaves {margin / GIB:.1f} GiB."
        yield f"  {remedy}"


def _notes(found: Arrangement) -> Iterator[str]:
    work = found.work
    if found.unused:
        yield f"  {found.unused} GPUs have nothing to do."
    if found.sequences < work.responses:
        yield (
            f"  A batch has {work.responses}, so that some wait for others: it is "
            f"slower, and works."
        )
    elif found.replicas * work.group_size > 2 * work.responses:
        yield (
            f"  A batch has {work.responses}, few for {found.replicas} servers: a "
            f"larger groups_per_batch keeps them busy."
        )


def _speed_lines(shape: Shape, found: Arrangement) -> Iterator[str]:
    speed, work = estimate(shape, found), found.work
    if isinstance(speed, str):
        yield f"Seconds of a step are unknown: {speed}."
        return
    yield (
        f"Seconds of a step, if these are {speed.card}s (--card), for responses of "
        f"{work.mean:,.0f} tokens in the mean (--mean-response):"
    )
    rate, meanwhile = speed.tokens_per_second, ", meanwhile" * speed.overlapped
    rows = {
        f"collect, {rate:,.0f} tokens/s a server": speed.ranges["collect"],
        f"train{meanwhile}, MFU {speed.mfu:.2f}": speed.ranges["train"],
        "update weights": speed.ranges["update"],
        "a step": speed.ranges["step"],
    }
    for name, (seconds, low, high) in rows.items():
        yield f"  {name:{WIDTH}} {seconds:8.2f}   {low:.2f} to {high:.2f}"
    hour, high, low = (3600 / seconds for seconds in speed.ranges["step"])
    yield f"  {'steps an hour':{WIDTH}} {hour:8.0f}   {low:.0f} to {high:.0f}"
    if speed.unmeasured:
        yield (
            f"  The range is wide: no measured run on {speed.card}s had "
            f"{', '.join(speed.unmeasured)}."
        )


def _line(name: str, size: float) -> str:
    return f"  {name:{WIDTH}} {size / GIB:8.2f}"


def to_json(
    shape: Shape, cluster: Cluster, work: Workload, found: Arrangement | NothingFits
) -> str:
    """Returns a line with a JSON object; sizes are in bytes."""
    about: dict[str, Any] = {
        "model": shape.name,
        "parameters": shape.parameters,
        "cluster": asdict(cluster),
        "work": asdict(work),
        "fits": isinstance(found, Arrangement),
    }
    if isinstance(found, NothingFits):
        return json.dumps({**about, **asdict(found)})
    speed = estimate(shape, found)
    return json.dumps(
        {
            **about,
            "place": found.place,
            "ranks": found.ranks,
            "replicas": found.replicas,
            "tp_size": found.tp_size,
            "sequences": found.sequences,
            "trainer": {**asdict(found.trainer), "peaks": found.trainer.peaks},
            "server": asdict(found.server),
            "margin": found.margin,
            "speed": speed_object(speed),
            "arguments": grpo_arguments(found),
            "command": command_of(shape, found),
        }
    )


def speed_object(speed: Speed | str) -> dict[str, Any]:
    """Returns seconds for JSON, or why there are none."""
    if isinstance(speed, str):
        return {"unknown": speed}
    hour = 3600 / speed.step
    return {**asdict(speed), **speed.ranges, "steps_an_hour": hour}
