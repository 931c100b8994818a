"""Decode a page: texts, sites, slots and rings, as the types of a snapshot."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from ctypes import Structure
from functools import cache
from typing import Any

import msgspec

from distdiag.diagnosis.model.snapshot import Buckets, Group, Loader, Model, Site
from distdiag.page.layout import BARRIER_PEER, MODELS, NO_GROUP
from distdiag.page.reader import PageReader
from distdiag.terms.ranks import unfold_ranks

STACKS_KEPT = 512
LEAST_POLLS = 8  # of a loader's workers


class PageDecoder:
    """A page and the texts that its offsets point at; cached, because texts never change."""

    def __init__(self, reader: PageReader, start_ns: int) -> None:
        self.reader, self.start_ns = reader, start_ns  # the latter by the monotonic clock: when the run began
        # the newest copy; empty before the first `reader.read`
        self.page, self.header, self.text = reader.page, reader.page.header, reader.text
        self._json: dict[int, Any] = {}
        self._sites: dict[int, Site | None] = {}
        self._stacks: dict[bytes, tuple[Site, ...]] = {}

    # -- times and sites --------------------------------------------------------------------------

    def s(self, ns: int) -> float | None:
        """Return monotonic nanoseconds as seconds since the run began; None for 0, which means not known."""
        return (ns - self.start_ns) / 1e9 if ns else None

    def site(self, offset: int) -> Site | None:
        if offset not in self._sites:
            found = self.reader.site(offset)
            site = None
            for frame in reversed(found):
                site = Site(*frame, caller=site)
            self._sites[offset] = site
        return self._sites[offset]

    def path_of(self, file: str) -> str:
        """Return the absolute path of a file that Python names relative to a directory of the job; itself if it is not known."""
        known = {s.file for s in self._sites.values() if s is not None and s.file.endswith(f"/{file}")}
        return known.pop() if len(known) == 1 else file

    def stack(self) -> tuple[Site, ...]:
        """Return the user's frames of the main thread, innermost first, from the newest sample of the pulse."""
        return self.stack_of(bytes(self.header.stack)[: self.header.stack_depth * 8])

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
        found = self.parsed(self.header.facts)
        return found if isinstance(found, dict) else {}

    @property
    def backend_files(self) -> tuple[str, ...]:
        """Files and folders of the rank's backends that are written in Python."""
        found = self.facts.get("backend_files")
        return tuple(x for x in found if isinstance(x, str)) if isinstance(found, list) else ()

    @property
    def unfollowed(self) -> list[tuple[str, str, Site | None]]:
        """What the rank did with groups that cannot be followed: operation, group, line."""
        found = self.facts.get("unfollowed")
        if not isinstance(found, list):
            return []
        each = [x for x in found if isinstance(x, list) and len(x) == 3 and all(isinstance(n, int) for n in x[1:])]
        return [(str(what), self.group_key(group), self.site(site)) for what, group, site in each]

    # -- slots -------------------------------------------------------------------------------------------

    def group_key(self, index: int) -> str:
        """Return a readable name of a group, equal on all ranks: default_pg, or from its description, or its name."""
        if not 0 <= index < self.header.n_groups:
            return "?"
        slot = self.page.groups[index]
        name, description = self.text(slot.name), self.text(slot.description)
        again = f"#{slot.generation}" if slot.generation > 1 else ""
        if description == "default_pg":
            return "default_pg" + again
        if description and description != "undefined":
            return f"{description}:{name}{again}"
        return f"group {name}{again}"

    def groups(self) -> list[tuple[str, Group]]:
        slots, text = self.page.groups[: self.header.n_groups], self.text
        return [
            (text(s.name), Group(name=self.group_key(i), ranks=unfold_ranks(text(s.ranks)),
                                 description=text(s.description), backend=text(s.backend)))
            for i, s in enumerate(slots)
        ]  # fmt: skip

    def p2p(self) -> dict[str, int]:
        """Return how many messages the rank has issued, by `send:PEER:TAG:GROUP` or `recv:…`."""
        return {
            f"{'send' if s.send else 'recv'}:{'any' if s.peer < 0 else s.peer}:{s.tag}:{self.group_key(s.group)}": s.count
            for s in self.page.peers[: self.header.n_peers]
            if s.peer != BARRIER_PEER
        }

    def sites_of(self, op: str) -> list[Site]:
        """Return where `op` was called (of DDP: forward, backward), most calls first."""
        slots = [s for s in self.page.sites[: self.header.n_sites] if self.text(s.op) == op]
        found = (self.site(s.site) for s in sorted(slots, key=lambda s: -s.count))
        return [site for site in found if site is not None]

    def sites(self) -> dict[str, int]:
        """Return how many collectives were called at each site."""
        out: dict[str, int] = {}
        for slot in self.page.sites[: self.header.n_sites]:
            site = self.site(slot.site)
            if site is not None:
                out[site.key] = out.get(site.key, 0) + slot.count
        return out

    def loaders(self) -> tuple[Loader, ...]:
        return tuple(
            self._of_slot(
                Loader,
                s,
                distributed_sampler=bool(s.distributed_sampler),
                sampler_fits=s.distributed_sampler == 1 if s.distributed_sampler else None,
                iterations_started=s.iterations,
                mean_elements=s.elements / s.given if s.given else None,
                fetching=min(s.fetching_permille, 1000) / 1000 if s.polls >= LEAST_POLLS else None,
                first_fingerprints=tuple(s.first[: s.n_first]),
                previous_fingerprints=tuple(s.previous[: s.n_previous]),
                epoch_samples=tuple(s.epoch_samples) if s.sampled_epoch else (),
            )
            for s in self.page.loaders[: self.header.n_loaders]
        )

    def models(self) -> tuple[Model, ...]:
        built = self.header.n_models
        return tuple(
            self._of_slot(
                Model,
                m,
                group=self.group_key(m.group) if m.group != NO_GROUP else None,
                elements=m.parameter_elements,
                flag_of_library=m.find_unused == 2,
                never_called=tuple(map(str, self.parsed(m.never_called) or [])) if m.never_called else None,
                search_ms=m.search_ns / m.searches / 1e6 if m.searches else None,
                buckets=self.buckets(m.buckets),
            )
            for m in (self.page.models[i % MODELS] for i in range(max(0, built - MODELS), built))  # newest last
        )

    def buckets(self, offset: int) -> Buckets | None:
        with contextlib.suppress(msgspec.ValidationError):
            found = self.parsed(offset)
            return msgspec.convert(found, Buckets) if found else None
        return None

    def sizes(self, offset: int) -> tuple[tuple[str, int], ...]:
        return tuple((str(name), int(size)) for name, size in self.parsed(offset) or [])

    def _of_slot(self, kind: type[Any], slot: Structure, **given: Any) -> Any:
        """Return a slot as a type of the snapshot: `given`, and the fields that both have under one name."""
        for name, read in _shared(kind, type(slot)):
            if name not in given:
                given[name] = read(self, getattr(slot, name))
        return kind(**given)


