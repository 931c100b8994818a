"""Secrets in a command line: `--hf-token VALUE`, `WANDB_API_KEY=VALUE`, `https://user:password@host`.

The command of a run is stored in run.db and printed in reports, which people mail.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from contextlib import suppress

KEEP = "DISTDIAG_KEEP_SECRETS"  # 1: store and show command lines unmasked
MASK = "***"

_SECRET = re.compile(r"token|key|passw|secret|credential", re.IGNORECASE)
_NUMBERED = re.compile(r"(?<!auth.)(?<!access.)(?<!api.)(?<!hf.)tokens\b|tokeni[sz][a-z]*|(num|max|min)[-_.]?\w*token|(?<![a-z])key[-_.]?(value|bias|dim|size|padding)"
                       "|monkey|keyboard", re.IGNORECASE)  # fmt: skip
_OPTION = re.compile(r"-{0,2}\+{0,2}[A-Za-z_][\w.\-/@]*")
_QUOTED = 1 << 16  # characters; shlex takes four times as long for a word of twice the length
_IN_URL = re.compile(
    r"""([a-z+.-]{0,20}://[^/@\s:"']*:|https?://)[^/\s"']+(?=@)|([?&][^=&\s"']*(?:token|key|passw|secret|credential)[^=&\s"']*=)[^&\s"']+""",
    re.IGNORECASE,
)


def kept() -> bool:
    """True if the user asked to keep secrets (`DISTDIAG_KEEP_SECRETS=1`)."""
    return os.environ.get(KEEP, "") not in ("", "0")


def mask(arguments: Sequence[str]) -> list[str]:
    """Return a command line with the values of secrets replaced by `***`.

    A secret is the value of an option or variable with "token", "key", "passw", "secret" or "credential" in its name:
    `--name=VALUE`, `--name VALUE` or `NAME=VALUE`. Options for counts and models (`--max-tokens`, `--tokenizer`) are exempt.
    """
    out: list[str] = []
    follows = False
    for argument in arguments:
        name, equals, value = argument.partition("=")
        secret = bool(_OPTION.fullmatch(name)) and _is_secret(name)
        if follows and not argument.startswith("--"):
            out.append(MASK)
            follows = False
            continue
        follows = secret and not equals and name.startswith("-")
        # --opt=api_key=VALUE
        inner = f"{name}={mask([value])[0]}" if "=" in value and name.startswith("-") else argument
        out.append(f"{name}={MASK}" if secret and equals and value else _without_secrets(inner))
    return out


def _is_secret(name: str) -> bool:
    """True if a name has a word for a secret besides those of counts and models: `tokenizer_token`."""
    return _SECRET.search(_NUMBERED.sub("", name)) is not None


def _without_secrets(text: str) -> str:
    """Return a text with the secrets in its URLs replaced: of a user, or of a query."""
    return _IN_URL.sub(lambda found: (found[1] or found[2]) + MASK, text)


def mask_text(command: str) -> str:
    """Return a stored command line with secrets replaced; unchanged if there are none."""
    arguments, quote = command.split(), str
    if len(command) <= _QUOTED:
        with suppress(ValueError):
            arguments, quote = shlex.split(command), shlex.quote
    masked = mask(arguments)
    return command if masked == arguments else " ".join(a if MASK in a else quote(a) for a in masked)


_LITERAL = re.compile(
    r"""(?P<name>[A-Za-z_]\w*)(?P<between>["']?\]?\s*(?::\s*\w+\s*)?[=:,]\s*)(?P<quote>["'])(?P<value>[^"'\n]+)(?P=quote)"""
)


def mask_source(text: str) -> str:
    """Return the text of a source file with the literals replaced that are assigned to a name of a secret; lines keep their numbers."""

    def masked(found: re.Match[str]) -> str:
        name = found["name"]
        if not _is_secret(name):
            return found[0]
        return f"{name}{found['between']}{found['quote']}{MASK}{found['quote']}"

    return _without_secrets(_LITERAL.sub(masked, text))
