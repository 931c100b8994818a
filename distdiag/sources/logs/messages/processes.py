"""Which process is which rank, how fast the ranks are, and where a launch begins: no failures. `learned.py` takes them."""

from __future__ import annotations

from distdiag.sources.logs.message import F, message

MESSAGES = (
    message("shut_down", F, ("EngineCore exiting", r"\bEngineCore exiting\.")),  # as it was asked to
    message("gpu_scores", F, ("worse relative performance", r"worse relative performance\. Affected ranks: (?P<ranks>[\[{].{1,400}[\]}])"),
       ("Score=", r"^(?:\s{0,5}\d{1,6}: )?\s{1,20}Rank=(?P<r>\d{1,7}) Node=(?P<host>\S{1,253}) Score=(?P<score>[01]\.\d{1,4})"),
       ("report processing time", r"(?P<over>Straggler report processing time)"),  # its last line
       series=True),
    message("iteration", F, ("elapsed time per iteration", r"\biteration\s{1,12}(?P<step>\d{1,12})/.{0,200}?elapsed time per iteration \(ms\): (?P<ms>\d{1,12}(?:\.\d{1,6})?)(?:.{0,200}?global batch size:\s{1,9}(?P<batch>\d{1,9}))?"), series=True),
    message("straggler_report", F, ("MxRtt/Rnk: ", r"MnRtt/Rnk: (?P<least_ms>\d{1,9}(?:\.\d{1,6})?)ms/\d+ \| MxRtt/Rnk: (?P<most_ms>\d{1,9}(?:\.\d{1,6})?)ms/(?P<r>\d{1,7})\b(?:.{0,200}?MxTmp/Rnk: (?P<temperature>\d{1,3}(?:\.\d{1,3})?)C/(?P<hot>\d{1,7}))?(?:.{0,200}?MnClk/Rnk: (?P<clock>\d{1,6}(?:\.\d{1,3})?)MHz/(?P<low>\d{1,7}) \| MxClk/Rnk: (?P<clocks>\d{1,6}))?.{0,200}?MnEtpt/Rnk: \d{1,9}(?:\.\d{1,6})?TF/(?P<least>\d{1,7})"), series=True),
    message("nccl_rank", F, (" in world size ", r"\brank (?P<r>\d+) in world size (?P<world>\d+)"),
       ("world_size=", r"\brank=(?P<r>\d+)\b,? world_size=(?P<world>\d+)"),
       (" nRanks ", r"\brank (?P<r>\d+) nRanks (?P<world>\d+)"),
       (" nranks ", r"\brank (?P<r>\d+) nranks (?P<world>\d+)(?:.{0,60}?\bbusId (?P<bus>[\da-f]{1,12})\b)?")),
    message("nccl_runs", F, ("NCCL version ", r"(?:^|NCCL INFO |[\])>|:] ?)NCCL version (?P<version>\d{1,3}\.\d{1,3}\.\d{1,3})")),
    message("nccl_setting", F, (" set by environment to ", r"NCCL INFO (?P<key>NCCL_(?:PROTO|ALGO|SOCKET_IFNAME|NTHREADS|\w+NCHANNELS|\w*BUFFSIZE)) set by environment to (?P<value>[^\s.]{1,80})")),
    message("interface", F, ("NCCL INFO Bootstrap", r"NCCL INFO Bootstrap ?: Using (?:\[0\])?(?P<dev>[\w.-]{1,40}):(?P<addr>[\w.:]{3,60})<\d+>"),
       ("NCCL INFO NET/Socket", r"NCCL INFO NET/Socket ?: Using \[0\](?P<dev>[\w.-]{1,40}):(?P<addr>[\w.:]{3,60})<\d+>(?P<more>(?: ?\[\d{1,2}\][\w.-]{1,40}:[\w.:]{3,60}<\d+>){0,16})"),
       ("OOB ", r"NCCL INFO NET/\w+ ?: Using .{0,400}\bOOB (?P<dev>[\w.-]{1,40}):(?P<addr>[\w.:]{3,60})<\d+>")),
    message("npu", F, ("npu:", r"(?:\b[Rr]ank[ :=]{1,2}(?P<r>\d{1,6})\b.{0,80}?)?\bnpu:(?P<device>\d{1,4})\b")),
    message("joined", F, ("to store for rank", r"Added key: \S{1,80} to store for rank: (?P<r>\d+)")),
    message("env", F, ("RANK=", r"(?<![_\w])RANK=(?P<r>\d+)\b(?:.{0,200}?\bWORLD_SIZE=(?P<world>\d+))?"),
       ("RANK: ", r"^\s{2,99}RANK:\s{1,40}(?P<r>\d+)\s*$")),
    message("spawned", F, (" spawned with command", r"process (?P<pid>\d+) spawned with command.{0,4000}?--local[_-]rank[= ](?P<local>\d+)")),
    message("own_rank", F, ("world size: ", r"(?:^|[^\w ] ?|\bProcess |\b[Gg]lobal )[Rr]ank: (?P<r>\d+), world size: (?P<world>\d+)"),
       ("MEMBER: ", r"GLOBAL_RANK: (?P<r>\d+), MEMBER: \d+/(?P<world>\d+)"),
       ("global_rank=", r"JobEnvironment\(.{0,400}\bglobal_rank=(?P<r>\d+)\((?P<world>\d+)\)"),
       (" local_rank", r"\brank[ =](?P<r>\d+)(?:/(?P<world>\d+))?,? local_rank[ =]\d"),
       ("Process index: ", r"(?:^|[\]:|)>-] ?)Process index: (?P<r>\d+)\s*$"),  # of Accelerate
       ("distributed init (rank ", r"\bdistributed init \(rank (?P<r>\d+)\)")),
    message("world", F, ("RUNNING", r"^\s*\d{1,6}(?:\s{1,12}\d{1,7}){3}\s{1,12}(?P<world>\d{1,7})\s{1,12}\d{1,7}\s{1,12}RUNNING\s"),
       ("world_size=", r"\bworld_size=(?P<world>\d{1,7}),? n(?:um_)?nodes=\d"),
       ("Num processes: ", r"(?:^|[\]:|)>-] ?)Num processes: (?P<world>\d{1,7})\s*$"),
       ("world size: ", r"\busing world size: (?P<world>\d{1,7})\b"),  # Megatron
       ("dist_world_size=", r"\bdist_world_size=(?P<world>\d{1,7})\b")),
    message("node_ranks", F, ("global_rank_mapping=", r"\bglobal_rank_mapping=.{0,60}?(?P<nodes>\{.{1,1000})")),
    message("tasks", F, ("--ntasks", r"(?:^#SBATCH|\bsrun\b.{0,200}?) --ntasks[= ](?P<n>\d{1,6})\b")),
    message("torchrun", F, ("distributed/elastic", r"torch/distributed/elastic"),
       ("distributed.elastic", r"torch\.distributed\.elastic"),
       ("Setting OMP_NUM_THREADS", r"Setting OMP_NUM_THREADS environment variable for each process")),
    message("launch", F, ("Setting OMP_NUM_THREADS", r"Setting OMP_NUM_THREADS environment variable for each process"),
       ("distributed/run.py", r"torch/distributed/run\.py:\d{1,5}\] \*{20}"),
       ("WORLD INFO DICT", r"WORLD INFO DICT"),
       ("Initializing distributed: GLOBAL_RANK", r"Initializing distributed: GLOBAL_RANK: 0,")),
    message("command", F, *((name, rf"^(?:\+{{1,3}}|\S{{0,80}}[$#]) (?P<command>.{{0,400}}\b{name}.{{1,1000}})") for name in ("torchrun ", "accelerate launch ", "mpirun ", "deepspeed "))),
    message("requeued", F, ("SLURM_RESTART_COUNT", r"\bSLURM_RESTART_COUNT\W{1,3}[1-9]"),
       ("equeue", r"(?i:\brequeued?\b.{0,60}\brestart(?:[ _]count)?\W{1,3}[1-9])"),
       ("allocated resources", r"\bjob \d+ has been allocated resources")),
    message("closing", F, (" closing signal", r"Sending process (?P<pid>\d+) closing signal")),
    message("nodes_wanted", F, ("min_nodes", r"\bmin_nodes\s{1,20}: (?P<nodes>\d{1,6})\b")),
    message("node_came", F, ("attempts to join the next", r"The node '(?P<node>[^']{1,200}?)_\d{1,9}_\d{1,9}' attempts to join the next")),
    message("restart", F, ("estarting worker group", r"[Rr]estarting worker group"),
       ("will restart worker group", r"will restart worker group")),
    message("again", F, ("esum", r"\b[Rr]esum(?:ing|ed) (?:training |run )?(?:from|at)\b"),
       ("etry", r"\b[Rr]etrying\b|\b[Rr]etry (?:#|attempt )?\d"),
       ("batch size", r"\b(?:[Dd]ecreas|[Rr]educ|[Ll]ower|[Tt]ry)ing batch size"),
       ("tarted training worker group", r"\bStarted training worker group\b"),
       ("equeue", r"\b[Rr]equeued?\b"),
       ("estart", r"\b[Rr]estart(?:ing|ed)\b.{0,40}\b(?:actor|pod|worker|container|task|job|training|attempt|process)")),
)  # fmt: skip