# by type of a field: its value from that of a slot; below 0 is not known
_READ: dict[Any, Callable[[PageDecoder, int], Any]] = {
    int: lambda _, value: value,
    bool: lambda _, value: bool(value),
    int | None: lambda _, value: None if value < 0 else value,
    bool | None: lambda _, value: None if value < 0 else bool(value),
    str: lambda page, offset: page.text(offset),
    Site | None: PageDecoder.site,
    tuple[tuple[str, int], ...]: PageDecoder.sizes,
}


@cache
def _shared(kind: type[Any], slot: type[Structure]) -> list[tuple[str, Callable[[PageDecoder, int], Any]]]:
    return [(f.name, _READ[f.type]) for f in msgspec.structs.fields(kind) if hasattr(slot, f.name) and f.type in _READ]


class Ring:
    """The records of one ring of a page that have not been read yet."""

    def __init__(self, of: PageDecoder, name: str) -> None:
        self._header, self._records, self._count = of.header, getattr(of.page, name), f"n_{name}"
        self.read = self.missed = 0  # missed: overwritten before they were read

    def new(self) -> Iterator[Any]:
        """Yield the new records, oldest first, without those that are half written."""
        records, newest = self._records, getattr(self._header, self._count)
        oldest = newest - len(records)
        if oldest > self.read:
            self.missed += oldest - self.read
            self.read = oldest
        while self.read < newest:
            record = records[self.read % len(records)]
            self.read += 1
            if record.number == self.read:
                yield record
