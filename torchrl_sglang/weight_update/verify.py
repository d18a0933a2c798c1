"""Verifies that the servers hold, and generate with, the weights that were sent.

*Values*: the first rows of a few parameters of every server must equal the trainer's,
bit for bit; this finds a server that kept its old weights. *Log-probs* of a few prompts
on every server must equal the trainer's model; this finds weights in the wrong
place. The trainer's side is computed before and while the weights are sent, so that its
model may change afterwards.
"""

from __future__ import annotations

import dataclasses
import inspect
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchrl_sglang.backends.client.control import CONTROL_TIMEOUT_SECONDS
from torchrl_sglang.backends.contract import RLSGLangEngine
from torchrl_sglang.errors import (
    RequestRefusedError,
    UnsupportedByServerError,
    WeightMismatchError,
    WeightSyncStateError,
)
from torchrl_sglang.support.event_loop import run_sync
from torchrl_sglang.types import BLOCK_FP8, ServerCapabilities
from torchrl_sglang.weight_update.encodings.block_fp8 import FP8
from torchrl_sglang.weight_update.sources.base import UserWeights
from torchrl_sglang.weight_update.weights import TensorSpec, Weights

ROWS = 2
"""Rows of a matrix that are compared."""

ELEMENTS = 256
"""Elements of a vector that are compared."""

NUM_PROMPTS = 4

PROMPT_TOKENS = 32
"""Length of a prompt, where the context allows it."""

FLOAT32_TOLERANCE = 1e-3
"""Allowed mean difference of log-probs in float32. Engine and trainer were measured to
differ by less than 1e-5; other kernels sum in another order."""

HALF_TOLERANCE = {torch.bfloat16: 0.15, torch.float16: 0.03, FP8: 0.5}
"""Allowed mean difference of log-probs, in standard deviations of the trainer's own.
Rounding was measured to cost up to 0.046 in bfloat16 and 0.006 in float16, over models
of 2 to 16 layers and five scales of weights; two models that have nothing in common
differ by 1.0 to 1.2. FP8 of weights and activations, emulated on a CPU, cost 0.08 to
0.13 with usual scales, and 0.43 with weights of standard deviation 0.3."""

# Compared parameters, from the first layer to the last. Their rows are the same on a
# tensor-parallel server's first rank and in the checkpoint.
_KINDS = ("embed_tokens", "q_proj", "gate_proj", "layernorm", ".norm", "lm_head")


def watch(
    engine: RLSGLangEngine, weights: Weights, origin: UserWeights, *, version: str
) -> tuple[Weights, Callable[[], None]]:
    """Returns the weights to send instead, and the comparison to call afterwards.

    The model of ``origin`` scores prompts, if it can be called. Raises
    :class:`UnsupportedByServerError` if nothing can be compared.
    """
    adapter = weights.adapter is not None
    names = [] if adapter else _find_readable(engine, weights)
    # Servers cannot generate before their cache is awake.
    model = None if engine.asleep else whole_model(origin)
    if not names and model is None:
        raise UnsupportedByServerError(
            f"verify=True has nothing to compare: the servers of "
            f"{engine.capabilities.model_path!r} do not tell the values of these "
            f"weights, and log-probs need awake servers and a model that is whole on "
            f"this rank and can be called with input_ids, got "
            f"{type(origin.value).__name__}. "
            f"Register such a model, or leave verify=True out. The known limits in the "
            f"documentation say how to verify one that is spread over ranks (FSDP2)."
        )
    dtypes = {spec.name: spec.dtype for spec in weights.specs}
    served = {engine.capabilities.dtype or torch.bfloat16}
    if not adapter:
        served = set(dtypes.values())
    compare_log_probs = _watch_log_probs(engine, model, served, adapter, version)
    values: dict[str, torch.Tensor] = {}
    extremes: dict[str, torch.Tensor] = {}

    def read() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights.read():
            if name in names:
                # The first rows as a server holds them; float32 is exact.
                first = tensor.detach()[: ELEMENTS if tensor.dim() == 1 else ROWS]
                values[name] = first.to("cpu", dtypes[name], copy=True).float()
                del first
            if tensor.is_floating_point() and tensor.itemsize > 1 and tensor.numel():
                extremes[name] = torch.stack(torch.aminmax(tensor.detach()))
            yield name, tensor
            # Not held while the next one is made.
            del tensor

    def check() -> None:
        if not adapter:
            _check_alone(engine, version)
        _check_numbers(extremes, version)
        for name, value in values.items():
            _compare_values(engine, name, value)
        compare_log_probs()

    return dataclasses.replace(weights, read=read, memory=None), check


