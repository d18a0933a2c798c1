"""Memory of a run, by formula: bytes of a GPU, from sizes and counts.

Each formula names its source. ``B`` is bytes; a value of bfloat16 has 2, a value of
float32 has 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torchrl_sglang.cli.plan.shapes import Shape
from torchrl_sglang.weight_update.transports.base import BUCKET_BYTES

GIB = 2**30

HALF, FULL = 2, 4
"""Bytes of a value of bfloat16, and of float32."""

ADAMW_STATE = 2 * FULL
"""Bytes of a parameter's two moments (``torch.optim.AdamW``), in its own type. A fused
step needs nothing else."""

LOGIT_BYTES = {True: 10, False: 6}
"""Bytes of a logit at the begin of the backward pass, with and without autocast.
``F.cross_entropy`` of bfloat16 logits keeps their log-softmax (2). With autocast, its
loss is in float32: a copy (4), and its gradient (4). Without, there are the gradients
of the loss and of the log-softmax (2 each). Measured with autocast: 18.7 GB for 8,448
tokens of 0.5B shapes, ``benchmarks/loss.py``; the formula gives 18.5."""

PACKED_LOGIT_BYTES = HALF
"""Bytes of a logit of packed responses, whose gradient replaces it."""

RUNTIME = 2 * GIB
"""Memory besides tensors: CUDA's context, kernels, NCCL's buffers. A sleeping server,
which has little else, held 1.9 GB on an H200."""

MEAN_SHARE = 0.25
"""Tokens of a response in the mean, by those of the longest, as in measured runs."""

SLACK = 0.05
"""Free share of a GPU: allocators round up, and blocks are fragmented."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Parameters of a run that determine its memory and speed."""

    sequence: int = 2048
    """Tokens of the longest prompt with its response."""
    prompt: int | None = None
    """Tokens of that prompt, if known."""
    mean_response: int | None = None
    """Tokens of a response in the mean, if known."""
    group_size: int = 8
    """Responses to a prompt."""
    groups_per_batch: int = 16
    """Prompts of a batch."""
    lora: int | None = None
    """Rank of the trained adapter; ``None``: all weights are trained."""
    reference: bool = False
    """Whether the loss has a divergence from the model before training."""
    checkpointing: bool = True
    """Whether the backward pass recomputes activations."""

    packed: bool = True
    """Whether responses go through the model in a common row without padding, if the
    model allows it."""

    @property
    def responses(self) -> int:
        """Responses of a batch."""
        return self.group_size * self.groups_per_batch

    @property
    def prompt_tokens(self) -> int:
        """Tokens of a prompt; none if they are unknown."""
        return self.prompt or 0

    @property
    def longest(self) -> int:
        """Tokens of the longest response."""
        return self.sequence - self.prompt_tokens

    @property
    def mean(self) -> float:
        """Tokens of a response in the mean."""
        return self.mean_response or MEAN_SHARE * self.longest

    @property
    def context(self) -> float:
        """Tokens of its response before a token, in the mean.

        Of lengths with an exponential distribution, up to the longest.
        """
        return min(self.mean, self.longest / 2)

    @property
    def tree_ratio(self) -> float:
        """Tokens of a group over its distinct ones."""
        tokens = self.group_size * self.sequence
        return tokens / (tokens - (self.group_size - 1) * self.prompt_tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerMemory:
    """Bytes of a trainer's GPU: permanent and temporary tensors."""

    kept: Mapping[str, float]
    """Permanent tensors of the run."""
    training: Mapping[str, float]
    """Additional tensors of a forward and backward pass."""
    stepping: Mapping[str, float]
    """Additional tensors of an optimizer step."""
    updating: Mapping[str, float]
    """Additional tensors of a weight update."""
    loading: Mapping[str, float]
    """Tensors while the model is loaded, before all others."""

    @property
    def standing(self) -> float:
        """Bytes between two steps."""
        return sum(self.kept.values())

    @property
    def peaks(self) -> dict[str, float]:
        """Most bytes of tensors in each phase."""
        beside = {name: getattr(self, name) for name in ("training", "stepping")}
        beside["updating"] = self.updating
        totals = {k: self.standing + sum(v.values()) for k, v in beside.items()}
        return {**totals, "loading": sum(self.loading.values())}

    @property
    def peak(self) -> float:
        """Most bytes of tensors at any time."""
        return max(self.peaks.values())


def trained_parameters(shape: Shape, lora: int | None) -> int:
    """Returns the number of trained parameters.

    An adapter of rank ``r`` has ``r (inputs + outputs)`` for each linear layer but the
    head (LoRA, https://arxiv.org/abs/2106.09685, section 4.1; PEFT's ``all-linear``).
    """
    return shape.parameters if lora is None else lora * shape.linear_features


def trainer_memory(
    shape: Shape, work: Workload, *, ranks: int, tokens: int
) -> TrainerMemory:
    """Returns the memory of each rank of the trainer.

    ``trainers.models`` loads weights in float32. One rank computes passes with
    autocast; several share the model with FSDP2, which gathers a layer in bfloat16 and
    reduces its gradient in float32. ``tokens`` is ``max_tokens_per_pass``; a longer
    response has its own pass.
    """
    trained = trained_parameters(shape, work.lora)
    frozen = 0 if work.lora is None else shape.parameters
    tokens = max(tokens, work.sequence)
    permanent = {
        "weights": FULL * (trained + frozen) / ranks,
        "optimizer": ADAMW_STATE * trained / ranks,
    }
    if work.reference and work.lora is None:
        # An adapter's reference is the model without it.
        permanent["reference model"] = FULL * shape.parameters / ranks
    gradients = {"gradients": FULL * trained / ranks}
    return TrainerMemory(
        kept=permanent,
        training={
            **gradients,
            **pass_memory(shape, work, autocast=ranks == 1, tokens=tokens),
        },
        stepping=gradients,
        updating={"buckets": update_memory(shape, work, ranks=ranks)},
        # FSDP2 moves a group to the GPU, and keeps this rank's shard of it.
        loading={
            "weights": permanent["weights"],
            "a group": FULL * largest_group(shape) if ranks > 1 else 0,
        },
    )


def largest_group(shape: Shape) -> int:
    """Returns the parameters of FSDP2's largest group."""
    return max(shape.largest_layer, shape.outside_layers)


def host_memory(shape: Shape, work: Workload) -> float:
    """Returns the memory of the first rank's machine, while ranks load.

    The first rank alone reads the model, in float32, and sends the others their share a
    layer at a time; and the reference model, after it.
    """
    frozen = 0 if work.lora is None else shape.parameters
    return FULL * (trained_parameters(shape, work.lora) + frozen)


def pass_memory(
    shape: Shape, work: Workload, *, autocast: bool, tokens: int
) -> dict[str, float]:
    """Returns the memory of a forward and backward pass, beside weights and gradients.

    Two moments can be the largest: the loss, with logits and their gradient, and the
    backward pass of a layer, with recomputed activations and FSDP2's reduction of
    gradients.
    """
    one = layer_activations(shape, autocast=autocast) * tokens
    stream = FULL if autocast else HALF
    saved = stream * shape.hidden * tokens if work.checkpointing else one
    logits = LOGIT_BYTES[autocast] * shape.vocabulary * tokens
    if work.packed:
        # The gradient of the head, in bfloat16, comes before they go.
        head = 0 if work.lora is not None else HALF * shape.vocabulary * shape.hidden
        logits = PACKED_LOGIT_BYTES * shape.vocabulary * tokens + head
    # Of the largest layer again, and the gradients of its activations, of which the
    # widest are there at a time.
    again = one if work.checkpointing else 0
    widest = 2 * HALF * max(shape.mlp, shape.attention, shape.hidden) * tokens
    trained_by_fsdp = work.lora is None and not autocast
    reduced = (HALF + FULL) * gathered_parameters(shape) if trained_by_fsdp else 0
    return {
        "copies of weights": weight_copies(shape, work, autocast=autocast),
        "activations": shape.layers * saved,
        "logits or a layer": max(logits, again + widest + reduced),
        "attention mask": 0 if work.packed else mask_memory(work, tokens=tokens),
    }


def layer_activations(shape: Shape, *, autocast: bool) -> float:
    """Returns a layer's bytes per token, kept for its backward pass.

    Of a decoder layer with RMSNorm, rotary embedding and a gated MLP (Llama,
    https://arxiv.org/abs/2302.13971), as transformers computes it, tensor by tensor:

    - a norm keeps its input in float32 and its result before the weight; there are two;
    - linear layers keep their input in bfloat16. Autocast makes a copy for each of
    them: three of the attention's, two of the MLP's;
    - attention keeps queries, keys and values, the last two repeated for each head
      (transformers' ``repeat_kv``), and its result, which the next linear layer keeps;
    - a norm of queries and keys (Qwen3) keeps these in float32, and its result;
    - the MLP keeps both parts, the activation of one, and their product;
    - with experts, each chosen expert has its copy of the input, and of the output.
    """
    norms = 2 * (FULL + (FULL if autocast else HALF))
    inputs = HALF * (5 if autocast else 2)
    attention = 4 * HALF * shape.attention + (FULL + HALF) * shape.normed
    mlp = 4 * HALF * shape.mlp
    experts = 2 * HALF * shape.experts_per_token * shape.hidden
    return (norms + inputs) * shape.hidden + attention + mlp + experts


def weight_copies(shape: Shape, work: Workload, *, autocast: bool) -> float:
    """Returns the bytes of weights in bfloat16.

    Autocast keeps the copy of each weight with a gradient until it ends
    (``torch.autocast``, ``cache_enabled``), here a whole minibatch, and makes others on
    use. FSDP2 has the group outside of the layers gathered during the whole pass and
    two layers, as it gathers the next layer ahead; for the same number it has the
    gradient in bfloat16 and in float32 in the backward pass
    (``torch.distributed.fsdp.fully_shard``).
    """
    if autocast:
        trained = work.lora is None
        copied = shape.parameters if trained else shape.largest_layer
        kept_for_backward = 0 if work.checkpointing or trained else shape.parameters
        return HALF * max(copied, kept_for_backward)
    return HALF * gathered_parameters(shape)


def gathered_parameters(shape: Shape) -> int:
    """Returns the number of parameters gathered by FSDP2 at a time."""
    return shape.outside_layers + 2 * shape.largest_layer


def mask_memory(work: Workload, *, tokens: int) -> float:
    """Returns the bytes of the mask of padded attention, and of its bias in bfloat16.

    A square for each sequence, as transformers makes it for PyTorch's attention.
    """
    return (1 + HALF) * tokens * work.sequence


def update_memory(shape: Shape, work: Workload, *, ranks: int) -> float:
    """Returns the bytes of a weight update on the trainer's GPU.

    One bucket in the served type and the next bucket, of at most the model; with FSDP2
    also the gathered float32 values of the largest parameter.
    """
    bucket = min(BUCKET_BYTES * 3 / 2, HALF * trained_parameters(shape, work.lora))
    return bucket + (FULL * shape.largest_parameter if ranks > 1 else 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerMemory:
    """Bytes of each GPU of a server."""

    weights: float
    """Its share of the weights, in bfloat16."""
    cache: float
    """The KV cache: the remainder of the server's share."""
    token: float
    """Bytes of a token in the cache."""
    unreserved: float
    """Outside of the share: activations, CUDA graphs, buckets of an update."""

    @property
    def tokens(self) -> int:
        """Number of tokens in the cache, on all GPUs of the server together."""
        return max(int(self.cache // self.token), 0)


def server_memory(
    shape: Shape, *, tp_size: int, memory: float, share: float
) -> ServerMemory:
    """Returns the memory of each GPU, of ``memory`` bytes, of a server.

    SGLang shares weights and heads among ``tp_size`` GPUs; a head of keys and values is
    repeated where there are fewer of them. ``share`` is ``mem_fraction_static``, the
    part of a GPU for weights and cache (SGLang's ``ModelRunner``,
    ``profile_max_num_token``).
    """
    weights = HALF * shape.parameters / tp_size
    parts = min(tp_size, shape.kv_heads)
    return ServerMemory(
        weights=weights,
        cache=share * memory - weights,
        token=HALF * shape.cache / parts,
        unreserved=(1 - share) * memory,
    )
