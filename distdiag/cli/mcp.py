"""`distdiag mcp`: a run as read-only tools for an assistant."""

from __future__ import annotations

import click

from distdiag.errors import need


@click.command()
@click.argument("run", required=False)
def command(run: str | None) -> None:
    """Serve a run to an assistant by the Model Context Protocol, over stdin and stdout, until stdin ends.

    The tools diagnose, findings, stacks, steps and sql only read: nothing is written, started or asked from the job. RUN: default
    reports/latest, found anew for each call, so the run may begin later. What the tools return comes from the job, and is marked as
    untrusted. `distdiag skill` prints how to read it.
    """
    need(("mcp",), "the server for assistants")
    from distdiag.assistant.server import server

    server(run).run("stdio")
