"""Script to run or describe a router, in the interpreter with sglang-router.

::

    python router_launch.py describe
    python router_launch.py serve --config <file of arguments, in JSON>

This package is not installed there, so the file stands alone.
``sglang_router.launch_router`` imports all of SGLang, which takes seconds and fails on
a CPU, lacks some of the policies, and shows keys on its command line.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import fields
from typing import Any


def describe() -> dict[str, Any]:
    """Returns the version, the argument names and the policies of the router."""
    from sglang_router.router_args import RouterArgs
    from sglang_router.sglang_router_rs import PolicyType
    from sglang_router.version import __version__

    names = [name for name in dir(PolicyType) if name[0].isupper()]
    return {
        "version": __version__,
        "arguments": [field.name for field in fields(RouterArgs)],
        # CacheAware -> cache_aware
        "policies": [re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower() for name in names],
    }


def serve(path: str) -> None:
    """Routes with the arguments in a file until the process is signalled to end."""
    from sglang_router.router import Router
    from sglang_router.router_args import RouterArgs

    with open(path) as file:
        arguments = json.loads(json.load(file)["arguments"])
    Router.from_args(RouterArgs(**arguments)).start()


if __name__ == "__main__":
    if sys.argv[1] == "describe":
        print(json.dumps(describe()))  # noqa: T201 - Read by the parent process.
    else:
        serve(sys.argv[-1])
