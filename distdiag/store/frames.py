"""One rank as every reader shows it: a row of table `rank`, and of the frames kept for time travel."""

from __future__ import annotations

import math
import typing
import zlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from distdiag.store.rows import Row
from distdiag.terms.untrusted import MAX_INT, MAX_RANKS


class RankRow(Row, frozen=True, kw_only=True, gc=False):
    """Newest state of one rank: the columns of table `rank`, then those that only the screen needs.

    Frames are stored by column name. A column that is None for all ranks takes no space.
    """

    TABLE = "rank"
    rank: int
    node: int = 0
    local_rank: int = 0
    host: str = ""
    pid: int | None = None
    gpu: int | None = None
    life: str = "missing"
    exit_code: int | None = None
    signal: int | None = None
    exception: str | None = None
    t_s: float | None = None
    heartbeat_age_s: float | None = None
    phase: str | None = None
    phase_age_s: float | None = None
    step: int | None = None
    epoch: int | None = None
    file: str | None = None
    line: int | None = None
    function: str | None = None
    waiting_op: str | None = None
    waiting_group: str | None = None
    waiting_seq: int | None = None
    waiting_bytes: int | None = None
    waiting_age_s: float | None = None
    rss_bytes: int | None = None
    dropped: int | None = None
    recorder_errors: int | None = None
    recorder_error: str | None = None
    # --- beyond the table: medians over the rank's last (up to 50) steps, ms
    step_ms: float | None = None
    self_ms: float | None = None  # step - wait
    delta_self_ms: float | None = None  # against median_low of the other ranks
    wait_ms: float | None = None
    data_ms: float | None = None
    h2d_ms: float | None = None
    forward_ms: float | None = None
    backward_ms: float | None = None
    optimizer_ms: float | None = None
    other_ms: float | None = None
    samples_per_s: float | None = None
    loss: float | None = None
    device_bytes: int | None = None  # torch's allocator, peak reserved, on this rank's device
    last_op: str | None = None  # the newest collective issued, completed or not
    last_group: str | None = None
    last_seq: int | None = None
    last_bytes: int | None = None
    severity: str | None = None  # of the worst open finding that has this rank among its culprits
    cpu_pct: float | None = None
    late_ms: float | None = None
    slowest_in: int | None = None  # of the last 50 steps, how many this rank was the slowest of
    activity: str | None = None  # words of findings.Where.state

    def waiting(self, *more: str) -> str | None:
        """Return `all_reduce #417 (default_pg)`, with more in its parentheses; None if the rank is in no collective."""
        number = f" #{self.waiting_seq}" if self.waiting_seq is not None else ""
        details = ", ".join(x for x in (self.waiting_group, *more) if x)
        return self.waiting_op and f"{self.waiting_op}{number}" + (f" ({details})" if details else "")


TABLE_COLUMNS = RankRow.__struct_fields__[:28]  # the columns of table `rank`

# Column types of a packed frame: 'f' for durations and shares (seven digits), 'd' for other numbers, words by index.
_FLOAT32 = frozenset(
    n for n in RankRow.__struct_fields__ if n.endswith(("_ms", "_pct", "_age_s", "_per_s")) or n == "loss"
)
_HINTS = typing.get_type_hints(RankRow)
_WORDS = frozenset(n for n, t in _HINTS.items() if str in (t, *typing.get_args(t)))
_INTEGERS = frozenset(n for n, t in _HINTS.items() if int in (t, *typing.get_args(t)))
_DEFAULTS = dict(zip(RankRow.__struct_fields__, msgspec.structs.astuple(RankRow(rank=0)), strict=True))


class _Packed(msgspec.Struct):
    n: int
    numbers: dict[str, tuple[str, bytes]]  # column -> (array type code, little-endian items; NaN = None)
    words: dict[str, tuple[list[str | None], str, bytes]]  # column -> (vocabulary, type code, index per rank)


MAX_FRAME_BYTES, MAX_COLUMNS = 64 << 20, 100  # unpacked: 128 Ki ranks of 48 columns
_NUMBER_CODES, _INDEX_CODES = frozenset("fd"), frozenset("HI")
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Packed)


def _from_bytes(code: str, data: bytes) -> array:
    a = array(code)
    a.frombytes(data)
    return a


def pack(rows: Sequence[RankRow]) -> bytes:
    """Return the blob of `frame.ranks`, by column: a screen reads few columns of thousands of ranks.

    Reading 4,096 ranks takes about 3 ms this way, and 17 ms from a list of rows.
    """
    packed = _Packed(len(rows), {}, {})
    columns = zip(*map(msgspec.structs.astuple, rows), strict=True)
    for name, column in zip(RankRow.__struct_fields__, columns, strict=False):
        missing = column.count(None)
        if missing == len(rows):
            continue
        if name in _WORDS:
            numbers = {word: i for i, word in enumerate(dict.fromkeys(column))}
            code = "H" if len(numbers) < 2**16 else "I"
            index = array(code, map(numbers.__getitem__, column))
            packed.words[name] = (list(numbers), code, index.tobytes())
        else:
            code = "f" if name in _FLOAT32 else "d"
            values = [math.nan if v is None else v for v in column] if missing else column
            packed.numbers[name] = (code, array(code, values).tobytes())
    return zlib.compress(_encoder.encode(packed), 1)


