"""Records functional collectives (`torch.distributed._functional_collectives`), which DTensor and tensor parallelism issue.

They go from Python to C++ operators, past the methods of `ProcessGroup` and `Work`. A call is issued when torch wraps its
result, and complete after `wait_tensor` of that result. What C++ and compiled code issue or wait for by themselves is not seen.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from distdiag.recorder.hooks.collectives import METHODS, Collectives
from distdiag.recorder.hooks.group_counters import Group
from distdiag.recorder.hooks.wrap_collectives import local, wrap_wait
from distdiag.recorder.hooks.wrapping import around, settle, settle_late, wraps
from distdiag.recorder.state import guarded
from distdiag.recorder.unseen import has_memory

MODULE = "torch.distributed._functional_collectives"
# name -> (method of ProcessGroup that C++ calls, index of the argument with the group); names of torch 2.10 to 2.13
_FUNCTIONS: dict[str, tuple[str, int]] = {
    "all_reduce": ("allreduce", 2),
    "all_reduce_coalesced": ("allreduce_coalesced", 2),
    "broadcast": ("broadcast", 2),
    "all_gather_single": ("_allgather_base", 2),
    "all_gather_tensor": ("_allgather_base", 2),
    "all_gather_single_coalesced": ("allgather_into_tensor_coalesced", 1),
    "all_gather_into_tensor_coalesced": ("allgather_into_tensor_coalesced", 1),
    "reduce_scatter_single": ("_reduce_scatter_base", 3),
    "reduce_scatter_tensor": ("_reduce_scatter_base", 3),
    "reduce_scatter_single_coalesced": ("reduce_scatter_tensor_coalesced", 3),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter_tensor_coalesced", 3),
    "all_to_all_single": ("alltoall_base", 3),
}
_NEEDED = ("wait_tensor", "_maybe_wrap_tensor", "_resolve_group_name", "_are_we_tracing")


@guarded
def install(collectives: Collectives) -> None:
    """Wrap the functions of torch's module `MODULE`; nothing if this torch lacks what the recording needs, which is noted."""
    module: Any = sys.modules[MODULE]
    missing = [f"_functional_collectives.{name}" for name in _NEEDED if not hasattr(module, name)]
    if missing:
        collectives.recorder.lacks(missing)
        return
    for name, (method, group_at) in _FUNCTIONS.items():
        original = getattr(module, name, None)
        if original is not None:
            setattr(module, name, _wrap(collectives, module, original, method, group_at))
    module._maybe_wrap_tensor = _wrap_result(collectives, module._maybe_wrap_tensor)
    module.wait_tensor = _wrap_wait(collectives, module.wait_tensor)


def _wrap(collectives: Collectives, module: Any, original: Any, method: str, group_at: int) -> Any:
    failed = collectives.failed

    @guarded
    def begin(args: tuple, kwargs: dict) -> tuple[int, Group, bool, int] | None:
        if not args or module._are_we_tracing() or not _is_real(module, args[0]):
            return None
        group = args[group_at] if len(args) > group_at else kwargs.get("group")
        if group is None or isinstance(group, list):  # a list of ranks is deprecated: resolving it warns
            return None
        if not isinstance(group, c10d.ProcessGroup):
            group = c10d._resolve_process_group(module._resolve_group_name(group))
        root = (*args[1:2], kwargs.get("src"))[0] if method == "broadcast" else None
        before = (None,) * METHODS[method][1]
        return collectives.begin(group, method, (*before, args[0], SimpleNamespace(asyncOp=True, rootRank=root)), {})

    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        began = None
        try:
            began = None if getattr(local, "inside", False) else begin(args, kwargs)
            if began is None:
                return original(*args, **kwargs)
            local.inside, local.functional = True, ([began[0]], *began[1:3])
            out = original(*args, **kwargs)
            local.inside, local.functional = False, None
            return out
        except BaseException as e:
            if began is not None:
                local.inside, local.functional = False, None
            e.__traceback__ = e.__traceback__.tb_next  # type: ignore[union-attr]
            try:
                settle(e, failed if began else None, (*(began or ())[:2], method, e))
            except BaseException as late:
                settle_late(late, e, failed if began else None, (*(began or ())[:2], method, e))
            raise

    return call


def _wrap_result(collectives: Collectives, original: Any) -> Any:
    """Return `original`, which torch calls with each result right after the call is issued."""

    @guarded
    def issued(result: Any) -> None:
        current: tuple[list[int], Group, bool] | None = getattr(local, "functional", None)
        if current is not None and (address := _address(result)):
            collectives.issued_functional(*current, address)

    return around(original, issued)


def _wrap_wait(collectives: Collectives, original: Any) -> Any:
    @guarded
    def begins(tensor: Any) -> tuple[int, bool] | None:
        address = _address(getattr(tensor, "elem", tensor)) if collectives.results else 0
        return collectives.functional_wait_begins(address) if address else None

    return wraps(original)(wrap_wait(collectives, original, begins))


def _is_real(module: Any, value: Any) -> bool:
    """True for a tensor, or a list of them, whose shape can be read: not for a traced one."""
    if isinstance(value, (list, tuple)):
        value = value[0] if value else None
    return isinstance(value, torch.Tensor) and (
        has_memory(type(value)) or isinstance(value, module.AsyncCollectiveTensor)
    )


def _address(tensor: Any) -> int:
    """Return the address of a tensor's memory; 0 if it has none."""
    return tensor.untyped_storage().data_ptr() if isinstance(tensor, torch.Tensor) and has_memory(type(tensor)) else 0
