"""Where snapshots and verdicts come from besides a live job: flight-recorder dumps and logs. They own files and formats."""
