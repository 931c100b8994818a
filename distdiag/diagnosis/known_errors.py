"""Errors of torch and of frameworks whose cause is known: one row per message, with what the rank's page knows about it.

A row holds for every job: the message has one cause, or the recorder knows which of several it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from distdiag.diagnosis.model.snapshot import RankState
from distdiag.diagnosis.text.phrases import at
from distdiag.terms.untrusted import bounded


def _last_batch(state: RankState) -> str:
    """Return that the rank is in the last batch of a loader, and that this one is smaller; empty if it is not."""
    for loader in state.loaders:
        n, size = loader.length, loader.batch_size
        if not n or not size or not loader.dataset_length or loader.drop_last or loader.batches != n:
            continue
        rest = loader.dataset_length % size  # a DistributedSampler's part is not known exactly
        if rest and not loader.distributed_sampler:
            return f"the last batch of the loader{at(loader.site)} has {rest:,} of {size:,} samples"
    return ""


def _search(state: RankState) -> str:
    """Return the flags of its wrapped modules that make DDP visit parameters more than once."""
    unused, static = any(m.find_unused for m in state.models), any(m.static_graph for m in state.models)
    return f"find_unused_parameters={unused}, static_graph={static}" if state.models else ""


def _forwards(state: RankState) -> str:
    """Return that a wrapped module ran several forwards since its last backward, each of which broadcasts buffers."""
    ahead = max((m.forwards - m.synced_backwards for m in state.models if m.broadcast_buffers), default=0)
    text = f"the wrapped module has run {ahead} forwards since its last backward, with broadcast_buffers=True"
    return text if ahead > 1 else ""


class Known(NamedTuple):
    """A message, and what to do.

    Attributes:
        shows: What the rank's page knows about it; empty if nothing.
        only_if_shown: The message has other causes, too: without that fact the row is not used.
    """

    message: re.Pattern[str]
    do: str
    shows: Callable[[RankState], str] | None = None
    only_if_shown: bool = False


ROWS = (
    Known(bounded(r"mark a variable ready only once|marked as ready twice"),
          "pass use_reentrant=False to torch.utils.checkpoint, and leave out find_unused_parameters=True: with it DDP counts the "
          "parameters of a reentrant checkpoint twice; a module that is used twice in one forward needs static_graph=True", _search),
    Known(bounded(r"batches of different size with .dispatch_batches"),
          "drop the last batch (drop_last=True), or pass dispatch_batches=False or split_batches=True to Accelerator: its "
          "dispatcher concatenates one batch for each rank on rank 0", _last_batch),
    Known(bounded(r"Expecting \d+ \w+_mbs but got \d+"),
          "give the pipeline's schedule a batch that splits into as many micro-batches as it was built for: drop_last=True, or pad "
          "the last batch", _last_batch),
    Known(bounded(r"modified by an inplace operation"),
          "run one forward for both inputs (concatenate them), or pass broadcast_buffers=False: DDP writes the buffers (BatchNorm) in "
          "every forward, in place, and the first forward's graph still needs them", _forwards, only_if_shown=True),
    Known(bounded(r"Sizes of tensors must match|stack expects each tensor to be equal size|must match the size of tensor|is invalid for input of size"),
          "pass drop_last=True to that loader, or take the sizes from the batch", _last_batch, only_if_shown=True),
    Known(bounded(r"does not require grad and does not have a grad_fn"),
          "let the loss depend on a parameter in every step, also where a batch has nothing to learn (add 0 times the output): the "
          "other ranks wait for this rank's gradients"),
    Known(bounded(r"received 0 items of ancdata|Too many open files"),
          "raise the limit of open files (`ulimit -n`), or torch.multiprocessing.set_sharing_strategy('file_system')"),
    Known(bounded(r"unable to write to file </torch_|No space left on device.{0,40}(/dev/shm|torch_)|unable to mmap|insufficient shared memory"),
          "give the job more /dev/shm (docker --shm-size, a Memory emptyDir), or use fewer DataLoader workers"),
    Known(bounded(r"out of memory"),
          "lower that rank's largest batch or sequence length, or use checkpointing; see who else uses the GPU: `nvidia-smi`"),
    Known(bounded(r"(Missing|Unexpected) key\(s\) in state_dict.{0,400}module\."),
          "save and load `model.module.state_dict()`: the names begin with `module.` because DDP's own state was saved"),
    Known(bounded(r"Forward order differs across ranks"),
          "let every rank call the same submodules in the same order: a branch on data, or a module that only some ranks have, changes "
          "what FSDP gathers"),
    Known(bounded(r"Global rank \d+ is not part of group|Group rank \d+ is not part of group"),
          "give src and dst as ranks of the whole job (dist.get_global_rank(group, 0)), or pass group_src or group_dst: they number the "
          "members of the group"),
    Known(bounded(r"Incorrect (input|output) list size"),
          "give the list one entry for each rank of the group, in every case: pad it with empty entries"),
    Known(bounded(r"Default process group has not been initialized"), "call init_process_group before that line, on every rank"),
)  # fmt: skip


def known(state: RankState) -> tuple[str, str] | None:
    """Return (what the rank's page shows, what to do) about the exception that a rank ended by; None if it is not in the table."""
    for row in ROWS:
        if row.message.search(state.exception or ""):
            shown = row.shows(state) if row.shows is not None else ""
            if shown or not row.only_if_shown:
                return shown, row.do
    return None
