"""Verifies that the servers hold, and generate with, the weights that were sent.

Two comparisons, each where it is possible. *Values*: the first rows of a few parameters
of every server must equal the trainer's, bit for bit; this finds a server that kept its
old weights, however little they differ. *Log-probs* of a few prompts on every server
must be those of the trainer's model; this finds weights in the wrong place.

The trainer's side is computed before and while the weights are sent, so that its model
may change afterwards.
"""

from __future__ import annotations

import dataclasses
import inspect
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torchrl.modules.llm.policies import LLMWrapperBase

from torchrl_sglang.backends.base import CONTROL_TIMEOUT_SECONDS, RLSGLangEngine
from torchrl_sglang.backends.support.event_loop import run_sync
from torchrl_sglang.errors import (
    RequestRefusedError,
    UnsupportedByServerError,
    WeightMismatchError,
    WeightSyncStateError,
)
from torchrl_sglang.weight_update.sources.adapter import peft_model_in
from torchrl_sglang.weight_update.weights import Weights

__all__ = ["Verifier", "allowed_difference", "choose_names", "whole_model"]

ROWS = 2
"""Rows of a matrix that are compared."""

ELEMENTS = 256
"""Elements of a vector that are compared."""

NUM_PROMPTS = 4
"""Prompts that each server scores."""

PROMPT_TOKENS = 32
"""Length of a prompt, where the context allows it."""

FLOAT32_TOLERANCE = 1e-3
"""Allowed mean difference of log-probs in float32. Engine and trainer were measured to
differ by less than 1e-5; other kernels sum in another order."""

HALF_TOLERANCE = {torch.bfloat16: 0.15, torch.float16: 0.03}
"""Allowed mean difference of log-probs, in standard deviations of the trainer's own.
Rounding was measured to cost up to 0.046 in bfloat16 and 0.006 in float16, over models
of 2 to 16 layers and five scales of weights; two models that have nothing in common
differ by 1.0 to 1.2."""

# Compared parameters, from the first layer to the last. Their rows are the same on a
# tensor-parallel server's first rank and in the checkpoint.
_KINDS = (
    "embed_tokens.weight",
    "q_proj.weight",
    "gate_proj.weight",
    "layernorm.weight",
    ".norm.weight",
    "lm_head.weight",
)

