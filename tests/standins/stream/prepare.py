"""Builds the stand-in's libraries once, before its jobs start; one line on stderr gives the reason if that fails."""

import sys

from stream_backend import build

if __name__ == "__main__":
    try:
        build.build()
    except build.NoCompiler as e:
        sys.exit(str(e))
