"""Server flags that a GPU machine needs, for tests and benchmarks."""

from __future__ import annotations

import os
import shlex

__all__ = ["FLAGS_VARIABLE", "server_arguments"]

FLAGS_VARIABLE = "SGLANG_BUNDLE_FLAGS"
"""Environment variable with further flags of SGLang's server for this machine."""


def server_arguments() -> dict[str, object]:
    """Returns these flags as arguments of ``from_pretrained``.

    Examples:
        >>> import os
        >>> os.environ["SGLANG_BUNDLE_FLAGS"] = "--tp-size 2 --disable-cuda-graph"
        >>> server_arguments()
        {'tp_size': '2', 'disable_cuda_graph': True}
        >>> del os.environ["SGLANG_BUNDLE_FLAGS"]
    """
    arguments: dict[str, object] = {}
    name = ""
    for word in shlex.split(os.environ.get(FLAGS_VARIABLE, "")):
        if word.startswith("--"):
            name = word.removeprefix("--").replace("-", "_")
            arguments[name] = True
        else:
            arguments[name] = word
    return arguments
