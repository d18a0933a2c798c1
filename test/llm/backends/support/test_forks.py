"""What a forked process begins anew."""

from __future__ import annotations

import gc
import os

from torchrl_sglang.support.forks import _resets, after_fork


class Keeps:
    def __init__(self, name):
        self.name, self.pids = name, []
        after_fork(self.note)

    def note(self):
        self.pids.append(os.getpid())


def in_child(call) -> int:
    pid = os.fork()
    if not pid:
        os._exit(call())
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_methods_of_objects_that_live():
    kept, dropped = Keeps("a"), Keeps("b")
    known = len(_resets)
    del dropped
    gc.collect()
    assert in_child(lambda: int(kept.pids == [os.getpid()])) == 1
    assert kept.pids == []
    # In a child of a child, both are called.
    assert in_child(lambda: in_child(lambda: len(kept.pids))) == 2
    after_fork(kept.note)
    # What is gone is forgotten.
    assert len(_resets) <= known
    assert in_child(lambda: len(kept.pids)) == 2
