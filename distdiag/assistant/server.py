"""`distdiag mcp`: the answers as tools of the Model Context Protocol, over stdio. stdout belongs to the protocol."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

import msgspec
from mcp.types import ToolAnnotations

from distdiag.assistant import answers, query
from distdiag.errors import DistdiagError
from distdiag.streams import json_ascii_controls

try:
    from mcp.server.mcpserver import MCPServer as Server
    from mcp.server.mcpserver.exceptions import ToolError
except ModuleNotFoundError:  # before mcp 2
    from mcp.server.fastmcp import FastMCP as Server  # type: ignore[no-redef]
    from mcp.server.fastmcp.exceptions import ToolError  # type: ignore[no-redef]

INSTRUCTIONS = f"""\
distdiag judges distributed PyTorch jobs: which rank hangs, is slow or has crashed, at which line. Begin with `diagnose`; a finding of
certainty "proved" holds, a "suspected" one is a hint. Then `findings` for sites and evidence, `stacks`, `steps` for speed, `sql` for
the rest. The tools only read. {answers.UNTRUSTED}"""


def server(run: str | None) -> Any:
    """Return the server for one run."""
    made = Server("distdiag", instructions=INSTRUCTIONS, log_level="ERROR")
    tools = answers.Answers(run)
    for tool in (tools.diagnose, tools.findings, tools.stacks, tools.steps):
        _add(made, tool, str(tool.__doc__))
    _add(made, tools.sql, f"{tools.sql.__doc__} Tables:\n{query.tables()}")
    return made


def _add(made: Any, tool: Callable[..., dict[str, Any]], description: str) -> None:
    @wraps(tool)
    def answer(*args: Any, **kwargs: Any) -> str:
        try:
            return json_ascii_controls(msgspec.json.encode(tool(*args, **kwargs)))
        except DistdiagError as e:
            raise ToolError(f"{e.message.rstrip(chr(46))}. Hint: {e.hint}") from None

    hints = ToolAnnotations.model_validate({"readOnlyHint": True, "openWorldHint": False})
    plain = {"structured_output": False} if "structured_output" in inspect.signature(made.add_tool).parameters else {}
    made.add_tool(answer, name=tool.__name__, description=description, annotations=hints, **plain)
