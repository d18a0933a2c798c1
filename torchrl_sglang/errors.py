"""The exceptions of this package.

Each is also the expected built-in exception, so ``except ValueError`` keeps working::

    SGLangError
    ├── ConfigurationError(ValueError)                 an argument is wrong
    │   ├── ChatTemplateError                          a template refuses messages
    │   ├── NotFiniteError                             a column is NaN or infinite
    │   └── TaskError                                  a prompt cannot be collected
    ├── ServerError(RuntimeError)                      a server failed
    │   ├── ServerStartError                           it never became ready
    │   ├── ServerDiedError                            its process ended
    │   ├── RequestRefusedError                        4xx: the request is wrong
    │   ├── ServerUnavailableError(ConnectionError)    no connection, or a 5xx answer
    │   └── ServerTimeoutError(TimeoutError)           no answer before the timeout
    ├── UnsupportedByServerError(NotImplementedError)  its version or flags lack this
    ├── WeightSyncError(RuntimeError)                  a weight update failed
    │   ├── WeightSyncStateError                       calls in the wrong order
    │   ├── WeightTransferError                        the transfer broke
    │   └── WeightMismatchError(ValueError)            names, shapes, dtypes do not fit
    ├── GenerationAbortedError(RuntimeError)           an abort cut a response off
    ├── GatewayError(RuntimeError)                     a gateway refuses a client
    ├── CheckpointError(RuntimeError)                  not written, or it does not fit
    └── CollectionError(RuntimeError)                  a collector cannot go on
        ├── CollectionTimeoutError(TimeoutError)       no batch was complete in time
        └── UserFunctionError                          a function of the user raised

A message is a full sentence: the failure, the value, the server, and the next step.
Errors take their attributes as keywords, are not changed afterwards
(:meth:`SGLangError.replace` makes a copy) and can be pickled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self


class SGLangError(Exception):
    """Base class of every error of this package."""

    partly: bool = False
    """Whether a call to several servers failed here and succeeded on another server."""
    completions: Mapping[int, object] = {}
    """Finished responses (:class:`.Completion`) of the failed batch, by position."""

    def __init__(self, *message: object, **attributes: Any) -> None:
        super().__init__(*message)
        allowed = [getattr(base, "__annotations__", ()) for base in type(self).__mro__]
        for name in attributes:
            if not any(name in names for names in allowed):
                raise TypeError(f"{type(self).__name__} has no attribute {name!r}.")
        vars(self).update(attributes)

    def replace(
        self,
        *,
        note: str | None = None,
        cause: BaseException | None = None,
        **attributes: Any,
    ) -> Self:
        """Returns a copy with other attributes, a further note or another cause.

        Examples:
            >>> RequestRefusedError("The prompt is too long.").replace(index=3).index
            3
        """
        notes = [*getattr(self, "__notes__", ()), *([note] if note else ())]
        error = type(self)(*self.args, **attributes)
        vars(error).update({**vars(self), **attributes})
        if notes:
            error.__notes__ = notes
        error.__cause__ = cause or self.__cause__
        error.__context__ = self.__context__
        error.__suppress_context__ = bool(cause) or self.__suppress_context__
        return error.with_traceback(self.__traceback__)


class ConfigurationError(SGLangError, ValueError):
    """An argument, a sampling parameter or an input value is wrong."""


class ChatTemplateError(ConfigurationError):
    """A chat template refuses a conversation, such as for the order of its roles."""


class NotFiniteError(ConfigurationError):
    """Training data is NaN or infinite: a column, or a server's log-probs."""


class TaskError(ConfigurationError):
    """A task cannot be collected, however often it is tried."""


class ServerError(SGLangError, RuntimeError):
    """A server failed to execute a request."""


class ServerStartError(ServerError):
    """A server did not become ready; the message carries the end of its log."""


class ServerDiedError(ServerError):
    """The process of a server ended; the message carries the end of its log."""


class RequestRefusedError(ServerError):
    """A server answered with a client error (4xx)."""

    status: int | None = None
    """The HTTP status."""
    index: int | None = None
    """Position in the batch of the refused request."""


class ServerUnavailableError(ServerError, ConnectionError):
    """A server cannot be reached, or failed with a server error (5xx)."""

    transient: bool = False
    """The connection broke or the server answered 5xx; a retry, or another server, may
    succeed. A malformed answer is not transient."""
    status: int | None = None
    """The HTTP status, if the server had begun to answer."""


class ServerTimeoutError(ServerError, TimeoutError):
    """A server did not answer before the timeout of the call."""


class UnsupportedByServerError(SGLangError, NotImplementedError):
    """The server's version or its flags lack a capability."""


class WeightSyncError(SGLangError, RuntimeError):
    """A weight update failed."""


class WeightSyncStateError(WeightSyncError):
    """A weight-update call came in the wrong order, or the weights are inconsistent."""


class WeightTransferError(WeightSyncError):
    """A weight transfer broke before it finished."""

    server_lost: bool = False
    """A server ended during the transfer, and is being restarted."""
    untouched: bool = False
    """The servers refused before they received anything, and hold the old weights."""


class WeightMismatchError(WeightSyncError, ValueError):
    """Names, shapes or dtypes of the weights do not fit the served model."""


class GenerationAbortedError(SGLangError, RuntimeError):
    """An abort cut a response off before it was finished."""

    index: int | None = None
    """Position of the response in the batch."""
    requested: bool = False
    """Whether this engine aborted its own request."""
    partial: Any = None
    """The :class:`.Completion` until then, with ``finish_reason`` ``"abort"``; ``None``
    where it is unknown."""


class CheckpointError(SGLangError, RuntimeError):
    """A checkpoint of a training run was not written, or cannot be read into a run."""


class CollectionError(SGLangError, RuntimeError):
    """A collector cannot continue; its cause is the final error."""


class CollectionTimeoutError(CollectionError, TimeoutError):
    """No batch was complete before the timeout."""


class UserFunctionError(CollectionError):
    """A function of the user raised, or returned too late; its cause is the error."""


class GatewayError(SGLangError, RuntimeError):
    """A gateway refuses a client: a limit is reached, or its key is invalid.

    Also raised if sessions cannot be written to their file, and if all agents failed.
    """

    status: int = 403
    """The HTTP status."""
    code: str | None = None
    """Error code for programs, such as ``"previous_response_not_found"``."""
    param: str | None = None
    """Invalid field of the request, if any."""
