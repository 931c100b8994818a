"""Findings on a dumped job: late ranks, stalls and deadlocks, messages, operations in flight, ranks and files that are missing."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from distdiag.diagnosis import kinds
from distdiag.diagnosis.model.findings import CollectiveRef, Finding, Severity, Where, rank_list
from distdiag.diagnosis.model.snapshot import Call, Site, Snapshot
from distdiag.diagnosis.text.cycle import NEW_GROUP_ADVICE
from distdiag.diagnosis.text.incident import collective_ref, collective_text, group_label
from distdiag.diagnosis.text.phrases import NO_PROGRESS, at, where_at
from distdiag.diagnosis.text.template import Template, filled
from distdiag.diagnosis.waits import compatible
from distdiag.diagnosis.waits.wait import Wait, call_at
from distdiag.sources.dumps.culprits import Blame, one_more
from distdiag.sources.dumps.load_report import LoadReport
from distdiag.sources.dumps.running import APART_S, MOVING_S, Working
from distdiag.sources.dumps.times import DUMPED_WITHIN_S, LateRanks, written_at_timeout
from distdiag.terms.operations import synchronizes
from distdiag.terms.units import duration


@dataclass(frozen=True)
class Findings:
    """What the dumps of a job show, as findings."""

    snapshot: Snapshot
    loaded: LoadReport
    blame: Blame

    # -- sites and names ----------------------------------------------------------------------------------------------

    def where(self, ranks: Iterable[int]) -> tuple[Where, ...]:
        """Return where each rank issued its oldest operation in flight, else its newest operation.

        If its ring has lost that operation's entry, its site is not known.
        """
        out = []
        for r in ranks:
            call, state = self.blame.oldest.get(r), self.snapshot.ranks.get(r)
            newest = state.current_site if state is not None and (call is None or call.op) else None
            site = (call.site if call is not None else None) or newest
            by_stack = state is not None and bool(state.user_stack)
            newest_call = "last_call" if site and not by_stack else None
            out.append(where_at(r, site, "waiting" if call is not None else newest_call))
        return tuple(out)

    def evidence(self, ranks: Collection[int]) -> tuple[str, ...]:
        """Return the files of the first of these ranks."""
        return tuple(path for rank in tuple(ranks)[:8] for path in self.loaded.files.get(rank, ()))

    def text(self, w: Wait, rank: int | None = None) -> str:
        return collective_text(self.snapshot, w, _any_call(w) if rank is None else w.calls[rank])

    def ref(self, w: Wait | None) -> CollectiveRef | None:
        return None if w is None else collective_ref(self.snapshot, w, _any_call(w))

    # -- ranks that others wait for -----------------------------------------------------------------------------------

    def late_rank(self, late: LateRanks) -> Finding:
        """Return the finding on a collective that timed out, and the ranks that issued it after that."""
        culprits = tuple(sorted(late.late_s))
        states = self.snapshot.ranks
        calls = {q: c for q in culprits if (c := call_at(states[q], late.group, late.seq)) is not None}
        name = next((compatible.op_name(c.op) for c in calls.values()), "") or "collective"
        others = tuple(sorted(set(self.blame.victims) - set(culprits))) or late.others
        sites = {q: c.site for q, c in calls.items()}
        return LATE(
            culprits=culprits, victims=others, where=(where_at(q, sites.get(q)) for q in culprits),
            waiting=self.where(others), evidence=self.evidence(culprits),
            what=f"{name} #{late.seq:,} ({group_label(self.snapshot, late.group)})",
            late=max(late.late_s.values()), limit=late.timeout_s, site=next(iter(sites.values()), None),
        )  # fmt: skip

    def still_working(self, working: Working) -> Finding:
        """Return the finding on ranks that had not entered what others wait in, and still made other calls."""
        culprits, main = self.blame.culprits, self.blame.main
        given_up = main is not None and self._timed_out(main)
        limit_s = self.loaded.timeouts_s.get(main.group) if main is not None and given_up else None
        rate, name = working.per_s, compatible.op_name(working.call.op)
        often = f" (about {rate:,.0f} {name} a second)" if rate is not None else ""
        apart = working.site or working.call.site
        return (WORKING_LATE if given_up else WORKING)(
            culprits=culprits, victims=sorted(set(self.blame.victims)), collective=self.ref(main),
            where=self.where(culprits), waiting=self.where(self.blame.victims), evidence=self.evidence(culprits),
            what=self._awaited(), last=self.call_text(working.call), ago=working.ago_s, often=often,
            waited=working.waited_s, limit=f", and the timeout is {limit_s:.0f} s" if limit_s else "",
            calls=f"the {'call' if working.site else 'work'}{at(apart)}",
        )  # fmt: skip

    def stall(self, young: bool) -> Finding:
        """Return the finding on ranks that others wait for: a deadlock if the dumps show how they wait for each other."""
        blame, culprits = self.blame, self.blame.culprits
        what = self._awaited()
        unmade = self._half_made()
        facts: dict[str, Any] = {"what": what}
        cause = None
        if (more := self.one_more()) is not None:
            template = MORE if blame.alone else LESS
            facts |= {"number": more[0], "site": more[1], "other": more[2]}
        elif blame.alone:
            template = EXTRA
        elif unmade:
            template, culprits = UNMADE, self.loaded.without_group[unmade]
            facts |= {"made_by": blame.culprits, "group": group_label(self.snapshot, unmade)}
        elif blame.circle and not culprits:
            messages = blame.circle[0].p2p
            template, cause = CYCLE, "p2p_cycle" if messages else "group_cycle"
            facts["advice"] = MESSAGES_ADVICE if messages else ORDER_ADVICE
            calls = [f"rank {r:,} in {self.text(w, r)}" for w in blame.circle for r in w.ranks]
            facts["calls"] = ", ".join(calls[:4]) + (", …" if len(calls) > 4 else "")
        elif blame.crossed:
            template = CROSSED
            calls = [f"{rank_list(ranks)} issued {self.text(w)}" for w, ranks in blame.crossed]
            facts["calls"] = " first, and ".join(calls)
            made = (w.calls[r].site for w, ranks in blame.crossed for r in ranks if r in w.calls)
            lines = {site.key: site for site in made if site}
            facts["sites"] = ":" * bool(lines) + " and".join(map(at, lines.values()))
        elif (passed := self._passed()) is not None:
            template = PASSED
            site = blame.main and next((c.site for c in blame.main.calls.values() if c.site), None)
            facts |= {"own": self.call_text(passed[0]), "later": passed[1], "site": site}
        else:
            template = STALL
            facts |= self._stall_facts(what)
        if young:
            template = replace(template, **RUNNING)
            here, elsewhere, theirs = self._due()
            if blame.main is not None and not blame.main.p2p:  # all that were, not only those that others wait for
                here = sorted(blame.main.missing.intersection(self.loaded.files))
            way = "{here} {here:was|were} on {here:its|their} way to {what}" if here else "{what} was in flight"
            way += ", {elsewhere} to {theirs}" if here and elsewhere else ""
            facts["on_way"] = filled(way, here=here, elsewhere=elsewhere, what=what, theirs=theirs)
        return template(
            cause=cause, culprits=culprits, victims=sorted({*blame.victims, *blame.culprits} - set(culprits)),
            collective=self.ref(blame.main),
            where=(where_at(q, more[1]) for q in culprits) if more and blame.alone else self.where(culprits or blame.victims),  # without a culprit, the site of each victim
            waiting=self.where(blame.victims), evidence=self.evidence(culprits), **facts,
        )  # fmt: skip

    def _awaited(self) -> str:
        """Return what the others wait in; of a message, the end that is missing."""
        main = self.blame.main
        if main is None:
            return "a collective"
        if not main.p2p or main.key[4] not in self.blame.culprits:
            return self.text(main)
        here, there = ("recv", "send") if main.key[2] == "send" else ("send", "recv")
        return f"the {here} that matches rank {main.key[3]:,}'s {there} ({group_label(self.snapshot, main.group)})"

    def _due(self) -> tuple[list[int], list[int], str]:
        """Return the culprits that lack what `_awaited` names, the others, and what these lack."""
        culprits, main = self.blame.culprits, self.blame.main
        if main is None or self.blame.alone:
            return list(culprits), [], ""
        members = {*main.missing, *self.blame.behind}.intersection(self.snapshot.groups[main.group].ranks)
        later = members != set(culprits) <= set(self.snapshot.groups[main.group].ranks)
        theirs = "what the others issued after it" if later else "what other groups wait in"
        if main.p2p:  # a message has one other end
            members, theirs = main.key[4:5] if main.key[4] in culprits else culprits, "the other end of another message"
        return [q for q in culprits if q in members], [q for q in culprits if q not in members], theirs

    def _stall_facts(self, what: str) -> dict[str, str]:
        """Return what the template of a stall names: what the culprits lack, who waits, how they stopped, what to do."""
        blame, culprits, main = self.blame, self.blame.culprits, self.blame.main
        group = None if main is None else self.snapshot.groups[main.group]
        here, elsewhere, theirs = self._due()
        if blame.behind == culprits:
            lack = "{culprits} {culprits:has|have} issued {what} but not begun it" + self._queued()
        elif (
            here and elsewhere and main is not None and main.missing.isdisjoint(here)
        ):  # queued behind what it waits in
            lack = "{here} {here:has|have} issued {what} but not begun it, and {elsewhere} {elsewhere:has|have} not entered {theirs}"
        elif here and elsewhere:
            lack = "{here} {here:has|have} not entered {what}, nor {elsewhere} {theirs}"
        else:
            lack = "{culprits} {culprits:has|have} not entered {what}"
        waiters = "{victims:#} ranks wait" if len(blame.victims) > 8 else "{victims} {victims:waits|wait}"
        on_host = group is not None and group.backend == "gloo"
        stopped = "" if on_host else ": the device stopped"
        parts = (
            (blame.idle, "no collective is in flight there{whose}: the CPU side launched no more"),
            (blame.device, "what is in flight there has completed on all other ranks{whose}" + stopped),
        )
        if blame.device and not blame.idle and not on_host:
            advice = DEVICE_ADVICE
        else:
            advice = HOST_ADVICE if blame.idle and not blame.device else EITHER_ADVICE
        waited, older_s = self.waited(), self._older_s()
        if waited and blame.idle == culprits and older_s > APART_S:
            whose_dump = "its dump is" if len(culprits) == 1 else "their dumps are"
            parts += ((culprits, f"{whose_dump} {duration(older_s)} older than the others'"),)
            advice = ENDED_ADVICE
        first = next(iter(self.where(culprits)), None)
        last = first is not None and first.state == "last_call"
        whose = {ranks: "" if len(ranks) == len(culprits) else f" ({rank_list(ranks)})" for ranks, _ in parts}
        return {
            "lack": filled(lack, culprits=culprits, here=here, elsewhere=elsewhere, what=what, theirs=theirs),
            "waiters": filled(waiters, victims=blame.victims),
            "waited": waited,
            "condition": "".join("; " + filled(text, whose=whose[ranks]) for ranks, text in parts if ranks),
            "advice": filled(
                advice,
                who=culprits,
                after=filled(" after the last call{site}" * last + "{site}" * (not last), site=first),
            ),
        }

    def waited(self) -> str:
        """Return how long ranks had waited at most when their files were written; empty if that is later, as of copies."""
        since, main = self.blame.oldest, self.blame.main
        limit_s = self.loaded.timeouts_s.get(main.group) if main is not None else None
        waits: list[float] = []
        for r in self.blame.victims:
            times, call = self.loaded.times.get(r), since.get(r)
            if main is None or r not in main.ranks or call is None or call.entered_s is None:
                continue
            if times is None or times.written_s is None or times.newest_s is None or times.written_s < times.newest_s:
                return ""
            waits.append(times.written_s - call.entered_s)
        longest = max(waits, default=0.0)
        known = limit_s is not None and MOVING_S <= longest <= limit_s + DUMPED_WITHIN_S
        return f", for {duration(longest)} at most, by the files' times" if known else ""

    def untimed(self) -> bool:
        """True if nothing shows that what ranks wait in timed out, nor how long they had waited."""
        main = self.blame.silent_in or self.blame.main
        return not self.waited() and (main is None or not self._timed_out(main))

    def _older_s(self) -> float:
        """Return by how much the culprits' files are older than those of all victims; 0 if a file is older than its entries."""
        times = self.loaded.times
        written = {r: t.written_s for r, t in times.items() if t.written_s and t.written_s >= (t.newest_s or 0.0)}
        mine, theirs = ([written.get(r) for r in ranks] for ranks in (self.blame.culprits, self.blame.victims))
        known = [t for t in mine + theirs if t is not None]
        return min(known[len(mine) :]) - max(known[: len(mine)]) if theirs and len(known) == len(mine + theirs) else 0.0

    def _queued(self) -> str:
        """Return the oldest operation in flight of the one culprit, if others wait in a later one; else empty."""
        call, main = self.blame.oldest.get(self.blame.culprits[0]), self.blame.main
        one = len(self.blame.culprits) == 1 and call is not None and not call.p2p and main is not None
        if not one or call is None or main is None or (call.group, call.seq) == main.key:
            return ""
        return f", nor completed {self.call_text(call)}, which it issued before"

    def call_text(self, call: Call) -> str:
        return collective_text(self.snapshot, Wait((call.group, call.seq)), call)

    def one_more(self) -> tuple[int, Site, Site] | None:
        """Return `culprits.one_more`: the call that one side made more often than the other, if their paths show it."""
        blame, main = self.blame, self.blame.main
        if main is None or main.p2p or not blame.culprits or not main.missing.isdisjoint(main.calls):
            return None
        behind = sorted(main.missing)
        if behind != sorted(blame.victims if blame.alone else blame.culprits):
            return None
        return one_more(self.loaded.paths, sorted(main.calls), behind, main)

    def _passed(self) -> tuple[Call, list[int]] | None:
        """Return the collective in which the culprits wait, and who issued it after the one that the culprits lack.

        None if they wait in none, or a rank issued the two in the culprits' order.
        """
        main, culprits, states = self.blame.main, self.blame.culprits, self.snapshot.ranks
        own = [self.blame.oldest.get(q) for q in culprits]
        first = own[0] if own else None
        if main is None or main.p2p or first is None or first.seq is None or not main.missing.issuperset(culprits):
            return None
        if first.group == main.group or any(c is None or (c.group, c.seq) != (first.group, first.seq) for c in own):
            return None
        later = {q: call_at(states[q], first.group, first.seq) for q in main.calls}
        both = {q: (main.calls[q].entered_s, call.entered_s) for q, call in later.items() if call is not None}
        if not both or any(a is None or b is None or a >= b for a, b in both.values()):
            return None
        return first, sorted(both)

    def _half_made(self) -> str:
        """Return the group for which the stopped ranks may all wait, as a member never created it; else an empty text.

        A communicator is created before its first operation is recorded, and its members wait for each other during that.
        """
        stopped = set(self.blame.idle)
        for name, without in self.loaded.without_group.items():
            members = set(self.snapshot.groups[name].ranks) - set(without)
            used = any(name in state.enqueued for state in self.snapshot.ranks.values())
            if not used and stopped and stopped == set(self.blame.culprits) <= members:
                return name
        return ""

    def other_members(self, stuck: Collection[int]) -> Finding | None:
        """Return the finding on a group that has other members on some of its ranks, if these are culprits or stuck; else None."""
        for name, without in self.loaded.without_group.items():
            group, (plain, at_sign, _) = self.snapshot.groups[name], name.rpartition("@")
            has, others = set(group.ranks).difference(without), set(self.blame.victims).union(stuck)
            same = (g for key, g in self.snapshot.groups.items() if at_sign and key.rpartition("@")[0] == plain)
            theirs = next((g.ranks for g in same if g is not group and not set(without).isdisjoint(g.ranks)), None)
            if theirs and not has.isdisjoint({*self.blame.culprits, *stuck}):
                return OTHER_MEMBERS(
                    culprits=sorted(has) if len(has) < len(without) else (), victims=sorted(others - has), where=self.where(has),
                    waiting=self.where(sorted(others - has)), group=group.description or plain,
                    has=sorted(has), members=rank_list(group.ranks), without=without, theirs=rank_list(theirs),
                )  # fmt: skip
        return None

    # -- operations in flight with no rank missing --------------------------------------------------------------------

    def in_flight(self, running: bool) -> Finding:
        """Return the finding on operations that all ranks have issued and none has completed."""
        given_up = [w for w in self.blame.in_flight if self._timed_out(w)]
        wait = (given_up or self.blame.in_flight)[0]
        gloo, assumed = self.snapshot.groups[wait.group].backend == "gloo", wait.group in self.loaded.assumed
        network = GLOO_ADVICE if gloo else NCCL_ADVICE
        if wait.seq == 1 and not wait.p2p:
            network = FIRST_ADVICE + network
        ranks = sorted({r for w in self.blame.in_flight for r in w.ranks})
        others = sorted(set(self.blame.victims).difference(ranks))
        stuck = bool(given_up) or (bool(others) and not running and not wait.p2p)
        others = others if stuck else []
        return (STUCK if stuck else IN_FLIGHT)(
            culprits=ranks if others and not wait.p2p else (), victims=others or ranks, collective=self.ref(wait),
            where=self.where(ranks) if others else (), waiting=self.where(others or ranks) if stuck else (),
            what=self.text(wait), ranks=ranks, how="timed out" if given_up else "has not completed",
            lacking="on all ranks that show this group" if assumed else "with no rank missing",
            other="a member that never came, or " if assumed else "", network=(MEMBERS_ADVICE if assumed else "") + network,
            wait=filled("; {others} {others:waits|wait} for {ranks:it|them}" * bool(others), others=others, ranks=ranks),
        )  # fmt: skip

    def moved(self) -> str:
        """Return who has completed what comes after an operation in flight, and needs its ranks, too; empty if the job may hang.

        Some member has to have completed each of the others.
        """
        later: dict[int, set[int]] = {}
        for nth, w in enumerate(self.blame.in_flight):
            calls = ((q, c) for q in self.snapshot.groups[w.group].ranks for c in self.snapshot.ranks[q].calls)
            here = [
                (q, c.seq) for q, c in calls if c.group == w.group and c.completed_s is not None and synchronizes(c.op)
            ]
            done = {q: seq for q, seq in here if seq is not None and seq >= w.seq}
            if w.p2p or not done or self._timed_out(w):
                return ""
            later |= {nth: after} if (after := {q for q, seq in done.items() if seq > w.seq}) else {}
        for nth, ranks in later.items():
            wait = self.blame.in_flight[nth]
            return filled(MOVED, what=self.text(wait), later=sorted(ranks), ranks=sorted(wait.calls))
        return ""

    def _timed_out(self, w: Wait) -> bool:
        """True if the watchdog timed it out, or the dump or its file was written after the group's timeout."""
        limit_s = self.loaded.timeouts_s.get(w.group)
        for r, call in w.calls.items():
            if call.timed_out:
                return True
            if call.entered_s is None or not limit_s:
                continue
            written, asked = self.loaded.times[r].written_s, self.loaded.times[r].asked_s
            if asked is not None and asked - call.entered_s >= limit_s:
                return True
            if written is not None and written_at_timeout(written - call.entered_s, limit_s):
                return True
        return False


