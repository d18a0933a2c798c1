"""A learner on several ranks goes on with the state of another one."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from helpers.forked_starts import trainer_python

PROGRAM = Path(__file__).with_name("learner_state_program.py")


def test_every_rank_loads_its_share():
    """Each loads what ``state_dict()`` gave it."""
    words = "-m torch.distributed.run --nproc-per-node 2 --master-port 0"
    words += " --rdzv-backend c10d --rdzv-endpoint localhost:0"
    done = subprocess.run(
        [trainer_python(), *words.split(), str(PROGRAM)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
