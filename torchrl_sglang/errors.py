"""The exceptions that this package raises: the bottom of the import order.

Every error that leaves the package on purpose is one of these, and each is also the
built-in exception that a caller would expect, so ``except ValueError`` keeps working::

    SGLangError
    ├── ConfigurationError(ValueError)            a value given here is wrong
    ├── ServerError(RuntimeError)                 a server did not do what was asked
    │   ├── ServerStartError                      it never became ready
    │   ├── ServerDiedError                       its process ended
    │   ├── RequestRefusedError                   it answered 4xx: the request is wrong
    │   ├── ServerUnavailableError(ConnectionError)   no connection, or it answers 5xx
    │   └── ServerTimeoutError(TimeoutError)      no answer within the time budget
    ├── UnsupportedByServerError(NotImplementedError)   its version or flags lack this
    ├── WeightSyncError(RuntimeError)             new weights did not arrive whole
    │   ├── WeightSyncStateError                  called in the wrong order
    │   ├── WeightTransferError                   the transfer broke
    │   └── WeightMismatchError(ValueError)       names, shapes or dtypes do not fit
    └── GenerationAbortedError(RuntimeError)      a response was cut off by an abort

A message is a full sentence: what failed, which value, which server, what to do next.
All of them pickle: their constructor takes the message, and everything else that they
carry lives in ``__dict__``, which :meth:`BaseException.__reduce__` preserves.
"""

from __future__ import annotations

import types
from collections import abc

__all__ = [
    "ConfigurationError",
    "GenerationAbortedError",
    "RequestRefusedError",
    "SGLangError",
    "ServerDiedError",
    "ServerError",
    "ServerStartError",
    "ServerTimeoutError",
    "ServerUnavailableError",
    "UnsupportedByServerError",
    "WeightMismatchError",
    "WeightSyncError",
    "WeightSyncStateError",
    "WeightTransferError",
]


class SGLangError(Exception):
    """Base class of every error of this package.

    Attributes:
        partly (bool): a call to several servers failed on this one and succeeded on
            another.
        completions (Mapping[int, Completion]): where it ended the generation of a
            batch, the responses that were finished by then, by their position.
    """

    partly: bool = False
    completions: abc.Mapping[int, object] = types.MappingProxyType({})


class ConfigurationError(SGLangError, ValueError):
    """An argument, a sampling parameter or an input value is wrong."""


class ServerError(SGLangError, RuntimeError):
    """A server did not do what was asked of it."""


class ServerStartError(ServerError):
    """A server that was started here did not become ready; carries its log's end."""


class ServerDiedError(ServerError):
    """The process of a server that was started here ended; carries its log's end."""


class RequestRefusedError(ServerError):
    """A server answered with a client error (4xx).

    Attributes:
        status (int | None): the HTTP status.
        index (int | None): position in the batch of the item that was refused.
    """

    status: int | None = None
    index: int | None = None


class ServerUnavailableError(ServerError, ConnectionError):
    """A server cannot be reached, or failed with a server error (5xx).

    Attributes:
        transient (bool): the connection broke or the server answered 5xx, so that
            another try, or another server, may succeed. An answer that makes no sense
            is not transient.
        status (int | None): the HTTP status, if the server had begun to answer.
    """

    transient: bool = False
    status: int | None = None


class ServerTimeoutError(ServerError, TimeoutError):
    """A server did not answer within the time budget of the call."""


class UnsupportedByServerError(SGLangError, NotImplementedError):
    """The server's version or its flags lack what was asked for."""


class WeightSyncError(SGLangError, RuntimeError):
    """The servers did not receive new weights whole."""


class WeightSyncStateError(WeightSyncError):
    """A weight-update call came in the wrong order, or the weights are in doubt."""


class WeightTransferError(WeightSyncError):
    """A weight transfer broke before it finished.

    Attributes:
        untouched (bool): the servers refused before they received anything.
    """

    untouched: bool = False


class WeightMismatchError(WeightSyncError, ValueError):
    """Names, shapes or dtypes of the weights do not fit the served model."""


class GenerationAbortedError(SGLangError, RuntimeError):
    """A response was cut off by an abort, so it is not a finished one.

    Attributes:
        index (int | None): position of the response in the batch.
        requested (bool): the engine that sent the request had it aborted.
    """

    index: int | None = None
    requested: bool = False
