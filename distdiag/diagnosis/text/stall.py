"""The findings of rule `stall`: their sentences, and what to do about each thing that a late rank may be doing."""

from __future__ import annotations

from functools import partial

from distdiag.diagnosis import kinds
from distdiag.diagnosis.model.findings import Severity
from distdiag.diagnosis.text.phrases import NO_PROGRESS
from distdiag.diagnosis.text.template import Template
from distdiag.terms.activity import ACTIVITIES

WAIT_OF = "{victims:#} of {world} ranks wait"
_warning = partial(Template, kinds.STALL, severity=Severity.WARNING)
_MISSES, _DOING = "{missing}{size}{implicit}", "{does}{loop}{worker}{open}{handling}{gone}"
_WAITED = "{victims} {victims:has|have} waited {waited_s:time}{usual}"
STALL = _warning("user_code", f"{{died}}{{left}}{_MISSES}; {_DOING}; {_WAITED}", "{cost}", "{do}")
AT_LINE = _warning("user_code", f"{{died}}{_DOING}; {_MISSES}; {_WAITED}", "{cost}", "{do}")
TRAINS_ON = _warning("user_code",
    "{culprits} has not entered {collective}{called_at} and keeps training{site}, {ahead:,} steps ahead of "
    "{victims}, {victims:which has|which have} waited {waited_s:time}", WAIT_OF,
    "check when that loop ends: a condition on the rank's own loss, time or data; let all ranks decide together, "
    "or bound its steps; this is cleared if the rank enters the collective")  # fmt: skip
INCOMPLETE = _warning("unknown",
    "{issued} not completed for {waited_s:time}: a device is busy with earlier work, or the network does not "
    "deliver", NO_PROGRESS,
    "see what the devices do (`nvidia-smi`, a long kernel before the call?) and the network's errors")  # fmt: skip
NOBODY_MOVES = _warning("unknown",
    "no rank has moved for {still_s:time}{unknown}: {places}", NO_PROGRESS,
    "{do}")  # fmt: skip
NOT_JOINED = _warning("unknown",
    "{culprits} {culprits:was never seen and|were never seen, and at least one of them} has not joined in {collective}; {victims} "
    "{victims:has|have} waited {waited_s:time}{at_call}", "the job does not start",
    "check that the launcher started {culprits} (WORLD_SIZE, --nnodes, --nproc-per-node; each process needs its own RANK); read "
    "{culprits:its log|their logs}; check from there that MASTER_ADDR and its port answer: `distdiag doctor --reach HOST:PORT`")  # fmt: skip
NOT_CONNECTED = _warning("unknown",
    "all {victims:#} ranks have been in {collective}{at_call} for {waited_s:time} and do not find each other", NO_PROGRESS, "{do}")  # fmt: skip
KEY_LEFT_OUT = _warning("user_code",
    "{culprits} has not set the key '{key}' of a store, for which {waits} waits{at_wait}: the key that it set last is '{last}'{at_last}, and it "
    "waits for '{own}'{at_own}; no rank has moved for {still_s:time}", NO_PROGRESS,
    "see what led {culprits} past that line: {why}, or a condition; set the key on that path, too, or let the error end the rank, and give the waits a timeout")  # fmt: skip
NEVER_JOINED = _warning("user_code",
    "{died}{culprits} {culprits:has|have} not entered {opened}{at_opened}, which {victims} {victims:has|have} in flight; {each} {does}, "
    "and {culprits} {culprits:waits|wait} for {victims:it|them} in {call}{at_call}{implicit} for {waited_s:time}", NO_PROGRESS,
    "{do}")  # fmt: skip
DO_DUMP = (
    "`distdiag dump` saves the stacks of all threads: look for a lock or a native call that two of them need, threads that "
    "communicate at once, or a device that hangs"
)
DO_ORDER = (
    "each of these collectives lacks a rank that is in another of them: let one thread of every rank issue them, in one order, or give each "
    "group its own thread on all ranks; `distdiag dump` saves the stacks of all threads"
)
DO_NO_KEY = "find which rank should set its key before it waits for another's, and give these waits a timeout"
DO_KEYS = "the keys differ between ranks: build them from something that is equal on all (hash() of a string is not: it is salted per process)"
DO_DIED = (
    "fix that error on {ranks}; let a thread that fails end its rank, or report it to the main thread of each rank"
)
DO_ABSENT = "find what keeps {ranks} from {call}: a thread that has not started, or that returned before it"
OPEN = ", with {call}{site} in flight, which {ranks} {ranks:has|have} not entered"
DO_OPEN = "{ranks} must enter {call}, too, or no rank may: {why}"
DO_GONE = (
    "see what ended that process (what it printed; `dmesg -T | grep -i oom`); if the rank waits for it, let the rank fail with it: look "
    "at is_alive() or the exit code, and give the wait a timeout"
)
DO_IMPORT = (
    "if that thread or process imports the same module, or a name of it, it waits until this import ends: start none while a module is imported, "
    "but in a function that is called later"
)
DO_LEFT = "let all ranks leave that loop in the same round: let them decide together when it ends (all_reduce a flag)"
DO_POLL = "find who ends the loop `{loop}`: it may have failed, or caught an exception and gone on"
DO_POLL_FILE = f"{DO_POLL}; or it makes another file: compare the path on the ranks"
DO_POLL_GONE = (
    "find who should remove the file that `{loop}` tests: a lock file stays if its process was killed; look at its age and its "
    "owner, remove it if that has gone, and lock with `fcntl.flock`, which ends with its process"
)
_LEFT_OUT = (
    "{culprits} may have left out what {victims} {victims:%s} for, at `{why}`{at_why}; {victims} {victims:is|are} in %s"
    "`{text}`{at_text}, and {culprits} has gone on to {call}{at_call}{implicit}, where it has waited {waited_s:time}"
)
POLLED = _warning("user_code", _LEFT_OUT % ("polls|poll", "the loop "), WAIT_OF,
    "see whether `{why}`{at_why} led {culprits} past it, and let it tell the others then (broadcast); poll with a time limit")  # fmt: skip
KEY_UNSET = _warning("user_code", _LEFT_OUT % ("waits|wait", ""), WAIT_OF,
    "see whether `{why}`{at_why} led {culprits} past it, and set the key on that path, too")  # fmt: skip
FED = (
    "it waits{site} for the queue `{name}`, which {fillers} {fillers:fills|fill}{put}, and {fillers:this waits|these wait} for it in turn: a "
    "cycle, unless another thread or process fills that queue"
)
DO_FED = "find what lets {fillers} leave out `{name}.put(…)`{put}{skip}; put something there in any case, or let {ranks} take what there is: get(timeout=…)"
DOES = {a.word: a.does for a in ACTIVITIES if a.does}
DO = {a.word: a.do for a in ACTIVITIES if a.do} | {
    "": "if that work is meant to take so long, do it on all ranks, in a thread, or with a longer timeout of the group; if not, see where it "
    "hangs; `distdiag dump` saves all stacks; this is cleared if the rank continues",
    "sleep": "give that wait an end (a retry, a rate limit, a poll), or do it before the others enter the collective; `distdiag dump` saves all "
    "stacks; this is cleared if the rank continues",
    "loads itself": "check that line of the dataset: with num_workers=0 it runs in the training process",
    "workers": "check that line of the dataset: storage that hangs, a lock, a loop",
    "worker's lock": "a worker that is forked while another thread of its rank holds that lock waits for it for ever: start that thread after the "
    'workers, give the DataLoader multiprocessing_context="forkserver", or take no lock in the dataset',
}
