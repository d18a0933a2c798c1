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
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def limit_in_flight(wanted: int) -> int:
    """Returns how many requests can be in flight; raises the limit if necessary."""
    others = _count_open_files() + OTHER_FILES
    needed = others + wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    allowed = min(wanted, max(soft - others, FEWEST_IN_FLIGHT))
    if allowed < wanted:
        torchrl_logger.warning(
            f"This process may have {soft} files open (ulimit -Hn), so {allowed} "
            f"requests of an engine are in flight at once, and not "
            f"max_in_flight={wanted}."
        )
    return allowed


def lacks_open_files(error: BaseException) -> bool:
    """Returns whether a call failed because no more files can be opened."""
    if _is_lack(error):
        return True
    # Resolving a host name fails without an errno.
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as failure:
        return _is_lack(failure)
    return False


def _is_lack(error: BaseException) -> bool:
    return getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE)


def _count_open_files() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 0
