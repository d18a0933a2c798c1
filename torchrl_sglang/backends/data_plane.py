"""Generation: prompts in, completions out, wherever a server is there to make them.

One server takes a batch as one request, which is the fastest form that it has. If it
refuses the batch, its items are sent one by one, so that the bad one names itself and
the others are answered. Several servers get one request for each prompt, so that the
router can balance them and each can be sent again by itself.
"""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections import Counter
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import (
    AbstractContextManager,
    aclosing,
    asynccontextmanager,
    contextmanager,
)
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from torchrl._utils import logger as torchrl_logger

from torchrl_sglang.backends.http import HttpClient
from torchrl_sglang.backends.retries import RetryPolicy
from torchrl_sglang.backends.router import ROUTING_KEY_HEADER, lost_in_router
from torchrl_sglang.backends.stats import Counters
from torchrl_sglang.backends.wire import GenerateRequest, parse_completion, to_payload
from torchrl_sglang.errors import (
    GenerationAbortedError,
    RequestRefusedError,
    ServerTimeoutError,
    ServerUnavailableError,
    SGLangError,
)
from torchrl_sglang.types import Adapter, Completion, ServerCapabilities

__all__ = ["DataPlane", "Targets"]

SINGLE_REQUESTS = 64
"""How many items of a refused batch are under way at once: each has a connection."""

LATE_SECONDS = 0.5
"""A request that is under way tells by itself that its budget is used up, so soon."""

CLOSE_SECONDS = 1.0
"""Budget for the last aborts when an engine is shut down."""

ABORT_REPEATS = 5
"""How often an abort is said again of a request that goes on."""

ABORT_REPEAT_SECONDS = 0.5
"""How soon it is said again."""

ABORT_SECONDS = 5.0
"""Budget for telling the servers that nobody waits for a request any more."""

PRIMED_TOKENS = 32
"""A prompt of so many tokens that a batch has several times is computed once before its
samples are sent: those that arrive together would each compute it, and a router that
has not seen it yet would spread them."""

Outcome = Completion | SGLangError
"""What becomes of a request."""

T = TypeVar("T")


class AdapterUse(Protocol):
    """Which LoRA adapter a request is computed with."""

    def used(
        self, names: Sequence[str | None]
    ) -> AbstractContextManager[Sequence[Adapter | None]]:
        """Keeps the adapters of requests loaded while these are under way.

        Args:
            names: what each request selects.
        """

    async def missed(self, error: RequestRefusedError) -> bool:
        """Returns whether a request is worth sending again, with other adapters.

        Args:
            error: the server's answer to it.
        """


class Targets(Protocol):
    """Where generation requests go."""

    @property
    def only(self) -> str | None:
        """The one server, where there is no other and no router."""

    @property
    def urls(self) -> Sequence[str]:
        """Every server, for aborts."""

    def pick(
        self, session: str | None, avoid: Sequence[str], *, direct: bool = False
    ) -> str:
        """Returns where to send a request.

        Args:
            session: requests of one session go to one place as long as it works.
            avoid: places where it has failed, which are chosen last.
            direct: to a server, and not to the router.

        Raises:
            ServerDiedError: if no server is left.
            WeightSyncStateError: if none has the current weights.
        """

    def failed(self, url: str) -> None:
        """Takes note that a request to this address failed."""


