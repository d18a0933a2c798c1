"""Start phase and remedies from the log of a starting server."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

_PHASES = (
    # The latest phase in the log is the current phase.
    ("server_args=", "starting its processes"),
    ("Init torch distributed begin", "joining its ranks"),
    ("Init parallel begin", "joining its ranks"),
    ("Load weight begin", "loading the weights"),
    ("Load weight end", "allocating the KV cache"),
    # Several kinds of them; each begin and end is a line.
    ("Capture ", "capturing CUDA graphs"),
    ("max_total_num_tokens=", "starting its HTTP server"),
    ("Application startup complete", "warming up"),
    ("The server is fired up", "ready"),
)
"""Text in SGLang's log -> phase begun there."""

_MEMORY = (
    # SGLang counts allocations of other programs as the server's own.
    (
        r"Raise --mem-fraction-static above ([\d.]+)",
        "mem_fraction_static more than {0}",
    ),
    (r"([Ii]ncrease|[Rr]aise) --mem-fraction-static", "a greater mem_fraction_static"),
    (
        r"OutOfMemoryError|CUDA out of memory|Cannot allocate memory",
        "a smaller mem_fraction_static or max_total_tokens",
    ),
)
"""SGLang's message about memory -> helpful argument."""

_NO_MODEL = re.compile(
    r"couldn't connect to 'https?://|not a valid model identifier|a gated repo|"
    r"not appear to have a file named config\.json|Unrecognized model in"
)
"""Messages of transformers about a model that it cannot read."""


def find_phase(log: str) -> str:
    """Returns the phase of a server's start."""
    begun = [(log.rfind(text), phase) for text, phase in _PHASES]
    place, phase = max(begun)
    return phase if place >= 0 else "importing SGLang"


def find_remedy(log: str, line: Sequence[str] = ()) -> str:
    """Returns a sentence with a remedy for a failed start; empty: unknown.

    ``line`` is the command line, which has the model.
    """
    for pattern, remedy in _MEMORY:
        if match := re.search(pattern, log):
            return (
                f"Memory is short: end other programs, or start the server with "
                f"{remedy.format(*match.groups())}."
            )
    if _NO_MODEL.search(log):
        model = dict(pairwise(line)).get("--model-path", "")
        return (
            f"The model {model!r} cannot be read: give a folder with config.json, or "
            f"a name on the hub, which needs a network, and HF_TOKEN if it is gated."
        )
    return ""
