"""CUDA graphs of the stand-in: `with capture() as graph: …`, then `graph.replay()`.

Only collectives are captured; compute operations run at once, as always on the stand-in.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from stream_backend import install


@contextmanager
def capture() -> Iterator[Any]:
    """Collect the collectives of the block in a graph, which runs them when it is replayed."""
    extension = install.loaded[0]
    graph = extension.Graph()
    extension.capture(graph)
    try:
        yield graph
    finally:
        extension.capture(None)
