"""Values exchanged by the package's layers.

Frozen, keyword-only and free of torch tensors, except for the dtypes and shapes of
:data:`ModelMetadata`. Nothing here does I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import torch

__all__ = [
    "Adapter",
    "Completion",
    "Distribution",
    "EngineStats",
    "FinishReason",
    "FusedParameter",
    "LogProbsMode",
    "ModelMetadata",
    "PauseMode",
    "ServerCapabilities",
    "ServerPlacement",
    "ServerStats",
    "SyncReport",
    "TensorPart",
    "TokenLayout",
    "TokenValues",
    "UpdateStats",
    "VersionSpan",
]

ModelMetadata: TypeAlias = dict[str, tuple[torch.dtype, torch.Size]]
"""Parameter name -> (dtype, shape), under Hugging Face's names, in load order."""

FinishReason: TypeAlias = Literal["stop", "length", "abort"]
"""Reason of a response's end; an abort is an error unless ``return_partial=True``."""

LogProbsMode: TypeAlias = Literal["model", "sampling", "behaviour"]
"""Kind of log-probabilities: the model's own, ``log_softmax(logits)``; after
temperature, penalties, biases and grammar; or of the actual sampling distribution,
after top-k, top-p and min-p, too."""

PauseMode: TypeAlias = Literal["continue", "retract", "abort", "in_place", "none"]
"""Treatment of running requests while weights are updated. ``"retract"``, SGLang's name
of the servers' part in it, equals ``"continue"``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorPart:
    """A view of a larger tensor, under its name for the server's loader."""

    name: str
    """Name for the loader."""
    shape: torch.Size
    """Shape of the part."""
    stride: tuple[int, ...]
    """Strides in the larger tensor, which is contiguous, in elements."""
    offset: int
    """Offset in the larger tensor, in elements."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FusedParameter:
    """A parameter of the module, in parts for the server's loader.

    For example all experts of a layer, which a checkpoint stores separately.
    """

    shape: torch.Size
    """Shape in the module."""
    parts: tuple[TensorPart, ...]
    """The parts; a renamed parameter has a single part."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionSpan:
    """A run of response tokens of a single weight version."""

    version: str
    """Weight version reported by the server."""
    start: int
    """Index of the first response token of the span."""
    end: int
    """Index after the last response token of the span."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLayout:
    """The layout of a per-token quantity."""

    name: str
    """Name of the quantity."""
    dtype: str
    """NumPy's name of its type."""
    shape: tuple[int, ...] | None = ()
    """Shape of a token's value; ``None``: a list of variable length."""
    unknown: float = -1
    """Value of a token without data, such as a prompt's. For lists, the list of such a
    token is empty."""
    padding: float = -1
    """Value at positions without a token."""

    @property
    def is_ragged(self) -> bool:
        """Whether tokens have lists."""
        return self.shape is None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenValues:
    """A quantity of some tokens, in order, with its layout.

    Examples:
        >>> values = TokenValues(
        ...     layout=TokenLayout(name="allowed", dtype="int32", shape=None),
        ...     values=np.array([5, 6, 7], dtype="int32"),
        ...     counts=np.array([2, 1]),
        ... )
        >>> len(values), values.tolist(), values[1:].tolist()
        (2, [[5, 6], [7]], [[7]])
    """

    layout: TokenLayout
    """Type and shape of the values."""
    values: np.ndarray[Any, Any]
    """Values of shape ``(tokens, *layout.shape)``; lists are concatenated."""
    counts: np.ndarray[Any, Any] | None = None
    """int64 ``(tokens,)``: lengths of lists; ``None`` if there are none."""

    def __len__(self) -> int:
        return len(self.values if self.counts is None else self.counts)

    def __getitem__(self, part: slice) -> TokenValues:
        if self.counts is None:
            return TokenValues(layout=self.layout, values=self.values[part])
        ends = np.concatenate([[0], np.cumsum(self.counts)])
        start, stop, _ = part.indices(len(self.counts))
        return TokenValues(
            layout=self.layout,
            values=self.values[ends[start] : ends[max(start, stop)]],
            counts=self.counts[part],
        )

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, TokenValues)
            and self.layout == other.layout
            and len(self) == len(other)
            and np.array_equal(self.values, other.values, equal_nan=self._has_nan)
            and (
                self.counts is None
                or other.counts is None
                or np.array_equal(self.counts, other.counts)
            )
        )

    __hash__ = None  # type: ignore[assignment]  # Arrays have none either.

    @property
    def _has_nan(self) -> bool:
        return np.dtype(self.layout.dtype).kind == "f"

    def tolist(self) -> list[Any]:
        """Returns a value, or a list, for each token."""
        if self.counts is None or not len(self):
            return list(self.values.tolist())
        ends = np.cumsum(self.counts)[:-1]
        return [part.tolist() for part in np.split(self.values, ends)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """A finished response, in tokens."""

    token_ids: list[int]
    """Response token ids, the stop token included."""
    log_probs: list[float] | None = None
    """Log-probability of each response token, NaN where unknown; ``None`` if not
    requested."""
    logprobs_mode: LogProbsMode | None = None
    """Kind of the log-probabilities; ``None`` if not requested."""
    top_token_ids: list[list[int]] | None = None
    """The top-k tokens of each position, likeliest first; ``None`` if not requested."""
    top_log_probs: list[list[float]] | None = None
    """Log-probabilities of the top-k tokens."""
    prompt_log_probs: list[float] | None = None
    """Log-probability of each prompt token given its predecessors; NaN for the first
    token. ``None`` if not requested."""
    columns: Mapping[str, TokenValues] = field(default_factory=dict)
    """Further quantities of each response token, from ``token_columns``."""
    prompt_columns: Mapping[str, TokenValues] = field(default_factory=dict)
    """Quantities of each prompt token, if available."""
    finish_reason: FinishReason
    """Reason of the response's end."""
    matched_stop: int | str | None = None
    """The stop token id or stop string at its end."""
    cached_tokens: int = 0
    """Number of prompt tokens whose KV cache came from the prefix cache."""
    versions: tuple[VersionSpan, ...] = ()
    """Weight versions of the response tokens, in order, without gaps. Empty if unknown:
    SGLang before 0.5.20 reports only the last version."""
    weight_version: str | None = None
    """Weight version at the end of the response, as the server reports it."""
    mixed_state: bool = False
    """Whether later tokens were, or may have been, computed on a stale KV cache (as by
    ``pause_mode="in_place"``): their log-probabilities belong to no single version."""
    text: str | None = None
    """The server's own decoding, if it has a tokenizer."""
    adapter: str | None = None
    """Name of the response's LoRA adapter, if any."""
    adapter_version: str | None = None
    """Version of the adapter, if a weight update published it; ``versions`` agrees."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """A LoRA adapter on the servers of an engine."""

    name: str
    """Name of the adapter in requests."""
    served_as: str
    """Name of the adapter on the servers, which changes with each load."""
    version: str | None = None
    """Weight version, if a weight update published it."""
    pinned: bool = False
    """Whether the servers always keep the adapter ready for batches."""


FP8_BLOCK = 128
"""Rows and columns of a block of FP8 weights that has a scale."""

BLOCK_FP8 = "fp8 in blocks of 128 x 128"
"""``ServerCapabilities.quantized`` of servers for FP8 weights with scales."""

DraftUpdate: TypeAlias = Literal["auto", "keep", "update"]
"""Treatment of a draft model in a weight update: a fitting model, none, or the same."""


WeightRoute: TypeAlias = Literal["distributed", "tensor", "disk"]
"""Route by which servers load weights: a process group, a request, or a folder."""

WeightLoader: TypeAlias = Literal["sglang", "traced"]
"""Loader of new weights: the model's own, or copies traced in it once."""

TRACED_LOADER: Final = "torchrl_sglang_loader.load"
"""Name of the traced loader among the weight loaders of a server."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerArgs:
    """Used arguments of a server, under SGLang's own names.

    The defaults apply to arguments without a server's report.
    """

    device: str | None = None
    nnodes: int = 1
    model_path: str | None = None
    """Model at the server's start, whatever it has loaded since."""
    revision: str | None = None
    load_format: str | None = None
    """``"dummy"``: it started with random weights."""
    quantization: str | None = None
    json_model_override_args: str | None = None
    enable_symm_mem: bool = False
    enable_memory_saver: bool = False
    mem_fraction_static: float | None = None
    weight_cache_mode: str | None = None
    """Other than ``"off"``: servers share weights through a daemon."""
    disable_radix_cache: bool = False
    enable_hierarchical_cache: bool = False
    hicache_storage_backend: str | None = None
    disaggregation_mode: str | None = None
    """Other than ``"null"``: prefill and decoding are on different servers."""
    enable_return_routed_experts: bool = False
    enable_metrics: bool = False
    enable_trace: bool = False
    speculative_accept_threshold_single: float = 1.0
    """Below 1, it accepts drafts of at least this probability."""
    speculative_accept_threshold_acc: float = 1.0
    """Cumulative acceptance threshold; below 1, sampling is lossy."""
    sampling_mask_max_tokens: int | None = None
    enable_priority_scheduling: bool = False
    """Whether it starts waiting requests in the order of their priorities."""
    schedule_low_priority_values_first: bool = False
    """Whether small numbers have priority."""
    disable_priority_preemption: bool = False
    """Whether a running request continues when a request of higher priority arrives."""
    max_lora_rank: int | None = None
    lora_target_modules: Any = None
    max_loras_per_batch: int | None = None
    max_loaded_loras: int | None = None

    @classmethod
    def read(cls, reported: Mapping[str, Any]) -> ServerArgs:
        """Reads them from a server's report; ``None`` is the default."""
        names = (f.name for f in fields(cls))
        values = {name: reported.get(name) for name in names}
        return cls(**{name: v for name, v in values.items() if v is not None})


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertShape:
    """Sizes of a mixture of experts."""

    num_layers: int
    """Layers of the model, including dense layers."""
    num_chosen: int
    """Experts per token by a router's choice, without shared experts."""
    num_experts: int | None = None
    """Experts of a layer for the router's choice, if configured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerCapabilities:
    """Capabilities of a server, detected when an engine connects to it."""

    version: str
    """Version of SGLang."""
    model_path: str
    """Path or hub name of the served model, as the server sees it."""
    tokenizer_path: str
    """Path or hub name of the tokenizer, as the server sees it."""
    vocab_size: int
    """Token ids lie in ``[0, vocab_size)``; others can kill a server."""
    eos_token_ids: tuple[int, ...] = ()
    """End tokens of a response in the model's configuration; the server's tokenizer may
    add its own."""
    max_context: int
    """Most tokens of prompt and response together."""
    max_prompt: int
    """Most tokens of a prompt."""
    dtype: torch.dtype | None
    """Type of the served weights, if the server reports it."""
    tp_size: int
    """Tensor-parallel size."""
    pp_size: int
    """Pipeline-parallel size."""
    dp_size: int
    """Data-parallel size inside the server."""
    needs_update_session: bool
    """Weights must be sent between begin and end calls."""
    keeps_requests: bool = False
    """Whether the prefix cache can be flushed while the server holds retracted
    requests, which then continue exactly with new weights."""
    load_route: str
    """Path for the number of running and queued requests."""
    info_route: str = "/server_info"
    """Path for the server's arguments; its scheduler takes part."""
    weight_loaders: tuple[str, ...] = ()
    """Functions in the server's Python for weight updates to name; another name ends
    the server."""
    has_tokenizer: bool
    """The server can decode tokens and match stop strings."""
    has_grammar: bool
    """The server accepts regex, JSON-schema and EBNF constraints."""
    weight_version: str
    """Version of the weights at the time of connecting."""
    has_lora: bool = False
    """The server supports LoRA adapters."""
    lora_tensors_field: str | None = None
    """Field of a request for an adapter's tensors; ``None`` if the server reads
    adapters only from files."""
    adapters: tuple[str, ...] = ()
    """Names of the LoRA adapters at the time of connecting."""
    can_sleep: bool = False
    """The server can release GPU memory and allocate it again."""
    keeps_weights: bool = False
    """Released weights are restored when their memory is allocated again."""
    tells_paused: bool = False
    """The server reports under ``/ready`` whether it is paused."""
    start_id: str = ""
    """Identifies the latest start of the server; empty if unknown."""
    uses_seeds: bool = False
    """A request's seed determines its tokens; other servers ignore it."""
    speculates: bool = False
    """The server drafts tokens and verifies several in a pass."""
    streams_deltas: bool = False
    """Events of a stream contain only new tokens, not the response so far."""
    draft: Literal["separate", "same"] | None = None
    """Origin of the weights of a speculative draft model: its own checkpoint, or the
    served model's; ``None``: there is none, or it has no weights."""
    biased_drafts: bool = False
    """The server's n-gram drafts let it sample token 0 too often at a temperature."""
    graphs_up_to: int | None = None
    """Largest batch of a CUDA graph, for each of ``dp_size``; ``None``: unknown, no
    graphs, or never exceeded."""
    selects_draft: bool = False
    """A weight update selects the served model, its draft or both."""
    spares_draft: bool = False
    """The server can leave its draft model out of a weight update."""
    feeds_draft: bool = False
    """Tensors of a weight update can reach the draft model."""
    encodes_top_logprobs: bool = False
    """The server can send the top-k tokens of a prompt as arrays."""
    has_traced_loader: bool = False
    """The server was started with ``weight_loader="traced"``."""
    quantized: str | None = None
    """Difference of the weights from an unquantized checkpoint; ``None``: none."""
    stores_stale_prefixes: bool = False
    """The server's storage of prefixes (``hicache_storage_backend``) is keyed by tokens
    alone: it also returns prefixes of older weights or another adapter."""
    experts: ExpertShape | None = None
    """Sizes of a mixture of experts; ``None`` for other models."""
    default_sampling_params: Mapping[str, Any] = field(default_factory=dict)
    """Default sampling parameters of requests: ``preferred_sampling_params``."""
    server_args: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """All arguments of the server, as it reports them."""

    @property
    def longest_prompt(self) -> int:
        """Most tokens of a prompt with room for a response."""
        return min(self.max_prompt, self.max_context - 1)

    @property
    def args(self) -> ServerArgs:
        """Used arguments of the server."""
        return ServerArgs.read(self.server_args)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerPlacement:
    """Place of a server of an engine."""

    url: str
    """Address of the server."""
    local: bool
    """Whether the server is on this machine."""
    device: str | None
    """``"cuda"`` or ``"cpu"``."""
    gpus: tuple[str, ...] | None = None
    """The GPUs of its ranks, in order, under the names of ``CUDA_VISIBLE_DEVICES``
    here; ``None`` for a server of another owner."""
    visible_gpus: tuple[str, ...] | None = None
    """GPUs visible to its processes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Distribution:
    """Counts of values between bounds, cumulative since the start.

    The difference of two covers the time between them.

    Examples:
        >>> early = Distribution(bounds=(1.0, 4.0), counts=(1, 0, 0), total=0.5)
        >>> late = Distribution(bounds=(1.0, 4.0), counts=(1, 4, 0), total=12.5)
        >>> late.since(early).mean
        3.0
        >>> late.since(early).quantile(0.5)
        2.5
    """

    bounds: tuple[float, ...]
    """Upper bounds, in ascending order and inclusive."""
    counts: tuple[int, ...]
    """Number of values up to each bound and above its predecessor; the last counts
    values above all bounds."""
    total: float
    """Sum of the values."""

    @property
    def count(self) -> int:
        """Number of values."""
        return sum(self.counts)

    @property
    def mean(self) -> float:
        """Mean of the values; NaN if there are none."""
        return self.total / self.count if self.count else float("nan")

    def since(self, earlier: Distribution | None) -> Distribution:
        """Returns the counts since an earlier state of the same distribution."""
        if earlier is None:
            return self
        pairs = zip(self.counts, earlier.counts, strict=True)
        return Distribution(
            bounds=self.bounds,
            counts=tuple(new - old for new, old in pairs),
            total=self.total - earlier.total,
        )

    def quantile(self, share: float) -> float:
        """Returns a quantile, as Prometheus' ``histogram_quantile`` estimates it.

        It is interpolated between two bounds, and the last bound for greater values;
        NaN if there are none.
        """
        rank, seen, low = share * self.count, 0, 0.0
        if not self.count:
            return float("nan")
        for bound, count in zip(self.bounds, self.counts, strict=False):
            if count and seen + count >= rank:
                return low + (bound - low) * max(rank - seen, 0.0) / count
            seen, low = seen + count, bound
        return self.bounds[-1]


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerStats:
    """Activity of a server of an engine."""

    url: str
    """Address of the server."""
    state: str
    """``"serving"``, ``"stale"`` (it waits for the next weight update), ``"leaving"``
    (it finishes its requests before its removal), ``"down"``, ``"unreachable"`` (down,
    and no other server could take its requests), ``"lost"`` (restarted too often), or
    ``"asleep: "`` and the released memory."""
    running: int | None
    """Running requests, of all users; ``None`` if it does not respond."""
    queued: int | None
    """Requests in its queue."""
    cache_usage: float | None = None
    """Used share of its KV cache; ``None`` if not reported."""
    weight_version: str | None
    """Version of its weights."""
    restarts: int
    """Number of restarts by this engine."""
    reason: str
    """Reason why the server does not serve."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStats:
    """Totals of an engine since it was made, and its present activity."""

    in_flight: int
    """Requests of this engine object in flight."""
    queued: int
    """Requests of this engine object before their dispatch."""
    completed: int
    """Finished responses."""
    retries: int
    """Requests sent again."""
    restarts: int
    """Restarted servers."""
    tokens_per_second: float
    """Response tokens of the last ten seconds, over ten seconds."""
    prompt_tokens: int
    """Tokens of the prompts of completed responses."""
    response_tokens: int
    """Tokens of completed responses."""
    cached_tokens: int
    """Prompt tokens from the prefix cache."""
    cache_hit_rate: float
    """Share of the prompt tokens from the prefix cache."""
    retractions: int
    """Number of retractions: requests removed from a batch by servers, for lack of
    memory or for a weight update, and computed again."""
    request_seconds: Distribution
    """Time from sending a request until its response was read. A response interrupted
    by an update or a lost server has several requests."""
    queue_seconds: Distribution
    """Queueing time on the server, if reported."""
    first_token_seconds: Distribution
    """Time until a server's first token, if reported."""
    response_lengths: Distribution
    """Tokens of completed responses."""
    weight_version: str
    """Weight version of new responses."""
    servers: tuple[ServerStats, ...]
    """Statistics of each server."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncReport:
    """Facts about a finished weight update."""

    version: str
    """Weight version of the servers' reports from now on."""
    transport: str
    """``"broadcast"``, ``"cuda_ipc"``, ``"delta"``, ``"disk"``, ``"lora"``;
    ``"checkpoint"`` if the servers returned to their own files, ``"none"`` if another
    trainer rank sends."""
    reason: str = ""
    """Reason for the transport."""
    num_tensors: int
    """Number of tensors sent; tied weights count once."""
    num_bytes: int
    """Bytes sent."""
    wire_bytes: int | None = None
    """Bytes of the requests to all servers together, if the transport sends less than
    the tensors; ``None`` otherwise."""
    num_buckets: int
    """Number of transfers."""
    seconds: float
    """Duration of the whole update, in seconds."""
    phase_seconds: Mapping[str, float] = field(default_factory=dict)
    """Duration of each phase (pause, flush, begin, send, end, resume), in seconds."""

    @property
    def gb_per_second(self) -> float:
        """Bytes sent over the seconds of the send phase, in 1e9 bytes per second."""
        seconds = self.phase_seconds.get("send", self.seconds)
        return self.num_bytes / seconds / 1e9 if seconds > 0 else float("inf")


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateStats:
    """Totals of a sender's weight updates."""

    updates: Mapping[str, int]
    """Number of successful updates, by transport."""
    failures: int
    """Number of failed updates."""
    num_bytes: int
    """Bytes sent."""
    seconds: Distribution
    """Duration of successful updates."""
    phase_seconds: Mapping[str, float]
    """Seconds in each phase of these updates, in total."""
    last: SyncReport | None
    """Report of the last update."""
