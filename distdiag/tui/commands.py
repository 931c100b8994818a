"""The command palette: every screen, order and export by name, and "go to rank N"."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import partial

from textual.app import App, SystemCommand
from textual.command import Hit, Hits, Provider

from distdiag.tui.data.order import ORDERS
from distdiag.tui.files import Files
from distdiag.tui.keys import KEYS
from distdiag.tui.navigation import Navigation


class RankCommands(Provider):
    """`12`, `rank 12`: opens that rank."""

    async def search(self, query: str) -> Hits:
        m = re.fullmatch(r"\s*(?:go\s*to\s*)?(?:rank\s*)?(\d+)\s*", query, re.IGNORECASE)
        navigation = getattr(self.app, "navigation", None)
        if m is None or navigation is None:
            return
        rank = int(m[1])
        if rank < navigation.app.snap.summary.n:
            yield Hit(1.0, f"Go to rank {rank}", partial(navigation.open_rank, rank), help="open the rank's own screen")


def system_commands(app: App[None], navigation: Navigation, files: Files) -> Iterable[SystemCommand]:
    """Yield all key actions by name, and further commands."""
    for key in KEYS:
        if key.action.startswith("show("):
            name = key.action[6:-2]
            yield SystemCommand(
                f"Screen: {key.label}", f"{key.help} ({key.shown})", partial(navigation.action_show, name)
            )
    for order in ORDERS:
        yield SystemCommand(f"Sort by {order.title}", "order of the rank table", partial(navigation.sort_by, order.key))
    for text, meaning in (
        ("sev>=warn", "only ranks with a finding"),
        ("life:running", "only running ranks"),
        ("", "all ranks"),
    ):
        yield SystemCommand(f"Filter: {text or 'off'}", meaning, partial(navigation.app.set_filter, text))
    yield SystemCommand("Follow the worst rank", "the cursor stays on top (f)", navigation.action_follow)
    yield SystemCommand("Group by node", "or by rank again (g)", navigation.action_group)
    yield SystemCommand("Pause or resume", "hold this moment; the job keeps running (space)", navigation.action_pause)
    yield SystemCommand("Go to the first moment", "replay from the beginning", navigation.action_first_moment)
    yield SystemCommand("Go to rank …", "type the number of the rank instead", app.action_command_palette)
    yield SystemCommand("Export snapshot", "as JSON (e)", files.action_export)
    yield SystemCommand("Picture of the screen", "as SVG (P)", files.action_picture)
    yield SystemCommand("Theme", "colours, light and dark", app.action_change_theme)
    yield SystemCommand("Quit", "the job is not affected (q)", partial(app.run_action, "leave(0)"))
