"""Makes every process group of this process a stand-in, whatever backend the script names.

`sitecustomize` arranges that `install` runs when torch.distributed is imported. Environment:
    STANDIN_NCCL         legacy, nccl2 (torch 2.15 or newer): which of torch's two implementations; default: the installed
                         torch's `nccl`
    STANDIN_RUN_AHEAD    operations that the host may launch after a collective (default 1024)
    STANDIN_EAGER        1: communicators are created with their group, as with init_process_group(device_id=…)
    STANDIN_EAGER_BYTES  messages up to this size complete without their receiver (default 4 MiB)
    STANDIN_PAIRS        blocking: the host waits while the communicator of two ranks is created for their first message
"""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any

from stream_backend import build

NAME = "stream"
DRAIN_MS = 2000  # time at exit for operations in flight to complete
loaded: list[Any] = []  # the extension, once a process group was created
_REPLACED = {"gloo", "nccl", "undefined", ""}


def _is_nccl2(dist: Any) -> bool:
    """True if the stand-in behaves as nccl2.

    Raises:
        RuntimeError: this torch has no hooks by which nccl2 is recorded.
    """
    has = hasattr(dist, "_maybe_attach_flight_recorder")
    wanted = os.environ.get("STANDIN_NCCL")
    if wanted is None:
        return has and os.environ.get("TORCH_DIST_USE_NCCL2") != "0"
    if wanted not in ("legacy", "nccl2") or (wanted == "nccl2" and not has):
        raise RuntimeError(f"STANDIN_NCCL={wanted}: legacy, or with torch 2.15 or newer nccl2")
    return wanted == "nccl2"


def _extension(nccl2: bool) -> ModuleType:
    folder = build.build()
    spec = importlib.util.spec_from_file_location("_stream", folder / "_stream.so")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.install(
        str(folder),
        int(os.environ.get("STANDIN_RUN_AHEAD", "1024")),
        int(os.environ.get("STANDIN_EAGER_BYTES", str(4 << 20))),
        os.environ.get("STANDIN_PAIRS") == "blocking",
        nccl2,
    )
    return module


def _switch_off_gloos_recorder(c10d: Any) -> None:
    """Disable the flight recorder of gloo, which carries the stand-in's data; it reads its environment when first used."""
    name = "TORCH_FR_BUFFER_SIZE"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        c10d._dump_fr_trace_json(False, False)
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def install(dist: Any) -> None:
    """Register the backend in `torch.distributed.distributed_c10d` in place of gloo and NCCL."""
    c10d: Any = importlib.import_module("torch._C._distributed_c10d")

    _switch_off_gloos_recorder(c10d)
    nccl2 = False  # chosen with the first group: forked ranks have their environment after this import
    nothing = b'{"version": "2.10", "pg_config": {}, "pg_status": {}}'
    c10d._dump_nccl_trace_json = lambda *_, **__: nothing
    eager = os.environ.get("STANDIN_EAGER") == "1"

    def create(options: Any, _: Any) -> Any:
        import torch

        if not loaded:  # a launcher does not need it
            extension = _extension(nccl2)
            extension.replace_reads(torch.Tensor)
            if not nccl2:
                c10d._dump_nccl_trace_json = extension.dump_json
                c10d._dump_nccl_trace = extension.dump
            atexit.register(extension.drain, DRAIN_MS)
            loaded.append(extension)
        if nccl2 and options.split_from:
            options.split_from.split_from_all()
        ranks = options.global_ranks_in_group or range(options.group_size)
        out = loaded[0].create(
            options.store, options.group_rank, options.group_size, options.timeout, list(ranks), eager, nccl2
        )
        if nccl2:
            out.eager_connect_single_device(torch.device("cpu"))
        return out

    dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu"])
    original = dist._new_process_group_helper

    def _new_process_group_helper(
        group_size: int, group_rank: int, global_ranks_in_group: list[int], backend: Any, *args: Any, **kwargs: Any
    ) -> Any:
        nonlocal eager, nccl2
        if not loaded:
            nccl2 = _is_nccl2(dist)
            if not nccl2 and hasattr(dist, "_FR_SELF_RECORDING_BACKENDS"):
                dist._FR_SELF_RECORDING_BACKENDS.add(NAME)
        named = str(backend or "").lower()
        # the job's groups; a further group that requests gloo gets it, as it would next to NCCL
        if named in _REPLACED - {"gloo"} or "nccl" in named or (named == "gloo" and not global_ranks_in_group):
            backend = dist.Backend(NAME)
            eager = eager or kwargs.get("device_id") is not None  # the id of a GPU that does not exist here
        if backend == NAME:
            kwargs["device_id"] = None
        out = original(group_size, group_rank, global_ranks_in_group, backend, *args, **kwargs)
        if backend == NAME and out[0] is not dist.GroupMember.NON_GROUP_MEMBER:
            _as_nccl(out[0], eager or nccl2, connected=nccl2)
        if backend == NAME and eager and not nccl2 and global_ranks_in_group:
            _split(dist)
        return out

    dist._new_process_group_helper = _new_process_group_helper
    _allow_monitored_barrier(dist)


def _split(dist: Any) -> None:
    """Wait for all ranks of the default group: ranks without a communicator also call ncclCommSplit."""
    world = dist._get_default_group()
    store, name = dist._world.pg_map[world][1], f"ncclCommSplit/{dist._world.group_count}"
    if store.add(name, 1) == world.size():
        store.set(f"{name}/all", "1")
    store.wait([f"{name}/all"])


def _as_nccl(pg: Any, eager: bool, connected: bool) -> None:
    """Add sequence numbers: torch checks the type of a backend, not the backend, for them."""
    import torch

    cpu, kind = torch.device("cpu"), type(pg).BackendType.NCCL
    backend = pg._get_backend(cpu)
    pg._register_backend(cpu, kind, backend)
    pg._set_default_backend(kind)
    if eager:
        pg.bound_device_id = torch.device("cpu", 0)
        if not connected:
            backend.eager_connect_single_device(cpu)


def _allow_monitored_barrier(dist: Any) -> None:
    """Allow monitored_barrier, which torch refuses for all backends but gloo, so that jobs that call it run here."""
    original = dist.monitored_barrier

    def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> Any:
        if dist._rank_not_in_group(group) or dist.get_backend(group) != NAME:
            return original(group, timeout, wait_all_ranks)
        group = group or dist._get_default_group()
        limit = timeout or dist._get_default_timeout(dist.Backend.GLOO)
        return group.monitored_barrier(limit, wait_all_ranks=wait_all_ranks)

    dist.monitored_barrier = monitored_barrier


def on_import() -> None:
    """Install as soon as torch.distributed.distributed_c10d has been imported."""
    from importlib.machinery import PathFinder

    name = "torch.distributed.distributed_c10d"

    class Finder:
        @staticmethod
        def find_spec(fullname: str, path: Any = None, target: Any = None) -> Any:
            if fullname != name:
                return None
            sys.meta_path.remove(Finder)  # type: ignore[arg-type]
            spec = PathFinder.find_spec(fullname, path)
            if spec is None or spec.loader is None:
                return None
            loader, execute = spec.loader, spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                del loader.exec_module
                install(module)

            loader.exec_module = exec_module  # type: ignore[method-assign]
            return spec

    sys.meta_path.insert(0, Finder)  # type: ignore[arg-type]
