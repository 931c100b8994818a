"""Wording of stalls: what a rank that others wait for does, and what to do about it."""

from __future__ import annotations

DOES = {
    "stdin": "waits for standard input",
    "gil_held": "is stuck in C code that holds the GIL",
    "lock": "waits for a lock",
    "queue": "waits on a queue",
    "socket": "waits on a socket, a pipe or a key of a store",
    "process": "waits for a process that it started",
    "worker": "waits for a thread or process that it started",
    "event_loop": "waits in an event loop in which no task can run",
    "data": "waits for its data loader",
    "checkpoint": "writes a checkpoint",
    "sleep": "sleeps",
    "device": "waits for its own device, which is busy with other work",
    "user_code": "is busy in its own code",
}
DO = {
    "stdin": "remove the prompt, or answer it before the launch; only rank 0 may ask, and the others must not wait for it",
    "data": "check the loader's workers of that rank (dead, stuck on storage?); `distdiag dump` shows them",
    "lock": "find who holds the lock; hold no lock across a collective",
    "queue": "find who should fill or drain that queue",
    "socket": "check the other end of that connection (who should send, or set the key?), and give it a timeout",
    "process": "see what that process does (`ps --ppid PID`), and give the call a timeout; or let all ranks continue without it",
    "worker": "check that thread or process: it may have ended by an error that no log shows, been killed, or wait for this rank; "
    "`distdiag dump` shows the threads, `ps --ppid PID` the processes",
    "event_loop": "find the task that it awaits and what that task awaits (asyncio.all_tasks(), PYTHONASYNCIODEBUG=1): a task that "
    "failed without being awaited, a queue that no task fills, a peer that does not answer",
    "device": "check what was launched before that line: a long kernel, a copy, a device shared with another process",
    "gil_held": "check the native call at that line",
    "checkpoint": "wait, or write checkpoints asynchronously",
}
DEFAULT_ADVICE = "check that line; `distdiag dump` saves all stacks; this is cleared if the rank continues"
NOBODY = (
    "`distdiag dump` saves the stacks of all threads: look for a lock or a native call that two of them need, threads that communicate "
    "at once, or a device that hangs"
)
