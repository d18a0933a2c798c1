"""GRPO on GSM8K, asynchronously: the engine generates while the trainer trains.

    python grpo-async.py                # needs GPUs
    python grpo-async.py +debug=cpu     # a tiny model on a CPU, in minutes

Parameters are in ``config/``; ``name=value`` changes one.
"""

from __future__ import annotations

from grpo_config import start
from grpo_train import train

if __name__ == "__main__":
    start("async", train)