def _any_call(w: Wait) -> Call | None:
    """Return the call of one of the ranks in a wait."""
    return next((w.calls[r] for r in w.ranks if r in w.calls), None)


_AGAIN = (
    "take a second set of dumps some seconds later, or run `distdiag attach --here` on each host: if nothing has moved"
)
_missing_rank = partial(Template, kinds.DEADLOCK, "missing_rank")
_group_cycle = partial(Template, kinds.DEADLOCK, "group_cycle")
_stall = partial(Template, kinds.STALL, "unknown")
LATE = Template(kinds.TIMEOUT, "late_rank",
    "{culprits} issued {what} {late:time} after the first rank of its group; the timeout is {limit:time}, so the others "
    "had given up", "the job ends with a timeout",
    "see what {culprits} did before{site}; where that may take so long, give init_process_group or new_group a longer "
    "timeout")  # fmt: skip
_WORKING = (
    "{culprits} {culprits:has|have} not entered {what}, but {culprits:was|were} still working: {last} began {ago:time} before the "
    "dump{often}; {victims} had waited {waited:time}{limit}"
)
_WORKING_ADVICE = "see why {calls} takes so long on {culprits}: bound it, or give all ranks equally much of it"
WORKING = _stall(_WORKING, "{victims} {victims:waits|wait}", _WORKING_ADVICE, severity=Severity.WARNING)
WORKING_LATE = Template(kinds.TIMEOUT, "late_rank", _WORKING, "the job ends with a timeout",
    _WORKING_ADVICE + "; if it may take so long, give init_process_group or new_group a longer timeout")  # fmt: skip
