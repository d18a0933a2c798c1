"""Generation: prompts in, completions out, wherever a server is there to make them.

One server takes a batch as one request, which is the fastest form that it has, and
sends each response when it is finished. If the batch fails, the items that have no
response yet are sent one by one, so that the bad one names itself and the others are
answered. Several servers get one request for each prompt, so that the router can
balance them and each can be sent again by itself.

Where the log-probabilities that a server takes while it samples are not those that were
asked for, the finished response is scored; see :mod:`.log_probs`.
"""

from __future__ import annotations

import asyncio
import itertools
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
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import (
    AbstractContextManager,
    AsyncExitStack,
    ExitStack,
    aclosing,
    asynccontextmanager,
    contextmanager,
)
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import orjson
from torchrl._utils import logger as torchrl_logger

from torchrl_sglang.backends.client.http import HttpClient, Response
from torchrl_sglang.backends.generation.log_probs import to_scoring_request, with_scores
from torchrl_sglang.backends.generation.metrics import Counters
from torchrl_sglang.backends.generation.protocol import (
    ROUTING_KEY_HEADER,
    GenerateRequest,
    parse_completion,
    to_payload,
)
from torchrl_sglang.backends.generation.retries import RetryPolicy
from torchrl_sglang.backends.generation.sampling import dropped_by_router
from torchrl_sglang.errors import (
    GenerationAbortedError,
    RequestRefusedError,
    ServerTimeoutError,
    ServerUnavailableError,
    SGLangError,
)
from torchrl_sglang.types import Adapter, Completion, ServerCapabilities

__all__ = ["DataPlane", "Moment", "Targets"]

LARGEST_BATCH = 512
"""Most requests that are sent as one: a server looks at each of them whenever one has
news."""

SINGLE_REQUESTS = 64
"""How many items of a batch are in flight by themselves at once: each has a connection.
"""

MOST_SCORINGS = 5
"""How often a response is scored that weight updates and aborts come in the way of."""

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
    ) -> AbstractContextManager[list[Adapter | None]]:
        """Keeps the adapters of requests loaded while these are under way.

        Args:
            names: what each request selects.
        """

    def held(self, adapters: Sequence[Adapter | None]) -> AbstractContextManager[None]:
        """Keeps these very adapters loaded.

        Args:
            adapters: what :meth:`used` yielded.
        """

    async def missed(self, error: RequestRefusedError) -> bool:
        """Returns whether a request is worth sending again, with other adapters.

        Args:
            error: the server's answer to it.
        """


@dataclass(frozen=True, slots=True)
class Moment:
    """The state of the weights when a request is sent."""

    version: str
    """Their version, which separates prefix-cache entries."""
    interruptions: int
    """How often weight updates had aborted what was in flight."""
    looks: int
    """How often servers had been looked at for older weights."""


