"""No two files of distdiag import each other, directly or through others."""

from __future__ import annotations

import grimp

# Files that may still do so, with the reason; it stays empty, or gets shorter.
ALLOWED: frozenset[str] = frozenset()


def test_no_two_files_import_each_other_in_a_circle() -> None:
    """Imports inside functions and those for the types alone count, too: a circle of types is a circle of ideas."""
    graph = grimp.build_graph("distdiag", cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    while True:  # take away what imports nothing of the rest, and what nothing of the rest imports
        used = set().union(*imports.values())
        left = {m: needs & imports.keys() for m, needs in imports.items() if needs & imports.keys() and m in used}
        if left == imports:
            break
        imports = left
    assert imports.keys() <= ALLOWED, {module: sorted(needs) for module, needs in imports.items()}
