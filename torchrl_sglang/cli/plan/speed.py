"""Seconds of a step, by formula, from rates measured on GPUs.

``test/llm/cli/test_plan_speed.py`` compares the formulas with each measured run. In
brackets are sources: rows of ``benchmarks/RESULTS.md``, models of
``benchmarks/table.json``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from torchrl_sglang.cli.plan.arrange import Arrangement
from torchrl_sglang.cli.plan.memory import GIB, HALF, Workload, trained_parameters
from torchrl_sglang.cli.plan.shapes import Shape
from torchrl_sglang.objectives.tree import TREES_PAY


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """A GPU on which runs were measured."""

    device: str
    """Name that CUDA has for it."""
    memory: tuple[float, float]
    """Least and most GiB of a GPU that counts as this card."""
    bandwidth: float
    """Bytes a second of its memory, of the data sheet."""
    mfu: Mapping[float, float]
    """Parameters of a model, in 1e9 -> measured MFU of a training step."""
    flops: float = 989e12
    """FLOP a second in bfloat16 without sparsity, of the data sheet."""


CARDS = {
    "H100": Card(
        device="NVIDIA H100 80GB HBM3",
        memory=(75, 82),
        bandwidth=3.35e12,
        # [training.py, 2 H100: packed]
        mfu={0.494: 0.150, 3.09: 0.207},
    ),
    "H200": Card(
        device="NVIDIA H200",
        memory=(138, 142),
        bandwidth=4.8e12,
        # [table.json: smollm2-135m; training.py, H200: packed, twice; table.json: 7b]
        mfu={0.135: 0.057, 0.494: 0.179, 3.09: 0.309, 7.62: 0.345},
    ),
}

BANDWIDTH_SHARE = 0.85
"""Share of a GPU's bandwidth with which a decode step reads weights and KV cache
[modes.py fp8 7b: bfloat16, 32 responses at a time]."""
MATMUL_SHARE = 0.65
"""Share of a GPU's FLOP/s in prefill [distillation.py 7b: raw prefill, 45,014 tokens/s]
and in decode steps of many responses [modes.py fp8 7b: 256 at a time]."""
HOST_STEP, HOST_TOKEN = 1.1e-3, 15e-6
"""Seconds of a server's processor for a decode step, and for a token [table.json:
generation alone, 0.5b on one server and on two, smollm2-135m]."""
UPDATE, UPDATE_RATE = 0.1, 80e9
"""Seconds of any weight update, with the servers' sleep, and its bytes a second
[table.json: 0.5b, 7b]."""
SCORING = 1 / 3
"""Share of a training step that a further forward pass takes [training.py: packed, with
a pass before]."""

NEAR, FAR = 1.25, 1.65
"""Factors of the range beside a measured run, which a test holds, and far from one: MFU
of 3B and 7B shapes has differed by as much between runs (0.207 and 0.345)."""
UPDATE_FACTOR = 3.0
"""Factor of the range of an update, by the same test; it is a small part of a step."""
PHASES = ("collect", "train", "update", "step")


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """Expected seconds of the phases of a step."""

    card: str
    """The GPU whose rates they follow."""
    collect: float
    """From a batch's first request to its last response."""
    train: float
    """A step of the trainer."""
    update: float
    """A weight update, with the servers' sleep."""
    overlapped: bool
    """Whether servers generate while the trainer trains."""
    tokens_per_second: float
    """Generated tokens a second of a server."""
    mfu: float
    """Share of the GPU's FLOP/s in training."""
    unmeasured: tuple[str, ...]
    """Properties of the run that no measured run had."""

    @property
    def step(self) -> float:
        """Seconds of a step."""
        both = max if self.overlapped else math.fsum
        return both((self.collect, self.train)) + self.update

    @property
    def ranges(self) -> dict[str, tuple[float, float, float]]:
        """Expected, least and most seconds of each phase and of a step."""
        factor = FAR if self.unmeasured else NEAR
        factors = {**dict.fromkeys(PHASES, factor), "update": UPDATE_FACTOR}
        expected = {name: getattr(self, name) for name in PHASES}
        return {k: (s, s / factors[k], s * factors[k]) for k, s in expected.items()}


def find_card(memory: float) -> str | None:
    """Returns the measured card with so many GiB."""
    sizes = {name: card.memory for name, card in CARDS.items()}
    return next((n for n, (low, high) in sizes.items() if low <= memory <= high), None)


