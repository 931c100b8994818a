"""What lines mean that need no comparison of ranks: lost connections, a start that failed, ranks that a library calls late.

Three tables, one for each stage of `verdict.judge`. Of the rows of a stage, in their order, the first that has facts is the finding;
`_fields` fills in `{…}`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from distdiag.diagnosis.consequences import OF_OTHERS, OTHER_ENDED
from distdiag.diagnosis.known_errors import remedy
from distdiag.diagnosis.model.findings import CollectiveRef, Finding, rank_list
from distdiag.diagnosis.text.incident import verb
from distdiag.diagnosis.text.phrases import NO_PROGRESS_MADE, at, shortened
from distdiag.sources.logs import blamed, meanings
from distdiag.sources.logs.build import ENDED, Fields, fewer, finding, job_ranks, last_words, library, some, who
from distdiag.sources.logs.facts import Collected, Fact
from distdiag.sources.logs.join import HERE, first_site
from distdiag.terms.units import rough_time
from distdiag.terms.untrusted import MAX_RANKS, bounded

_ANY = ("0.0.0.0", "::")
NO_ROUTE = bounded(r"No route to host|Network is unreachable")
_REFUSED = bounded(r"Connection refused")


@dataclass(frozen=True, slots=True)
class Row:
    """One reading of facts.

    Attributes:
        names: Names of the facts; all of them are evidence.
        kind: Kind and cause of the finding.
        blaming: Text and advice if the facts show whom the others waited for.
        pick: Which of the facts count.
        when: True if the row is meant for these facts.
        blames: Return whom the writers waited for, as far as the facts show.
        more: Return what the text may name, besides the fields of the facts and those of all rows.
        subject: Who it is, if the lines name nobody.
    """

    names: str
    kind: str
    text: str
    advice: str
    blaming: tuple[str, str] | None = None
    pick: Callable[[Fact], bool] = lambda _fact: True
    when: Callable[[Sequence[Fact]], bool] = lambda _facts: True
    blames: Callable[[Collected, Sequence[Fact]], Collection[int]] = blamed.nobody
    more: Callable[[Sequence[Fact]], dict[str, str]] = lambda _facts: {}
    subject: str = "a rank"
    op: str = ""
    proved: bool = False


def _reason(regex: re.Pattern[str]) -> Callable[[Sequence[Fact]], bool]:
    """Return a test whether all lines have such a reason."""
    return lambda facts: all(regex.search(f.fields.get("reason", f.text)) for f in facts)


def _where(fact: Fact) -> str:
    """Return on which host, or in which file, a process wrote a line."""
    return fact.who.host or fact.who.label or fact.file or "a host"


_LATE, _LOST, _SET = "timeout/late_rank", "rank_lost/silent", "rank_lost/configuration"
_GLOO = "a gloo collective timed out{after}: {who} waited in it{at}"
_HCCL = "{who} waited in HCCL{at} for a connection that the rank at the other end did not make in time"
_MESH = "gloo on {who}{on} could not connect to every other rank (gloo's reason: {reason})"
_SHARED = "give gloo the interface that the nodes share (GLOO_SOCKET_IFNAME=eth0): a host name that resolves to 127.0.1.1 is the most common reason"
_ITSELF = "gloo on {who}{on} could not connect to a rank at {peer}, an address by which each host means itself"
_OWN_NAME = "{there} own host name must lead to an address that the others reach: `getent hosts $(hostname)` must not print 127.* (/etc/hosts); or set GLOO_SOCKET_IFNAME on all nodes to the interface that they share"
_ENDED = "{first}see how that process ended: its log, exit code, `dmesg -T` for oom-kill or Xid; if it is alive, the network: interface (NCCL_SOCKET_IFNAME), firewall, MTU"
_RDMA = remedy("ibv_modify_qp failed", _ENDED)
_STARTED = "see whether all nodes have started (squeue, kubectl get pods), with one MASTER_ADDR, MASTER_PORT and world size, and whether they reach that port"
_RESOLVE = "correct that name or address there: all nodes need the same MASTER_ADDR (--master-addr, --rdzv-endpoint), which `getent hosts NAME` resolves on each; a temporary failure (-3) is the DNS of that host or pod (/etc/resolv.conf, CoreDNS); on Kubernetes, look at the master's headless service, too"
_ONE_NCCL = "install the same torch (and NCCL) on all nodes, or use one image; compare the lines `NCCL version` of each node (NCCL_DEBUG=VERSION); see that no process of another job uses the same MASTER_ADDR and MASTER_PORT"
_ONE_JAX = "install jax, jaxlib and the plugin in the same versions there as on the other hosts (`pip list | grep -i jax`, one image for all), and compare `nvidia-smi` there: that process did not find its accelerator"
_JOIN_JAX = "see whether all processes that num_processes counts were started, with one coordinator_address that every host reaches (localhost means each host itself), then read the logs of those that did not come"
_UNEVEN = "give all ranks the same number of batches (drop_last, padding), or call hvd.join() at the end of the data; else look for an operation under a condition on the rank; see what {who} did last"
LATE_ROWS = (
    Row("barrier_late barrier_reached", _LATE, "{culprits} did not reach monitored_barrier{at} within {limit}",
        "read the log of {culprits}, and take {its} stack the next time before the barrier times out",
        when=lambda facts: any(f.name == "barrier_late" for f in facts), op="monitored_barrier", proved=True, blames=blamed.late),
    Row("barrier_reached", _LATE, "{who} reached monitored_barrier{at} and then lost rank 0, which knows the missing rank",
        "read rank 0's log: it names the ranks that failed to pass monitoredBarrier; if it has none, rank 0 ended", op="monitored_barrier"),
    *(Row(name, kind, "Horovod's ranks wait for each other: {few} did not submit what the others wait for{few_lack}, and {many} did not submit what the first ones wait for{many_lack}", _UNEVEN.format(who="its ranks"),
        ("{culprits} did not submit what Horovod's other ranks wait for{few_lack}, but another operation{many_lack}, which these did not: the program took another way there", _UNEVEN.format(who="{culprits}")),
        when=lambda facts: bool(blamed.without_each_other(facts)), blames=lambda _found, facts: fewer(blamed.without_each_other(facts)), more=blamed.of_sides) for name, kind in (("horovod_stall", "stall/unknown"), ("horovod_late", _LATE))),
    Row("horovod_stall", "stall/unknown", "{culprits} did not submit what Horovod's other ranks wait for: its stall inspector reports it",
        "see what {culprits} did meanwhile (`py-spy dump --pid …`): a longer branch, no data left, or a collective that only the others call", blames=blamed.missing),
    Row("horovod_late", _LATE, "{culprits} did not submit what Horovod's other ranks wait for",
        "see what {culprits} did meanwhile (`py-spy dump --pid …`): a longer branch, an exception that was caught, or a collective that only the others call", blames=blamed.missing),
    Row("message_size", "rank_lost/crashed", "{who}, while NCCL set up a communicator, received a message of {got} bytes instead of {has}: the two ends have different versions of NCCL, or are of different jobs", _ONE_NCCL,
        when=lambda facts: "op.preamble" not in facts[0].text),
    Row("rank_count", "rank_lost/crashed", "{who}, while NCCL set up a communicator of {has} ranks, heard from a process that gave {got}: the two ends have different versions of NCCL, or are of different jobs", _ONE_NCCL),
    Row("message_size", "mismatch/shape", "{who} received a message of {got} bytes where its own call expected {has}{at}: the ranks called one collective with different sizes",
        "compare the shapes that the ranks pass there: the last, smaller batch, or an input that is padded differently"),
    Row("net_size", "mismatch/shape", "{who}{on_host} and its peer at {all_peers} exchanged messages of different sizes in one collective{at} ({has} and {got} bytes): their calls differ, or their settings or versions of NCCL do{settings}",
        "give all hosts the same NCCL_PROTO, NCCL_ALGO and other NCCL_* variables, and one version of NCCL (NCCL_DEBUG=INFO prints what is `set by environment`); if they have, compare the shapes that the ranks pass there"),
    Row("jax_barrier", _LATE, "processes of JAX waited in vain at its barrier {barrier}{at}: the log does not name those that did not come", _JOIN_JAX,
        ("{culprits} did not come to JAX's barrier {barrier}, where the others waited{at}", _JOIN_JAX), blames=blamed.missing),
    Row("unique_id", _LATE, "rank {awaited} did not reach the first collective of a group, where {who} {waits} for it{at}, inside {within}: they wait there until it has done its work{bar}",
        meanings.GOES_FIRST.format(who="rank {awaited}", where="it"), when=lambda facts: not blamed.lost_store(facts) and any(f.within for f in facts), blames=blamed.first_of_group, more=blamed.of_group),
    Row("unique_id", _LATE, "rank {awaited} did not reach the first collective of a group, where {who} {waits} for it{at} ({reason})",
        "see what rank {awaited} did meanwhile: long work before the first collective (data, a download, a model), an exception, "
        "or a collective that only the others call; give long work a longer timeout in init_process_group", when=lambda facts: not blamed.lost_store(facts), blames=blamed.first_of_group, more=blamed.of_group),
    Row("hccl_wait hccl_heartbeat", _LATE, "{culprits} did not come to HCCL's {tag}, where {who} {waits} for it{at}, and HCCL lost the heartbeat of device {device} on {host}",
        "see how the process of {culprits} on {host} ended: its log and exit code, plog, `dmesg -T`, `npu-smi info`; if it is alive, the network between the hosts",
        when=lambda facts: any(f.name == "hccl_heartbeat" for f in facts) and "awaited" in facts[0].fields and "group" not in facts[0].fields, blames=blamed.awaited_in_world, more=blamed.of_group),
    Row("hccl_wait", _LATE, "{who} {waits} in HCCL's {tag}{at} for rank {awaited} of {group}, which did not come; its rank in the job is not in the log",
        "read the logs of that group's ranks for an error before this one; give the logs of all ranks",
        ("{culprits} did not come to HCCL's {tag}, where {who} {waits} for it{at}",
         "read the log of {culprits}, and take {its} stack the next time: another failure there, a longer branch, or another call"), blames=blamed.awaited_in_world, more=blamed.of_group),
    *(Row("hccl_socket", _LATE, f"{_HCCL}{more}{{bar}}", do, (f"{_HCCL}{more}; {{culprits}} {{reports}} nothing, and may be what they waited for{{bar}}", do), blames=blamed.silent,
        when=lambda facts, inside=bool(more): inside <= any(f.within for f in facts)) for more, do in (
            (", inside {within}: they wait there until the rank that goes first has done its work", meanings.GOES_FIRST.format(who="that rank", where="it") + "; HCCL_CONNECT_TIMEOUT (120 s unless set) is the limit of this wait"),
            ("", "read the logs of the ranks that do not report it: one failed, or is late (HCCL_CONNECT_TIMEOUT is the limit); then the network of the NPUs: `hccn_tool`"))),
    Row("load_wait", _LATE, "{who} had loaded its part of the model, and waited{at} in vain for other ranks to load theirs",
        "read the logs of the other nodes' ranks: one failed there, or its storage is slow; {who} is not the cause"),
    Row("jax_backend jax_key", "rank_lost/crashed", "{who} found no accelerator: {what}; it then waited in vain for other processes of JAX, which have other devices", _ONE_JAX,
        when=blamed.alone_without_device, blames=blamed.themselves),
    Row("jax_key jax_backend", _LATE, "{culprits} did not publish its devices to JAX's other processes, where {who} {waits} for it{at} ({key}); {culprits} itself printed: {printed}",
        _ONE_JAX,
        when=lambda facts: blamed.own_of_awaited(facts) != "", blames=blamed.without_key, more=lambda facts: {"printed": shortened(blamed.own_of_awaited(facts), 160)}),
    Row("jax_key", _LATE, "{culprits} did not publish its devices to JAX's other processes, where {who} {waits} for it{at} ({key})",
        "read the log of {culprits}: it failed, was late, or found other devices (platform) than the others: `python -c 'import jax; print(jax.devices())'` there", blames=blamed.without_key),
    Row("ep_timeout", "stall/unknown", "DeepEP timed out on {who}{at}: what the other ranks send did not arrive",
        "see first whether a rank of another log failed, or came later than the timeout (it still compiled or loaded); if all of them waited, the path of NVSHMEM: "
        "versions of DeepEP and NVSHMEM that fit, IBGDA, `ibstat` on all hosts",
        ("DeepEP timed out on {who}{at}; {culprits} reported no timeout, and may be what they waited for",
         "read the log of {culprits}, and take {its} stack the next time: it failed, or came later than the timeout"), blames=blamed.silent),
    Row("rpc_late", _LATE, "{who} waited for a worker's answer{call}{at} until the timeout; which worker did not answer is not in the log",
        "take the stacks of all workers the next time, before the timeout (`py-spy dump --pid …`), and read their own logs: the waiting process is not the cause"),
)  # fmt: skip
START_ROWS = (
    Row("ras_rank ras_count ras_group", _LATE, "NCCL's RAS reports that {behind} of a communicator of {size} ranks launched collectives up to number {seq} only, the others up to number {most}: {where}",
        "see where that process is while it hangs (`py-spy dump --pid {pid}` on {host}), and read its log: it does not make the call in which the others wait",
        when=lambda facts: bool(blamed.ranks_behind(facts)[0]), blames=blamed.of_behind, more=blamed.of_ras),
    Row("engine_watchdog", "stall/unknown", "{who} made no progress{stuck}, and SGLang's watchdog ended the server",
        "take the stacks of all schedulers the next time before that (`py-spy dump --pid …`), and look at their GPUs (`dmesg -T | grep -i xid`): a collective that not all of them entered, or a kernel that hangs"),
    Row("npu_task", "stall/unknown", "a task on the NPU of {who} did not end in time{at}",
        "read the logs of the other ranks first: a collective waits for a rank that failed or is late; then the NPU's own log (plog, `npu-smi info`)"),
    Row("monitor_late", "stall/unknown", "{culprits} gave its monitor no sign of life{stuck}, so the monitor ended {its} process",
        "it hung, or worked for longer than the monitor allows: take the stacks of that process the next time (`py-spy dump --native --pid …`, before the monitor's limit), look at its GPU (`dmesg -T | grep -i xid`); if that work takes so long as a rule, raise the limit, or report a heartbeat in it", blames=blamed.missing),
    Row("stuck_watchdog", "stall/unknown", "the watchdog of {who} made no progress{stuck}: a call to CUDA or NCCL does not return there, or a thread holds the GIL in one",
        "take the stacks of that process with native frames the next time (`py-spy dump --native --pid …`, gdb); look at its GPU (`dmesg -T | grep -i xid`)", blames=blamed.stuck),
    Row("no_host", _SET, "the job, or a part of it, did not start: ssh could not resolve the host name {all_peers}",
        "check `getent hosts {peer}` where the launcher runs, and the hostfile (mpirun --host): that node must exist under this name; on Kubernetes, its pod must run before the launcher starts (`kubectl get pods`), with a headless service for its name"),
    Row("not_started", _SET, "the job, or a part of it, did not start{there}: {what}",
        "compare that node's clock (`chronyc tracking`) and its munge (`munge -n | ssh NODE unmunge`) with the controller's; start again without the node",
        when=lambda facts: any("credential" in f.text for f in facts)),
    Row("not_started", _SET, "the job, or a part of it, did not start{there}: {what}",
        "the image could not be fetched there: check its name and tag, the credentials (imagePullSecrets) and the rate limit of its registry, and that this node reaches it and has space: `kubectl describe pod`",
        when=lambda facts: "pull" in facts[0].fields["what"]),
    Row("not_started", _SET, "the job, or a part of it, did not start{there}: {what}",
        "give the cluster what the pod requests, or request less: free it (other jobs, the quota), correct node selector and tolerations; `kubectl describe pod` shows the request; the other pods wait for it, so let a gang scheduler start all or none",
        when=lambda facts: all("nodes are available" in f.fields["what"] for f in facts)),
    Row("not_started", _LOST, "the job, or a part of it, did not start{there}: {what}",
        "correct that on the node it names, then start again: the environment and its paths must be the same on all nodes, and the request must fit the cluster"),
    Row("not_scheduled", _SET, "the job waits for resources, and the log shows no rank that ran: {what}",
        "see with `ray status` what the cluster has, and which trial, job or actor holds it: free that, or ask for no more (num_workers, resources_per_worker)"),
    Row("store_connect", _SET, "{who} could not reach the job's store at {peer}:{port}{at}: {why}{masters}",
        "start with the DNS of the host or pod that wrote {file} (/etc/resolv.conf, CoreDNS, a network policy): a temporary failure there is no wrong name, least of all if other ranks joined; else see MASTER_ADDR there, and on Kubernetes the master's headless service",
        when=lambda facts: facts[0].fields.get("why", "").startswith("the name") and "Temporary failure" in facts[0].fields["why"], subject="a node", more=lambda facts: {"file": facts[0].path.name}),
    Row("store_connect", _SET, "{who} could not reach the job's store at {peer}:{port}{at}: {why}{masters}",
        _RESOLVE, when=lambda facts: facts[0].fields.get("why", "").startswith("the name"), subject="a node"),
    Row("store_connect", _SET, "{who} could not reach the job's store at {peer}:{port}{at}: {option} is {peer}, which means each of the {of_nodes} nodes itself",
        "give {option} (MASTER_ADDR) on all nodes the address or name of the first node, by which the others reach it", when=lambda facts: {"of_nodes", "option"} <= facts[0].fields.keys(), subject="a node"),
    Row("store_connect", _SET, "{who} could not reach the job's store at {peer}:{port}{at}: the first of {of_nodes} nodes was named {peer}, which means each node itself",
        "give the first node a host name that the others resolve to its address (`hostname`, /etc/hosts), or pass it to torchrun there as --local-addr; if {peer} is your MASTER_ADDR, give that node's address instead",
        when=lambda facts: "of_nodes" in facts[0].fields, subject="a node"),
    Row("store_connect", _SET, "{who} could not reach the job's store at {peer}:{port}{at}: {why}{masters}",
        "give all nodes one MASTER_ADDR and MASTER_PORT (--master-addr, --master-port), those of the first node",
        when=lambda facts: bool(facts[0].fields.get("masters")), subject="a node"),
    Row("store_connect", _LOST, "{who} could not reach the job's store at {peer}:{port}{at}: {why}{masters}",
        "check that {peer} is the first node, and that rank 0 runs there: {why}; `nc -vz {peer} {port}`",
        when=lambda facts: "why" in facts[0].fields and facts[0].fields["peer"] not in HERE, subject="a node"),
    Row("store_connect", _LOST, "{who} could not reach a store at {peer}:{port}{at}: nobody listens there on its own host",
        "that address means the host itself: see whether the process that serves the store (rank 0, or the server of another group, e.g. vLLM's) runs on this host and has not failed; if it runs on another one, give its address",
        when=lambda facts: facts[0].fields["peer"] in _ANY, subject="a node"),
    Row("store_connect", _LOST, "{who} could not reach the job's store at {peer}:{port}{at}: rank 0, or torchrun's first node, does not listen there",
        "the address is this node's own: on several nodes set MASTER_ADDR (--rdzv-endpoint) to the first node; on one, see why rank 0 did not start",
        when=lambda facts: facts[0].fields["peer"] in HERE, subject="a node"),
    Row("store_connect", _LOST, "{who} could not reach the job's store at {peer}:{port}{at}: the log does not show whether nothing listens there, or the way there is closed",
        "see whether {peer} is the first node's address, whether rank 0 (torchrun there) has started and not failed, and whether this node reaches it: `nc -vz {peer} {port}` (refused: nothing listens there; no answer: a firewall, a security group, a wrong address, or the host is down)", subject="a node"),
    Row("clients", _SET, "{left} of {expected} ranks had not joined{after}{at}: {unresolved}", _RESOLVE,
        ("{culprits} had not joined{after}{at}: {unresolved}", _RESOLVE), when=lambda facts: "unresolved" in facts[0].fields, blames=blamed.absent_clients),
    Row("clients", _SET, "{left} of {expected} ranks had not joined{after}{at}", _STARTED,
        ("{culprits} had not joined{after}{at}: the {joined} of {expected} ranks that had are those that announced themselves in the log{launched}",
         "start as many processes as the job has ranks (num_nodes × devices): with Slurm, nodes × --ntasks-per-node, and no smaller --ntasks, or one task a node with a launcher that starts its ranks (torchrun); else " + _STARTED),
        when=lambda facts: "launched" in facts[0].fields, blames=blamed.absent_clients),
    Row("clients", _LOST, "{left} of {expected} ranks had not joined{after}{at}: the log does not say which", _STARTED,
        ("{culprits} had not joined{after}{at}, as far as the log shows: {joined} of {expected} ranks had, and it has lines of all others", _STARTED), blames=blamed.absent_clients),
    Row("store_barrier store_waiting", _SET, "{joined} processes have joined a job of {expected} ranks: it was launched twice, or processes of an earlier one use the same store",
        "end the processes of earlier launches on all nodes, and give this one another --master-port (--rdzv-id)", pick=lambda f: (f.number("joined") or 0) > (f.number("expected") or 0), blames=blamed.absent_at_barrier),
    Row("store_barrier", _LOST, "{left} of {expected} ranks did not reach init_process_group or new_group in time: the log does not say which",
        "see the logs of all nodes for a rank that failed or is still busy; all ranks must make every new_group call",
        ("{culprits} did not reach init_process_group or new_group in time{at}: {joined} of {expected} ranks had joined",
         "read the log of {culprits}: whether it has started, failed before that call, or is still busy; all ranks must make every new_group call"), blames=blamed.absent_at_barrier),
    Row("name", _SET, "{who} could not resolve a host name{at}: the job's first node, or its name, does not exist (yet)",
        _RESOLVE, subject="a node"),
    Row("full_mesh loopback", _LOST, "gloo on {who} could not connect to every other rank: {loops} cannot resolve its own host name, so gloo listens there on the loopback address, which no other host reaches",
        "set GLOO_SOCKET_IFNAME on all nodes to the interface that they share, in the environment of the processes themselves (with Ray: before `ray start`); or give that host its own name and address (/etc/hosts): `getent hosts $(hostname)`",
        when=lambda facts: len({_where(f) for f in facts}) > 1 and {f.name for f in facts} == {"full_mesh", "loopback"}, subject="a node", more=lambda facts: {"loops": some([_where(f) for f in facts if f.name == "loopback"])}),
    Row("full_mesh", _SET, _ITSELF + ": the host of that rank gave it as its own", _OWN_NAME.format(there="each host's"),
        (_ITSELF + ": {culprits}, whose connections were then closed, most likely gave it", _OWN_NAME.format(there="on the host of {culprits}, its")),
        pick=lambda f: f.fields.get("peer", "").startswith("127."), blames=blamed.gave_loopback, subject="a node"),
    Row("full_mesh", _LOST, _MESH, _SHARED, pick=lambda f: "closed by" not in f.fields["reason"], subject="a node"),
    Row("full_mesh", _LOST, _MESH, _SHARED, subject="a node"),
    Row("keep_alive rendezvous", _SET, "torchrun lost its rendezvous: its port was in use at the start (line {taken}), so it used the store that another launcher serves there, most likely one of another job, and that one ended",
        "give each job on this host its own store: torchrun --standalone, or another port (--rdzv-endpoint=localhost:0, --master-port); then resume from the newest checkpoint; if both launchers are of this job, read the other one's log",
        when=lambda facts: "taken" in facts[0].fields, subject="a node"),
    Row("keep_alive", _LOST, "torchrun on {nodes} lost the rendezvous: the node that serves it{server} could not be reached any more: it ended, or its network failed{absent}",
        "read that node's log (it is that of --rdzv-endpoint), its `dmesg -T` and the scheduler's record: these lines only follow from what happened there"),
    Row("rendezvous", _LOST, "{who} did not complete torchrun's rendezvous ({what}){came}",
        "see whether all nodes have started with one --rdzv-endpoint, --rdzv-id and --nnodes, and reach that address", subject="a node"),
)  # fmt: skip
LOST_ROWS = (
    Row("efa", _LOST, "NCCL on {who} got no answer from {all_peers} over EFA: {what}",
        "look at that instance: its process, `dmesg -T`, its status in the cloud's console; if it is well, the security group and the subnet"),
    Row("efa_send", _LOST, "NCCL on {who} could not reach others over EFA: {what}",
        "if no step has worked, it is most often the security group of the instances: it must allow all traffic, in and out, from itself (not only TCP); then all of them in one subnet, `fi_info -p efa`, and one version of aws-ofi-nccl, libfabric and the EFA driver; else see whether a peer's process ended first", when=lambda facts: "remote" in facts[0].text),
    Row("efa_send", _LOST, "NCCL on {who} failed to send over EFA: {what}", "see whether a peer's process ended first, then `fi_info -p efa`, the versions of aws-ofi-nccl, libfabric and the EFA driver, and `dmesg -T`"),
    Row("ray_head", _LOST, "Ray lost its head node (GCS): it ended, or somebody stopped it",
        "see the head's gcs_server.out, its memory and `dmesg -T`, and whether `ray stop` was called"),
    Row("coordination", _LOST, "{nodes} sent no heartbeats to the coordination service any more: it ended, or hangs",
        "read the log of {nodes}: its failure came before this message, which the others only repeat", blames=blamed.unhealthy),
    Row("ib", "rank_lost/crashed", "NCCL's RDMA failed on {who} itself, not at its peer {all_peers} (status {status}: {meaning})",
        "GPU memory could not be registered or read there: the driver and nvidia-peermem or DMA-BUF, IOMMU and ACS, a buffer freed too early; run once with NCCL_NET_GDR_LEVEL=LOC, and see `dmesg -T | grep mlx5`",
        when=lambda facts: facts[0].fields["status"] in meanings.LOCAL, more=blamed.of_ib),
    Row("ib", _LOST, "NCCL on {who} lost its RDMA connection to {all_peers}{over} (status {status}: {meaning}){one_end}",
        "check that link{ends}: `ibstat`, `perfquery`, switch counters, RoCE's GID and flow control (NCCL_IB_GID_INDEX); see first whether the peer's process ended", more=blamed.of_ib),
    Row("ib_setup", "rank_lost/crashed", "{who}{on_host} could not connect over RDMA{at}: its device {dev} has no address at GID index {index} (local GID ::)",
        "see `show_gids` and `ip addr` there: the interface of {dev} has no IP address, or its table differs from the other hosts' (a container without that interface); give it one, else leave the device out on all hosts (NCCL_IB_HCA=^{dev}), or let NCCL choose (unset NCCL_IB_GID_INDEX)",
        pick=lambda f: f.fields.get("own") == "::", subject="a process", blames=blamed.themselves),
    Row("ib_setup", _LOST, "{who}{on_host} could not connect over RDMA{at}: the device at the other end of {dev} has no address at its GID index (remote GID ::), and the log does not show that end",
        "see `show_gids` and `ip addr` on the other hosts, and compare them with this one; leave a device without an address out on all hosts (NCCL_IB_HCA=^{dev})",
        pick=lambda f: f.fields.get("remote") == "::", subject="a process", blames=blamed.themselves),
    Row("ib_setup", _LOST, "{who}{on_host} could not connect over RDMA{at}: device {dev}: {what} (local GID {own}, remote GID {remote})", _RDMA,
        subject="a process", pick=lambda f: "own" in f.fields, blames=blamed.themselves),
    Row("ib_setup", _LOST, "{who}{on_host} could not connect over RDMA{at}: device {dev}: {what}", _RDMA, subject="a process", blames=blamed.themselves),
    Row("gloo_timeout", _LATE, _GLOO + ", inside {within}: they wait there until the rank that goes first has done its work",
        meanings.GOES_FIRST.format(who="that rank", where="it"), when=lambda facts: any(f.within for f in facts), blames=blamed.silent),
    Row("gloo_timeout closed store_lost lost", _LATE, _GLOO + "; the log does not show which rank they waited for",
        "give the logs of all ranks; with TORCH_DISTRIBUTED_DEBUG=DETAIL a monitored_barrier before the collective names the missing rank",
        (_GLOO + "; {culprits} reported no timeout, and may be what they waited for{bar}",
         "{do_bar}read the log of {culprits}, and take {its} stack the next time, to see whether {they} came to that call"),
        when=lambda facts: any(f.name == "gloo_timeout" for f in facts), blames=blamed.silent),
    Row("unique_id", _LOST, "{who} lost the store while a communicator was made{at} ({reason}): the process that serves it, rank 0 or torchrun's, ended first",
        "read the log of rank 0 and of its node's launcher: its failure came before these", blames=blamed.first_of_group, more=blamed.of_group),
    Row("pipe_lost", "rank_lost/crashed", "{who} lost the process at the other end of a pipe{at}: a worker of a loader, or another child, had ended",
        "see how that child ended: what it printed before, `dmesg -T | grep -i oom`, /dev/shm, `ulimit -n`; run once with num_workers=0 to see a loader's own exception", subject="a process"),
    Row("closed", _SET, "{who} could not make a connection{to}{at}: that is {bridge}, which other hosts cannot reach",
        "set NCCL_SOCKET_IFNAME{use}: NCCL has to use an interface by which the other hosts reach it", pick=lambda f: "bridge" in f.fields, subject="a process", more=lambda facts: {"use": facts[0].fields.get("use", "")}, blames=blamed.silent_of_job),
    Row("closed store_lost lost", _SET, "{who} could not make a connection{to}{at}: a firewall rejects it, or no route leads there",
        "open the ports between these hosts (iptables, firewalld, security groups: NCCL and gloo use any port), and see the route: `ip route get ADDRESS`; or choose another interface: NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME", when=_reason(NO_ROUTE), subject="a process", blames=blamed.silent_of_job),
    Row("closed store_lost lost", _LOST, "{who} could not make a connection{to}{at}: nothing listens there (any more), or a firewall is between them{nothing}", _ENDED, when=_reason(_REFUSED), subject="a process", blames=blamed.silent_of_job),
    Row("closed store_lost lost", _LOST, "{who} lost the job's store{to}{at}: the process that serves it, rank 0 or torchrun's, had ended{nothing}", _ENDED,
        when=lambda facts: all(f.name == "store_lost" for f in facts), subject="a process", blames=blamed.silent_of_job),
    Row("closed store_lost lost", _LOST, "{who} lost a connection{to}{at}: the process at the other end had ended, or the network broke{nothing}", _ENDED, subject="a process", blames=blamed.silent_of_job),
    Row("ccl_thread nccl_error", _SET, "oneCCL on {who} could not start its worker threads{at}: pthread_create returns {errno}",
        "22 (EINVAL): it is bound to a core that this process may not use: set CCL_WORKER_AFFINITY to cores of each rank's cpuset (`taskset -cp PID`, Slurm's --cpus-per-task, the container's cpuset), or give each rank more cores, or fewer workers (CCL_WORKER_COUNT=1); 11 (EAGAIN): `ulimit -u` and pids.max", when=lambda facts: any(f.name == "ccl_thread" for f in facts)),
    Row("dist_error", _LOST, "{who} stopped waiting{at}, as another process of the job had ended or failed: {what}",
        "read the lines before it, the workers' own logs and `dmesg -T` of their hosts: this message only follows from what happened there", when=lambda facts: all(OF_OTHERS.search(f.text) and "CCL" not in f.text for f in facts)),
    Row("nccl_error own_error dist_error", "rank_lost/crashed", "HCCL failed on {who}{at}: {what}",
        "read the lines after it (EI…, EJ…, ERR…): they have the reason; often another rank failed first", when=lambda facts: facts[0].fields.get("what", "").startswith(("Hccl", "Acl", "acl", "[ERROR] HCCL")), more=blamed.of_library),
    Row("nccl_error own_error dist_error nccl_warning", "rank_lost/crashed", "{library} failed on {who}{on_host}{at}: {what}: {warning}",
        "NCCL's warning is the reason, the exceptions follow from it: compare it with the first NCCL WARN or `Last error` of the other ranks", when=lambda facts: len({f.name == "nccl_warning" for f in facts}) == 2, more=blamed.of_library),
    Row("nccl_error own_error dist_error", "rank_lost/crashed", "{library} failed on {who}{at}: {what}", "read the first |CCL_ERROR| line of each process: it has the reason, the others follow",
        when=lambda facts: any("|CCL_ERROR|" in f.text for f in facts), more=blamed.of_library),
    Row("nccl_error own_error dist_error", "rank_lost/crashed", "{library} failed on {who}{at}: {what}", "run again with CCL_LOG_LEVEL=info, which prints the reason", when=lambda facts: library(facts[0]) == "oneCCL", more=blamed.of_library),
    Row("nccl_error own_error dist_error", "rank_lost/crashed", "{library} failed on {who}{at}: {what}", "{again}", more=blamed.of_library),
    Row("timeout_cut", _LATE, "the log ends inside a message of {who}, which reports that a collective timed out: which one, and whom it waited for, is not in it",
        "give the rest of this log, and the logs of all ranks"),
    Row("store_wait", _LATE, "{who} waited {limit} in the job's store{at} for {key}, which no process has set",
        "see what the other side did: the rank or service that sets this key has failed, or never made the matching call",
        ("{culprits} did not join a gloo group{at} in {limit}, where {who} waited",
         "see whether {culprits} has started, what it did before that call, and whether all ranks make it"), blames=blamed.owner_of_key),
)  # fmt: skip


def first_of(rows: Sequence[Row], found: Collected) -> list[Finding]:
    """Return the finding of the first row that fits; empty if none does."""
    for row in rows:
        names = row.names.split()
        facts = [f for name in names for f in found.named(name) if row.pick(f)]
        # flushed: another completion has the reason; logged by oneCCL: the exception says more
        facts.sort(key=lambda f: f.fields.get("status") == "5" or "|CCL_ERROR|" in f.text)
        if any(f.name != "nccl_warning" and not OTHER_ENDED.search(f.text) for f in facts):
            facts = [f for f in facts if not OTHER_ENDED.search(f.text)]  # the rest only follows from another's failure
        if facts and row.when(facts):
            return [_finding(found, row, facts)]
    return []


def _finding(found: Collected, row: Row, facts: list[Fact]) -> Finding:
    culprits = sorted(row.blames(found, facts))
    victims = sorted(blamed.waiting(found, facts).difference(culprits))
    text, advice = row.blaming if row.blaming is not None and culprits else (row.text, row.advice)
    fields = _fields(facts, culprits, victims, row.subject)
    bar = found.moving(facts)
    fields |= {
        "bar": f"; a progress bar moved on while they waited ({bar})" if bar else "",
        "do_bar": f"{meanings.GOES_ON}; else " if bar else "",
    }
    fields |= row.more(facts) | _of_job(found) | {"settings": _settings(found)}
    kind, _, cause = row.kind.partition("/")
    waited = row.kind in (_LATE, "stall/unknown") and not fields["printed"]
    went_on = kind == "rank_lost" and found.steps
    return finding(
        kind,
        cause,
        facts,
        text.format_map(fields) + (last_words(found, culprits) if waited else ""),
        remedy(fields["warning"], advice.format_map(fields)),
        culprits=culprits,
        victims=victims,
        proved=row.proved,
        cost=ENDED if went_on else NO_PROGRESS_MADE,
        collective=CollectiveRef(row.op, "") if row.op else None,
    )


def _of_job(found: Collected) -> dict[str, str]:
    """Return which nodes came to a rendezvous, if some did not; the host of the job's store; the ranks of which no log has a line."""
    came, wanted = found.nodes_came, found.nodes_wanted
    shown = f"; of the {wanted:,} nodes that it needs, the log shows {len(came):,} that came: {some(sorted(came))}"
    absent = sorted(set(range(min(max(found.ranks, default=0), MAX_RANKS))) - found.ranks)
    without = f"; no log has a line of {rank_list(absent)}" if absent else ""
    printed = found.interfaces or found.settings  # by lines of NCCL's level INFO
    again = "NCCL_DEBUG is on, and no line has a warning of NCCL: give the logs of all ranks, one of them may have it"
    server = f" ({min(found.servers)})" if len(found.servers) == 1 else ""
    return {"came": shown if 0 < len(came) < wanted else "", "server": server, "absent": without} | {
        "again": again if printed else "run again with NCCL_DEBUG=WARN, which prints the reason"
    }