def _find_readable(engine: RLSGLangEngine, weights: Weights) -> list[str]:
    """Returns the names of parameters whose values the servers report."""
    quantized = engine.capabilities.quantized
    if quantized not in (None, BLOCK_FP8):
        raise UnsupportedByServerError(
            f"The servers hold quantised weights ({quantized!r}), which cannot be "
            f"compared with what was sent; leave verify=True out."
        )
    names = []
    for name in choose_names(comparable(weights.specs)):
        with suppress(RequestRefusedError):
            rows = run_sync(engine.control.get_weights_by_name(name, 1))
            if all(isinstance(row, list) and row for row in rows):
                names.append(name)
    return names


def _check_alone(engine: RLSGLangEngine, version: str) -> None:
    """Checks that requests are computed with the weights that were sent, alone."""
    carried = set(engine.published_adapters(timeout=CONTROL_TIMEOUT_SECONDS))
    if engine.default_adapter is not None:
        carried.add(engine.default_adapter)
    if carried:
        raise WeightMismatchError(
            f"After the update to version {version}, requests that select no LoRA "
            f"adapter carry {', '.join(map(repr, sorted(carried)))} over the weights "
            f"that were sent. Did somebody publish it meanwhile? Send the weights "
            f"again."
        )


def _check_numbers(extremes: Mapping[str, torch.Tensor], version: str) -> None:
    """Checks that the weights that were sent have no NaN.

    ``extremes``: least and greatest element of each tensor.
    """
    for name, values in extremes.items():
        if bool(values.isnan().any()):
            raise WeightMismatchError(
                f"The weights of version {version} that were sent have NaN: {name} is "
                f"the first such tensor. The servers have them now, and would generate "
                f"noise; send finite weights, such as the last checkpoint's."
            )


def to_floats(answer: Any) -> torch.Tensor:
    """Converts a server's numbers; NaN and infinities come as ``null``."""
    return torch.from_numpy(np.array(answer, dtype=np.float32))


def _compare_values(engine: RLSGLangEngine, name: str, expected: torch.Tensor) -> None:
    rows = run_sync(engine.control.get_weights_by_name(name, len(expected)))
    for url, values in zip(engine.control.urls, map(to_floats, rows), strict=True):
        # A rank of a tensor-parallel server may hold fewer rows.
        reference = expected[: len(values)]
        reference = reference.where(reference.isfinite(), torch.nan)
        equal = values.shape == reference.shape and torch.allclose(
            values, reference, rtol=0, atol=0, equal_nan=True
        )
        if not equal:
            starts = [
                [round(value, 6) for value in numbers.flatten()[:4].tolist()]
                for numbers in (values, reference)
            ]
            raise WeightMismatchError(
                f"After the update to {url}, {name} is not what was sent there: it "
                f"begins with {starts[0]}, sent was {starts[1]}. Did another trainer "
                f"update this server?"
            )


