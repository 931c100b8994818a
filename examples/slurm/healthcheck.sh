#!/bin/sh
# HealthCheckProgram= in slurm.conf, with HealthCheckNodeState=IDLE: it measures, so it must not run next to a job.
# Slurm kills it after 60 s, and runs it as root, without PATH and HOME. It drains the node only for a proved fault.
distdiag=/opt/distdiag/bin/distdiag

line=$("$distdiag" probe all --as healthcheck 2>/dev/null)
if [ $? -eq 1 ]; then
    /usr/bin/scontrol update NodeName="$(/bin/hostname -s)" State=DRAIN Reason="$line"
fi
exit 0 # slurmd does not register the node otherwise