class DataPlane:
    """Sends generation requests. Used from the background loop only.

    Args:
        http: connections.
        targets: where to send requests.
        capabilities: what the servers can do.
        retries: when a failed request is sent again.
        max_in_flight: most requests under way at once; a batch sent as one counts
            as one.
        counters: what is counted.
        adapters: the LoRA adapters; by default there are none.
    """

    def __init__(
        self,
        http: HttpClient,
        targets: Targets,
        capabilities: ServerCapabilities,
        *,
        retries: RetryPolicy,
        max_in_flight: int,
        counters: Counters,
        adapters: AdapterUse | None = None,
    ) -> None:
        self._adapters = adapters or NoAdapters()
        self._http = http
        self._targets = targets
        self._capabilities = capabilities
        self._retries = retries
        self._max_in_flight = max_in_flight
        self._counters = counters
        self._begin_in_this_process()

    def _begin_after_fork(self) -> None:
        # What is under way in a fork's parent is nothing that the child waits for.
        if self._pid != os.getpid():
            self._begin_in_this_process()

    def _begin_in_this_process(self) -> None:
        self._pid = os.getpid()
        self._counters.in_flight = 0
        self._turns = asyncio.Semaphore(self._max_in_flight)
        # Our names of the requests that are under way -> the caller's.
        self._running: dict[str, str | None] = {}
        # What the servers call them now; nothing before the first attempt.
        self._sent_as: dict[str, str] = {}
        self._aborted: set[str] = set()
        self._sent = 0
        self._tidying: set[asyncio.Task[None]] = set()

    async def generate(
        self,
        requests: Sequence[GenerateRequest],
        *,
        cache_key: str,
        timeout: float,
        request_timeout: float | None = None,
    ) -> list[Outcome]:
        """Returns each request's completion, or the error that is its own.

        Args:
            requests: checked requests.
            cache_key: version of the weights, which separates prefix-cache entries.
            timeout: budget for the batch, in seconds.
            request_timeout: budget for each request from when it is sent.

        Raises:
            ServerUnavailableError: if no server can be reached, or they fail.
            ServerDiedError: if every server has ended.
            ServerTimeoutError: if the budget of the batch is used up.
        """
        if not requests:
            return []
        if self._targets.only is None or request_timeout is not None:
            outcomes: list[Outcome | None] = [None] * len(requests)
            stream = self.stream(
                requests,
                cache_key=cache_key,
                timeout=timeout,
                request_timeout=request_timeout,
            )
            async for index, outcome in stream:
                outcomes[index] = outcome
            return _placed(outcomes)
        deadline = time.monotonic() + timeout
        with self._registered([r.request_id for r in requests]) as rids:
            shared = list(shared_prompts(requests).values())
            await self._prime(shared, cache_key, deadline)
            try:
                async with self._turn(deadline):
                    return await self._with_retries(
                        lambda url, sent: self._post_all_but_aborted(
                            url, requests, rids, sent, cache_key, deadline
                        ),
                        None,
                        deadline,
                        rids,
                    )
            except RequestRefusedError as error:
                if len(requests) == 1:
                    error.index = 0
                    return [error]
            outcomes = [None] * len(requests)
            async for index, outcome in self._stream(
                requests,
                rids,
                cache_key=cache_key,
                timeout=max(deadline - time.monotonic(), 1e-3),
                limit=SINGLE_REQUESTS,
            ):
                outcomes[index] = outcome
            return _placed(outcomes)

    async def _post_all_but_aborted(
        self,
        url: str,
        requests: Sequence[GenerateRequest],
        rids: Sequence[str],
        sent: Sequence[str],
        cache_key: str,
        deadline: float,
    ) -> list[Outcome]:
        live = [i for i, rid in enumerate(rids) if rid not in self._aborted]
        answers = await self._post(
            url,
            [requests[i] for i in live],
            [sent[i] for i in live],
            cache_key,
            deadline,
        )
        outcomes: list[Outcome] = [_aborted_here() for _ in requests]
        for index, answer in zip(live, answers, strict=True):
            outcomes[index] = answer
        for index, outcome in enumerate(outcomes):
            if isinstance(outcome, (GenerationAbortedError, RequestRefusedError)):
                outcome.index = index
            if isinstance(outcome, GenerationAbortedError):
                outcome.requested = rids[index] in self._aborted
        return outcomes

    async def stream(
        self,
        requests: Sequence[GenerateRequest],
        *,
        cache_key: str,
        timeout: float,
        request_timeout: float | None = None,
    ) -> AsyncGenerator[tuple[int, Outcome], None]:
        """Yields (index, outcome) as they come: one request for each prompt.

        Args:
            requests: checked requests.
            cache_key: as in :meth:`generate`.
            timeout: as in :meth:`generate`.
            request_timeout: as in :meth:`generate`; an item that uses it up is an
                error in its own place.

        Raises:
            SGLangError: as :meth:`generate` does; what is still under way is aborted.
        """
        with self._registered([r.request_id for r in requests]) as rids:
            outcomes = self._stream(
                requests,
                rids,
                cache_key=cache_key,
                timeout=timeout,
                request_timeout=request_timeout,
            )
            async with aclosing(outcomes):
                async for outcome in outcomes:
                    yield outcome

    async def _stream(
        self,
        requests: Sequence[GenerateRequest],
        rids: Sequence[str],
        *,
        cache_key: str,
        timeout: float,
        request_timeout: float | None = None,
        limit: int | None = None,
    ) -> AsyncGenerator[tuple[int, Outcome], None]:
        deadline = prime_by = time.monotonic() + timeout
        if request_timeout is not None:
            prime_by = min(deadline, time.monotonic() + request_timeout)
        turns = asyncio.Semaphore(limit or len(requests) or 1)
        primers = {
            shared: asyncio.ensure_future(self._prime([request], cache_key, prime_by))
            for shared, request in shared_prompts(requests).items()
        }
        places = {
            asyncio.ensure_future(
                self._one(
                    request,
                    rid,
                    cache_key,
                    deadline,
                    request_timeout,
                    turns,
                    primers.get(prefix(request)),
                )
            ): index
            for index, (request, rid) in enumerate(zip(requests, rids, strict=True))
        }
        pending = set(places)
        try:
            while pending:
                done, pending = await asyncio.wait(
                    pending,
                    timeout=max(deadline - time.monotonic(), 0.0) + LATE_SECONDS,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if not done:
                    raise ServerTimeoutError(
                        f"{len(pending)} of {len(requests)} requests waited for "
                        f"their turn until the budget of {timeout:.3g} s was used "
                        f"up. Others are under way; see max_in_flight."
                    )
                for finished in done:
                    index = places[finished]
                    yield index, _outcome(finished, index)
        finally:
            every: list[asyncio.Task[Any]] = [*primers.values(), *places]
            for task in every:
                task.cancel()
            # Errors of several items: one is raised, and the others are seen.
            await asyncio.gather(*every, return_exceptions=True)

    @asynccontextmanager
    async def _turn(self, deadline: float) -> AsyncIterator[None]:
        """Waits until one more request may be under way."""
        try:
            async with asyncio.timeout(max(deadline - time.monotonic(), 0.0)):
                await self._turns.acquire()
        except TimeoutError:
            raise ServerTimeoutError(
                "A request waited for its turn until its budget was used up: too many "
                "others are under way; see max_in_flight."
            ) from None
        try:
            yield
        finally:
            self._turns.release()

    @property
    def queued(self) -> int:
        """Requests that wait to be sent."""
        self._begin_after_fork()
        return len(self._running) - self._sent

    @contextmanager
    def _registered(self, names: Sequence[str | None]) -> Iterator[list[str]]:
        """Gives requests names, by which they can be aborted meanwhile."""
        self._begin_after_fork()
        # A server aborts every request whose id begins with the one it is told, so
        # these are of one length and never a user's.
        rids = [uuid.uuid4().hex for _ in names]
        self._running.update(zip(rids, names, strict=True))
        self._sent_as.update(dict.fromkeys(rids, ""))
        try:
            yield rids
        finally:
            for rid in rids:
                self._forget(rid)

    def _forget(self, rid: str) -> None:
        self._running.pop(rid, None)
        self._sent_as.pop(rid, None)
        self._aborted.discard(rid)

    async def _one(
        self,
        request: GenerateRequest,
        rid: str,
        cache_key: str,
        deadline: float,
        request_timeout: float | None,
        turns: asyncio.Semaphore,
        primer: asyncio.Task[None] | None,
    ) -> Completion:
        try:
            if primer is not None:
                await asyncio.shield(primer)
            return await self._in_turn(
                request, rid, cache_key, deadline, request_timeout, turns
            )
        finally:
            # The rest of the batch may take longer.
            self._forget(rid)

    async def _in_turn(
        self,
        request: GenerateRequest,
        rid: str,
        cache_key: str,
        deadline: float,
        request_timeout: float | None,
        turns: asyncio.Semaphore,
    ) -> Completion:
        async with turns, self._turn(deadline):
            own = deadline
            if request_timeout is not None:
                own = min(deadline, time.monotonic() + request_timeout)
            try:
                (outcome,) = await self._with_retries(
                    lambda url, sent: self._post(url, [request], sent, cache_key, own),
                    request.session_id,
                    own,
                    [rid],
                    # The router would drop these without a word.
                    direct=bool(lost_in_router(request.sampling_params)),
                )
            except (ServerTimeoutError, ServerUnavailableError) as error:
                # It had no time left for another attempt, and the batch has.
                late = own < deadline and own - time.monotonic() < LATE_SECONDS
                if late and request_timeout is not None:
                    raise _OwnBudgetError(
                        f"A request had no answer within {request_timeout:g} s: {error}"
                    ) from error
                raise
            if isinstance(outcome, GenerationAbortedError):
                outcome.requested = rid in self._aborted
            if isinstance(outcome, SGLangError):
                raise outcome
            return outcome

    async def _prime(
        self, requests: Sequence[GenerateRequest], cache_key: str, deadline: float
    ) -> None:
        """Has prompts computed that several requests share, and waits for it."""
        if not requests:
            return
        prompts = [
            replace(
                request,
                sampling_params={"max_new_tokens": 0},
                return_log_probs=False,
                top_log_probs=0,
            )
            for request in requests
        ]
        try:
            # Nobody's: who aborts a request does not wait for its primer.
            with self._registered([None] * len(prompts)) as rids:
                async with self._turn(deadline):
                    await self._with_retries(
                        lambda url, sent: self._post(
                            url, prompts, sent, cache_key, deadline, count=False
                        ),
                        prompts[0].session_id,
                        deadline,
                        rids,
                    )
        except SGLangError as error:
            # The requests themselves will meet the same, and say so.
            torchrl_logger.debug(f"Shared prompts were not computed ahead: {error}")

    async def _with_retries(
        self,
        send: Callable[[str, Sequence[str]], Awaitable[T]],
        session: str | None,
        deadline: float,
        rids: Sequence[str],
        *,
        direct: bool = False,
    ) -> T:
        failed: list[str] = []
        attempt = 0
        looked = False
        delay: float | None
        while True:
            attempt += 1
            if self._aborted.issuperset(rids):
                raise _aborted_here()
            url = self._targets.pick(session, failed, direct=direct)
            # Each attempt has ids of its own: the one before it is being aborted.
            sent = [f"{rid}-{attempt:03d}" for rid in rids]
            self._sent_as.update(zip(rids, sent, strict=True))
            self._counters.in_flight += len(rids)
            self._sent += len(rids)
            try:
                return await send(url, sent)
            except (asyncio.CancelledError, ServerTimeoutError):
                # Nobody waits for it any more, and the server need not either.
                self._tidy_up(sent)
                raise
            except RequestRefusedError as error:
                if looked or not await self._adapters.missed(error):
                    raise
                # It named an adapter that another process has had dropped meanwhile.
                looked, delay = True, 0.0
            except ServerUnavailableError as error:
                self._targets.failed(url)
                failed.append(url)
                delay = self._retries.delay(error, attempt)
                if delay is None or time.monotonic() + delay >= deadline:
                    raise
                torchrl_logger.debug(f"Attempt {attempt} failed: {error}")
                self._counters.retries += 1
            finally:
                self._counters.in_flight -= len(rids)
                self._sent -= len(rids)
            # What broke the connection need not have ended the request.
            self._tidy_up(sent)
            await asyncio.sleep(delay)

    async def _post(
        self,
        url: str,
        requests: Sequence[GenerateRequest],
        rids: Sequence[str],
        cache_key: str,
        deadline: float,
        *,
        count: bool = True,
    ) -> list[Outcome]:
        # The adapters of this moment: what waited for its turn gets the newest.
        with self._adapters.used([request.adapter for request in requests]) as used:
            payload = to_payload(
                requests,
                self._capabilities,
                cache_key=cache_key,
                rids=rids,
                adapters=[None if each is None else each.served_as for each in used],
            )
            answer = await self._http.request(
                "POST",
                f"{url}/generate",
                payload,
                timeout=max(deadline - time.monotonic(), 1e-3),
                headers={ROUTING_KEY_HEADER: requests[0].session_id or rids[0]},
            )
        replies = answer.raise_for_status().json()
        if isinstance(replies, dict) and len(requests) == 1:
            replies = [replies]
        if not isinstance(replies, list) or len(replies) != len(requests):
            size = len(replies) if isinstance(replies, list) else type(replies).__name__
            raise ServerUnavailableError(
                f"{url} was sent {len(requests)} prompts and answered {size}."
            )
        results: list[Outcome] = []
        for index, (reply, request) in enumerate(zip(replies, requests, strict=True)):
            try:
                completion = parse_completion(
                    reply,
                    request,
                    vocab_size=self._capabilities.vocab_size,
                    server=url,
                )
            except (GenerationAbortedError, RequestRefusedError) as error:
                error.index = index
                results.append(error)
            else:
                adapter = used[index]
                if adapter is not None:
                    completion = replace(
                        completion,
                        adapter=adapter.name,
                        adapter_version=adapter.version,
                    )
                if count:
                    self._counters.count(completion, len(request.input_ids))
                results.append(completion)
        return results

    async def call(
        self,
        path: str,
        payload: Callable[[], Mapping[str, Any]],
        *,
        session: str | None,
        request_id: str | None = None,
        adapter: str | None = None,
        timeout: float,
    ) -> dict[str, Any]:
        """Sends one request of another protocol than SGLang's own.

        Args:
            path: where to, such as ``"/v1/chat/completions"``.
            payload: returns the content, for each attempt.
            session: as in :class:`GenerateRequest`.
            request_id: as in :class:`GenerateRequest`.
            adapter: as in :class:`GenerateRequest`.
            timeout: budget, in seconds.

        Raises:
            SGLangError: as :meth:`generate` does.
        """
        deadline = time.monotonic() + timeout

        async def send(url: str, sent: Sequence[str]) -> dict[str, Any]:
            with self._adapters.used([adapter]) as (used,):
                selected = {} if used is None else {"lora_path": used.served_as}
                answer = await self._http.request(
                    "POST",
                    url + path,
                    {**payload(), **selected, "rid": sent[0]},
                    timeout=max(deadline - time.monotonic(), 1e-3),
                    headers={ROUTING_KEY_HEADER: session or sent[0]},
                )
            content = answer.raise_for_status().json()
            if not isinstance(content, dict):
                raise ServerUnavailableError(f"{url}{path} answered {content!r:.200}.")
            return content

        with self._registered([request_id]) as rids:
            async with self._turn(deadline):
                content = await self._with_retries(send, session, deadline, rids)
        self._counters.count_usage(content.get("usage") or {})
        return content

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        """Ends requests: those with these ids, or all, of other engines too.

        Args:
            request_ids: as given with the requests.

        Returns:
            How many requests of this engine were under way.
        """
        if request_ids is None:
            rids = [rid for rid in self._running if rid not in self._aborted]
        else:
            rids = [
                rid
                for rid, own in self._running.items()
                if own in request_ids and rid not in self._aborted
            ]
        # First of all, so that what waits here is not sent any more.
        self._aborted.update(rids)
        if request_ids is None:
            await self._tell_servers({"abort_all": True})
        await self._tell_about(rids)
        self._tidy_up_later(self._insist(rids))
        return len(rids)

    async def _tell_about(self, rids: Sequence[str]) -> None:
        known = [self._sent_as[r] for r in rids if r in self._running]
        await self._tell_each([name for name in known if name])

    async def _insist(self, rids: Sequence[str]) -> None:
        """Says again what may have overtaken the request that it was about."""
        for _ in range(ABORT_REPEATS):
            await asyncio.sleep(ABORT_REPEAT_SECONDS)
            if not any(rid in self._running for rid in rids):
                return
            await self._tell_about(rids)

    def _tidy_up(self, rids: Sequence[str]) -> None:
        """Has the servers end requests that nobody waits for, without waiting."""
        self._tidy_up_later(self._tell_each(rids))

    def _tidy_up_later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tidying.add(task)
        task.add_done_callback(self._tidying.discard)

    async def close(self) -> None:
        """Lets the servers hear what was given up last, and does not wait for long."""
        if self._tidying and self._pid == os.getpid():
            await asyncio.wait(self._tidying, timeout=CLOSE_SECONDS)

    async def _tell_each(self, rids: Sequence[str]) -> None:
        for start in range(0, len(rids), SINGLE_REQUESTS):
            part = rids[start : start + SINGLE_REQUESTS]
            await asyncio.gather(*(self._tell_servers({"rid": rid}) for rid in part))

    async def _tell_servers(self, what: dict[str, object]) -> None:
        async def one(url: str) -> None:
            try:
                await self._http.request(
                    "POST", f"{url}/abort_request", what, timeout=ABORT_SECONDS
                )
            except SGLangError as error:
                # A server that is gone has nothing left to abort.
                torchrl_logger.debug(f"An abort did not arrive: {error}")

        await asyncio.gather(*(one(url) for url in self._targets.urls))


class NoAdapters:
    """Computes every request with the base model."""

    @contextmanager
    def used(self, names: Sequence[str | None]) -> Iterator[list[None]]:
        """Yields no adapter for each; see :class:`AdapterUse`."""
        yield [None] * len(names)

    async def missed(self, error: RequestRefusedError) -> bool:
        """Returns False; see :class:`AdapterUse`."""
        return False


Prefix = tuple[tuple[int, ...], str | None]
"""What two requests must have in common to share cached state: prompt and adapter."""


def prefix(request: GenerateRequest) -> Prefix:
    """Returns what requests that share cached state with this one have too."""
    return tuple(request.input_ids), request.adapter


def shared_prompts(
    requests: Sequence[GenerateRequest],
) -> dict[Prefix, GenerateRequest]:
    """Returns the first request of each prompt that is worth computing ahead. Pure.

    Those that ask for the log-probabilities of their prompt compute it anyway.
    """
    prefixes = [
        prefix(request)
        for request in requests
        if len(request.input_ids) >= PRIMED_TOKENS
        and not request.return_prompt_log_probs
    ]
    counts = Counter(prefixes)
    found: dict[Prefix, GenerateRequest] = {}
    if len(counts) == len(prefixes):
        return found
    for request in requests:
        if counts[prefix(request)] > 1:
            found.setdefault(prefix(request), request)
    return found


def _aborted_here() -> GenerationAbortedError:
    error = GenerationAbortedError("The request was aborted before a server had it.")
    error.requested = True
    return error


class _OwnBudgetError(ServerTimeoutError):
    """One request used up its own budget, and the batch has some left."""


def _outcome(task: asyncio.Task[Completion], index: int) -> Outcome:
    """Returns what became of one request, or raises what is the whole batch's."""
    try:
        return task.result()
    except (GenerationAbortedError, RequestRefusedError, _OwnBudgetError) as error:
        if isinstance(error, (GenerationAbortedError, RequestRefusedError)):
            error.index = index
        return error


def _placed(outcomes: Sequence[Outcome | None]) -> list[Outcome]:
    missing = [index for index, outcome in enumerate(outcomes) if outcome is None]
    assert not missing, f"no outcome for {missing}"
    return [outcome for outcome in outcomes if outcome is not None]
