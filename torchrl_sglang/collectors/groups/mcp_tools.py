"""Tools of MCP servers as coroutine functions with schemas.

A server is connected once for each collector, by the official client, in a task of the
background event loop. A connection that was lost is made anew by the next call.
"""

from __future__ import annotations

import asyncio
import sys
import weakref
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from concurrent.futures import wait
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torchrl_sglang.collectors.groups.tools import by_their_names
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.support.checks import check_seconds
from torchrl_sglang.support.event_loop import (
    on_background_loop,
    run_async,
    run_sync,
    submit,
)
from torchrl_sglang.support.user_code import describe, first_error

CLOSE_SECONDS = 60.0
"""Timeout for a connection to end."""

CONNECTION_CLOSED = -32000
"""Code of an error of the client; other codes are the server's, which goes on."""


class ToolError(Exception):
    """A tool of a server failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class McpServer:
    """An MCP server whose tools the policy can call.

    Raises:
        ConfigurationError: unless there is either a URL or a command.

    Examples:
        >>> McpServer(command=["npx", "server-filesystem", "/data"]).command[0]
        'npx'
    """

    url: str | None = None
    """URL of a running server; alone, it can stand for the server."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Headers of requests to the URL, such as ``Authorization``."""
    command: Sequence[str] = ()
    """Program and arguments of a server that speaks by its input and output. It ends
    with the collector."""
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Variables of the command, beside ``PATH``, ``HOME`` and a few like them."""
    connect_timeout: float = 60.0
    """Seconds for the start of the server and its list of tools."""

    def __post_init__(self) -> None:
        check_seconds("connect_timeout", self.connect_timeout)
        if (self.url is None) == (not self.command) or isinstance(self.command, str):
            raise ConfigurationError(
                f"An MCP server has a url, or a command as a list of texts, got "
                f"url={self.url!r} and command={self.command!r}."
            )

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[Any]:
        """Yields the official client."""
        try:
            from httpx2 import AsyncClient, Timeout
            from mcp import Client, StdioServerParameters
            from mcp.client.stdio import stdio_client
            from mcp.client.streamable_http import streamable_http_client
        except ImportError as error:
            raise ConfigurationError(
                "Tools of MCP servers need its package from version 2 on: pip install "
                "'mcp>=2,<3'."
            ) from error
        async with AsyncExitStack() as stack:
            if self.url is not None:
                # A call has its timeout from the collector.
                http = AsyncClient(headers=dict(self.headers), timeout=Timeout(None))
                await stack.enter_async_context(http)
                transport = streamable_http_client(self.url, http_client=http)
            else:
                program, *arguments = self.command
                parameters = StdioServerParameters(
                    command=program, args=arguments, env=dict(self.environment)
                )
                # A notebook's sys.stderr is no file of the system.
                transport = stdio_client(parameters, errlog=sys.__stderr__)
            yield await stack.enter_async_context(Client(transport))


def is_server(tool: Any) -> bool:
    """Returns whether a tool is an MCP server: a URL, or a :class:`McpServer`.

    Examples:
        >>> is_server("http://127.0.0.1:8000/mcp"), is_server(len)
        (True, False)
    """
    is_url = isinstance(tool, str) and tool.startswith(("http://", "https://"))
    return is_url or isinstance(tool, McpServer)


def without_servers(tools: Any) -> Any:
    """Returns the tools that are no servers, which can be checked without them."""
    if isinstance(tools, Mapping):
        return {name: tool for name, tool in tools.items() if not is_server(tool)}
    pairs = _pairs(tools)
    return [tool for _, tool in pairs if not is_server(tool)] if pairs else tools


class McpServers:
    """Connections to MCP servers.

    Args:
        tools: a list or a mapping as of :class:`.FunctionGroups`.

    Attributes:
        close (callable): closes all connections and ends the servers that were started.
        tools (dict): name -> the function or pair of function and schema, with the
            tools of servers in their places.

    Raises:
        ConfigurationError: without the package `mcp`, if a server cannot be connected,
            or if it has a tool with the name of another one.
    """

    def __init__(self, tools: Any) -> None:
        self.tools = tools
        self._servers: list[_Connection] = []
        # Also if the collector is dropped, and at the interpreter's exit.
        self.close = weakref.finalize(self, _close, self._servers)
        pairs = _pairs(tools)
        if not any(is_server(tool) for _, tool in pairs):
            return
        self.tools = {}
        try:
            for prefix, tool in pairs:
                self._add(prefix, tool)
        except BaseException:
            self.close()
            raise

    def _add(self, prefix: str | None, tool: Any) -> None:
        if is_server(tool):
            server = _Connection(McpServer(url=tool) if isinstance(tool, str) else tool)
            self._servers.append(server)
            listed = run_sync(server.list_tools())
            named = {f"{prefix}_{name}" if prefix else name: t for name, t in listed}
        else:
            named = by_their_names([tool]) if prefix is None else {prefix: tool}
        for name, function in named.items():
            if name in self.tools:
                raise ConfigurationError(
                    f"tools has two of the name {name!r}, the second of {tool!r}; give "
                    f"a mapping of names: those of a server become NAME_tool."
                )
            self.tools[name] = function


class _Connection:
    """A connection to a server, in a task on the background event loop."""

    def __init__(self, server: McpServer) -> None:
        self._server = server
        self._task: asyncio.Task[None] | None = None
        self._client: asyncio.Future[Any] | None = None
        self._stop = asyncio.Event()

    async def list_tools(self) -> list[tuple[str, Any]]:
        """Returns each tool's name, and its function with the schema."""
        try:
            async with asyncio.timeout(self._server.connect_timeout):
                client = await self._connected()
                page = await client.list_tools()
                tools = list(page.tools)
                while page.next_cursor is not None:
                    page = await client.list_tools(cursor=page.next_cursor)
                    tools += page.tools
        except Exception as error:
            await self.close()
            reason = "it does not answer" if isinstance(error, TimeoutError) else ""
            raise ConfigurationError(
                f"The tools of {self._server!r} cannot be read: "
                f"{reason or describe(first_error(error))}; start it before the run."
            ) from error
        return [
            (tool.name, (partial(self.call, tool.name), _schema(tool)))
            for tool in tools
        ]

    async def call(self, name: str, /, **arguments: Any) -> str:
        """Calls a tool, on any event loop.

        Raises:
            ToolError: if it fails, or the connection does.
        """
        return await run_async(self._call(name, arguments))

    async def _call(self, name: str, arguments: dict[str, Any]) -> str:
        task = None
        try:
            client = await self._connected()
            task = self._task
            result = await client.call_tool(name, arguments)
        except Exception as error:
            if _is_lost(error) and self._task is task:
                # The next call connects again.
                await self.close()
            raise ToolError(describe(first_error(error))) from error
        text = _text(result)
        if result.is_error:
            raise ToolError(text)
        return text

    async def close(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            self._stop.set()
            if self._client is not None and not self._client.done():
                task.cancel()
            await asyncio.wait([task], timeout=CLOSE_SECONDS)
            task.cancel()

    def _has_ended(self) -> bool:
        return self._task is None or self._task.done()

    async def _connected(self) -> Any:
        if self._has_ended():
            self._stop = asyncio.Event()
            self._client = asyncio.get_running_loop().create_future()
            self._task = asyncio.create_task(self._serve(self._client, self._stop))
        assert self._client is not None
        # A caller that is cancelled leaves the connection to the others.
        return await asyncio.shield(self._client)

    async def _serve(self, ready: asyncio.Future[Any], stop: asyncio.Event) -> None:
        """Holds the connection: its task enters and leaves it."""
        try:
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(self._server.connect_timeout):
                    client = await stack.enter_async_context(self._server.connected())
                ready.set_result(client)
                await stop.wait()
        except BaseException as error:
            is_error = isinstance(error, Exception)
            if not ready.done():
                closed = ConnectionError("The connection was closed.")
                ready.set_exception(error if is_error else closed)
                # Nobody may wait any more.
                ready.exception()
            if not is_error:
                raise


def _close(servers: list[_Connection]) -> None:
    closing = [submit(server.close()) for server in servers]
    # The garbage collector calls this in any thread.
    if not on_background_loop():
        wait(closing, CLOSE_SECONDS)


def _pairs(tools: Any) -> list[tuple[str | None, Any]]:
    if isinstance(tools, Mapping):
        return list(tools.items())
    if isinstance(tools, Iterable) and not isinstance(tools, str):
        return [(None, tool) for tool in tools]
    return []


def _schema(tool: Any) -> dict[str, Any]:
    return {"description": tool.description or "", "parameters": tool.input_schema}


def _text(result: Any) -> str:
    """Returns the text of a result; the policy reads no other content."""
    parts = [
        part.text if part.type == "text" else f"[{part.type} left out]"
        for part in result.content
    ]
    return "\n".join(parts)


def _is_lost(error: BaseException) -> bool:
    """Returns whether an error is the connection's, not one call's."""
    cause = first_error(error)
    code = getattr(cause, "code", None)
    if code is not None:
        return bool(code == CONNECTION_CLOSED)
    # The client raises these about the content of a result.
    return not isinstance(cause, (RuntimeError, TypeError, ValueError))
