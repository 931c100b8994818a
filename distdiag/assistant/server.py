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
    """Return the server for one run; the run is found and opened anew for each call, so it may begin later or end meanwhile."""
    made = Server("distdiag", instructions=INSTRUCTIONS, log_level="ERROR")

    def diagnose() -> str:
        """The verdict on the job: its state, and each finding with its ranks, message and advice. Call this first."""
        return _json(answers.diagnose(run))

    def findings(id: str = "") -> str:
        """Findings in full: file and line of each rank, the collective, cost, evidence. `id` (from diagnose) chooses one."""
        return _json(answers.findings(run, id))

    def stacks() -> str:
        """The newest saved Python stacks of all ranks as one tree, outermost frame first; ranks with equal frames share a branch."""
        return _json(answers.stack_tree(run))

    def steps(last: int = 50) -> str:
        """Median times of each rank over the last steps (at most 200), in ms. The slow rank has the largest self_ms."""
        return _json(answers.steps(run, last))

    def sql(query: str, limit: int = 100) -> str:
        """Rows of one SELECT on the run's SQLite database (at most 1000 rows and 2 s of CPU). Units are in the column names."""
        return _json(answers.sql(run, query, limit))

    for tool in (diagnose, findings, stacks, steps, sql):
        _add(made, tool, f"{tool.__doc__} Tables:\n{query.tables()}" if tool is sql else str(tool.__doc__))
    return made


def _add(made: Any, tool: Callable[..., str], description: str) -> None:
    @wraps(tool)
    def answer(*args: Any, **kwargs: Any) -> str:
        try:
            return tool(*args, **kwargs)
        except DistdiagError as e:
            raise ToolError(f"{e.message.rstrip(chr(46))}. Hint: {e.hint}") from None

    hints = ToolAnnotations.model_validate({"readOnlyHint": True, "openWorldHint": False})
    plain = {"structured_output": False} if "structured_output" in inspect.signature(made.add_tool).parameters else {}
    made.add_tool(answer, name=tool.__name__, description=description, annotations=hints, **plain)


def _json(answer: dict[str, Any]) -> str:
    return json_ascii_controls(msgspec.json.encode(answer))
