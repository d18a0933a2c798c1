"""How many connections this process can have: each needs an open file.

The usual limit of 1,024 is raised as far as the machine allows; if that is too little,
fewer requests are in flight. A request that finds no free file waits.
"""

from __future__ import annotations

import errno
import os
import resource

from torchrl._utils import logger as torchrl_logger

__all__ = ["lacks_open_files", "limit_in_flight", "open_files_limit"]

OTHER_FILES = 256
"""Open files for everything but generation requests: control calls, aborts, libraries,
checkpoints, idle connections."""

FEWEST_IN_FLIGHT = 16
"""At least this many requests are in flight, however low the limit is."""


def open_files_limit() -> int:
    """Returns how many files this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft


def limit_in_flight(wanted: int) -> int:
    """Returns how many requests can be in flight; raises the limit if necessary."""
    in_use = _count_open_files()
    needed = in_use + wanted + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    if soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    allowed = in_flight_within(soft, in_use, wanted)
    if allowed < wanted:
        torchrl_logger.warning(
            f"This process may have {soft} files open (ulimit -Hn), so {allowed} "
            f"requests of an engine are in flight at once, and not "
            f"max_in_flight={wanted}."
        )
    return allowed


def in_flight_within(limit: int, in_use: int, wanted: int) -> int:
    """Returns how many of the wanted requests fit into a limit on open files.

    Examples:
        >>> in_flight_within(65_536, 40, 2048), in_flight_within(1024, 40, 2048)
        (2048, 728)
    """
    return min(wanted, max(limit - in_use - OTHER_FILES, FEWEST_IN_FLIGHT))


def lacks_open_files(error: BaseException) -> bool:
    """Returns whether a call failed because no more files can be opened."""
    number = getattr(error, "errno", None)
    return number in (errno.EMFILE, errno.ENFILE) or not _can_open()


def _can_open() -> bool:
    # Resolving a host name fails without an errno.
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return error.errno not in (errno.EMFILE, errno.ENFILE)
    return True


def _count_open_files() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 0