EXTRA = _missing_rank(
    "{culprits} {culprits:is|are} in {what}, which none of the other {victims:#} ranks has entered; they have nothing in "
    "flight", NO_PROGRESS, "take the call{site} out of what only {culprits} {culprits:reaches|reach} (`if rank == 0`, an `except`, "
    "a retry, an extra batch), or let all ranks make it")  # fmt: skip
MORE = _missing_rank(
    "{culprits} {culprits:is|are} in {what}, which none of the other {victims:#} ranks has entered: #{number:,} of {culprits} was the "
    "call{site}, which the others have not made; theirs was{other}", NO_PROGRESS,
    "let all ranks make the call{site}, or none: see what leads only {culprits} there (`if rank == 0`, an `except`, a retry, an extra batch)")  # fmt: skip
LESS = _missing_rank(
    "{culprits} {culprits:has|have} not entered {what}: #{number:,} of {culprits} was the call{other}, and that of the others{site}, which "
    "{culprits} left out", NO_PROGRESS, "look for a condition, a break or an early return that leads {culprits} past the call{site}: "
    "every member must make it equally often")  # fmt: skip
UNMADE = _missing_rank(
    "{culprits} never created group {group}, which {made_by} {made_by:has|have} created and not used yet; "
    "{made_by:it has|they have} not entered {what}, where the others wait", NO_PROGRESS, NEW_GROUP_ADVICE)  # fmt: skip
