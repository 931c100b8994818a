"""Ports and connections that were lost."""

from __future__ import annotations

from distdiag.sources.logs.message import C, F, H, Meaning, V, message

_PEER = r"(?P<peer>[^\s<>\]]+?)(?:<\d+>|\]?:\d+|\s|$)"

MESSAGES = (
    message("port_active", F, ("ort active", r"NCCL WARN NET/\w+ ?: (?:(?P<dev>\S{1,40}) )?Got async event : port active"),
       ("ink ", r"\b(?:mlx|bnxt|ice|ixgbe|i40e|ib|en|et|bond)\w* .{0,40}?(?P<dev>[\w.]{2,40}): (?:Port: \d+ |NIC )?Link (?:is )?(?:ACTIVE|[Uu]p)\b")),
    message("port_module", H, ("Port module event", r"\bmlx5_core (?P<device>[\da-f:.]{7,16}): Port module event\[error\]: module \d{1,3}, (?P<what>\w[^(]{2,80}?)\s*(?:\(|$)")),
    message("port_error", C, ("ink ", r"\b(?P<what>(?:mlx|bnxt|ice|ixgbe|i40e|ib|en|et|bond)\w* .{0,40}?(?P<dev>[\w.]{2,40}): (?:Port: \d+ |NIC )?Link (?:is )?(?:DOWN|[Dd]own))\b"),
       ("Got async event", r"NCCL WARN NET/\w+ ?: (?P<what>(?:(?P<dev>\S{1,40}) )?Got async event : .{0,60}(?:port error|down|catastrophic|fatal).*)"),
       meaning=Meaning("rank_lost", "silent", "lost a port of the network: {what}", "see that host's `ibstat`, `dmesg -T` and the switch: cable, transceiver or port; NCCL survives only an outage that is shorter than its retries (NCCL_IB_TIMEOUT, NCCL_IB_RETRY_CNT)"), own=True, of_node=True, once="host"),
    message("no_interface", C, ("nterface found", r"NCCL WARN (?P<what>.{0,60}\b[Nn]o (?:socket )?interface found(?:.{0,99}IFNAME=(?P<dev>\S{1,60}))?)"),
       ("nable to find ", r"(?P<what>Unable to find (?:interface|address) for: ?(?P<dev>[\w.:-]{1,60}))"),
       ("No such device", r"(?P<what>(?:gloo/|SIOCGIF|SO_BINDTODEVICE).{0,160}No such device)"),
       meaning=Meaning("rank_lost", "crashed", "found no network interface to use: {what}", "compare the names in NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME with `ip -br addr` on that host: an interface {dev} must exist there, and have an address; a prefix (`eth`), or `^lo,docker`, fits hosts whose names differ"), own=True),
    message("ib", V, ("Got completion", r"NET/\w+(?:/\w+)? ?: ?Got (?:async event|completion) from peer (?P<peer>[^\s<]+)(?:<\d+>)? with (?:status=|error )(?:\w+\()?(?P<status>\d+)(?:.{0,300}? hca (?P<hca>[\w.:-]{1,40}))?"), aborts=True),
    message("efa_send", V, ("completed with error", r"NET/OFI Request \S{1,40} completed with error\. .{0,40}?Error: \d+ \((?P<what>[A-Z][^)]{1,160}?)\.?\)(?!.{0,600}Peer host id)"), aborts=True),
    message("efa", V, ("Peer host id", r"NET/OFI .{0,120}Error: \d+ \((?P<what>[A-Z].{1,160}?)\.? My (?:host id|EFA addr).{0,200}?Peer host id: (?P<peer>[\w.-]+)"), aborts=True),
    message("ib_setup", V, ("ibv_modify_qp failed", r"Call to ibv_modify_qp failed with (?:error )?(?P<what>\d{1,4} [A-Z][\w ]{1,60}).{0,20}?\bon dev (?P<dev>[\w.-]{1,40})(?:.{0,120}?\blocal GID index (?P<index>\d{1,4}), local GID (?P<own>[\da-f:.]{2,60}), remote GID (?P<remote>[\da-f:.]{2,60}))?")),
    message("closed", V, ("losed by", r"Connection closed by (?:remote )?peer \[?" + _PEER),
       ("Peer host:", r"Peer host:\s{1,9}(?P<peer>\S+)"),
       ("Call to ", r"^(?!.*retrying).*Call to \w+ (?:from|to) " + _PEER + r".{0,30}?failed ?: (?P<reason>.*)"),
       ("onnect to ", r"^(?!.*retrying).*NCCL WARN .{0,40}[Cc]onnect to " + _PEER + r".{0,30}?(?:failed ?: |returned (?:\d{1,3}\()?)(?P<reason>[^),]*)"),
       ("returned Connection refused", r"^(?!.*retrying).*NCCL WARN .{0,60}returned (?P<reason>Connection refused)"),
       ("Connection reset by peer", r"gloo/transport/.{0,120}\] (?:Read|Write) error \[?" + _PEER + r".{0,20}Connection reset by peer"),
       ("onnection timed out", r"gloo/transport/.{0,120}\] (?:Read|Write) error \[?" + _PEER + r".{0,20}Connection timed out")),
    message("lost", V, ("Failed to meet rendezvous", r"Failed to meet rendezvous"),
       ("Horovod has been shut down", r"Horovod has been shut down")),
    message("dist_error", V),
    message("pipe_lost", V),
    message("ccl_thread", V, ("|CCL_ERROR|", r"\|CCL_ERROR\| .{0,80}?error while creating worker thread #\d+ pthread_create returns (?P<errno>\d{1,4})")),
    message("nccl_error", V, ("|CCL_ERROR|", r"\|CCL_ERROR\| (?P<what>.{1,160})"),
       ("oneCCL: ", r"oneCCL: (?:.{1,160}? EXCEPTION: )?(?P<what>.{1,160})"),
       (", error code is ", r"(?P<what>(?:Hccl|[Aa]cl)\w+(?:\([^)]{0,300}\)+)?, error code is \d+)"),
       ("operator name is Hccl", r"operator name is (?P<what>Hccl\w+)"),
       ("NCCL Error ", r"NCCL Error \d+: (?P<what>(?!unhandled cuda|invalid)[^,]{1,120})"),
       ("communicator was aborted", r"(?P<what>NCCL communicator was aborted)"),
       ("NCCL error", r"NCCL error(?: in)?: ?(?:\S+\.[ch]pp:\d+, |(?!\s*\S+\.[ch]pp:))(?P<what>(?!unhandled cuda|invalid|\{|$)[^,]{1,120})"),
       ("Error: ", r"^.*?\b(?P<what>nccl(?:Remote|System|Internal)Error)\b"), aborts=True),
    message("own_error", H, ("NCCL Error ", r"NCCL Error \d+: (?P<what>(?:unhandled cuda|invalid)[^,]{1,120})"),
       ("NCCL error", r"NCCL error(?: in)?: ?(?:\S+\.[ch]pp:\d+, |(?!\s*\S+\.[ch]pp:))(?P<what>(?:unhandled cuda|invalid)[^,]{1,120})"),
       ("Error: ", r"\b(?P<what>nccl(?:UnhandledCuda|InvalidUsage|InvalidArgument)\w*)\b")),
    message("store_lost", V, ("remote=[", r"TCPStore.{0,200}remote=\[(?P<server>[^\]\s]{1,253})\]:\d{1,5}\): (?:Connection reset by peer|Broken pipe|failed to recv, got 0 bytes)"),
       ("TCPStore", r"(?:Connection reset by peer|Broken pipe|failed to recv, got 0 bytes).{0,200}TCPStore|TCPStore.{0,200}(?:Connection reset by peer|Broken pipe|failed to recv, got 0 bytes)")),
    message("nccl_warning", H, ("NCCL WARN", r"NCCL WARN (?!\[(?:Proxy|Service|Rem Allocator)|Socket recv failed while polling|Failed to CUDA calloc)(?P<what>.{1,200})"),
       ("<warn> err: ", r"libfabric:.{1,160}<warn> err: \d{1,6}, message: (?P<what>.{1,200})")),
)  # fmt: skip