class RankTable:
    """Columns of one frame, decoded on first use; row i is the i-th rank of the frame."""

    def __init__(self, packed: _Packed) -> None:
        self.n = packed.n
        self._packed = packed
        self._numbers: dict[str, array] = {}
        self._words: dict[str, list[str | None]] = {}

    def __len__(self) -> int:
        return self.n

    def raw(self, name: str) -> bytes:
        """Return the stored bytes of a numeric column, to compare two frames; empty if not measured."""
        stored = self._packed.numbers.get(name)
        return stored[1] if stored else b""

    def numbers(self, name: str) -> array:
        """Return a numeric column as an array of floats, NaN where not measured."""
        found = self._numbers.get(name)
        if found is None:
            stored = self._packed.numbers.get(name)
            found = _from_bytes(*stored) if stored else array("d", [math.nan]) * self.n
            self._numbers[name] = found
        return found

    def known(self, name: str) -> Sequence[float]:
        """Return the finite values of a numeric column."""
        if name not in self._packed.numbers:
            return ()
        values = self.numbers(name)
        if math.isfinite(sum(values)):
            return values
        return [v for v in values if math.isfinite(v)]

    def coded(self, name: str) -> tuple[list[str | None], Sequence[int]]:
        """Return a text column as its vocabulary and each rank's index in it."""
        stored = self._packed.words.get(name)
        if stored is None:
            return [_DEFAULTS[name] if name == "host" else None], bytes(self.n)
        vocabulary, code, data = stored
        return vocabulary, bytes(self.n) if len(vocabulary) == 1 else _from_bytes(code, data)

    def words(self, name: str) -> list[str | None]:
        found = self._words.get(name)
        if found is None:
            vocabulary, index = self.coded(name)
            found = vocabulary * self.n if len(vocabulary) == 1 else [vocabulary[i] for i in index]
            self._words[name] = found
        return found

    def row(self, i: int) -> RankRow:
        return self.rows((i,))[0]

    def rows(self, indices: Iterable[int] | None = None) -> list[RankRow]:
        """Return some ranks as rows, by default all; of thousands of ranks use the columns."""
        chosen = list(range(self.n) if indices is None else indices)
        columns: dict[str, list[typing.Any]] = {}
        for name in self._packed.numbers:
            if name not in _HINTS:
                continue
            column, missing = self.numbers(name), _DEFAULTS[name]
            if name in _INTEGERS:
                columns[name] = [int(v) if abs(v) < MAX_INT else missing for v in map(column.__getitem__, chosen)]
            else:
                columns[name] = [v if v == v else missing for v in map(column.__getitem__, chosen)]
        for name in self._packed.words:
            if name in _HINTS:
                vocabulary, index = self.coded(name)
                vocabulary = [_DEFAULTS[name] if word is None else word for word in vocabulary]
                columns[name] = [vocabulary[index[i]] for i in chosen]
        names = list(columns)
        return [RankRow(**dict(zip(names, values, strict=True))) for values in zip(*columns.values(), strict=True)]


def unpack_table(blob: bytes) -> RankTable:
    """Return the columns of a packed frame.

    Raises:
        msgspec.DecodeError, zlib.error, ValueError: the blob is not a frame.
    """
    stream = zlib.decompressobj()
    data = stream.decompress(blob, MAX_FRAME_BYTES)
    if not stream.eof:
        raise zlib.error("cut short, or larger than any frame")
    return RankTable(_valid(_decoder.decode(data)))


def _valid(packed: _Packed) -> _Packed:
    """Return the frame if every column has one value per rank, and the ranks can be ranks.

    Raises:
        ValueError: it is not valid.
    """
    if not 0 <= packed.n <= MAX_RANKS or len(packed.numbers) + len(packed.words) > MAX_COLUMNS:
        raise ValueError("more ranks or columns than a frame can have")
    for code, data in packed.numbers.values():
        if code not in _NUMBER_CODES or len(data) != packed.n * array(code).itemsize:
            raise ValueError("a column of another length")
    for vocabulary, code, data in packed.words.values():
        if code not in _INDEX_CODES or len(data) != packed.n * array(code).itemsize:
            raise ValueError("a column of another length")
        if packed.n and len(vocabulary) != 1 and max(_from_bytes(code, data)) >= len(vocabulary):
            raise ValueError("a word that is not in the vocabulary")
    if packed.n:
        if "rank" not in packed.numbers:
            raise ValueError("a frame without ranks")
        ranks = _from_bytes(*packed.numbers["rank"])
        if not (min(ranks) >= 0 and max(ranks) < MAX_RANKS and math.isfinite(sum(ranks))):
            raise ValueError("ranks out of range")
    return packed


@dataclass(frozen=True)
class Frame:
    """The screen's data at one moment."""

    t_s: float  # seconds since the run began
    state: str  # a `findings.State`
    state_text: str  # what follows the state's word in the header
    table: RankTable  # every rank, by column

    @property
    def ranks(self) -> list[RankRow]:
        """All ranks as rows; for thousands of ranks use `table`."""
        return self.table.rows()