def estimate(
    shape: Shape, found: Arrangement, *, staleness: int | None = None
) -> Speed | str:
    """Returns the seconds of a step, or the reason why they are unknown.

    ``staleness`` is ``max_staleness``, by default 1 where servers have GPUs of their
    own, and 0 on shared GPUs.
    """
    cluster, work = found.cluster, found.work
    name = cluster.card or f"a GPU of {cluster.memory / GIB:.0f} GiB"
    card = CARDS.get(name)
    if card is None:
        return f"no run on {name} was measured, only on {' and '.join(CARDS)} (--card)"
    if shape.experts_per_token:
        return "no run of a mixture of experts was measured"
    if found.spans_nodes:
        return "no run on several machines was measured"
    if staleness is None:
        staleness = int(found.place == "separate")
    collect = collect_seconds(shape, found, card, staleness)
    mfu = interpolate(card.mfu, shape.parameters / 1e9)
    train = train_flop(shape, work) / (mfu * card.flops * found.ranks)
    return Speed(
        card=name,
        collect=collect,
        train=train * (1 + SCORING) if work.reference else train,
        update=UPDATE + HALF * trained_parameters(shape, work.lora) / UPDATE_RATE,
        overlapped=staleness > 0,
        tokens_per_second=work.responses * work.mean / found.replicas / collect,
        mfu=mfu,
        unmeasured=_unmeasured(shape, found, card),
    )


def interpolate(mfu: Mapping[float, float], size: float) -> float:
    """Returns the MFU of a size, linear in its logarithm between ascending sizes."""
    size = min(max(size, min(mfu)), max(mfu))
    low, high = next(pair for pair in pairwise(mfu) if size <= pair[1])
    share = math.log(size / low) / math.log(high / low)
    return mfu[low] + share * (mfu[high] - mfu[low])


def collect_seconds(
    shape: Shape, found: Arrangement, card: Card, staleness: int
) -> float:
    """Returns the seconds in which servers generate a batch.

    A decode step reads the weights once, and takes more for each of its tokens: the
    server's processor or the matrices' FLOP, which overlap, and the KV cache of the
    text before it. There are as many decode steps as the longest response has tokens,
    and more where responses wait for room in the KV cache; with a larger
    ``max_staleness`` than 1, a batch has the time of as many steps.
    """
    work, bandwidth = found.work, BANDWIDTH_SHARE * card.bandwidth
    weights = (shape.matrices + shape.head) / found.tp_size
    # Of a prompt or a response; a token of the embedding is looked up.
    multiply = 2 * weights / (MATMUL_SHARE * card.flops)
    cached = found.server.token * (work.prompt_tokens + work.context)
    responses = work.responses / found.replicas
    room = found.server.tokens / (work.prompt_tokens + work.mean)
    steps = work.longest + work.mean * max(responses / room - 1, 0)
    return (
        steps / max(staleness, 1) * (HOST_STEP + HALF * weights / bandwidth)
        + responses * work.mean * (max(HOST_TOKEN, multiply) + cached / bandwidth)
        + responses / work.group_size * work.prompt_tokens * multiply
    )


def train_flop(shape: Shape, work: Workload) -> float:
    """Returns the model's FLOP of a forward and a backward pass over a batch.

    Two for each parameter of a matrix and token, and of the causal attention, times
    three, without what is computed again: those of ``benchmarks/training.py``.
    """
    written = work.responses * work.mean
    prompts = work.responses * work.prompt_tokens
    shared = work.groups_per_batch * work.prompt_tokens
    if written + prompts >= TREES_PAY * (written + shared):
        prompts = shared
    row = 2 * work.context + work.prompt_tokens
    attention = 2 * shape.layers * shape.attention * row
    return 3 * (
        (2 * shape.matrices + attention) * (written + prompts)
        + 2 * shape.head * written
    )


def _unmeasured(shape: Shape, found: Arrangement, card: Card) -> tuple[str, ...]:
    """Returns the properties in which a run is far from measured runs."""
    work, size = found.work, shape.parameters / 1e9
    sizes = min(card.mfu) / 1.5, max(card.mfu) * 1.5
    running = work.responses / found.replicas
    trained = work.responses * work.mean / found.ranks
    properties = {
        f"{size:.3g}B parameters": not sizes[0] <= size <= sizes[1],
        f"{found.ranks} trainer ranks": found.ranks > 2,
        f"{found.replicas} servers": found.replicas > 2,
        f"servers of {found.tp_size} GPUs": found.tp_size > 1,
        "an adapter (train has the seconds of all weights)": work.lora is not None,
        "training without gradient checkpointing": not work.checkpointing,
        f"passes of {found.tokens_per_pass:,} tokens": found.tokens_per_pass < 8192,
        f"responses of {work.longest:,} tokens": work.longest > 4096,
        # CUDA graphs of a server are for 512 requests.
        "more than 512 responses at once on a server": running > 512,
        "less than 8,192 tokens of a batch for a trainer rank": trained < 8192,
    }
    return tuple(name for name, condition in properties.items() if condition)