def _watch_log_probs(
    engine: RLSGLangEngine,
    model: nn.Module | None,
    served: set[torch.dtype],
    adapter: bool,
    version: str,
) -> Callable[[], None]:
    """Scores prompts with the trainer's model; returns the servers' comparison."""
    if model is None:
        return lambda: None
    prompts = choose_prompts(engine.capabilities, version)
    expected = _score(model, prompts)
    # Either side may compute in half precision.
    dtypes = {value.dtype for value in model.parameters()} | served
    allowed = max(allowed_difference(dtype, expected) for dtype in dtypes)

    def compare() -> None:
        control, name = engine.control, None
        if adapter:
            name = engine.adapters[engine.default_adapter or ""].served_as
        answers = run_sync(
            control.prompt_log_probs(prompts, cache_key=version, adapter=name)
        )
        for url, log_probs in zip(control.urls, map(to_floats, answers), strict=True):
            differences = (log_probs - expected).abs()
            # A NaN is a difference.
            if bool(differences.mean() <= allowed):
                continue
            if bool(log_probs.isnan().any()):
                raise WeightMismatchError(
                    f"After the update to version {version}, the log-probs of {url} "
                    f"are no numbers, though no weight that was sent is NaN: an "
                    f"infinite weight, or an overflow in {engine.capabilities.dtype}. "
                    f"Send other weights, or serve the model in a wider type."
                )
            place = int(differences.nan_to_num(torch.inf).argmax())
            raise WeightMismatchError(
                f"After the update, {url} does not generate with what was sent there: "
                f"its log-probs differ from the trainer's by "
                f"{differences.mean():.3g} on average; rounding explains "
                f"{allowed:.3g}. Furthest apart are {log_probs.flatten()[place]:.4f} "
                f"and {expected.flatten()[place]:.4f}."
            )

    return compare


def choose_prompts(capabilities: ServerCapabilities, version: str) -> list[list[int]]:
    """Returns random prompts: others at every update, the same when it is repeated."""
    choice = random.Random(version)
    length = min(PROMPT_TOKENS, capabilities.max_prompt)
    return [
        [choice.randrange(capabilities.vocab_size) for _ in range(length)]
        for _ in range(NUM_PROMPTS)
    ]


def comparable(specs: Sequence[TensorSpec]) -> list[str]:
    """Returns the tensors that servers hold as they are sent.

    FP8 values and scales are held apart; log-probs compare both together.
    """
    encoded = {spec.name for spec in specs if spec.dtype == FP8}
    scales = {f"{name}_scale_inv" for name in encoded}
    return [spec.name for spec in specs if spec.name not in encoded | scales]


def choose_names(names: Sequence[str]) -> list[str]:
    """Returns some parameters, of every kind and from every depth."""
    chosen = []
    for position, kind in enumerate(_KINDS):
        layers = [name for name in names if name.endswith(f"{kind}.weight")]
        if layers:
            chosen.append(layers[position * (len(layers) - 1) // (len(_KINDS) - 1)])
    # An architecture with other names.
    step = max(len(names) // len(_KINDS), 1)
    return list(dict.fromkeys(chosen)) or list(names)[::step]


def allowed_difference(dtype: torch.dtype, expected: torch.Tensor) -> float:
    """Returns how much log-probs may differ from a side that computes in ``dtype``."""
    if dtype not in HALF_TOLERANCE:
        return FLOAT32_TOLERANCE
    return max(HALF_TOLERANCE[dtype] * float(expected.std()), FLOAT32_TOLERANCE)


def whole_model(weights: UserWeights) -> nn.Module | None:
    """Returns the model if it can score prompts; None if a part is elsewhere."""
    # Calling a wrapper could take every rank; PEFT's own forward may take anything, and
    # the base model has the adapter's layers.
    model = weights.innermost
    if weights.peft_model is not None:
        model = weights.peft_model.get_base_model()
    if model is None:
        return None
    elsewhere = any(
        isinstance(value, DTensor) or value.is_meta or not value.numel()
        for value in model.parameters()
    )
    takes_ids = "input_ids" in inspect.signature(model.forward).parameters
    return model if takes_ids and not elsewhere else None


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
            token_log_probs: torch.Tensor = log_probs.gather(-1, targets)[..., 0].cpu()
            return token_log_probs
    except Exception as error:
        raise WeightSyncStateError(
            f"The model that is to be sent cannot score a prompt of token ids "
            f"({type(error).__name__}: {error}), which verify=True needs; nothing was "
            f"sent. Leave verify=True out, or give its state dict."
        ) from error
    finally:
        for module in training:
            module.training = True
