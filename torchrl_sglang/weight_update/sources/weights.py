"""The tensors of one update, as a transport sees them: in order, one bucket at a time.

Where they come from is ``source.py``'s business. They may be the parameters of a model,
which stay where they are, or values that are gathered, merged or converted on the way
and are gone when the next ones are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from torchrl_sglang.errors import WeightMismatchError
from torchrl_sglang.weight_update.buckets import Bucket, TensorSpec, plan_buckets

__all__ = ["NamedTensors", "Weights"]

NamedTensors = dict[str, torch.Tensor]
"""Parameter name -> tensor."""


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Everything that one update sends, checked against the served model.

    Examples:
        >>> weights = Weights(
        ...     specs=(
        ...         TensorSpec(name="a", dtype=torch.float16, shape=torch.Size([3])),
        ...         TensorSpec(name="b", dtype=torch.float16, shape=torch.Size([2])),
        ...     ),
        ...     read=lambda: iter([("a", torch.ones(3)), ("b", torch.zeros(2))]),
        ...     device=torch.device("cpu"),
        ...     stable=True,
        ... )
        >>> [list(tensors) for bucket, tensors in weights.buckets(max_bytes=8)]
        [['a'], ['b']]
    """

    specs: tuple[TensorSpec, ...]
    """Names that the server's loader takes, the types that it serves, and shapes; in
    the order in which :attr:`read` yields them."""
    read: Callable[[], Iterator[tuple[str, torch.Tensor]]]
    """Yields every tensor, whole, under its served name; on any device and of any
    floating-point type. Can be called once for each update."""
    device: torch.device
    """Where most of them are."""
    stable: bool
    """Tensors stay as they are until the update has ended. Those of a source that is
    not stable are held by nobody else: each bucket is to be let go before the next one
    is asked for."""

    @property
    def num_bytes(self) -> int:
        """Size of all tensors, as they are sent."""
        return sum(spec.num_bytes for spec in self.specs)

    def buckets(
        self, max_bytes: int, small_below: int = 0
    ) -> Iterator[tuple[Bucket, NamedTensors]]:
        """Yields layouts with their tensors, which may still have to be cast.

        Args:
            max_bytes: target size of a bucket; see :func:`.plan_buckets`.
            small_below: size of tensors that travel apart; see there.

        Raises:
            WeightMismatchError: if the source yields something else than it announced.
        """
        announced = {spec.name: tuple(spec.shape) for spec in self.specs}
        source = self.read()
        held: NamedTensors = {}
        for bucket in plan_buckets(self.specs, max_bytes, small_below):
            names = [spec.name for spec in bucket.specs]
            awaited = set(names) - held.keys()
            while awaited:
                name, value = _next(source, announced)
                held[name] = value
                awaited.discard(name)
                del value
            tensors = {name: held.pop(name) for name in names}
            yield bucket, tensors
            if not self.stable:
                # This generator is paused while the next tensors are made.
                tensors.clear()
        if next(source, None) is not None:
            raise WeightMismatchError(
                f"The source of the weights yields more than the {len(announced)} "
                f"tensors that it announced."
            )


def _next(
    source: Iterator[tuple[str, torch.Tensor]],
    announced: Mapping[str, tuple[int, ...]],
) -> tuple[str, torch.Tensor]:
    item = next(source, None)
    if item is None:
        raise WeightMismatchError(
            f"The source of the weights ended before it had yielded all "
            f"{len(announced)} tensors."
        )
    name, value = item
    if tuple(value.shape) != announced.get(name):
        raise WeightMismatchError(
            f"The source of the weights yields {name} of shape {tuple(value.shape)}, "
            f"and announced {announced.get(name, 'no such tensor')}."
        )
    return name, value
