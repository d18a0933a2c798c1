"""An MCP server: ``mcp_server.py`` by stdio, ``mcp_server.py PORT`` over HTTP."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import BaseModel

server = MCPServer("weather", log_level="ERROR")


@server.tool()
def get_weather(city: str) -> str:
    """Returns the weather of a city."""
    if city == "Atlantis":
        raise ToolError("there is no such city")
    return f"It is 21 degrees in {city}."


@server.tool()
def die() -> str:
    """Ends the server in the middle of a call."""
    os._exit(1)


@server.tool()
def hang() -> str:
    """Never answers."""
    time.sleep(3600)
    return ""


class Reading(BaseModel):
    degrees: int


class FaultyReading(Reading):
    degrees: str  # type: ignore[assignment]


@server.tool()
def measure() -> Reading:
    """Returns a result that does not fit its schema."""
    return FaultyReading(degrees="many")


@server.tool()
def get_process() -> str:
    """Returns the process of this server."""
    return str(os.getpid())


@server.tool()
def forget() -> str:
    """Removes a tool of this server."""
    server.remove_tool("get_weather")
    return "forgotten"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        Path(os.environ["PID_FILE"]).write_text(str(os.getpid()))
        server.run("stdio")
