"""`distdiag history s3://…` against a local S3 server: moto, and the extension httpfs of the installed DuckDB; skipped without them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("duckdb")

import duckdb

from distdiag.cli import main
from tests.history.runs import write_fleet


def extension() -> bool:
    with duckdb.connect() as con:
        try:
            con.execute("SET autoinstall_known_extensions = false; LOAD httpfs")
        except duckdb.Error:
            return False
    return True


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield the address of a bucket with six runs."""
    if not extension():
        pytest.skip(f"DuckDB {duckdb.__version__} has no extension httpfs here, and it cannot be downloaded")
    moto = pytest.importorskip("moto.server")
    boto3 = pytest.importorskip("boto3")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    where = "http://{}:{}".format(*server.get_host_and_port())
    for name, value in {
        "AWS_ENDPOINT_URL": where, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b'c", "AWS_REGION": "us-east-1",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    client = boto3.client("s3", endpoint_url=where, region_name="us-east-1")
    client.create_bucket(Bucket="runs")
    write_fleet(tmp_path / "fleet", 6)
    for file in (tmp_path / "fleet").rglob("run.db"):
        client.upload_file(str(file), "runs", f"team/{file.parent.name}/run.db")
    client.put_object(Bucket="runs", Key="team/broken/run.db", Body=b"no database")
    yield "s3://runs/team"
    server.stop()
    assert threading.active_count() < 20


def test_runs_are_read_from_object_storage(bucket: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["history", bucket]) == 0
    remote = capsys.readouterr()
    assert main(["history", str(tmp_path / "fleet")]) == 0
    assert remote.out == capsys.readouterr().out and remote.out.startswith("6 runs")
    assert "skipped s3:/runs/team/broken" in remote.err or "skipped s3://runs/team/broken" in remote.err


def test_a_bucket_that_is_not_there_is_one_line(bucket: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["history", "s3://absent/x"]) in (2, 4)
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_a_missing_extension_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    if extension():
        pytest.skip("the extension is installed")
    assert main(["history", "s3://bucket/x"]) == 2
    err = capsys.readouterr().err
    assert "needs DuckDB's extension httpfs" in err and "INSTALL httpfs" in err and len(err.splitlines()) == 2
