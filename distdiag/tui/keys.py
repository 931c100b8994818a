"""Every key, once: the app binds them, the key bar shows the ones that matter now, the help lists them all."""

from __future__ import annotations

from dataclasses import dataclass

from distdiag.store.liveness import Monitor
from distdiag.tui.data.snapshot import Snapshot
from distdiag.tui.data.state import job_state
from distdiag.tui.draw.lines import Line, Part, line
from distdiag.tui.draw.text import cells
from distdiag.tui.ui import Ui


@dataclass(frozen=True)
class Key:
    keys: str  # textual's names, comma-separated; the first is shown
    action: str  # what it does, in the app's words
    label: str  # in the key bar; empty = never shown there
    help: str  # one line of the help
    shown: str  # as a person writes it
    pages: tuple[str, ...] = ()  # where it means something; empty = everywhere
    needs: str = ""  # when the key bar shows it: "live", "steps", "running", "paused"; empty = always


RANKED = ("ranks", "heat", "memory", "data", "timeline")  # names of the screens that are a `RankedPage`
KEYS: tuple[Key, ...] = (
    Key("1", "show('ranks')", "Ranks", "who is slow, and what does it cost", "1"),
    Key("2", "show('comm')", "Comm", "is the network the cause, or a rank", "2"),
    Key("3", "show('heat')", "Heat", "one rank, one step, or everywhere", "3"),
    Key("4", "show('memory')", "Mem", "who will run out; are the GPUs busy", "4"),
    Key("5", "show('findings')", "Findings", "what happened while I was away", "5"),
    Key("6", "show('data')", "Data", "do ranks get their own, equally many batches", "6"),
    Key("7", "show('stacks')", "Stacks", "which line is every rank at", "7"),
    Key("8", "show('probes')", "Probes", "how fast is the machine, and is the job as fast", "8"),
    Key("9", "show('timeline')", "Timeline", "who stopped first, and who waits for it", "9"),
    Key("0", "show('profile')", "Profile", "where does the time of a step go", "0"),
    Key("escape", "back", "Back", "back to the screen before", "Esc", ("rank", "help")),
    Key("enter", "open", "", "open the rank (or the finding's rank) under the cursor", "Enter"),
    Key("n", "neighbour(1)", "Next rank", "next rank, in the order of the table", "n", ("rank",)),
    Key("p", "neighbour(-1)", "Previous", "previous rank", "p", ("rank",)),
    Key("r", "refresh_stacks", "Take stacks", "take new stacks of all ranks now (distdiag dump)", "r", ("stacks", "rank"), "live"),
    Key("R", "record_profile", "Record", "record a profile of three steps (distdiag profile)", "R", ("profile", "ranks", "rank"), "steps"),
    Key("t", "travel", "To that moment", "show the run at the moment this finding was raised", "t", ("findings",)),
    Key("left", "pan(-1)", "", "cursor one cell to the left; earlier", "←", ("heat", "timeline")),
    Key("right", "pan(1)", "", "cursor one cell to the right; later", "→", ("heat", "timeline")),
    Key("shift+left", "pan(-10)", "", "ten cells to the left", "shift+←", ("heat", "timeline")),
    Key("shift+right", "pan(10)", "", "ten cells to the right", "shift+→", ("heat", "timeline")),
    Key("plus,equals_sign", "zoom(1)", "Zoom", "fewer steps, or less time, in one cell", "+", ("heat", "timeline")),
    Key("minus", "zoom(-1)", "", "more steps, or more time, in one cell", "-", ("heat", "timeline")),
    Key("m", "metric", "Metric", "next metric of the heat map", "m", ("heat",)),
    Key("space", "pause", "Pause", "hold this moment; the job keeps running", "space", (), "running"),
    Key("space", "pause", "Resume", "follow the job again", "space", (), "paused"),
    Key("left_square_bracket", "step(-1)", "", "one moment back (a finished run replays)", "["),
    Key("right_square_bracket", "step(1)", "", "one moment forward", "]"),
    Key("left_curly_bracket", "step(-10)", "", "ten moments back", "{"),
    Key("right_curly_bracket", "step(10)", "", "ten moments forward", "}"),
    Key("s", "sort", "Sort", "next sort order", "s", RANKED),
    Key("S", "reverse", "", "reverse the sort order", "S", RANKED),
    Key("slash", "filter", "Filter", "show only some ranks", "/", RANKED),
    Key("g", "group", "", "group by node, or by rank again", "g", ("ranks",)),
    Key("f", "follow", "", "keep the cursor on the worst rank", "f", RANKED),
    Key("up,k", "move(-1)", "", "up", "↑ k"),
    Key("down,j", "move(1)", "", "down", "↓ j"),
    Key("pageup,ctrl+b", "page(-1)", "", "one screen up", "PgUp"),
    Key("pagedown,ctrl+f", "page(1)", "", "one screen down", "PgDn"),
    Key("home", "ends(-1)", "", "to the first", "Home"),
    Key("end", "ends(1)", "", "to the last", "End"),
    Key("e", "export", "", "write this snapshot as JSON", "e"),
    Key("P", "picture", "", "write this screen as SVG", "P"),
    Key("ctrl+p", "command_palette", "", "all commands by name", "ctrl+p"),
    Key("question_mark", "show('help')", "Help", "this page", "?"),
    Key("q", "leave(0)", "Quit", "leave; the job is not affected", "q"),
)  # fmt: skip

# At most so many in the key bar; in this order they give way where it is narrow.
_BAR_LIMIT = 12
_GIVE_WAY = (
    "Zoom", "Record", "Probes", "Profile", "Stacks", "Data", "Previous", "Filter", "Sort", "Mem", "Heat", "Comm",
)  # fmt: skip


def works_on(key: Key, page: str) -> bool:
    """True if the key changes what this page shows; `Esc` and what needs a job work everywhere, if asked for."""
    return not key.pages or page in key.pages or key.action == "back" or bool(key.needs)


def applies(key: Key, snap: Snapshot, ui: Ui) -> bool:
    """True if the key does something on this page, in this state."""
    if key.pages and ui.page not in key.pages:
        return False
    live, paused = snap.monitor is Monitor.LIVE, ui.paused_at_s is not None
    steps = live and job_state(snap).word != "DEADLOCK"
    return {"": True, "live": live, "steps": steps, "running": live and not paused, "paused": paused}[key.needs]


def key_bar(snap: Snapshot, ui: Ui, width: int) -> Line:
    """Return the last line of the screen: keys that do something here, clickable."""
    keys = [k for k in KEYS if k.label and applies(k, snap, ui)]
    if ui.page in ("rank", "help"):
        keys = [k for k in keys if not k.action.startswith("show(") or k.label == "Help"]

    def length(ks: list[Key]) -> int:
        return sum(cells(k.shown) + cells(k.label) + 2 for k in ks) - 1

    for label in _GIVE_WAY:
        if length(keys) <= width and len(keys) <= (_BAR_LIMIT if width < 120 else 20):
            break
        keys = [k for k in keys if k.label != label or f"'{ui.page}'" in k.action]
    parts: list[str | Part | tuple[str, str]] = []
    for k in keys:
        here = k.action == f"show('{ui.page}')"
        hit = f"do:{k.action}"
        parts += [(k.shown, "key", hit), (f" {k.label}", "bold" if here else "", hit), " "]
    return line(*parts[:-1])
