"""Weight versions of servers as policy versions of a collector. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from torchrl_sglang.types import Completion


class PolicyVersions:
    """Maps the version that a server reports to the collector's count of updates.

    Servers may have had updates before this collector existed, so the two numbers can
    differ.

    Args:
        served: version of the servers' weights when the count is ``version``.
        version: the collector's policy version.

    Examples:
        >>> versions = PolicyVersions("default", 0)
        >>> versions.add("17")
        >>> versions.current, versions.of("default"), versions.of("17")
        (1, 0, 1)
    """

    def __init__(self, served: str, version: int = 0) -> None:
        self._version_of = {served: version}
        self._first_announced: int | None = None
        self.current = version
        """Number of updates so far."""

    def add(self, served: str | None) -> None:
        """Counts an update; ``served`` is the servers' version of its weights."""
        self.current += 1
        if served is not None:
            # Weights that were served before do not become newer.
            self._version_of.setdefault(served, self.current)

    def announce(self, served: str) -> None:
        """Takes a version that servers may have from now on for the next update's.

        Servers generate with it before the update has been counted, and an update that
        was sent again has several.

        Examples:
            >>> versions = PolicyVersions("3")
            >>> versions.announce("4")
            >>> versions.announce("5")
            >>> versions.current, versions.of("4")
            (0, 1)
            >>> versions.add("5")
            >>> versions.current, versions.of("4"), versions.of("5")
            (1, 1, 1)
        """
        if self._first_announced is None and served.isdigit():
            self._first_announced = int(served)
        # No weights had it before: at most an update that failed has announced it.
        self._version_of[served] = self.current + 1

    def fail(self, *, generated: bool) -> None:
        """Ends the announcements of an update that has failed.

        Args:
            generated: servers may have generated with its weights, which so have a
                count of their own; the next update's are others.
        """
        if generated:
            self.current += 1
            return
        versions = self._version_of.items()
        self._version_of = {
            name: version for name, version in versions if version <= self.current
        }

    def add_served(self, served: str) -> None:
        """Takes another version of the servers for the current one."""
        self._version_of.setdefault(served, self.current)

    def restart(self, version: int) -> None:
        """Continues with another count, as the version of the served weights."""
        self._version_of = dict.fromkeys(self._version_of, version)
        self.current = version

    def of(self, served: str) -> int | None:
        """Returns the policy version of a server's version; ``None`` if unknown."""
        known_version = self._version_of.get(served)
        if known_version is not None or not served.isdigit():
            return known_version
        # Another sender's update: it is as old as the newest one before it.
        older = [
            min(version, self.current)
            for name, version in list(self._version_of.items())
            if not name.isdigit() or int(name) < int(served)
        ]
        return max(older, default=None)

    def foreign(self, completions: Iterable[Completion]) -> str | None:
        """Returns a version of responses that another sender has given the servers.

        The collector's own senders announce theirs. Versions from before their first
        update belong to an earlier run, or to a checkpoint.
        """
        names = (
            name
            for completion in completions
            for name in (
                *(span.version for span in completion.versions),
                completion.weight_version,
            )
        )
        return next((name for name in names if self._is_foreign(name)), None)

    def _is_foreign(self, served: str | None) -> bool:
        first = self._first_announced
        if first is None or served is None or not served.isdigit():
            return False
        return int(served) > first and served not in self._version_of

    def oldest(self, completions: Iterable[tuple[Completion, int]]) -> int:
        """Returns the policy version of the oldest response token."""
        versions = (
            version
            for completion, version_sent in completions
            for version, _ in self.spans(completion, version_sent)
        )
        return min(versions, default=self.current)

    def spans(self, completion: Completion, sent: int) -> Iterator[tuple[int, int]]:
        """Yields policy version and number of tokens of each part of a response."""
        if not completion.versions:
            yield sent, len(completion.token_ids)
        for span in completion.versions:
            version = self.of(span.version)
            yield sent if version is None else version, span.end - span.start

    def of_tokens(self, completion: Completion, sent: int) -> torch.Tensor:
        """Returns the policy version of each token of a response."""
        spans = self.spans(completion, sent)
        parts = [torch.full((count,), version) for version, count in spans]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)
