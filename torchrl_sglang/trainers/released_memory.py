"""Memory that servers on the trainer's GPUs release and need when they wake up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.trainers.ranks import TrainerRanks


class ReleasedMemory:
    """Measures the memory that servers on this rank's GPU release and take again.

    SGLang's server ends if it wakes up and the memory is not there: what a trainer
    keeps meanwhile, such as the moments of an optimizer, is there from the first step
    on. All ranks make each call. ``read`` returns the free and total bytes of this
    rank's GPU; None where the trainer has none.
    """

    def __init__(
        self, ranks: TrainerRanks, read: Callable[[], tuple[int, int]] | None
    ) -> None:
        self._ranks = ranks
        self._read = read
        self._released = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Counts the memory that servers release, or take again, in the block."""
        free = self._free()
        self._ranks.barrier()
        yield
        self._released += self._free() - free

    def check(self, share: float | None) -> None:
        """Refuses to wake servers up that would not find their memory, on all ranks."""
        needed, self._released = self._released, 0
        message = ""
        if self._read is not None:
            free, total = self._read()
            message = shortage(needed, free, total, share)
        messages = [text for text in self._ranks.gather(message) if text]
        if messages:
            raise ConfigurationError(messages[0])

    def _free(self) -> int:
        return 0 if self._read is None else self._read()[0]


def shortage(wanted: int, free: int, whole: int, share: float | None) -> str:
    """Returns an error message if less is free than a server needs, or an empty text.

    ``wanted``, ``free`` and ``whole`` are bytes of the GPU, and ``share`` is the
    server's ``mem_fraction_static``, if known.

    Examples:
        >>> shortage(30, 40, 80, 0.6)
        ''
        >>> message = shortage(40 * 10**9, 32 * 10**9, 80 * 10**9, 0.6)
        >>> "'mem_fraction_static': 0.49}" in message
        True
    """
    if wanted <= free:
        return ""
    less = "a smaller mem_fraction_static"
    if share is not None:
        # One more hundredth for what allocators round.
        fits = int(100 * (share - (wanted - free) / whole) - 1) / 100
        if fits > 0:
            less = f"engine={{'mem_fraction_static': {fits:g}}}, which is {share:g} now"
    return (
        f"A server on the trainer's GPU released {wanted / 1e9:.1f} GB for its cache, "
        f"and {free / 1e9:.1f} GB are free after a step: the trainer keeps the rest. "
        f"The server was not woken up, which would have ended it. Give {less}, more "
        f"GPUs to the trainer, or a GPU to each with colocated=False."
    )


def gpu_memory(device: torch.device) -> Callable[[], tuple[int, int]] | None:
    """Returns a reader of a GPU's free and total bytes; None for a CPU."""
    if device.type != "cuda":
        return None

    def read() -> tuple[int, int]:
        # What PyTorch keeps for later is free for others, too.
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)

    return read
