"""`distdiag skill`: how an assistant reads our output."""

from __future__ import annotations

import click

from distdiag.streams import say


@click.command()
def command() -> None:
    """Print how an assistant reads distdiag's output, as Markdown with the header of a skill.

    \b
    mkdir -p .claude/skills/distdiag
    distdiag skill > .claude/skills/distdiag/SKILL.md
    """
    from distdiag.assistant.skill import page

    say(page())
