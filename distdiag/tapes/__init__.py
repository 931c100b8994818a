"""Tapes: the snapshots of a job as the diagnosis got them, kept so that the verdict can be made again without the job."""
