"""Weights that a function exports: (name, tensor) pairs, made anew for every update."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from torchrl_sglang.errors import ConfigurationError, WeightMismatchError
from torchrl_sglang.weight_update.sources.base import Source, Wanted, describe, gather
from torchrl_sglang.weight_update.weights import TensorSpec

__all__ = ["ExporterCache", "empty_error", "read_pairs"]


class ExporterCache:
    """Keeps what the last exporter yielded, so that it need not be run again to ask."""

    def __init__(self) -> None:
        self._exporter: Any = None
        self._specs: dict[str, TensorSpec] = {}

    def forget(self) -> None:
        """Makes the next update run the exporter once more."""
        self._exporter, self._specs = None, {}

    def source(self, exporter: Any, export: Callable[[], Any]) -> Source:
        """Makes a source of an exporter, running it where it is a new one."""
        # A bound method is another object every time it is looked up.
        equal = inspect.ismethod(exporter) and exporter == self._exporter
        if not self._specs or not (equal or exporter is self._exporter):
            specs: dict[str, TensorSpec] = {}
            for name, tensor in read_pairs(export, exporter):
                specs[name] = describe(name, tensor)
                del tensor
            if not specs:
                raise empty_error(exporter)
            self._exporter, self._specs = exporter, specs
        specs = self._specs

        def read(wanted: Wanted) -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in read_pairs(export, exporter):
                _check_announced(tensor, name, specs.get(name))
                if name in wanted:
                    yield name, gather(tensor, wanted[name])
                del tensor

        return Source(specs=specs, read=read, stable=False)


def _check_announced(tensor: torch.Tensor, name: str, known: TensorSpec | None) -> None:
    integer = not tensor.dtype.is_floating_point
    before = known and (known.dtype, tuple(known.shape))
    if (
        known is None
        or known.shape != tensor.shape
        or known.dtype.is_floating_point == integer
    ):
        raise WeightMismatchError(
            f"The exporter of the weights yields {name} of {tensor.dtype} and shape "
            f"{tuple(tensor.shape)}, and yielded {before or 'no such tensor'} before."
        )


def read_pairs(
    export: Callable[[], Any], given: Any
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the (name, tensor) pairs of an export, validated, holding none of them."""
    items = export()
    if isinstance(items, Mapping):
        items = items.items()
    if not isinstance(items, Iterable) or isinstance(items, (str, bytes)):
        raise ConfigurationError(
            f"A function that exports weights must return an iterator of (name, "
            f"tensor); {given!r} returned a {type(items).__name__}."
        )
    seen = set()
    iterator, end = iter(items), object()
    while True:
        # For each step alone: a suspended generator must leave no grad mode behind.
        with torch.no_grad():
            item = next(iterator, end)
        if item is end:
            return
        if not (isinstance(item, (tuple, list)) and len(item) == 2):
            raise ConfigurationError(
                f"An iterable of weights must yield (name, tensor), got a "
                f"{type(item).__name__}; model.parameters() has no names, "
                f"model.named_parameters() has."
            )
        name, value = item
        del item
        if not isinstance(value, torch.Tensor):
            raise ConfigurationError(
                f"The weight {name!r} is a {type(value).__name__}, not a tensor."
            )
        if name in seen:
            raise ConfigurationError(f"The weights hold {name!r} twice.")
        seen.add(name)
        yield name, value
        del value


def empty_error(given: Any) -> ConfigurationError:
    """Makes the error for weights without a tensor."""
    return ConfigurationError(
        f"The {type(given).__name__} that was given as weights has no parameter. "
        f"Is it the inference wrapper? Register the model that is trained."
    )
