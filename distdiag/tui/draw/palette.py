"""Fixed colours of areas: the phases of a step, small bars, heat cells. The same in every theme.

A style of a line names them with a prefix: `area-data` draws in the colour, `on-data` draws on it, `in-data` writes a
word on it. The phases are Okabe and Ito's colours and the heat scale is viridis: both are distinct with every kind
of colour vision.
"""

from __future__ import annotations

from distdiag.terms.steps import PROFILE_PARTS, STEP_PARTS

_DRAWN = {p.name: p for p in (*STEP_PARTS, *PROFILE_PARTS) if p.letter}
PHASES = (*(p.name for p in STEP_PARTS if p.part and p.letter), "wait")  # of a step, as bars show them
PARTS = tuple(p.name for p in PROFILE_PARTS)  # of a step in a profile
WORDS, SHORT, LETTERS, ABOUT = (
    {name: getattr(p, field) or name for name, p in _DRAWN.items()} for field in ("word", "short", "letter", "about")
)

HEAT_LEVELS = 16
_VIRIDIS = (
    "#440154", "#481a6c", "#472f7d", "#414487", "#39568c", "#31688e", "#2a788e", "#23888e",
    "#1f988b", "#22a884", "#35b779", "#54c568", "#7ad151", "#a5db36", "#d2e21b", "#fde725",
)  # fmt: skip

# name: colour on dark themes, colour on light themes
COLOURS: dict[str, tuple[str, str]] = {
    "track": ("#2e3338", "#c4c9cf"),
    "fill": ("#7f9fbf", "#4a6f95"),
    "hot": ("#d55e00", "#d55e00"),
    "band": ("#4a6076", "#a9bccf"),
}
COLOURS |= {name: p.colour for name, p in _DRAWN.items()} | {f"heat{i}": (c, c) for i, c in enumerate(_VIRIDIS)}
_INK, _PAPER = "#101214", "#ffffff"
_WRITTEN_ON = {
    "backward": (_PAPER, _PAPER),
    "hidden": (_PAPER, _PAPER),
    "idle": ("#a8b0b8", "#4d545c"),
    "wait": ("#a8b0b8", "#4d545c"),
    "optimizer": (_INK, _INK),
}
_WRITTEN_ON |= {f"heat{i}": (_PAPER, _PAPER) for i in range(9)}
_KINDS = ("area", "on", "in")


def colours(style: str, dark: bool = True) -> tuple[str | None, str | None] | None:
    """Return text and background colour of one style name with a prefix; None if it is not a style of an area."""
    kind, _, name = style.partition("-")
    if kind not in _KINDS or name not in COLOURS:
        return None
    colour = COLOURS[name][0 if dark else 1]
    if kind == "area":
        return colour, None
    if kind == "on":
        return None, colour
    return _WRITTEN_ON.get(name, (_INK, _INK))[0 if dark else 1], colour


def code_256(colour: str) -> int:
    """Return the nearest of the 216 colours of a terminal's fixed cube."""
    levels = (0, 95, 135, 175, 215, 255)
    near = [min(range(6), key=lambda i, v=int(colour[k : k + 2], 16): abs(levels[i] - v)) for k in (1, 3, 5)]
    return 16 + 36 * near[0] + 6 * near[1] + near[2]
