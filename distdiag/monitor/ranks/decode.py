"""Decode a page: texts, sites and slots, as the types of a snapshot."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, field
from typing import Any

import msgspec

from distdiag.diagnosis.model.snapshot import Buckets, Loader, Model, Site
from distdiag.page.layout import BARRIER_PEER, NO_GROUP, Header, Page
from distdiag.page.reader import PageReader
from distdiag.terms.ranks import unfold_ranks

STACKS_KEPT = 512
LEAST_POLLS = 8  # of a loader's workers


@dataclass(slots=True)
class GroupSeen:
    """A process group as one rank's page describes it."""

    key: str
    description: str
    backend: str
    ranks: tuple[int, ...]
    name: str  # torch's own


@dataclass
class PageDecoder:
    """A page and the texts that its offsets point at; cached, because texts never change."""

    reader: PageReader
    start_ns: int  # monotonic time at which the run began
    page: Page | None = None
    _json: dict[int, Any] = field(default_factory=dict)
    _sites: dict[int, Site | None] = field(default_factory=dict)
    _stacks: dict[bytes, tuple[Site, ...]] = field(default_factory=dict)

    # -- times and sites --------------------------------------------------------------------------

    def s(self, ns: int) -> float | None:
        """Return monotonic nanoseconds as seconds since the run began; None for 0, which means not known."""
        return (ns - self.start_ns) / 1e9 if ns else None

    def site(self, offset: int) -> Site | None:
        if offset not in self._sites:
            found = self.reader.site(offset)
            self._sites[offset] = Site(*found) if found else None
        return self._sites[offset]

    def text(self, offset: int) -> str:
        return self.reader.text(offset)

    def stack(self, h: Header) -> tuple[Site, ...]:
        """Return the user's frames of the main thread, innermost first, from the newest sample of the pulse."""
        return self.stack_of(bytes(h.stack)[: h.stack_depth * 8])

    def stack_of(self, offsets: bytes) -> tuple[Site, ...]:
        """Return the frames at these offsets, 64 bits each, innermost first."""
        known = self._stacks.get(offsets)
        if known is None:
            if len(self._stacks) >= STACKS_KEPT:
                self._stacks.clear()
            each = (int.from_bytes(offsets[i : i + 8], "little") for i in range(0, len(offsets), 8))
            known = self._stacks[offsets] = tuple(s for at in each if (s := self.site(at)))
        return known

    def parsed(self, offset: int) -> Any:
        """Return the parsed JSON text at this offset; None if it is invalid."""
        if not offset:
            return None
        if offset not in self._json:
            try:
                self._json[offset] = json.loads(self.text(offset))
            except ValueError:
                self._json[offset] = None
        return self._json[offset]

    @property
    def facts(self) -> dict[str, Any]:
        found = self.parsed(self.page.header.facts) if self.page else None
        return found if isinstance(found, dict) else {}

    @property
    def backend_files(self) -> tuple[str, ...]:
        """Files and folders of the rank's backends that are written in Python."""
        found = self.facts.get("backend_files")
        return tuple(x for x in found if isinstance(x, str)) if isinstance(found, list) else ()

    @property
    def unfollowed(self) -> list[tuple[str, str, Site | None]]:
        """What the rank did with groups that cannot be followed: operation, group, line."""
        found, page = self.facts.get("unfollowed"), self.page
        if page is None or not isinstance(found, list):
            return []
        each = [x for x in found if isinstance(x, list) and len(x) == 3 and all(isinstance(n, int) for n in x[1:])]
        return [(str(what), self.group_key(page, group), self.site(site)) for what, group, site in each]

    # -- slots -------------------------------------------------------------------------------------------

    def group_key(self, page: Page, index: int) -> str:
        """Return a readable name of a group, equal on all ranks: default_pg, or from its description, or its name."""
        if not 0 <= index < page.header.n_groups:
            return "?"
        slot = page.groups[index]
        name, description = self.text(slot.name), self.text(slot.description)
        again = f"#{slot.generation}" if slot.generation > 1 else ""
        if description == "default_pg":
            return "default_pg" + again
        if description and description != "undefined":
            return f"{description}:{name}{again}"
        return f"group {name}{again}"

    def groups(self) -> list[GroupSeen]:
        """Return the process groups that this rank knows."""
        page, text = self.page, self.text
        if page is None:
            return []
        slots = [(self.group_key(page, i), page.groups[i]) for i in range(page.header.n_groups)]
        return [
            GroupSeen(key, text(s.description), text(s.backend), unfold_ranks(text(s.ranks)), text(s.name))
            for key, s in slots
        ]

    def p2p(self, page: Page) -> dict[str, int]:
        """Return how many messages the rank has issued, by `send:PEER:TAG:GROUP` or `recv:…`."""
        out: dict[str, int] = {}
        for i in range(page.header.n_peers):
            s = page.peers[i]
            if s.peer == BARRIER_PEER:
                continue
            peer = "any" if s.peer < 0 else str(s.peer)
            out[f"{'send' if s.send else 'recv'}:{peer}:{s.tag}:{self.group_key(page, s.group)}"] = s.count
        return out

    def sites(self, page: Page) -> dict[str, int]:
        """Return how many collectives were called at each site."""
        out: dict[str, int] = {}
        for i in range(page.header.n_sites):
            slot = page.sites[i]
            site = self.site(slot.site)
            if site is not None:
                out[site.key] = out.get(site.key, 0) + slot.count
        return out

    def loaders(self, page: Page) -> tuple[Loader, ...]:
        def known(v: int) -> int | None:
            return v if v >= 0 else None

        out = []
        for i in range(page.header.n_loaders):
            s = page.loaders[i]
            out.append(
                Loader(
                    site=self.site(s.site),
                    length=known(s.length),
                    batch_size=known(s.batch_size),
                    dataset_length=known(s.dataset_length),
                    drop_last=None if s.drop_last < 0 else bool(s.drop_last),
                    distributed_sampler=bool(s.distributed_sampler),
                    sampler_fits=s.distributed_sampler == 1 if s.distributed_sampler else None,
                    sampler_epoch=known(s.sampler_epoch),
                    shuffle=None if s.shuffle < 0 else bool(s.shuffle),
                    iterations_started=s.iterations,
                    batches=s.batches,
                    exhausted=bool(s.exhausted),
                    in_training=bool(s.in_training),
                    workers=s.workers,
                    promised=bool(s.promised),
                    fed=bool(s.fed),
                    fetching=min(s.fetching_permille, 1000) / 1000 if s.polls >= LEAST_POLLS else None,
                    first_fingerprints=tuple(s.first[: s.n_first]),
                    previous_fingerprints=tuple(s.previous[: s.n_previous]),
                )
            )
        return tuple(out)

    def buckets(self, offset: int) -> Buckets | None:
        """Return a DDP module's buckets; None if they are unknown or damaged."""
        with contextlib.suppress(msgspec.ValidationError):
            found = self.parsed(offset)
            return msgspec.convert(found, Buckets) if found else None
        return None

    def models(self, page: Page) -> tuple[Model, ...]:
        out = []
        for i in range(page.header.n_models):
            m = page.models[i]
            unused = self.parsed(m.unused) or []
            out.append(
                Model(
                    name=self.text(m.name),
                    group=self.group_key(page, m.group) if m.group != NO_GROUP else None,
                    site=self.site(m.site),
                    parameters=m.parameters,
                    elements=m.parameter_elements,
                    frozen=m.frozen,
                    frozen_names=tuple((str(n), int(k)) for n, k in self.parsed(m.frozen_names) or []),
                    shape_hash=m.shape_hash,
                    find_unused=None if m.find_unused < 0 else bool(m.find_unused),
                    flag_of_library=m.find_unused == 2,
                    static_graph=bool(m.static_graph),
                    broadcast_buffers=bool(m.broadcast_buffers),
                    forwards=m.forwards,
                    synced_backwards=m.synced_backwards,
                    unused_checks=m.unused_checks,
                    unused_hits=m.unused_hits,
                    unused=tuple((str(n), int(k)) for n, k in unused),
                    unused_step=m.unused_step,
                    frozen_later=bool(m.frozen_later),
                    never_trained=tuple((str(n), int(k)) for n, k in self.parsed(m.never_trained) or []),
                    never_called=tuple(map(str, self.parsed(m.never_called) or [])) if m.never_called else None,
                    unused_site=self.site(m.unused_site),
                    search_ms=m.search_ns / m.searches / 1e6 if m.searches else None,
                    buckets=self.buckets(m.buckets),
                    evaluating=bool(m.evaluating),
                )
            )
        return tuple(out)
