"""When Python's garbage collector runs."""

from __future__ import annotations

import gc
import weakref

import pytest

from torchrl_sglang.support.garbage import (
    FROZEN_BY_PYTHON,
    NEW_OBJECTS_OF_SERVERS,
    collect_garbage_afterwards,
    collect_rarely_from_now_on,
    old_objects_frozen,
)


class Cycle:
    """An object that only the garbage collector frees."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def nothing_frozen():
    """Tests freeze what was imported before."""
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    yield
    if frozen:
        gc.freeze()


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_frozen")
def test_objects_that_exist_are_frozen_within_the_block():
    old = Cycle()
    dropped = weakref.ref(old)
    with old_objects_frozen():
        new = Cycle()
        gone = weakref.ref(new)
        del old, new
        gc.collect()
        assert gone() is None
        assert dropped() is not None
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert dropped() is None


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_frozen")
def test_they_are_not_after_an_error():
    with pytest.raises(ValueError, match="mine"), old_objects_frozen():
        raise ValueError("mine")
    assert gc.get_freeze_count() == 0


@pytest.mark.usefixtures("nothing_frozen")
def test_a_program_that_freezes_its_objects_is_left_alone():
    gc.freeze()
    with old_objects_frozen():
        assert gc.get_freeze_count() > FROZEN_BY_PYTHON
    # Some end without the garbage collector.
    assert gc.get_freeze_count() > FROZEN_BY_PYTHON
    gc.unfreeze()


@pytest.mark.usefixtures("nothing_frozen")
def test_a_server_collects_rarely_and_never_what_existed():
    threshold = gc.get_threshold()
    try:
        collect_rarely_from_now_on()
        begun = gc.get_stats()[0]["collections"]
        living = [[] for _ in range(NEW_OBJECTS_OF_SERVERS // 2)]
        assert gc.get_stats()[0]["collections"] == begun
        living += [[] for _ in range(NEW_OBJECTS_OF_SERVERS)]
        assert gc.get_stats()[0]["collections"] > begun
        assert gc.get_freeze_count() > FROZEN_BY_PYTHON
    finally:
        gc.set_threshold(*threshold)
        gc.unfreeze()


@pytest.mark.parametrize("enabled", [True, False])
def test_collections_are_as_they_were_after_a_pause(enabled):
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with collect_garbage_afterwards():
            assert not gc.isenabled()
            with collect_garbage_afterwards():
                pass
            assert not gc.isenabled()
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()
