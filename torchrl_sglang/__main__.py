"""Entry point of the program ``torchrl-sglang``; see :mod:`torchrl_sglang.cli`."""

from __future__ import annotations

import os
import sys

from torchrl_sglang.cli import main


def run() -> int:
    """Runs the command line as a program and returns its exit status."""
    # Standard output is for results, so TorchRL's logger must not write there.
    os.environ["TORCHRL_CONSOLE_STREAM"] = "stderr"
    return main()


if __name__ == "__main__":
    sys.exit(run())
