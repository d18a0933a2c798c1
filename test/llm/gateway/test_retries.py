"""Repeated requests, and requests that are the same."""

from __future__ import annotations

import asyncio
import gc

import pytest

from torchrl_sglang.gateway.retries import (
    FIRST,
    KEPT,
    LOST,
    Answer,
    Answers,
    attempt_of,
    digest_of,
)


def retry(count: int) -> dict[str, str]:
    return {"x-stainless-retry-count": str(count)}


RETRY = retry(1)
NAMED = {"Idempotency-Key": "a"}


class Work:
    """Answers that end when they are told to."""

    def __init__(self):
        self.answers = Answers()
        self.begun: list[asyncio.Future[int]] = []
        self.kept: list[int] = []
        self.recorded: list[int] = []
        self.hangs = asyncio.Event()

    async def compute(self):
        self.begun.append(asyncio.get_running_loop().create_future())
        number = await self.begun[-1]
        self.kept.append(number)
        return number

    async def keep(self, number):
        self.kept.append(number)

    async def receive(self, headers, content, fails):
        async with self.answers.to(
            headers,
            digest_of(headers, content),
            self.compute,
            keep=self.keep,
            withdraw=self.kept.remove,
            recorded=lambda: [
                Answer.recorded(number, request_id="", info=None)
                for number in self.recorded
            ],
        ) as answer:
            found = await answer
            if fails:
                raise ConnectionResetError
        return found

    async def ask(self, headers=(), content=b"content", *, fails=False):
        """Returns a request that has begun to wait."""
        task = asyncio.ensure_future(self.receive(dict(headers), content, fails))
        for _ in range(5):
            await asyncio.sleep(0)
        return task

    async def lose(self, number, **request):
        """A request whose answer cannot be delivered."""
        task = await self.ask(fails=True, **request)
        self.begun[-1].set_result(number)
        with pytest.raises(ConnectionResetError):
            await task


def shows(test):
    """Runs a test with work of its own."""

    def run():
        asyncio.run(test(Work()))

    return run


@shows
async def test_a_retry_joins_what_is_computed(work):
    """The first one may wait at a connection that nobody knows to be broken."""
    first, again = await work.ask(), await work.ask(RETRY)
    assert len(work.begun) == 1
    other = await work.ask(RETRY)
    assert len(work.begun) == 2
    work.begun[0].set_result(7)
    work.begun[1].set_result(8)
    assert [await first, await again, await other] == [7, 7, 8]


async def deliver(work, number):
    first = await work.ask()
    work.begun[-1].set_result(number)
    assert await first == number


@shows
async def test_responses_that_the_latest_attempt_missed_are_withdrawn(work):
    """The first attempt may even end later: its client has given it up."""
    first, again = await work.ask(), await work.ask(RETRY, fails=True)
    work.begun[0].set_result(7)
    with pytest.raises(ConnectionResetError):
        await again
    assert (await first, work.kept) == (7, [])
    assert await (await work.ask(retry(2))) == 7
    with pytest.raises(ConnectionResetError):
        await (await work.ask(retry(3), fails=True))
    assert (len(work.begun), work.kept) == (1, [])


@shows
async def test_a_retry_gets_nothing_where_several_requests_were_answered(work):
    await deliver(work, 7)
    await deliver(work, 8)
    await work.ask(RETRY)
    assert (len(work.begun), work.kept) == (3, [7, 8])


@pytest.mark.parametrize(("headers", "begun"), [(RETRY, 0), (NAMED, 0), ({}, 1)])
def test_an_answer_of_a_gateway_that_ended_is_given_again(headers, begun):
    async def test(work):
        work.recorded.append(7)
        task = await work.ask(headers)
        assert len(work.begun) == begun
        assert begun or await task == 7

    shows(test)()


@shows
async def test_a_retry_whose_first_attempt_never_came_is_repeated_itself(work):
    first = await work.ask(RETRY)
    work.begun[0].set_result(7)
    assert await first == await (await work.ask(retry(2))) == 7
    await work.ask(RETRY)
    assert len(work.begun) == 2


@shows
async def test_a_request_anew_after_all_attempts_is_what_is_repeated(work):
    for count in (0, 1, 2):
        (await work.ask(retry(count))).cancel()
    await deliver(work, 7)
    work.kept.remove(7)
    await work.ask(RETRY)
    assert len(work.begun) == 5