def _settings(found: Collected) -> str:
    """Return which settings of NCCL differ between the hosts that print theirs."""
    hosts = sorted(found.settings.keys() | found.interfaces.keys())
    texts = []
    for key in sorted({key for of_host in found.settings.values() for key in of_host} - {"NCCL_SOCKET_IFNAME"}):
        values = [found.settings.get(h, {}).get(key, "not shown") for h in hosts]
        if len(set(values)) > 1:
            texts.append(f"{key} is {some([f'{value} on {h}' for h, value in zip(hosts, values, strict=True)])}")
    return f"; {some(texts)}" if texts else ""


def _fields(facts: Sequence[Fact], culprits: Collection[int], victims: Collection[int], subject: str) -> Fields:
    """Return what a row's text may name: the first fact's fields, and what all facts together give."""
    first, by = facts[0].fields, facts[0].who
    out = Fields({k: shortened(v, 160 if k == "what" else 120) for f in reversed(facts) for k, v in f.fields.items()})
    by_ranks = [f for f in facts if f.rank is not None and not f.of_node] or facts  # whom the text names
    other = (f for f in by_ranks if "of_host" in f.fields or f.fields.get("peer", "").rstrip(".,") not in HERE)
    peers = [peer for f in other if (peer := f.fields.get("peer", "").rstrip(".,"))]
    of_host = {f.fields.get("peer"): f.fields.get("of_host", "") for f in facts}
    most = [p + of_host.get(p, "") for p, _ in Counter(peers).most_common(3)]
    limit, stuck, after = (blamed.highest(facts, key) for key in ("limit", "stuck_s", "after"))
    joined, expected = blamed.highest(facts, "joined") or 0, facts[0].number("expected") or 0
    ranks = tuple(victims) or job_ranks(facts)
    there = by.label or by.host or first.get("pod") or first.get("host") or by.process
    reports = verb(culprits, "reports", "report")
    named = rank_list(victims) if victims else who(facts, subject)
    out |= {
        "who": named,
        "at": at(first_site(facts)),
        "culprits": rank_list(culprits),
        "its": verb(culprits, "its", "their"),
        "they": verb(culprits, "it", "they"),
        "reports": reports,
        "nothing": f"; {rank_list(culprits)} {reports} nothing" if culprits else "",
        "waits": verb(ranks or facts[:1], "waits", "wait"),
        "within": next((f.within for f in facts if f.within), ""),
        "call": f" to {first['what']}" if "what" in first else "",
        "limit": rough_time((limit or 0) / 1e3),
        "stuck": f" for {rough_time(stuck)}" if stuck is not None else "",
        "after": f" after {rough_time(after if after is not None else (limit or 0) / 1e3)}" if after or limit else "",
        "joined": f"{joined:,}",
        "expected": f"{expected:,}",
        "left": f"{expected - joined:,}",
        "to": f" to {', '.join(most)}" if most else "",
        "first": f"look at {', '.join(most)} first: " if most else "",
        "all_peers": some([p + of_host.get(p, "") for p in peers]),
        "nodes": some([f.fields["node"] for f in facts if "node" in f.fields]),
        "there": f" on {there}" if there else "",
        "on": f" on {some(names)}" if all(names := [f.who.host for f in facts]) else "",
        "on_host": f" on {min(hosts)}"
        if len(hosts := {f.who.host for f in facts if f.who.host}) == 1 and min(hosts) not in named
        else "",
        "warning": shortened(next((f.fields["what"] for f in facts if f.name == "nccl_warning"), ""), 160),
    }
    return out
