"""THE table of quantities that servers report for each token, beside log-probs. Pure.

To add one, add a row to :data:`TOKEN_COLUMNS`, or give a :class:`TokenColumn` wherever
a name of the table is taken. Everything else is derived from it: the request, the check
of the reply, continuations after an abort or an update, the containers of the wrapper,
the rows of collectors and of the gateway, padding, and the gateway's file.

The columns of ``logprobs_mode="behaviour"`` stand here, too. Where sampling leaves
tokens out (top-k, top-p, min-p, greedy), SGLang reports those it left and the log-prob
among them, after temperature, penalties, biases and grammar. Where it leaves none out,
the log-probs of ``logprobs_mode="sampling"`` are those.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from torchrl_sglang.errors import ConfigurationError, UnsupportedByServerError
from torchrl_sglang.requests.sampling import GREEDY_TEMPERATURE, hint, temperature_of
from torchrl_sglang.types import LogProbsMode, ServerCapabilities, TokenLayout

TokenShape: TypeAlias = tuple[int, ...]

TOKENS = ("tokens", "full")
PROMPT = ("tokens", "prompt")
ATTENTION_MASK = ("masks", "all_attention_mask")
ASSISTANT_MASK = ("masks", "all_assistant_mask")
POLICY_VERSIONS = "token_policy_version"
"""Policy version of each token of the response, as collectors count weight updates: -1
for tokens not written by the policy."""

ROUTED_EXPERTS = "routed_experts"
"""Name of the column with the experts of each token."""
SAMPLING_SUPPORT = "sampling_support"
"""Name of the column with the tokens that each token was drawn from."""

RESERVED = frozenset(
    {
        *("tokens", "token_ids", "masks", "log_probs", "text", "history"),
        *("top_token_ids", "top_log_probs", "weight_version", "generation_info"),
        *("policy_version", "session", "group"),
        *("reward", "done", "terminated", "truncated", "next"),
    }
)
"""Names that mean something else in a completion, or in a row of a batch."""

_DTYPES = re.compile(r"bool|u?int(8|16|32|64)|float(16|32|64)|complex(64|128)")
"""NumPy's names of types that tensors have, too."""


def _is_shape(given: Any) -> bool:
    return isinstance(given, tuple) and all(
        isinstance(size, int) and size >= 0 for size in given
    )


