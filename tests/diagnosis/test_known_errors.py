"""Errors with a known cause: what a rank's page adds to the message, and what a row leaves to others."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from distdiag.diagnosis.known_errors import known
from distdiag.diagnosis.model.findings import Finding
from distdiag.diagnosis.model.snapshot import Call, Life, Loader, Model, RankState, Site, Snapshot
from distdiag.diagnosis.rules import deadlock, mismatch, rank_lost, unused_parameters
from tests.diagnosis.made import MODEL, findings, job, only, rank

LINE = Site("/job/train.py", 30, "main")


def crashed(q: int, exception: str, **more: object) -> RankState:
    return rank(q, life=Life.CRASHED, exception=exception, ended_s=9.0, current_site=LINE, user_stack=(LINE,), **more)


def ended(*ranks: RankState) -> Finding:
    s: Snapshot = job(*ranks)
    return only(findings(s, unused_parameters, mismatch, deadlock, rank_lost))


def batches(n: int, drop_last: bool = False) -> Loader:
    return Loader(site=LINE, length=64, batch_size=8, dataset_length=505, batches=n, drop_last=drop_last)


def test_the_last_smaller_batch_explains_an_error_about_sizes() -> None:
    text = "RuntimeError: Sizes of tensors must match except in dimension 0"
    found = ended(*(crashed(q, text, loaders=(batches(64),)) for q in (0, 1)))
    assert "the last batch of the loader at train.py:30 in main has 1 of 8 samples" in found.message
    assert "drop_last=True" in (found.advice or "")
    for loader in (batches(63), batches(64, drop_last=True)):  # else the batch is shown to be whole
        assert known(crashed(0, text, loaders=(loader,)))[0] == ""  # type: ignore[index]


@pytest.mark.parametrize(
    ("exception", "model", "advice", "shown"),
    [
        ("RuntimeError: Expected to mark a variable ready only once. This error", replace(MODEL, find_unused=True),
         "use_reentrant=False", "find_unused_parameters=True, static_graph=False"),
        ("RuntimeError: one of the variables needed for gradient computation has been modified by an inplace operation",
         replace(MODEL, forwards=102), "broadcast_buffers=False", "has run 2 forwards since its last backward"),
        ("RuntimeError: You can't use batches of different size with `dispatch_batches=True`", MODEL, "drop_last=True", ""),
        ("ValueError: Global rank 0 is not part of group <ProcessGroup>", MODEL, "group_src", ""),
        ("RuntimeError: ProcessGroupGloo::allgather: invalid tensor size at index 1 (expected (384, 96), got (96, 384))", MODEL, "the shape of the input", ""),
        ("RuntimeError: ProcessGroupGloo::scatter: Incorrect input list size 2.", MODEL, "one entry for each rank", ""),
        ("requests.exceptions.ReadTimeout: HTTPSConnectionPool(host='pics.example.org', port=443): Read timed out.", MODEL, "skip that sample on all ranks", ""),
        ("OSError: We couldn't connect to 'https://huggingface.co' to load the files", MODEL, "HF_HUB_OFFLINE=1", ""),
        ("urllib3.exceptions.MaxRetryError: HTTPSConnectionPool(host='hf.co', port=443): Max retries exceeded", MODEL, "HF_HUB_OFFLINE=1", ""),
        ("OSError: [Errno 24] Too many open files: '/data/a.tif'", MODEL, "a cache with a limit", ""),
        ("RuntimeError: unable to open shared memory object: Too many open files (24)", MODEL, "set_sharing_strategy", ""),
        ("RuntimeError: Parent directory out/tmp-checkpoint-60 does not exist.", MODEL, "another rank renamed or deleted it", ""),
        ("RuntimeError: Missing key in checkpoint state_dict: dataloader.dp_rank_3.", MODEL, "with as many ranks as saved it", ""),
        ("RuntimeError: Error(s) in loading state_dict for Net: Missing key(s) in state_dict: \"fc.weight\"", MODEL, "does not fit this model", ""),
        ("RuntimeError: Input type (double) and bias type (float) should be the same", MODEL, "`.float()`", ""),
        ("RuntimeError: mat1 and mat2 must have the same dtype, but got Double and Float", MODEL, "`.float()`", ""),
        ("RuntimeError: expected scalar type Half but found Float", MODEL, "`.float()`", ""),
        ("RuntimeError: Forward order differs across ranks: rank 0 is all-gathering 4 parameters", MODEL, "same order", ""),
    ],
)  # fmt: skip
def test_a_known_message_has_its_remedy(exception: str, model: Model, advice: str, shown: str) -> None:
    row = known(crashed(0, exception, models=(model,)))
    assert row is not None and advice in row[1] and shown in row[0]


def test_an_unknown_message_and_one_with_other_causes_have_none() -> None:
    assert known(crashed(0, "ValueError: bad label")) is None
    assert known(crashed(0, "RuntimeError: expected scalar type Long but found Float")) is None  # labels
    assert known(crashed(0, "RuntimeError: modified by an inplace operation")) is None  # one forward for each backward


@pytest.mark.parametrize("cut", [None, 150])
def test_a_taken_port_is_the_rank_s_own_failure(cut: int | None) -> None:
    text = (
        "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port: 33672, "
        "useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use"
    )
    lost = "torch.distributed.DistNetworkError: Failed to recv, got 0 bytes. Connection was likely closed."
    f = ended(crashed(0, text[:cut]), replace(crashed(1, lost), ended_s=9.5))
    assert (f.kind, f.cause, f.culprits, f.victims) == ("rank_lost", "crashed", (0,), (1,))
    assert "another --master-port" in (f.advice or "") and "another rank was gone" not in f.message


def test_split_sizes_that_gloo_refuses_are_a_mismatch() -> None:
    text = "RuntimeError: [enforce fail at alltoallv.cc:138] inLengthPerRank[myRank] == outLengthPerRank[myRank]. "
    call = Call(op="all_to_all_single", group="default_pg", seq=4, shape=(60, 16), received=960, site=LINE)
    found = only(findings(job(*(crashed(q, text, calls=(call,), models=()) for q in (0, 1))), mismatch))
    assert (found.kind, found.cause, found.culprits) == ("mismatch", "shape", (0, 1))
    assert "what each sends to itself is not what it expects from itself" in found.message


def test_a_static_graph_that_changed_is_an_error_and_no_claim_about_all_steps() -> None:
    unused = replace(
        MODEL, static_graph=True, unused=(("a.weight", 4),), unused_hits=1, unused_checks=41, unused_step=41
    )
    text = "RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one."
    s = job(*(crashed(q, text, models=(unused,)) for q in (0, 1)))
    found = only([f for f in findings(s, unused_parameters) if f.kind == "unused_parameters"])
    assert found.severity == "error" and "never" not in found.message
    assert "static_graph=True allows no other graph than that of the first step, and step 41 had one" in found.message


def test_a_message_that_only_names_a_state_dict_is_not_taken_for_a_checkpoint_that_does_not_fit() -> None:
    assert known(crashed(0, "AttributeError: 'NoneType' object has no attribute 'state_dict'")) is None
    fits_not = known(crashed(0, "RuntimeError: Error(s) in loading state_dict for Net: size mismatch for fc.weight"))
    assert fits_not is not None and "the checkpoint does not fit this model" in fits_not[1]
