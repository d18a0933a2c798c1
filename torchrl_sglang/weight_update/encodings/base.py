"""The base class of encodings, and the stage that applies one."""

from __future__ import annotations

import abc
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, ClassVar

import torch

from torchrl_sglang.errors import WeightMismatchError
from torchrl_sglang.weight_update.weights import TensorSpec, Weights


class WeightEncoding(abc.ABC):
    """Maps each served tensor to the tensors that are sent.

    Both methods are called on every tensor of an update, ``plan`` for all of them
    before the first byte is sent. One tensor at a time is encoded, where it is.

    Examples:
        Weights with a scale, as block-quantised servers take them:

        >>> from dataclasses import replace
        >>> import torch
        >>> class Scaled(WeightEncoding):
        ...     name = "scaled"
        ...     quantized = "fp8"
        ...
        ...     def plan(self, spec):
        ...         if not spec.name.endswith("proj.weight"):
        ...             return (spec,)
        ...         scale = replace(
        ...             spec, name=f"{spec.name}_scale_inv", shape=torch.Size([1])
        ...         )
        ...         return spec, scale
        ...
        ...     def encode(self, spec, tensor):
        ...         scale = tensor.abs().max()
        ...         yield (tensor / scale).to(spec.dtype)
        ...         yield scale.reshape(1).to(spec.dtype)
        >>> scheme = SGLangWeightSyncScheme(engine, encoding=Scaled())
        >>> scheme.options.encoding.name
        'scaled'
    """

    name: ClassVar[str]
    """Name in ``SGLangWeightSyncScheme(encoding=...)``."""
    quantized: ClassVar[str | None] = None
    """The servers that take what it makes, by ``ServerCapabilities.quantized``;
    ``None``: those that hold the weights as a checkpoint has them."""

    @abc.abstractmethod
    def plan(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        """Returns the specs of the encoded tensors, at least one: ``(spec,)`` sends the
        tensor as it is.

        Args:
            spec: name, type and shape as the servers' loader takes them.
        """

    @abc.abstractmethod
    def encode(self, spec: TensorSpec, tensor: torch.Tensor) -> Iterable[torch.Tensor]:
        """Yields the tensors of :meth:`plan`, in its order and of its types and shapes.

        It is not called for tensors that are sent as they are.

        Args:
            spec: of the tensor.
            tensor: of ``spec.shape``, on any device and of any floating-point type. It
                can be the trainer's own, and must not be changed.
        """


class Identity(WeightEncoding):
    """Sends every tensor as it is."""

    name = "identity"

    def plan(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        """Returns the tensor."""
        return (spec,)

    def encode(self, spec: TensorSpec, tensor: torch.Tensor) -> Iterable[torch.Tensor]:
        """Yields the tensor."""
        yield tensor


def encode_weights(weights: Weights, encoding: WeightEncoding) -> Weights:
    """Encodes weights, tensor by tensor as they are read.

    Raises:
        WeightMismatchError: if two tensors would have one name. Later, where the
            tensors are not those that were planned.
    """
    if type(encoding) is Identity:
        return weights
    plan = {spec.name: _plan(encoding, spec) for spec in weights.specs}
    specs = {spec.name: spec for spec in weights.specs}
    if all(plan[name] == (spec,) for name, spec in specs.items()):
        return weights
    encoded = [part for parts in plan.values() for part in parts]
    ((name, count),) = Counter(part.name for part in encoded).most_common(1)
    if count > 1:
        raise WeightMismatchError(
            f"encoding={encoding.name!r} makes two tensors of the name {name!r}; "
            f"nothing was sent."
        )

    def read() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights.read():
            if plan[name] == (specs[name],):
                yield name, tensor
            else:
                yield from _encode(encoding, specs[name], plan[name], tensor)
            # Not held while the next one is made.
            del tensor

    return replace(weights, specs=tuple(encoded), read=read, stable=False, memory=None)


def _plan(encoding: WeightEncoding, spec: TensorSpec) -> tuple[TensorSpec, ...]:
    """Plans a tensor by an encoding, whose answer is checked."""
    planned: Any = encoding.plan(spec)
    parts = tuple(planned) if isinstance(planned, Iterable) else ()
    if parts and all(isinstance(part, TensorSpec) for part in parts):
        return parts
    raise WeightMismatchError(
        f"encoding={encoding.name!r} plans {planned!r:.100} of {spec.name}, and not "
        f"one TensorSpec or several: the servers would keep the old tensor. Nothing "
        f"was sent."
    )


def _encode(
    encoding: WeightEncoding,
    spec: TensorSpec,
    parts: tuple[TensorSpec, ...],
    tensor: torch.Tensor,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the encoded tensors of one tensor, as planned."""
    changes = None if tensor.is_inference() else tensor._version
    with torch.no_grad():
        yielded: Any = encoding.encode(spec, tensor)
        encoded = [] if yielded is None else list(yielded)
    del yielded
    if changes is not None and tensor._version != changes:
        raise WeightMismatchError(
            f"encoding={encoding.name!r} has changed {spec.name} in place, which may "
            f"be the trainer's own; make another tensor of it."
        )
    del tensor
    kinds = [
        (value.dtype, value.shape) if isinstance(value, torch.Tensor) else type(value)
        for value in encoded
    ]
    planned = [(part.dtype, part.shape) for part in parts]
    if kinds != planned:
        raise WeightMismatchError(
            f"encoding={encoding.name!r} made {kinds} of {spec.name}, and planned "
            f"{planned}."
        )
    for part in parts:
        yield part.name, encoded.pop(0)