OTHER_MEMBERS = Template(kinds.GROUP_MISUSE, "not_a_member",
    "group {group} consists of {members} on {has}, but of {theirs} on {without}: {has} {has:waits|wait} for a member that never joins",
    NO_PROGRESS, "give new_group the same list of ranks on all ranks: compute it from values that they all have")  # fmt: skip
PASSED = _missing_rank(
    "{culprits} {culprits:has|have} not entered {what} but {culprits:is|are} in {own}, which {later} issued after it",
    NO_PROGRESS, "look for a condition, a break or an early return that leads {culprits} past the call{site}: every member "
    "must make it equally often")  # fmt: skip
CYCLE = _group_cycle(
    "ranks wait for each other in a cycle: {calls}; on each rank, the op that another waits for is queued behind its own",
    NO_PROGRESS, "{advice}")  # fmt: skip
CROSSED = _group_cycle("{calls} first: each waits for ranks that run it second", NO_PROGRESS,
    "use the groups in the same order on all ranks that share them, or wait for the first call before the second{sites}")  # fmt: skip
STALL = _stall("{lack}; {waiters} for {culprits:it|them}{waited}{condition}", NO_PROGRESS, "{advice}")
STUCK = _stall(
    "{what} {how} {lacking}: {other}{ranks:the device of|a link or a device between} {ranks} stopped{wait}",
    NO_PROGRESS,
    "{network}",
)
IN_FLIGHT = _stall("{what} was in flight {lacking}: a running job, or {other}a link or device that stopped", "none known",
    _AGAIN + ", {network}", severity=Severity.INFO)  # fmt: skip