def _as_sent(value: Any, num_tokens: int) -> Any:
    """Returns the field itself, which has one entry for each token."""
    return value


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenColumn:
    """One quantity that a server reports for each token, beside log-probs.

    It is asked for with ``token_columns=[...]``, by a row of your own, or by name:

    - ``"sampling_support"``: the token ids that a token was drawn from, after top-k,
      top-p and min-p, in no order. SGLang 0.5.20 or later, with a finite ``top_k``.
    - ``"routed_experts"``: the experts that each layer's router chose, ``(layers,
      chosen)``, of prompt and response; -1 in rows that the server did not report, such
      as the last token's. Servers are started with ``enable_return_routed_experts``.

    Examples:
        Log-probs of two tokens at each position, whichever was sampled:

        >>> def read(entries, num_tokens):
        ...     return [[entry[0] for entry in row] for row in entries]
        >>> yes_or_no = TokenColumn(
        ...     name="yes_or_no",
        ...     dtype="float32",
        ...     shape=(2,),
        ...     unknown=float("nan"),
        ...     padding=0.0,
        ...     request=lambda start: {
        ...         "return_logprob": True,
        ...         "token_ids_logprob": [5, 9],
        ...     },
        ...     field="output_token_ids_logprobs",
        ...     read=read,
        ... )
        >>> (completion,) = engine.generate(
        ...     input_ids=[5, 6, 7],
        ...     sampling_params={"max_new_tokens": 4, "ignore_eos": True},
        ...     token_columns=[yes_or_no],
        ... )
        >>> completion.columns["yes_or_no"].values.shape
        (4, 2)
    """

    name: str
    """Name in requests, and key of the container in a TensorDict."""
    dtype: str | Callable[[ServerCapabilities], str]
    """NumPy's name of its type, or a function of the servers."""
    shape: TokenShape | Callable[[ServerCapabilities], TokenShape] | None = ()
    """Shape of one token's value, or a function of the servers; ``None``: a list, of
    another length for each token."""
    request: Callable[[int], Mapping[str, Any]]
    """Returns the fields of a ``/generate`` call that ask for it, from the position of
    the first prompt token whose value is not known, for those that prompts have."""
    field: str
    """Field of the reply's ``meta_info`` that it comes in."""
    field_type: Any = Any
    """Type of that field, as msgspec checks it."""
    read: Callable[[Any, int], Sequence[Any] | np.ndarray[Any, Any]] = _as_sent
    """Returns a value, or a list, for each token, from the field and the number of
    tokens; or an array of one dimension, with the values one after the other. Raises a
    ValueError or a LookupError if the field is malformed."""
    of_prompt: bool = False
    """Prompt tokens have it, too: values begin at the position that ``request`` got."""
    late: bool = False
    """A server has the value of a token when it has computed the next one: a reply has
    none for the last token, and a server that computes tokens again after a weight
    update has others."""
    of_request: Callable[[Mapping[str, Any], ServerCapabilities], Any] | None = None
    """Returns the value of each response token, from sampling parameters and servers;
    ``None`` for the unknown one. Such a column asks the servers for nothing."""
    unknown: float = -1
    """Value of a token that has none. Of lists, such a token's is empty."""
    padding: float = -1
    """Value at places without a token."""
    dropped_by_router: bool = False
    """A router removes what asks for it; such requests go to the servers themselves."""
    problem: Callable[[Mapping[str, Any], ServerCapabilities], str | None] | None = None
    """Returns why the servers cannot report it for sampling parameters, and the remedy;
    ``None`` if they can."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not re.fullmatch(r"[a-z]\w*", self.name):
            raise ConfigurationError(
                f"The name of a TokenColumn is a word of small letters, digits and "
                f"'_', got {self.name!r}."
            )
        if self.name in RESERVED:
            raise ConfigurationError(
                f"A TokenColumn is named {self.name!r}, which is the name of something "
                f"else in a batch; give it another name."
            )
        shape = self.shape
        if not (shape is None or callable(shape) or _is_shape(shape)):
            raise ConfigurationError(
                f"The shape of the TokenColumn {self.name!r} must be a tuple of "
                f"integers, a function of the servers, or None, got {shape!r}."
            )
        if not callable(self.dtype):
            self._check_dtype(self.dtype)

    def _check_dtype(self, dtype: str) -> str:
        try:
            kind = np.dtype(dtype)
            if not (kind.isnative and _DTYPES.fullmatch(kind.name)):
                raise TypeError
            for value in (self.unknown, self.padding):
                if kind.kind in "biu" and int(value) != kind.type(value):
                    raise OverflowError
                kind.type(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise ConfigurationError(
                f"The TokenColumn {self.name!r} has the dtype {dtype!r}, which "
                f"must be NumPy's name of a type that holds unknown={self.unknown!r} "
                f"and padding={self.padding!r}."
            ) from error
        return dtype

    def layout(self, capabilities: ServerCapabilities) -> TokenLayout:
        """Returns the form of its values."""
        shape, dtype = self.shape, self.dtype
        return TokenLayout(
            name=self.name,
            dtype=self._check_dtype(dtype(capabilities)) if callable(dtype) else dtype,
            shape=shape(capabilities) if callable(shape) else shape,
            unknown=self.unknown,
            padding=self.padding,
        )


def _ask_for_sampling_support(start: int) -> dict[str, Any]:
    return {"return_sampling_mask": True}


def _no_sampling_support(
    params: Mapping[str, Any], capabilities: ServerCapabilities
) -> str | None:
    """Source: ``return_sampling_mask`` in ``sglang/srt/managers/scheduler.py``."""
    max_tokens = capabilities.args.sampling_mask_max_tokens
    if max_tokens is None:
        return (
            f"SGLang {capabilities.version} does not report it; it needs 0.5.20 or "
            f"later."
        )
    top_k = params.get("top_k", capabilities.default_sampling_params.get("top_k", -1))
    temperature = temperature_of(params, capabilities)
    greedy = temperature is not None and temperature < GREEDY_TEMPERATURE
    if greedy or 1 <= top_k <= max_tokens:
        return None
    return (
        f"top_k={top_k} leaves more tokens than a server reports; give a top_k of 1 to "
        f"{max_tokens}, or start the servers with a greater sampling_mask_max_tokens."
    )


def _ask_for_experts(start: int) -> dict[str, Any]:
    return {"return_routed_experts": True, "routed_experts_start_len": start}


def _read_experts(encoded: str, num_tokens: int) -> np.ndarray[Any, Any]:
    return np.frombuffer(base64.b64decode(encoded, validate=True), dtype="<i4")


def _shape_of_experts(capabilities: ServerCapabilities) -> TokenShape:
    experts = capabilities.experts
    return (0, 0) if experts is None else (experts.num_layers, experts.num_chosen)


def _dtype_of_experts(capabilities: ServerCapabilities) -> str:
    """Returns the smallest type that has -1 and the number of each expert."""
    experts = capabilities.experts
    count = None if experts is None else experts.num_experts
    return "int16" if count is None or count > 128 else "int8"


def _no_experts(
    params: Mapping[str, Any], capabilities: ServerCapabilities
) -> str | None:
    """Source: ``RoutedExpertsCapturer`` of SGLang."""
    if capabilities.experts is None:
        return (
            f"{capabilities.model_path!r} is no mixture of experts: its configuration "
            f"has no num_experts_per_tok. Leave the column out."
        )
    if not capabilities.args.enable_return_routed_experts:
        return (
            "the servers were started without it; start them with "
            "enable_return_routed_experts=True."
        )
    return None


_ROWS = (
    # Token ids that sampling could have drawn, after top-k, top-p and min-p.
    TokenColumn(
        name=SAMPLING_SUPPORT,
        dtype="int32",
        shape=None,
        request=_ask_for_sampling_support,
        field="output_token_sampling_mask",
        field_type=list[list[int]],
        dropped_by_router=True,
        problem=_no_sampling_support,
    ),
    # Experts that the routers of each layer chose.
    TokenColumn(
        name=ROUTED_EXPERTS,
        dtype=_dtype_of_experts,
        shape=_shape_of_experts,
        request=_ask_for_experts,
        field="routed_experts",
        field_type=str,
        read=_read_experts,
        of_prompt=True,
        late=True,
        dropped_by_router=True,
        problem=_no_experts,
    ),
)

TOKEN_COLUMNS: dict[str, TokenColumn] = {row.name: row for row in _ROWS}
"""Quantities that can be asked for by name, see :class:`TokenColumn`."""


def _temperature(params: Mapping[str, Any], capabilities: ServerCapabilities) -> float:
    value = temperature_of(params, capabilities)
    # A greedy token is alone in its support, whatever its logit is divided by.
    return 1.0 if value is None or value < GREEDY_TEMPERATURE else value


def _unknown(params: Mapping[str, Any], capabilities: ServerCapabilities) -> None:
    return None


def _ask_for_nothing(start: int) -> dict[str, Any]:
    return {}


TEMPERATURE = TokenColumn(
    name="sampling_temperature",
    dtype="float32",
    request=_ask_for_nothing,
    field="",
    of_request=_temperature,
    unknown=1.0,
    padding=1.0,
)
"""Temperature that each token was drawn with; 1 for greedy ones, and in prompts."""

LOG_PROBS = TokenColumn(
    name="sampling_log_probs",
    dtype="float32",
    request=_ask_for_sampling_support,
    field="output_token_sampling_logprobs",
    field_type=list[float],
    dropped_by_router=True,
)
"""Log-prob of each token within its support; becomes ``log_probs``."""

WHOLE_VOCABULARY = replace(
    TOKEN_COLUMNS[SAMPLING_SUPPORT],
    request=_ask_for_nothing,
    field="",
    of_request=_unknown,
    dropped_by_router=False,
    problem=None,
)
"""Support of tokens that were drawn from the whole vocabulary: empty lists."""


def find_columns(given: Any) -> tuple[TokenColumn, ...]:
    """Returns columns given by name or as rows; refuses unknown and repeated ones."""
    if isinstance(given, (str, TokenColumn)) or not isinstance(given, Iterable):
        raise ConfigurationError(
            f"token_columns must be a list of names or TokenColumns, got {given!r}."
        )
    columns: dict[str, TokenColumn] = {}
    for item in given:
        column = TOKEN_COLUMNS.get(item) if isinstance(item, str) else item
        if not isinstance(column, TokenColumn):
            names = ", ".join(map(repr, sorted(TOKEN_COLUMNS))) or "none"
            advice = hint(item, sorted(TOKEN_COLUMNS)) if isinstance(item, str) else ""
            raise ConfigurationError(
                f"token_columns holds {item!r}, which is neither a TokenColumn nor the "
                f"name of one; there are: {names}.{advice}"
            )
        if column.name in columns:
            raise ConfigurationError(
                f"token_columns holds {column.name!r} twice; leave one out."
            )
        columns[column.name] = column
    return tuple(columns.values())


def columns_of_mode(
    mode: LogProbsMode, columns: tuple[TokenColumn, ...]
) -> tuple[TokenColumn, ...]:
    """Adds the mode's columns: a trainer needs support and temperature."""
    if mode != "behaviour":
        return columns
    names = {column.name for column in columns}
    mode_columns = (TOKEN_COLUMNS[SAMPLING_SUPPORT], TEMPERATURE)
    return (*columns, *(column for column in mode_columns if column.name not in names))


def check_columns(
    columns: Sequence[TokenColumn],
    params: Mapping[str, Any],
    capabilities: ServerCapabilities,
) -> None:
    """Checks that the servers can report columns of a request with these parameters."""
    for column in columns:
        problem = column.problem and column.problem(params, capabilities)
        if problem:
            raise UnsupportedByServerError(
                f"token_columns holds {column.name!r}, and {problem}"
            )
