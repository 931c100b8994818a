"""`distdiag attach`: the verdict on a running job that was not recorded."""

from __future__ import annotations

import click

from distdiag.cli.options import ascii_option, fail_on_option
from distdiag.errors import DistdiagError
from distdiag.streams import say_json, say_wrapped


@click.command()
@click.argument("pids", nargs=-1, metavar="[PID…]", type=click.IntRange(min=1))
@click.option(
    "--job", metavar="NAME", help="The job with this run id, Slurm job id, MASTER_PORT, script or launcher's pid."
)
@click.option("--here", is_flag=True, help="The only job that runs here as this user.")
@click.option("--ras", is_flag=True, help="Ask NCCL's RAS for counts, too (NCCL 2.28.9 or newer).")
@click.option("--json", "as_json", is_flag=True, help="Print one object (distdiag.findings/1).")
@fail_on_option("Exit 1 if a finding is at least this bad.", "error", "warning", "never")
@ascii_option
def command(pids: tuple[int, ...], job: str | None, here: bool, ras: bool, as_json: bool, fail_on: str) -> int:
    """Judge a running job that was not recorded, by the stacks of its ranks on this host.

    PID is a launcher (torchrun, the script that spawns) or any rank: all ranks of its job on this host are
    sampled with py-spy, for about three seconds. Each is stopped for some milliseconds per sample; nothing in
    it changes. Stacks have no counts, so what they show is suspected, not proved: start the next run
    with DISTDIAG=1 to know. Where the job serves its flight recorder (TORCH_WORKER_SERVER_SOCKET,
    TORCH_NCCL_DEBUG_INFO_PIPE_FILE), a suspicion is checked with its counts.

    Exit codes: 0 nothing at or above --fail-on, 1 found, 2 bad pid or name, or no permission, 3 not all ranks
    are on this host, 4 no job.
    """
    from distdiag.attach import ranks
    from distdiag.attach.sample import py_spy
    from distdiag.attach.verdict import attach
    from distdiag.cli.verdict import exit_code, print_text

    if bool(pids) + (job is not None) + here != 1:
        hint = "`distdiag attach --here` takes the only job of this user"
        raise DistdiagError("name the job: PID…, --job NAME or --here", hint)
    py_spy()
    chosen = ranks.chosen(pids, job, ranks.jobs_here())
    if not as_json:
        say_wrapped(chosen.described, flush=True)
    report = attach(chosen, ras)
    if as_json:
        say_json(report)
    else:
        print_text(report)
    return int(exit_code(report, fail_on))