MOVED = (
    "{what} was in flight on {ranks} when {ranks:its dump was|their dumps were} taken, and the job moved on: {later} {later:has|have} "
    "completed later collectives, which need {ranks}, too"
)
# instead of the sentences of a stall or deadlock, if the job was running
RUNNING: dict[str, Any] = {
    "message": "{on_way} when the dumps were taken, and the calls were recent, as in a running job",
    "cost": "none known",
    "advice": _AGAIN + ", it hangs",
    "severity": Severity.INFO,
}
MESSAGES_ADVICE = "let every second rank receive before it sends, or use batch_isend_irecv"
ORDER_ADVICE = "issue the calls of these groups in one order on all ranks, or wait for one before the next is issued"
MEMBERS_ADVICE = "compare these ranks with the list that the script gives to new_group, or with the world size: look first at a rank that is missing here; else "
FIRST_ADVICE = "it is the group's first call, so see whether these ranks reach each other at all (interface, firewall, MTU, container): "
NCCL_ADVICE = (
    "check the network and the GPUs of these ranks: NCCL_DEBUG=INFO (NCCL_SOCKET_IFNAME chooses the interface), "
    "`dmesg -T | grep -i xid`, `distdiag probe pairs`"
)
GLOO_ADVICE = "check the network between the hosts of these ranks: `distdiag probe pairs`; GLOO_SOCKET_IFNAME chooses the interface"
DEVICE_ADVICE = "look at the GPUs of {who}: `dmesg -T | grep -i xid`, ECC counters; then at their processes' stacks"
_STACKS = (
    "`py-spy dump --native --pid …` while {who:it hangs|they hang}; if the job is over, start the next run with `distdiag run`, which "
    "keeps the stacks"
)
HOST_ADVICE = "see what {who} {who:does|do}{after} (Python code, a lock, the data loader, the GIL): " + _STACKS
ENDED_ADVICE = (
    "see whether the {who:process|processes} of {who} ended by then: log, exit code, a loop with fewer batches or an early return; "
    "if alive, take the stacks (`py-spy dump --native --pid …`)"
)
EITHER_ADVICE = "look at {who} first{after}: the GPU (`dmesg -T | grep -i xid`), the host, the stack: " + _STACKS
