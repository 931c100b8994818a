"""Bad input: one line of error, one of hint, the contract's exit code; nothing is started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distdiag.errors import DistdiagError, ExitCode
from distdiag.probekit.command import catalog
from distdiag.probekit.command import main as command
from distdiag.probekit.command.options import Options, check_backend, parse, place_ranks
from distdiag.probekit.measure.probe import load_probe


@pytest.mark.parametrize(
    ("arguments", "says", "hints"),
    [
        (["allredcue"], "unknown probe 'allredcue'", "allreduce"),
        (["zzz"], "unknown probe 'zzz'", "list"),
        (["allreduce", "--min-bytes", "0"], "from 1 to 2^63", "element"),
        (["allreduce", "--min-bytes", "1023"], "not a multiple", "1020"),
        (["allreduce", "--dtype", "int64", "--max-bytes", "1028"], "not a multiple", "1024"),
        (["allreduce", "--budget", "0.5"], "too small", "2 s"),
        (["allreduce", "--budget", "-1"], "too small", "2 s"),
        (["allreduce", "--budget", "soon"], "'soon' is not a number", "number"),
        (["allreduce", "--budget", "nan"], "not a finite number", "number"),
        (["allreduce", "--dtype", "fp4"], "fp4", "bfloat16"),
        (["allreduce", "--nproc", "two"], "'two' is not a whole number", "count"),
        (["allreduce", "--inject", "explode:rank=1"], "cannot be injected".replace("cannot", "not a fault that can"), "delay:rank=1"),
        (["allreduce", "--inject", "delay:rank=1"], "not a fault", "delay:rank=1"),
        (["allreduce", "--inject", "delay:rank=one,ms=5"], "not a number", "delay:rank=1"),
        (["allreduce", "--as", "xml"], "'xml' is not one of", "--help"),
        (["allreduce", "--wat"], "No such option", "--help"),
        (["allreduce", "--floor", "0"], "above 0", "machine"),
        (["barrier", "--floor", "1"], "does not apply", "--against"),
        (["allreduce", "--timeout", "0"], "--timeout", "default"),
        (["allreduce", "--min-bytes", "2M", "--max-bytes", "1M"], "above --max-bytes", "swap"),
    ],
)  # fmt: skip
def test_bad_options_print_error_and_hint_and_exit_with_2(
    arguments: list[str], says: str, hints: str, capsys: pytest.CaptureFixture[str]
):
    assert command.main(arguments) == ExitCode.USAGE
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == "" and len(lines) == 2
    assert lines[0].startswith("distdiag: error: ") and says in lines[0]
    assert lines[1].startswith("hint: ") and hints in lines[1]


def test_errors_are_an_object_under_json(capsys: pytest.CaptureFixture[str]):
    assert command.main(["alreduce", "--json"]) == 2
    out, _ = capsys.readouterr()
    error = json.loads(out)
    assert next(iter(error)) == "schema" and error["error"]["kind"] == "usage"
    assert "allreduce" in error["error"]["hint"]


@pytest.mark.parametrize("spelling", ["all_reduce", "all-reduce", "AllReduce", "allreduce"])
def test_a_probe_is_also_found_by_its_torch_name(spelling: str):
    assert catalog.canonical(spelling) == "allreduce"


def test_list_names_every_probe_of_the_contract(capsys: pytest.CaptureFixture[str]):
    names = "barrier broadcast allreduce reduce gather scatter allgather reducescatter alltoall sendrecv pairs dataloader step gpu all"
    assert command.main(["list"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == names.split()
    assert command.main(["list", "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)["probes"]) == names.split()


def placed(options: Options, gpus: int, min_ranks: int = 2) -> int:
    return place_ranks(options, gpus, min_ranks, 2)


@pytest.mark.parametrize(
    ("arguments", "gpus", "says"),
    [
        (["--nproc", "1"], 0, "needs 2 ranks, not 1"),
        (["--nproc", "0"], 0, "no rank"),
        (["--nproc", "4", "--device", "cuda"], 2, "--nproc 4 on 2 GPUs"),
        (["--backend", "nccl", "--device", "cpu"], 0, "cannot move CPU tensors"),
        (["--backend", "nccl"], 0, "no NVIDIA GPU"),
        (["--device", "cuda"], 0, "no NVIDIA GPU"),
        (["--inject", "drop:rank=5"], 0, "ranks are 0 to 1"),
    ],
)
def test_an_invalid_number_of_ranks_is_refused(arguments: list[str], gpus: int, says: str):
    with pytest.raises(DistdiagError) as e:
        placed(parse(arguments, "allreduce"), gpus)
    assert says in e.value.message and e.value.hint


@pytest.mark.parametrize(
    ("arguments", "gpus", "ranks", "device", "backend"),
    [
        ([], 0, 2, "cpu", "gloo"),
        ([], 1, 2, "cpu", "gloo"),  # one GPU is not enough for a pair
        ([], 8, 8, "cuda", "nccl"),
        (["--nproc", "4"], 8, 4, "cuda", "nccl"),
        (["--nproc", "4"], 2, 4, "cpu", "gloo"),
        (["--device", "cpu"], 8, 2, "cpu", "gloo"),
        (["--device", "cuda", "--share-gpus", "--nproc", "2"], 1, 2, "cuda", "gloo"),
        (["--device", "cuda", "--share-gpus", "--nproc", "2", "--backend", "nccl"], 1, 2, "cuda", "nccl"),
    ],
)
def test_default_ranks_devices_and_backends(arguments: list[str], gpus: int, ranks: int, device: str, backend: str):
    options = parse(arguments, "allreduce")
    assert placed(options, gpus) == ranks
    assert (options.device, options.backend) == (device, backend)


@pytest.mark.parametrize(
    ("name", "gpus", "ranks", "device"),
    [("step", 0, 2, "cpu"), ("step", 1, 1, "cuda"), ("step", 4, 4, "cuda"), ("dataloader", 4, 1, "cuda"), ("dataloader", 0, 1, "cpu")],
)  # fmt: skip
def test_probes_that_need_no_second_rank_use_the_one_gpu(name: str, gpus: int, ranks: int, device: str):
    options = parse([], name)
    probe = load_probe(name)
    assert place_ranks(options, gpus, probe.min_ranks, probe.default_ranks) == ranks
    assert options.device == device


def test_nccl_inside_a_launcher_without_a_gpu_is_refused():
    with pytest.raises(DistdiagError, match="no NVIDIA GPU"):
        check_backend(parse(["--backend", "nccl"], "allreduce"), 0)


def test_an_existing_output_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    there = tmp_path / "result.json"
    there.write_text("precious")
    for option in ("--output", "--save"):
        assert command.main(["allreduce", option, str(there)]) == 2
        assert "--force" in capsys.readouterr().err
    assert there.read_text() == "precious"
    assert command.main(["allreduce", "--save", str(tmp_path / "no" / "file")]) == 2
    assert "no directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "no baseline"),
        ("not json", "not JSON"),
        ('{"schema": "other/1"}', "schema 'other/1'"),
        ("[1, 2]", "not a baseline"),
        ('{"schema": "distdiag.probe-baseline/1", "entries": [{"key": 3}]}', "damaged"),
    ],
)
def test_an_unreadable_or_foreign_baseline_is_refused_before_measuring(
    content: str | None, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "base.json"
    if content is not None:
        file.write_text(content)
    assert command.main(["allreduce", "--against", str(file)]) == 2
    assert says in capsys.readouterr().err
    file.unlink(missing_ok=True)
    file.mkdir()
    assert command.main(["allreduce", "--against", str(file)]) == 2


def test_a_named_run_that_does_not_exist_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert command.main(["allreduce", "--run", str(tmp_path / "nothing")]) == ExitCode.NO_DATA
    assert "no run directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["dataloader", "--dataset", "nothing"], "MODULE:FUNCTION"),
        (["dataloader", "--dataset", "no_such_module_here:make"], "importing"),
        (["dataloader", "--dataset", "json:nothing"], "no function"),
        (["dataloader", "--workers", "1,x"], "whole number"),
        (["dataloader", "--workers", "500"], "more than any host needs"),
        (["step", "--strategies", "ddp,magic"], "'magic'"),
        (["step", "--model", "json:loads:x"], "no function"),
    ],
)  # fmt: skip
def test_bad_user_objects_are_refused(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]):
    assert command.main(arguments) == 2
    err = capsys.readouterr().err
    assert says in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "listed", "left_out"),
    [
        (["step", "--help"], ("--strategies", "--params", "--budget"), ("--workers", "--max-bytes", "--floor")),
        (["all_reduce", "--help"], ("--max-bytes", "--floor", "--budget"), ("--strategies", "--params", "--dataset")),
        (["dataloader", "--help"], ("--workers", "--batch-size"), ("--max-bytes", "--svg")),
        (["--help"], ("--strategies", "--max-bytes", "--workers", "sendrecv"), ()),
    ],
)
def test_the_help_of_a_probe_lists_its_own_options(
    arguments: list[str], listed: tuple[str, ...], left_out: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(arguments)
    shown = capsys.readouterr().out.split()
    assert set(listed) <= set(shown) and not set(left_out) & set(shown)
    assert (("distdiag probe --help") in " ".join(shown)) == (arguments != ["--help"])
