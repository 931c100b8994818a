"""The rows of many runs in DuckDB: loaded from runs, Parquet files or object storage, then closed to everything outside."""

from __future__ import annotations

import glob
import os
import tempfile
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import duckdb
import msgspec

from distdiag.errors import DistdiagError, ExitCode
from distdiag.history.collect import HistoryRow
from distdiag.store import rundir
from distdiag.terms.untrusted import visible

MEMORY, THREADS = "1GB", 2
MOST_DATABASE_BYTES = 2 << 30  # of one run.db in object storage, which is copied
MOST_FETCHED = 100_000  # runs
MOST_ANSWERS = 100_000  # rows
_TYPES = {"str": "VARCHAR", "int": "BIGINT", "float": "DOUBLE"}
COLUMNS = {
    name: next(sql for kind, sql in _TYPES.items() if str(hint).startswith(kind))
    for name, hint in HistoryRow.__annotations__.items()
}
VIEWS = {
    "runs": "SELECT run, any_value(name) AS name, any_value(started_unix_s) AS started_unix_s, any_value(duration_s) AS duration_s,"
    " any_value(state) AS state, any_value(world_size) AS world_size, count(DISTINCT host) FILTER (rank IS NOT NULL) AS hosts,"
    " median(step_ms) AS step_ms FROM history GROUP BY run",
    "ranks": "SELECT DISTINCT run, name, started_unix_s, host, rank, life, steps, step_ms, wait_ms FROM history WHERE rank IS NOT NULL",
    "findings": "SELECT run, name, started_unix_s, host, rank, kind, cause, severity, certainty, file, line, function,"
    " first_seen_s, cleared_s, message FROM history WHERE kind IS NOT NULL",
    "probes": "SELECT run, name, started_unix_s, host, probe, verdict, at_s, bus_bandwidth_bytes_per_s FROM history"
    " WHERE probe IS NOT NULL",
}


