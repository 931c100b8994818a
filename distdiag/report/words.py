"""Numbers and foreign text for people; nothing from the job is ever interpreted by a terminal or a browser."""

from __future__ import annotations

import re
import time

from distdiag.diagnosis.model.findings import size_text

NA = "–"
# C0 and C1 controls (escape sequences), and the characters that reorder or hide text
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")


def visible(text: object) -> str:
    """`text` with every control character written out (`\\x1b`), so that it is shown and never obeyed."""
    return _UNSAFE.sub(lambda m: m[0].encode("unicode_escape", "surrogatepass").decode("ascii"), str(text))


def milliseconds(value: float | None) -> str:
    """`0.042`, `3.1`, `231.4`, `12,400`; the unit is in the heading."""
    if value is None:
        return NA
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if abs(value) >= 1 or value == 0:
        return f"{value:.1f}"
    return f"{value:.3f}"


def number(value: float | None, digits: int = 0) -> str:
    return NA if value is None else f"{value:,.{digits}f}"


def percent(share: float | None) -> str:
    """A share between 0 and 1 as per cent."""
    return NA if share is None else f"{share * 100:.0f} %"


def size(value: float | None) -> str:
    return size_text(None if value is None else int(value))


def rate(bytes_per_s: float | None) -> str:
    """MB/s of 10^6 bytes, as network cards and disks are sold."""
    return NA if bytes_per_s is None else f"{bytes_per_s / 1e6:,.1f} MB/s"


def duration(seconds: float | None) -> str:
    """`41.2 s`, `4 min 31 s`, `2 h 05 min`."""
    if seconds is None:
        return NA
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{int(seconds) // 60} min {int(seconds) % 60:02d} s"
    return f"{int(seconds) // 3600:,} h {int(seconds) % 3600 // 60:02d} min"


def moment(unix_s: float | None) -> str:
    """Local date and time, with the offset, as another reader may sit elsewhere."""
    return NA if unix_s is None else time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(unix_s))