class Weights(Protocol):
    """What sending requests has to do with weight updates."""

    def moment(self) -> Moment:
        """Returns the state of the weights now."""

    async def outdated(
        self, request: GenerateRequest, outcome: Outcome, moment: Moment
    ) -> bool:
        """Returns whether a weight update has made an answer worthless.

        Args:
            request: what was asked.
            outcome: what it came to.
            moment: when it was sent.
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
        self,
        session: str | None,
        avoid: Sequence[str],
        *,
        direct: bool = False,
        prefer: str | None = None,
    ) -> str:
        """Returns where to send a request.

        Args:
            session: requests of one session go to one place as long as it works.
            avoid: places where it has failed, which are chosen last.
            direct: to a server, and not to the router.
            prefer: a server that is chosen if it serves and has not failed.

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
        weights: the state of the servers' weights.
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
        weights: Weights,
        adapters: AdapterUse | None = None,
    ) -> None:
        self._weights = weights
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
        # What the servers call those that they have.
        self._in_flight: set[str] = set()
        self._attempts = itertools.count()
        self._tidying: set[asyncio.Task[None]] = set()

    async def stream(
        self,
        requests: Sequence[GenerateRequest],
        *,
        timeout: float,
        request_timeout: float | None = None,
    ) -> AsyncGenerator[tuple[int, Outcome], None]:
        """Yields (index, outcome) of each request as it comes.

        An outcome is a completion, or the error that this one request came to; those of
        the others do not depend on it. What is still in flight when the generator is
        closed is aborted.

        Args:
            requests: checked requests.
            timeout: budget for the batch, in seconds.
            request_timeout: budget for each request from when it is sent.
        """
        with self._registered([r.request_id for r in requests]) as rids:
            job = _Job(
                requests=requests,
                rids=rids,
                deadline=time.monotonic() + timeout,
                request_timeout=request_timeout,
                together=(
                    self._targets.only is not None
                    and not self._capabilities.streams_deltas
                    and request_timeout is None
                    and len(requests) > 1
                ),
            )
            tasks = self._start(job)
            ended: asyncio.Queue[asyncio.Task[Outcome]] = asyncio.Queue()
            for task in tasks:
                task.add_done_callback(ended.put_nowait)
            pending = dict(tasks)
            try:
                while pending:
                    left = max(job.deadline - time.monotonic(), 0.0) + LATE_SECONDS
                    try:
                        async with asyncio.timeout(left):
                            task = await ended.get()
                    except TimeoutError:
                        for task, index in pending.items():
                            yield index, _outcome(task, index)
                        return
                    index = pending.pop(task)
                    yield index, _outcome(task, index)
            finally:
                every: list[asyncio.Task[Any]] = [*job.helpers, *tasks]
                for task in every:
                    task.cancel()
                # Errors of several items: one is raised, and the others are seen.
                await asyncio.gather(*every, return_exceptions=True)
                job.release_all()

    def _start(self, job: _Job) -> dict[asyncio.Task[Outcome], int]:
        """Starts a task for each request, and those that several of them wait for."""
        shared = shared_prompts(job.requests)
        primers: dict[Prefix, asyncio.Task[None]] = {}
        if not job.together:
            for key, request in shared.items():
                primers[key] = job.start(self._prime([request], job.until()))
        else:
            primer = None
            if shared:
                primer = job.start(self._prime(list(shared.values()), job.deadline))
            every = range(len(job.requests))
            for start in range(0, len(every), LARGEST_BATCH):
                part = every[start : start + LARGEST_BATCH]
                job.start(self._send_together(job, part, primer))
        return {
            asyncio.ensure_future(
                self._item(job, index, primers.get(prefix(request)))
            ): index
            for index, request in enumerate(job.requests)
        }

    async def _item(
        self,
        job: _Job,
        index: int,
        primer: asyncio.Task[None] | None,
    ) -> Outcome:
        """Returns what becomes of one request.

        It is sent again at once when a weight update has made its answer worthless.
        """
        request, rid = job.requests[index], job.rids[index]
        try:
            if primer is not None:
                await asyncio.shield(primer)
            answer = await job.answers[index] if job.together else None
            if isinstance(answer, SGLangError):
                return answer
            while True:
                if answer is None:
                    answer = await self._alone(job, request, rid)
                outcome = answer.result
                if not await self._weights.outdated(request, outcome, answer.moment):
                    scored = await self._scored(job, request, rid, answer)
                    if scored is not None:
                        return scored
                answer = None
        finally:
            # The rest of the batch may take longer.
            self._forget(rid)
            job.release(rid)

    async def _scored(
        self, job: _Job, request: GenerateRequest, rid: str, answer: _Answer
    ) -> Outcome | None:
        """Returns a response with the log-probabilities that were asked for.

        Returns:
            ``None`` if none of them can be known any more: the weights that generated
            the response have been replaced.
        """
        completion = answer.result
        if not (request.score_response and isinstance(completion, Completion)):
            return completion
        asked = to_scoring_request(request, completion)
        for _ in range(MOST_SCORINGS):
            scores = await self._alone(job, asked, rid, like=answer)
            outcome = scores.result
            if await self._weights.outdated(asked, outcome, scores.moment):
                continue
            if isinstance(outcome, Completion):
                return with_scores(completion, outcome)
            if not isinstance(outcome, GenerationAbortedError) or outcome.requested:
                return outcome
        return outcome if isinstance(outcome, SGLangError) else None

    async def _send_together(
        self, job: _Job, places: Sequence[int], primer: asyncio.Task[None] | None
    ) -> None:
        """Sends requests as one, and gives each its answer when it comes."""
        rids = [job.rids[place] for place in places]
        breaks = itertools.count(1)

        async def send(url: str, sent: Sequence[str]) -> None:
            for place in places:
                if job.rids[place] in self._aborted:
                    job.give(place, _aborted_here())
            names = dict(zip(places, sent, strict=True))
            waiting = job.open(places)
            self._landed([names[place] for place in set(places).difference(waiting)])
            try:
                await self._post_together(url, job, waiting, names)
            except ServerUnavailableError as error:
                if _spoils_batch(error, next(breaks)):
                    raise _SpoiltBatchError(str(error)) from error
                raise

        rest: SGLangError | None = None
        try:
            if primer is not None:
                await asyncio.shield(primer)
            async with self._turn(job.deadline):
                await self._with_retries(send, None, job.deadline, rids)
        except (RequestRefusedError, _SpoiltBatchError) as error:
            torchrl_logger.debug(f"The requests of a batch are sent alone: {error}")
        except SGLangError as error:
            rest = error
        finally:
            for place in job.open(places):
                job.give(place, rest)

    async def _post_together(
        self,
        url: str,
        job: _Job,
        places: Sequence[int],
        names: Mapping[int, str],
    ) -> None:
        requests = [job.requests[place] for place in places]
        if not requests:
            return
        rids = [names[place] for place in places]
        with self._adapters.used([request.adapter for request in requests]) as used:
            moment = self._weights.moment()
            events = self._http.events(
                f"{url}/generate",
                self._payload(requests, rids, moment, used, stream=True),
                timeout=max(job.deadline - time.monotonic(), 1e-3),
                headers={ROUTING_KEY_HEADER: requests[0].session_id or rids[0]},
            )
            async with aclosing(events):
                async for event in events:
                    reply = _finished(event, url)
                    if reply is None:
                        continue
                    position = _position(reply, len(requests), url)
                    self._landed([rids[position]])
                    self._take(
                        job,
                        places[position],
                        reply,
                        _Answer(
                            outcome=None,
                            moment=moment,
                            adapter=used[position],
                            url=url,
                            deadline=job.deadline,
                        ),
                    )

    def _take(
        self, job: _Job, place: int, reply: Mapping[str, Any], answer: _Answer
    ) -> None:
        """Gives a request its part of the answer to a batch."""
        rid, request = job.rids[place], job.requests[place]
        try:
            outcome = self._read(
                reply, request, answer.url, answer.moment, answer.adapter
            )
        except ServerUnavailableError as error:
            torchrl_logger.debug(f"A response is asked for again: {error}")
            job.give(place, None)
            return
        if isinstance(outcome, GenerationAbortedError):
            outcome = outcome.replace(requested=rid in self._aborted)
        job.hold(rid, self._adapters, answer.adapter)
        job.give(place, replace(answer, outcome=outcome))

    @asynccontextmanager
    async def _turn(
        self, deadline: float, turns: asyncio.Semaphore | None = None
    ) -> AsyncIterator[None]:
        """Waits until one more request may be in flight: of its batch, and of all."""
        async with AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(max(deadline - time.monotonic(), 0.0)):
                    if turns is not None:
                        await stack.enter_async_context(turns)
                    await stack.enter_async_context(self._turns)
            except TimeoutError:
                raise ServerTimeoutError(
                    "A request waited for its turn until its budget was used up: too "
                    "many others are in flight; see max_in_flight."
                ) from None
            yield

    @property
    def queued(self) -> int:
        """Requests that wait to be sent."""
        self._begin_after_fork()
        return len(self._running) - len(self._in_flight)

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

    def _landed(self, names: Sequence[str]) -> None:
        """Takes note that requests are in flight no longer, by the servers' names."""
        self._in_flight.difference_update(names)
        self._counters.in_flight = len(self._in_flight)

    async def _alone(
        self,
        job: _Job,
        request: GenerateRequest,
        rid: str,
        *,
        like: _Answer | None = None,
    ) -> _Answer:
        """Sends one request by itself.

        Args:
            job: the batch that it belongs to.
            request: what to send.
            rid: our name for it.
            like: what it is to be computed like: by the same server if possible, and
                with the same adapter.
        """
        async with self._turn(job.deadline, job.turns):
            own = job.until() if like is None else like.deadline

            async def send(url: str, sent: Sequence[str]) -> _Answer:
                (answer,) = await self._post(url, [request], sent, own, like=like)
                job.hold(rid, self._adapters, answer.adapter)
                return answer

            try:
                answer = await self._with_retries(
                    send,
                    request.session_id,
                    own,
                    [rid],
                    # The router would drop these without a word.
                    direct=dropped_by_router(request.sampling_params),
                    prefer=None if like is None else like.url,
                )
            except (ServerTimeoutError, ServerUnavailableError) as error:
                # It had no time left for another attempt, and the batch has.
                late = own < job.deadline and own - time.monotonic() < LATE_SECONDS
                if late and job.request_timeout is not None:
                    raise ServerTimeoutError(
                        f"A request had no answer within {job.request_timeout:g} s: "
                        f"{error}"
                    ) from error
                raise
            if isinstance(answer.result, GenerationAbortedError):
                answer.result.requested = rid in self._aborted
            return answer

    async def _prime(
        self, requests: Sequence[GenerateRequest], deadline: float
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
                score_response=False,
            )
            for request in requests
        ]
        try:
            # Nobody's: who aborts a request does not wait for its primer.
            with self._registered([None] * len(prompts)) as rids:
                async with self._turn(deadline):
                    await self._with_retries(
                        lambda url, sent: self._post(
                            url, prompts, sent, deadline, count=False
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
        prefer: str | None = None,
    ) -> T:
        failed: list[str] = []
        attempt = 0
        looked = False
        delay: float | None
        while True:
            attempt += 1
            if self._aborted.issuperset(rids):
                raise _aborted_here()
            url = self._targets.pick(session, failed, direct=direct, prefer=prefer)
            # Each attempt has ids of its own: the one before it is being aborted.
            number = next(self._attempts) % 16**8
            sent = [f"{rid}-{number:08x}" for rid in rids]
            self._sent_as.update(
                (rid, name)
                for rid, name in zip(rids, sent, strict=True)
                if rid in self._running
            )
            self._in_flight.update(sent)
            self._counters.in_flight = len(self._in_flight)
            try:
                return await send(url, sent)
            except (asyncio.CancelledError, ServerTimeoutError):
                # Nobody waits for it any more, and the server need not either.
                self._tidy_up(self._in_flight.intersection(sent))
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
                given_up = self._in_flight.intersection(sent)
                self._landed(sent)
            # What broke the connection need not have ended the request.
            self._tidy_up(given_up)
            await asyncio.sleep(delay)

    def _payload(
        self,
        requests: Sequence[GenerateRequest],
        rids: Sequence[str],
        moment: Moment,
        used: Sequence[Adapter | None],
        *,
        stream: bool = False,
    ) -> dict[str, Any]:
        return to_payload(
            requests,
            self._capabilities,
            cache_key=moment.version,
            rids=rids,
            adapters=[None if each is None else each.served_as for each in used],
            stream=stream,
        )

    async def _post(
        self,
        url: str,
        requests: Sequence[GenerateRequest],
        rids: Sequence[str],
        deadline: float,
        *,
        count: bool = True,
        like: _Answer | None = None,
    ) -> list[_Answer]:
        with ExitStack() as stack:
            if like is None:
                # The adapters of this moment: what waited for its turn has the newest.
                used = stack.enter_context(
                    self._adapters.used([request.adapter for request in requests])
                )
            else:
                used = [like.adapter] * len(requests)
                stack.enter_context(self._adapters.held(used))
            moment = self._weights.moment()
            answer = await self._http.request(
                "POST",
                f"{url}/generate",
                self._payload(requests, rids, moment, used),
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
        return [
            _Answer(
                outcome=self._read(
                    reply, request, url, moment, adapter, count=count and like is None
                ),
                moment=moment,
                adapter=adapter,
                url=url,
                deadline=deadline,
            )
            for reply, request, adapter in zip(replies, requests, used, strict=True)
        ]

    def _read(
        self,
        reply: Any,
        request: GenerateRequest,
        url: str,
        moment: Moment,
        adapter: Adapter | None,
        *,
        count: bool = True,
    ) -> Outcome:
        """Returns what one item of an answer says."""
        try:
            completion = parse_completion(
                reply,
                request,
                vocab_size=self._capabilities.vocab_size,
                server=url,
                sent_version=moment.version,
            )
        except (GenerationAbortedError, RequestRefusedError) as error:
            return error
        if adapter is not None:
            completion = replace(
                completion, adapter=adapter.name, adapter_version=adapter.version
            )
        if count:
            self._counters.count(completion, len(request.input_ids))
        return completion

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

    def _tidy_up(self, names: Iterable[str]) -> None:
        """Has the servers end requests that nobody waits for, without waiting."""
        told = list(names)
        if told:
            self._tidy_up_later(self._tell_each(told))

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
    def used(self, names: Sequence[str | None]) -> Iterator[list[Adapter | None]]:
        """Yields no adapter for each; see :class:`AdapterUse`."""
        yield [None] * len(names)

    @contextmanager
    def held(self, adapters: Sequence[Adapter | None]) -> Iterator[None]:
        """Does nothing; see :class:`AdapterUse`."""
        yield

    async def missed(self, error: RequestRefusedError) -> bool:
        """Returns False; see :class:`AdapterUse`."""
        return False


@dataclass(frozen=True, kw_only=True, slots=True)
class _Answer:
    """What a server answered to a request."""

    outcome: Outcome | None
    """What it comes to; ``None`` while that is being read."""
    moment: Moment
    """When it was sent."""
    adapter: Adapter | None
    """What it was computed with."""
    url: str
    """Where it was sent to."""
    deadline: float
    """When its own budget ends."""

    @property
    def result(self) -> Outcome:
        """What it comes to."""
        assert self.outcome is not None
        return self.outcome


_Part = _Answer | SGLangError | None
"""What a request gets of a batch that is sent as one; ``None``: it is sent alone."""


@dataclass(kw_only=True)
class _Job:
    """One batch, while it is worked on."""

    requests: Sequence[GenerateRequest]
    rids: Sequence[str]
    """Our names of them."""
    deadline: float
    request_timeout: float | None
    together: bool
    """They are sent as one request."""
    answers: list[asyncio.Future[_Part]] = field(init=False)
    """What each gets of it."""
    turns: asyncio.Semaphore = field(init=False)
    """Limits how many of them are in flight by themselves."""
    helpers: list[asyncio.Task[None]] = field(default_factory=list)
    """Tasks beside those of the requests."""
    _holds: dict[str, ExitStack] = field(default_factory=dict)

    def __post_init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.answers = [loop.create_future() for _ in self.requests]
        limit = SINGLE_REQUESTS if self.together else max(len(self.requests), 1)
        self.turns = asyncio.Semaphore(limit)

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs a task until the batch ends."""
        task = asyncio.ensure_future(work)
        self.helpers.append(task)
        return task

    def until(self) -> float:
        """Returns when the budget of a request ends that is sent now."""
        if self.request_timeout is None:
            return self.deadline
        return min(self.deadline, time.monotonic() + self.request_timeout)

    def open(self, places: Sequence[int]) -> list[int]:
        """Returns those requests that have not got their part of the answer yet."""
        return [place for place in places if not self.answers[place].done()]

    def give(self, place: int, part: _Part) -> None:
        """Gives a request its part of the answer, if it waits for one."""
        if not self.answers[place].done():
            self.answers[place].set_result(part)

    def hold(self, rid: str, adapters: AdapterUse, adapter: Adapter | None) -> None:
        """Keeps the adapter of a response loaded until :meth:`release`."""
        if adapter is not None:
            stack = self._holds.setdefault(rid, ExitStack())
            stack.enter_context(adapters.held([adapter]))

    def release(self, rid: str) -> None:
        """Lets the adapters of a response go."""
        stack = self._holds.pop(rid, None)
        if stack is not None:
            stack.close()

    def release_all(self) -> None:
        """Lets the adapters of all responses go."""
        for rid in list(self._holds):
            self.release(rid)


class _SpoiltBatchError(ServerUnavailableError):
    """A batch failed as a whole, perhaps for one of its requests."""


def _spoils_batch(error: ServerUnavailableError, breaks: int) -> bool:
    """Returns whether the requests of a batch that failed are to be sent alone. Pure.

    An answer that is an error or makes no sense may be the fault of one of them. A
    connection that breaks is more likely the server's, the first time.
    """
    if error.status is None:
        return False
    return error.status >= 500 or not error.transient or breaks > 1


def _finished(event: Any, url: str) -> dict[str, Any] | None:
    """Returns a finished response among the events of a batch; ``None`` for others.

    Raises:
        RequestRefusedError: if the event says so.
        ServerUnavailableError: if it is none of SGLang's, or tells of a failure.
    """
    if isinstance(event, dict) and isinstance(event.get("error"), dict):
        status = event["error"].get("code")
        Response(
            url=f"{url}/generate",
            status=status if isinstance(status, int) else 500,
            body=orjson.dumps(event),
        ).raise_for_status()
    try:
        finished = event["meta_info"]["finish_reason"]
    except (KeyError, TypeError) as error:
        raise _malformed(event, url) from error
    return None if finished is None else event


def _position(reply: Mapping[str, Any], size: int, url: str) -> int:
    position = reply.get("index")
    if type(position) is not int or not 0 <= position < size:
        # A batch of one is none to the server.
        if position is None and size == 1:
            return 0
        raise _malformed(reply, url)
    return position


def _malformed(event: Any, url: str) -> ServerUnavailableError:
    return ServerUnavailableError(
        f"{url} sent a malformed reply: {event!r:.300}", status=200
    )


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
    return GenerationAbortedError(
        "The request was aborted before a server had it.", requested=True
    )


def _outcome(task: asyncio.Task[Outcome], index: int) -> Outcome:
    """Returns what became of one request."""
    if not task.done():
        outcome: Outcome = ServerTimeoutError(
            "The budget of the batch was used up before this request was answered."
        )
    else:
        try:
            outcome = task.result()
        except SGLangError as error:
            outcome = error
    if isinstance(outcome, (GenerationAbortedError, RequestRefusedError)):
        return outcome.replace(index=index)
    return outcome