Check: TypeAlias = Callable[[], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Expected:
    """The trainer's side of a comparison of log-probs."""

    prompts: list[list[int]]
    """Prompts that every server scores."""
    log_probs: torch.Tensor
    """Log-probs of the trainer's model, ``(prompts, tokens - 1)``."""
    allowed: float
    """Mean difference that rounding explains."""


class Verifier:
    """Compares servers with the weights that a sender sends."""

    def __init__(self, engine: RLSGLangEngine) -> None:
        self._engine = engine
        self._readable: frozenset[str] | None = None

    def watch(
        self, weights: Weights, given: Any, *, version: str
    ) -> tuple[Weights, Check]:
        """Returns the weights to send instead, and the comparison to call afterwards.

        ``given`` is the caller's model, asked for log-probs if it can be called. Raises
        :class:`UnsupportedByServerError` if nothing can be compared.
        """
        if weights.adapter is not None:
            return weights, self._watch_adapter(given, version)
        names, model = self._find_comparable(weights, given)
        dtypes = {spec.name: spec.dtype for spec in weights.specs}
        expected = None
        if model is not None:
            expected = self._expect(model, set(dtypes.values()), version)
        sent: dict[str, torch.Tensor] = {}

        def read() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in weights.read():
                if name in names:
                    sent[name] = _head(tensor, dtypes[name])
                yield name, tensor
                # Not held while the next one is made.
                del tensor

        def check() -> None:
            self._check_alone(version)
            for name, value in sent.items():
                self._compare_values(name, value)
            if expected is not None:
                self._compare_log_probs(expected, version=version)

        return dataclasses.replace(weights, read=read), check

    def _watch_adapter(self, given: Any, version: str) -> Check:
        model = None if self._engine.asleep else whole_model(given)
        if model is None:
            raise UnsupportedByServerError(
                f"verify=True has nothing to compare: log-probs need awake servers and "
                f"a model that is whole on this rank and can be called with input_ids, "
                f"got {type(given).__name__}. Leave verify=True out."
            )
        served = self._engine.capabilities.dtype or torch.bfloat16
        expected = self._expect(model, {served}, version)

        def check() -> None:
            published = self._engine.adapters[self._engine.default_adapter or ""]
            self._compare_log_probs(
                expected, version=version, adapter=published.served_as
            )

        return check

    def _expect(
        self, model: nn.Module, served: set[torch.dtype], version: str
    ) -> _Expected:
        """Scores prompts with the trainer's model."""
        capabilities = self._engine.capabilities
        prompts = _make_prompts(
            version, capabilities.vocab_size, capabilities.max_prompt
        )
        log_probs = _score(model, prompts)
        # Either side may compute in half precision.
        dtypes = {value.dtype for value in model.parameters()} | served
        allowed = max(allowed_difference(dtype, log_probs) for dtype in dtypes)
        return _Expected(prompts=prompts, log_probs=log_probs, allowed=allowed)

    def _find_comparable(
        self, weights: Weights, given: Any
    ) -> tuple[frozenset[str], nn.Module | None]:
        """Returns the names of readable parameters, and the model that scores."""
        capabilities = self._engine.capabilities
        quantization = capabilities.server_args.get("quantization")
        if quantization:
            raise UnsupportedByServerError(
                f"The servers quantise what they receive ({quantization!r}), so it "
                f"cannot be compared with what was sent; leave verify=True out."
            )
        names = self._find_readable(weights)
        # Servers cannot generate before their cache is awake.
        model = None if self._engine.asleep else whole_model(given)
        if not names and model is None:
            raise UnsupportedByServerError(
                f"verify=True has nothing to compare: the servers of "
                f"{capabilities.model_path!r} do not tell the values of weights, and "
                f"log-probs need awake servers and a model that is whole on this rank "
                f"and can be called, got {type(given).__name__}. Register such a "
                f"model, or leave verify=True out."
            )
        return names, model

    def _find_readable(self, weights: Weights) -> frozenset[str]:
        if self._readable is None:
            self._readable = frozenset(
                name
                for name in choose_names([spec.name for spec in weights.specs])
                if self._is_readable(name)
            )
        return self._readable

    def _is_readable(self, name: str) -> bool:
        try:
            answers = run_sync(self._engine.control.get_weights_by_name(name, 1))
        except RequestRefusedError:
            return False
        return all(isinstance(answer, list) and answer for answer in answers)

    def _check_alone(self, version: str) -> None:
        """Checks that requests are computed with the weights that were sent, alone."""
        engine = self._engine
        carried = set(engine.published_adapters(timeout=CONTROL_TIMEOUT_SECONDS))
        if engine.default_adapter is not None:
            carried.add(engine.default_adapter)
        if carried:
            raise WeightMismatchError(
                f"After the update to version {version}, requests that select no LoRA "
                f"adapter carry {', '.join(map(repr, sorted(carried)))} over the "
                f"weights that were sent. Did somebody publish it meanwhile? Send the "
                f"weights again."
            )

    def _compare_values(self, name: str, sent: torch.Tensor) -> None:
        control = self._engine.control
        answers = run_sync(control.get_weights_by_name(name, len(sent)))
        for url, answer in zip(control.urls, answers, strict=True):
            found = torch.tensor(answer, dtype=torch.float32)
            # A rank of a tensor-parallel server may hold fewer rows.
            same = sent[: len(found)]
            if torch.equal(found, same):
                continue
            raise WeightMismatchError(
                f"After the update to {url}, {name} is not what was sent there: it "
                f"begins with {_listed(found)}, sent was {_listed(same)}. Did another "
                f"trainer update this server?"
            )

    def _compare_log_probs(
        self, expected: _Expected, *, version: str, adapter: str | None = None
    ) -> None:
        control = self._engine.control
        answers = run_sync(
            control.prompt_log_probs(
                expected.prompts, cache_key=version, adapter=adapter
            )
        )
        for url, answer in zip(control.urls, answers, strict=True):
            found = torch.tensor(answer, dtype=torch.float32)
            differs = (found - expected.log_probs).abs()
            # A NaN is a difference.
            if bool(differs.mean() <= expected.allowed):
                continue
            where = int(differs.nan_to_num(torch.inf).argmax())
            raise WeightMismatchError(
                f"After the update, {url} does not generate with what was sent there: "
                f"its log-probs differ from the trainer's by {differs.mean():.3g} on "
                f"average; rounding explains {expected.allowed:.3g}. Furthest apart "
                f"are {found.flatten()[where]:.4f} and "
                f"{expected.log_probs.flatten()[where]:.4f}."
            )


def choose_names(names: Sequence[str]) -> list[str]:
    """Returns some parameters, of every kind and from every depth."""
    chosen = []
    for position, kind in enumerate(_KINDS):
        found = [name for name in names if name.endswith(kind)]
        if found:
            chosen.append(found[position * (len(found) - 1) // (len(_KINDS) - 1)])
    # An architecture with other names.
    step = max(len(names) // len(_KINDS), 1)
    return list(dict.fromkeys(chosen)) or list(names)[::step]


def allowed_difference(dtype: torch.dtype, expected: torch.Tensor) -> float:
    """Returns how much log-probs may differ from a side that computes in ``dtype``."""
    if dtype not in HALF_TOLERANCE:
        return FLOAT32_TOLERANCE
    return max(HALF_TOLERANCE[dtype] * float(expected.std()), FLOAT32_TOLERANCE)


def whole_model(source: Any) -> nn.Module | None:
    """Returns the model in ``source`` that can score; None if a part is elsewhere."""
    if isinstance(source, LLMWrapperBase):
        source = source.model
    if isinstance(source, nn.parallel.DistributedDataParallel):
        # Calling the wrapper would take every rank.
        source = source.module
    source = getattr(source, "_orig_mod", source)
    adapted = peft_model_in(source)
    if adapted is not None:
        # PEFT's own forward may take anything; the base model has the adapter's layers.
        source = adapted.get_base_model()
    if not isinstance(source, nn.Module):
        return None
    if "input_ids" not in inspect.signature(source.forward).parameters:
        return None
    for value in source.parameters():
        if isinstance(value, DTensor) or value.is_meta or not value.numel():
            return None
    return source


def _head(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Copies the first rows as a server holds them, in float32, which is exact."""
    first = tensor.detach()[: ELEMENTS if tensor.dim() == 1 else ROWS]
    return first.to("cpu", dtype, copy=True).float()


def _make_prompts(version: str, vocab_size: int, max_prompt: int) -> list[list[int]]:
    # Other prompts at every update, and the same ones when it is repeated.
    choice = random.Random(version)
    length = min(PROMPT_TOKENS, max_prompt)
    return [
        [choice.randrange(vocab_size) for _ in range(length)]
        for _ in range(NUM_PROMPTS)
    ]


def _score(model: nn.Module, prompts: list[list[int]]) -> torch.Tensor:
    """Returns the log-probability of each token but the first of each prompt."""
    device = next(model.parameters()).device
    ids = torch.tensor(prompts, device=device)
    training = [module for module in model.modules() if module.training]
    try:
        model.eval()
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            logits = model(input_ids=ids).logits[:, :-1]
            log_probs = logits.float().log_softmax(-1)
            targets = ids[:, 1:, None].to(log_probs.device)
            found: torch.Tensor = log_probs.gather(-1, targets)[..., 0].cpu()
            return found
    except Exception as error:
        raise WeightSyncStateError(
            f"The model that is to be sent cannot score a prompt of token ids "
            f"({type(error).__name__}: {error}), which verify=True needs; nothing was "
            f"sent. Leave verify=True out, or give its state dict."
        ) from error
    finally:
        for module in training:
            module.training = True


def _listed(values: torch.Tensor) -> str:
    return str([round(value, 6) for value in values.flatten()[:4].tolist()])