@shows
async def test_a_retry_after_one_of_two_attempts_hung_up_gets_the_answer(work):
    first, again = await work.ask(), await work.ask(RETRY)
    first.cancel()
    await asyncio.wait([first])
    work.begun[0].set_result(7)
    assert await again == await (await work.ask(retry(2))) == 7


@pytest.mark.parametrize(
    ("headers", "greater"),
    [
        ({}, False),
        ({"x-stainless-retry-count": "0"}, False),
        ({"x-stainless-retry-count": "false"}, False),
        ({"x-envoy-attempt-count": "1"}, False),
        ({"x-envoy-attempt-count": "2"}, True),
        ({"x-stainless-retry-count": "10", "x-envoy-attempt-count": "1"}, True),
    ],
)
def test_attempts_are_counted_by_clients_and_proxies(headers, greater):
    assert (attempt_of(headers) > FIRST) is greater
    assert attempt_of({**headers, **retry(11)}) > attempt_of(headers)


@shows
async def test_a_retry_does_not_join_where_it_may_be_of_another(work):
    """Two votes wait, and the first attempt of a third one never arrived."""
    for count in (1, 2):
        await work.ask()
        assert len(work.begun) == count
    await work.ask(RETRY)
    assert len(work.begun) == 3


@shows
async def test_one_of_two_deliveries_is_enough(work):
    first, again = await work.ask(fails=True), await work.ask(RETRY)
    work.begun[0].set_result(7)
    with pytest.raises(ConnectionResetError):
        await first
    assert await again == 7
    assert work.kept == [7]
    await work.ask(RETRY)
    assert len(work.begun) == 2


@shows
async def test_few_answers_that_nobody_received_are_kept(work):
    for number in range(LOST + 3):
        await work.lose(number)
    found = [await (await work.ask(RETRY)) for _ in range(LOST)]
    assert found == list(range(3, LOST + 3))


@shows
async def test_few_answers_are_kept_of_many_equal_requests(work):
    for number in range(4 * LOST):
        await deliver(work, number)
        await work.lose(number)
    gc.collect()
    assert sum(type(each) is Answer for each in gc.get_objects()) <= LOST + 1


@shows
async def test_a_name_is_answered_alike_whenever_it_comes(work):
    await work.lose(7, headers=NAMED)
    for _ in range(3):
        assert await (await work.ask(NAMED)) == 7
        assert work.kept == [7]


@shows
async def test_the_same_request_is_computed_again(work):
    first, other = await work.ask(), await work.ask()
    assert len(work.begun) == 2
    first.cancel()
    await asyncio.wait([first])
    # One that waits for another answer does not keep this one alive.
    assert [future.cancelled() for future in work.begun] == [True, False]
    work.begun[1].set_result(1)
    assert await other == 1


@shows
async def test_the_last_one_that_waits_ends_the_computation(work):
    for each in [await work.ask(), await work.ask(RETRY)]:
        each.cancel()
        await asyncio.wait([each])
    assert work.begun[0].cancelled()


@shows
async def test_a_retry_while_the_answer_is_being_cancelled(work):
    first = await work.ask()
    first.cancel()
    again = await work.ask(RETRY)
    work.begun[1].set_result(5)
    assert await again == 5


@shows
async def test_a_retry_of_one_of_several_does_not_get_the_answer_of_another(work):
    first, other = await work.ask(), await work.ask()
    work.begun[0].set_exception(ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        await first
    again = await work.ask(RETRY)
    assert len(work.begun) == 3
    work.begun[1].set_result(1)
    work.begun[2].set_result(2)
    assert [await other, await again] == [1, 2]


@shows
async def test_the_oldest_answers_are_forgotten(work):
    for index in range(KEPT + 1):
        await work.lose(index, content=str(index).encode())
    retry = await work.ask(RETRY, content=b"1")
    assert await retry == 1
    assert len(work.begun) == KEPT + 1
    (await work.ask(RETRY, content=b"0")).cancel()
    assert len(work.begun) == KEPT + 2


@pytest.mark.parametrize(("seconds", "begun"), [(60.0, 2), (0.0, 3)])
def test_an_old_answer_is_forgotten(seconds, begun):
    async def test(work):
        work.answers = Answers(kept_seconds=seconds)
        await work.lose(7)
        await work.ask(content=b"other")
        await work.ask(RETRY)
        assert len(work.begun) == begun

    shows(test)()