class History:
    """An in-memory database with table `history` (the columns of `HistoryRow`) and the views of `VIEWS`."""

    def __init__(self) -> None:
        self._con = duckdb.connect(
            config={
                "memory_limit": MEMORY, "threads": THREADS, "max_temp_directory_size": "0KiB",
                "autoinstall_known_extensions": False, "autoload_known_extensions": False,
            }
        )  # fmt: skip
        self._con.execute(f"CREATE TABLE history ({', '.join(f'{n} {t}' for n, t in COLUMNS.items())})")

    def close(self) -> None:
        self._con.close()

    def add(self, rows: Iterable[HistoryRow]) -> None:
        """Insert rows; DuckDB reads JSON lines a hundred times faster than values.

        Raises:
            DistdiagError: they do not fit into the memory.
        """
        encode = msgspec.json.Encoder().encode
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            file.writelines(encode(row) + b"\n" for row in rows)
            file.flush()
            columns = ", ".join(f"{n}: '{t}'" for n, t in COLUMNS.items())
            rows_of_file = f"read_json(?, format='newline_delimited', columns={{{columns}}})"
            try:
                self._con.execute(f"INSERT INTO history SELECT * FROM {rows_of_file}", [file.name])
            except duckdb.Error as e:
                raise _failed(
                    "the rows of these runs cannot be loaded", e, "give fewer directories at a time"
                ) from None

    def add_parquet(self, path: Path) -> None:
        """Insert the rows of a file that `write_parquet` made.

        Raises:
            DistdiagError: it is none.
        """
        if path.exists() and not path.is_file():  # it would wait for a pipe
            raise DistdiagError(f"{path} is not a file", "`distdiag history DIR --parquet FILE` writes one")
        named = ", ".join(f"CAST({n} AS {t})" for n, t in COLUMNS.items())
        file = _quoted(glob.escape(str(path.absolute())))
        try:
            self._con.execute(f"INSERT INTO history SELECT {named} FROM read_parquet([{file}])")
        except duckdb.Error as e:
            raise _failed(f"{path} is no history", e, "`distdiag history DIR --parquet FILE` writes one") from None

    def write_parquet(self, path: Path) -> None:
        """Write the table; the file appears when it is whole."""
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            self._con.execute(f"COPY history TO {_quoted(str(part.absolute()))} (FORMAT parquet, COMPRESSION zstd)")
            os.replace(part, path)
        except (duckdb.Error, OSError) as e:
            part.unlink(missing_ok=True)
            raise _failed(f"{path} cannot be written", e, "give another file") from None

    def lock(self) -> None:
        """Make the views, and close the database: no file, no network, no extension, no setting can be reached from now on."""
        for name, sql in VIEWS.items():
            self._con.execute(f"CREATE VIEW {name} AS {sql}")
        self._con.execute("SET enable_external_access = false")
        self._con.execute("SET lock_configuration = true")

    def ask(self, sql: str, arguments: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Return the rows of a SELECT, at most `MOST_ANSWERS`."""
        return self._con.execute(sql, arguments).fetchmany(MOST_ANSWERS)

    def ask_untrusted(self, sql: str, most: int, limit_s: float) -> tuple[list[str], list[tuple[Any, ...]]]:
        """Return (columns, rows) of one SELECT, with limits on time and rows.

        Raises:
            DistdiagError: it is something else, is wrong, or takes too long.
        """
        late = threading.Event()

        def stop() -> None:
            late.set()
            self._con.interrupt()

        timer = threading.Timer(limit_s, stop)
        timer.start()
        try:
            statements = duckdb.extract_statements(sql)
            if [s.type for s in statements] != [duckdb.StatementType.SELECT]:
                raise DistdiagError(
                    "--sql needs one SELECT",
                    "distdiag history DIR --sql 'SELECT kind, count(*) FROM findings GROUP BY kind'",
                )
            found = self._con.execute(sql)
            return [d[0] for d in found.description or ()], found.fetchmany(most)
        except duckdb.Error as e:
            if late.is_set():
                text = f"--sql takes longer than {limit_s:g} s"
                raise DistdiagError(text, "ask for less", ExitCode.TIMEOUT, "timeout") from None
            hint = f"tables: history, {', '.join(VIEWS)}; `DESCRIBE history` has the columns"
            raise _failed("--sql", e, hint) from None
        finally:
            timer.cancel()


def fetch_runs(url: str, folder: Path) -> tuple[list[Path], list[tuple[Path, str]]]:
    """Copy each run.db below an s3:// address into `folder`; return their directories, and those that are too large.

    Raises:
        DistdiagError: DuckDB's extension is missing, or the storage refuses.
    """
    with duckdb.connect() as con:
        try:
            con.execute("SET autoinstall_known_extensions = false; LOAD httpfs")
        except duckdb.Error:
            raise DistdiagError(
                f"s3:// needs DuckDB's extension httpfs for version {duckdb.__version__}, which is not installed",
                "python -c \"import duckdb; duckdb.sql('INSTALL httpfs')\" on a machine with internet",
                kind="missing_extra",
            ) from None
        try:
            con.execute(_secret())
            pattern = f"{url.rstrip('/')}/**/{rundir.DATABASE}"
            files = "SELECT filename, size FROM read_blob(?) ORDER BY filename LIMIT ?"
            runs, broken = [], []
            for name, size in con.execute(files, [pattern, MOST_FETCHED]).fetchall():
                key = Path(*[p for p in urlsplit(name).path.split("/") if p not in ("", ".", "..")])
                if size > MOST_DATABASE_BYTES:
                    broken.append((Path(name), f"larger than {MOST_DATABASE_BYTES >> 30} GiB"))
                    continue
                content = con.execute("SELECT content FROM read_blob(?)", [name]).fetchone()
                target = folder / key
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content[0] if content else b"")
                runs.append(target.parent)
            return runs, broken
        except duckdb.Error as e:
            hint = "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION and AWS_ENDPOINT_URL are used"
            raise _failed(f"{url} cannot be read", e, hint) from None


def _secret() -> str:
    """Return SQL for the credentials of AWS' standard variables."""
    env = os.environ
    options = {
        "KEY_ID": env.get("AWS_ACCESS_KEY_ID"), "SECRET": env.get("AWS_SECRET_ACCESS_KEY"),
        "SESSION_TOKEN": env.get("AWS_SESSION_TOKEN"), "REGION": env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION"),
    }  # fmt: skip
    if endpoint := env.get("AWS_ENDPOINT_URL_S3") or env.get("AWS_ENDPOINT_URL"):
        address = urlsplit(endpoint)
        options |= {"ENDPOINT": address.netloc, "URL_STYLE": "path", "USE_SSL": str(address.scheme == "https").lower()}
    given = "".join(f", {name} {_quoted(value)}" for name, value in options.items() if value)
    return f"CREATE SECRET (TYPE s3{given})"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _failed(what: str, error: Exception, hint: str) -> DistdiagError:
    """Return what failed, with the first line of why."""
    line = str(error).partition("\n")[0]
    return DistdiagError(visible(f"{what}: {line}"), hint)
