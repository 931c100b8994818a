"""The recorder: what runs inside a rank. It writes into the rank's page and never raises, prints or blocks in the job.

Importing this package costs no torch: the hooks are installed once torch itself has been imported.
"""

from distdiag.recorder.session import Handle, attach

__all__ = ["Handle", "attach"]
