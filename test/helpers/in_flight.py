"""Requests that are in flight when a test updates, pauses or kills a server."""

from __future__ import annotations

import threading

from torchrl_sglang.support.event_loop import run_sync

TRIES = 10
"""A busy machine may see requests when they have been answered, or act too late."""


class InFlight:
    """Requests in a thread; servers run them when this has been made.

    The requests are sent again if they were answered before they were seen to run.

    Args:
        engine: the servers.
        call: sends the requests.
        least: how many requests run then, those that ran before counted in.
        all_servers: whether each server runs some of them.

    Attributes:
        before: the engine's counters from before the requests that run.
    """

    def __init__(self, engine, call, least=1, *, all_servers=False):
        self.result = self.error = None
        self._engine, self._least, self._all_servers = engine, least, all_servers
        assert any(self._begins(call) for _ in range(TRIES))

    def _begins(self, call):
        self.before = self._engine.stats()
        self._thread = threading.Thread(target=self._run, args=(call,))
        self._thread.start()
        while not self._are_running():
            if not self._thread.is_alive():
                assert self.error is None, self.error
                return False
        return True

    def _are_running(self):
        if self._all_servers:
            return all(server.running for server in self._engine.stats().servers)
        return run_sync(self._engine.control.running_requests()) >= self._least

    def _run(self, call):
        try:
            self.result = call()
        except Exception as error:
            self.error = error

    @property
    def runs(self):
        return self._thread.is_alive()

    def wait(self):
        self._thread.join(120)
        assert not self._thread.is_alive()
        if self.error is not None:
            raise self.error
        return self.result
