"""A fingerprint of which samples a map-style data set has, and in which order: to see whether all ranks have the same one.

It is made of the data set's own index: `Subset.indices`, a list of files. Nothing of the job's code runs: only attributes of the
object itself are read, and elements of built-in sequences, arrays and tensors.
"""

from __future__ import annotations

import re
import sys
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import Subset

from distdiag.recorder.unseen import attributes, has_memory

ELEMENTS = 64
KNOWN, SPLIT = 1 << 32, 1 << 33
_INDEX = re.compile(r"ind(?:ex|ices|s)?$|idxs?$|ids?$|perm|order")  # other integers may be labels, or seeds of the rank
_OF_RANK = re.compile(r"(?:rank|proc|worker|host|node|gpu|cuda)[-_:]?\d+", re.IGNORECASE)


def data_set_index(data: Any, length: int) -> int:
    """Return a hash of some elements of a data set's index, with `KNOWN`, and `SPLIT` if it is a Subset; 0: it has no known index."""
    if (of := _unwrapped(data, length)) is None:
        return 0
    data, chosen, found = of
    exact, split = not found, SPLIT if found else 0
    for name, value in attributes(data).items() if type(data).__module__ != "builtins" else ():
        picked = _elements(value, chosen, length if exact else None)
        names = [_name(x) for x in picked or ()]
        if names and (
            all(type(x) is str for x in names) or (_INDEX.search(name) and all(type(x) is int for x in names))
        ):
            found.append(names)
            break
    return zlib.crc32(repr((length, found)).encode()) | KNOWN | split if found else 0


def data_set_content(data: Any, length: int) -> int:
    """Return a hash of what a data set holds in memory: some samples, numbers or paths, and its attributes that are a number or a word.

    0 if it holds none. Two data sets with one hash make the same sample of an index, but for what they draw at random.
    """
    if data is None or (of := _unwrapped(data, length)) is None:
        return 0
    data, chosen, subsets = of
    found, exact, known = [length, *subsets], not subsets, False
    for name, value in {"": data, **attributes(data)}.items():
        if type(value) in (int, str):
            found.append(value)
            known |= name == "_fingerprint"  # Hugging Face's data sets have it, of their content
        for column in value if name == "tensors" and type(value) is tuple else (value,):
            rows = _rows(column, chosen, length if exact else None)
            found += rows
            if 2 * len({*rows}) > len(rows):  # else labels
                # one integer a sample may be the order of the samples
                known |= type(rows[0]) is str or (type(rows[0]) is tuple and [*map(type, rows[0])] != [int])
    return zlib.crc32(repr(found).encode()) or 1 if known else 0


def _unwrapped(data: Any, length: int) -> tuple[Any, list[int], list[Any]] | None:
    """Return (data set within up to four Subsets, some of its samples, which these are in each Subset).

    None if it has no length, or a Subset has no known index.
    """
    if length <= 0:
        return None
    chosen = list(range(0, length, max(1, length // ELEMENTS)))[:ELEMENTS]
    found: list[Any] = []
    while isinstance(data, Subset) and len(found) < 4:
        own = attributes(data)
        picked = _elements(own.get("indices"), chosen, None if found else length)
        if not picked or not all(type(x) is int and x >= 0 for x in picked):
            return None
        found.append(picked)
        data, chosen = own.get("dataset"), picked
    return data, chosen, found


def _rows(values: Any, chosen: Sequence[int], length: int | None) -> list[Any]:
    """Return the chosen samples of a column of a data set, a tuple of numbers or a word each; nothing if it is none."""
    numpy, kind = sys.modules.get("numpy"), type(values)
    array = kind is torch.Tensor and values.is_cpu and values.layout is torch.strided and not values.is_nested
    array |= numpy is not None and kind is numpy.ndarray and values.dtype.kind in "biuf"
    if not (values.ndim if array else kind in (list, tuple)):
        return []
    if len(values) != length if length is not None else len(values) <= max(chosen):
        return []
    if not array:
        return [_word(values[i]) for i in chosen]
    return [tuple(_spread(values[i].reshape(-1))) for i in chosen]  # a view of each: samples may be videos


def _spread(row: Any) -> list[Any]:
    """Return up to `ELEMENTS` numbers, evenly spread over a sample."""
    return row[:: max(1, len(row) // ELEMENTS)][:ELEMENTS].tolist()


def _word(x: Any) -> str | int | None:
    """Return a number or word of a sample: of a row of several the first word."""
    row = x.values() if type(x) is dict else x if type(x) in (list, tuple) else (x,)
    return next((part[:200] for part in row if type(part) is str), x if type(x) is int else None)


def _name(x: Any) -> str | int | None:
    """Return what identifies an element of an index: a file's name without its folder, which may be the node's or the rank's own."""
    if type(x) is tuple or type(x) is list:  # (path, label)
        x = next((part for part in x if type(part) is str), None)
    if type(x) is str:
        return _OF_RANK.sub("", x.rpartition("/")[2][-200:])
    return x if type(x) is int else None


def _elements(values: Any, chosen: Sequence[int], length: int | None) -> list[Any] | None:
    """Return the chosen elements of a sequence of a built-in type; None if it is none, or has another length."""
    numpy = sys.modules.get("numpy")
    if type(values) in (list, tuple, range):
        n, read = len(values), values.__getitem__
    elif numpy is not None and type(values) is numpy.ndarray and values.ndim == 1 and values.dtype.kind in "iuUO":
        n, read = len(values), values.item
    elif type(values) is torch.Tensor and values.dim() == 1 and values.is_cpu and has_memory(torch.Tensor):
        if values.is_floating_point() or values.is_complex() or values.layout is not torch.strided:
            return None
        n, read = len(values), lambda i: values[i].item()
    else:
        return None
    return [read(i) for i in chosen] if (n == length if length is not None else n > max(chosen)) else None
