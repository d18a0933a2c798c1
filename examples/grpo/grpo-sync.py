"""GRPO on GSM8K, synchronously: collect, train, send the weights, again.

    python grpo-sync.py                # needs GPUs
    python grpo-sync.py +debug=cpu     # a tiny model on a CPU, in minutes

Parameters are in ``config/``; ``name=value`` changes one.
"""

from __future__ import annotations

from grpo_config import start
from grpo_train import train

if __name__ == "__main__":
    start("sync", train)
