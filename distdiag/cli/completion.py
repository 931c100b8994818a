"""`distdiag completion`: the completion script of a shell, by click."""

from __future__ import annotations

import click

from distdiag.streams import say

SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
def command(shell: str) -> None:
    """Print the script that completes commands and options in a shell.

    Create the directory first if it is missing.

    \b
    distdiag completion bash > ~/.local/share/bash-completion/completions/distdiag
    distdiag completion zsh > ~/.zfunc/_distdiag       # ~/.zfunc must be in fpath
    distdiag completion fish > ~/.config/fish/completions/distdiag.fish
    """
    from click.shell_completion import get_completion_class

    from distdiag.cli import app

    kind = get_completion_class(shell)
    assert kind is not None
    say(kind(app, {}, "distdiag", "_DISTDIAG_COMPLETE").source())
