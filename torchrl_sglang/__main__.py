"""The program ``torchrl-sglang``; see :mod:`torchrl_sglang.cli`."""

from __future__ import annotations

import os
import sys

from torchrl_sglang.cli import main


def run() -> int:
    """Run the command line as a program of its own and return its exit status."""
    # Standard output is for results; TorchRL's logger, made when it is imported, would
    # write there too.
    os.environ["TORCHRL_CONSOLE_STREAM"] = "stderr"
    return main()


if __name__ == "__main__":
    sys.exit(run())
