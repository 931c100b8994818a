#!/bin/sh
# Prolog= in slurm.conf. Slurm runs it as root, without PATH and HOME, before each job on the node.
# Exit code 1 (a proved fault) drains the node and requeues the job; everything else lets the job start.
distdiag=/opt/distdiag/bin/distdiag

line=$("$distdiag" probe all --as prolog --budget 20 2>/dev/null)
code=$?
/usr/bin/logger -t slurm-prolog "$line"
[ "$code" -ne 1 ] # 0 also if distdiag is missing (127)
