"""The layout of a rank page: the fixed structures that a rank writes and the monitor reads, and their version."""

from __future__ import annotations

import ctypes
import struct
from ctypes import Structure, c_char, c_double, c_int32, c_int64, c_uint8, c_uint32, c_uint64
from enum import IntEnum
from pathlib import Path

MAGIC = b"DISTDIAG"
VERSION = 19
HEAP_BYTES = 192 * 1024
CALLS, STEPS, SAMPLES, SCALARS, DDP_TIMES = 1024, 256, 128, 64, 32
CALLERS = 3  # most callers of a call's site
KEY_BYTES = 80  # of a store's key
BACKEND_FRAME = "backend:"
STILL_NS = 100_000_000  # time in the same phase or wait after which a rank may be waiting
GROUPS, PEERS, SITES, LOADERS, MODELS, STACK = 64, 512, 256, 12, 6, 8


class Phase(IntEnum):
    """What the main thread does, according to the hooks; readers show the names in `words`."""

    INIT = 0
    DATA = 1
    H2D = 2
    FORWARD = 3
    BACKWARD = 4
    OPTIMIZER = 5
    OTHER = 6
    COLLECTIVE = 7
    CHECKPOINT = 8
    VALIDATE = 9
    DONE = 10


class Blocked(IntEnum):
    """What the main thread may be waiting in; `blocked_at` identifies the call or group."""

    NO = 0
    WAIT = 1  # inside Work.wait or a blocking call: index of the call record
    DDP = 2  # inside C++ of DDP (constructor, buffer broadcast, backward's reducer): group slot
    GROUP = 3  # creating a process group: index of the call record


class LifeWord(IntEnum):
    STARTING = 0
    RUNNING = 1
    EXITING = 2  # interpreter shutdown began, exit_code holds
    RAISED = 3  # an exception left the script
    LEFT_GROUP = 4  # destroy_process_group of the default group
    DETACHED = 5  # the script stopped recording, and continues


class Header(Structure):
    _fields_ = [
        ("magic", c_char * 8),
        ("version", c_uint32),
        ("page_bytes", c_uint32),
        ("pid", c_int32),
        ("rank", c_int32),
        ("local_rank", c_int32),
        ("world_size", c_int32),
        ("local_world_size", c_int32),
        ("node", c_int32),
        ("attempt", c_int32),
        ("gpu", c_int32),
        # fields written many times a step: adjacent whole words, as with cold caches each cache line counts
        ("phase", c_uint64),
        ("phase_since_ns", c_uint64),
        ("blocked", c_uint64),
        ("blocked_at", c_uint64),
        ("blocked_site", c_uint64),
        ("blocked_since_ns", c_uint64),
        ("step", c_uint64),
        ("micro_steps", c_uint64),  # backward passes
        ("n_steps", c_uint64),
        ("n_calls", c_uint64),
        ("epoch", c_int64),
        ("device_bytes", c_uint64),
        # NEWS: a change here makes the monitor read the page at once
        ("life", c_uint64),
        ("dropped", c_uint64),  # records and strings that did not fit
        ("errors", c_uint64),  # failures of the recorder
        ("exception_ns", c_uint64),
        ("caught_ns", c_uint64),
        ("n_groups", c_uint64),
        ("n_models", c_uint64),  # wrapped so far; the slots are those of the newest
        ("started_wall_ns", c_uint64),
        ("started_mono_ns", c_uint64),
        ("process_start_ticks", c_uint64),
        ("host", c_uint32),
        ("script", c_uint32),
        ("facts", c_uint32),  # JSON text: versions, backend, meta(**…) of the job; replaced whole
        ("heap_used", c_uint32),
        ("error", c_uint32),  # text of the recorder's last failure
        ("exit_code", c_int32),
        ("exception", c_uint32),
        ("exception_depth", c_uint32),
        ("exception_stack", c_uint32 * STACK),
        ("caught", c_uint32),  # newest exception from a collective or a step, which the script may still catch
        ("heartbeat_ns", c_uint64),
        ("beats", c_uint64),
        ("stack_version", c_uint64),  # odd while the pulse writes the stack
        ("stack_depth", c_uint64),
        ("stack", c_uint64 * STACK),  # sites of the user's frames, innermost first
        ("stack_phase", c_uint64),  # the phase in which the stack was sampled
        # "queue.get": the innermost Python frame of all, torch's and stdlib's included; BACKEND_FRAME before it: in a backend's code
        ("raw_innermost", c_uint64),
        ("stack_ns", c_uint64),  # 0: none was sampled since the rank left its groups
        # the exception that the main thread is handling while it waits, and the user's line that raised it; 0 = none
        ("handling", c_uint64),
        ("handling_site", c_uint64),
        ("n_samples", c_uint64),
        ("n_scalars", c_uint64),
        ("n_ddp_times", c_uint64),
        ("n_peers", c_uint32),
        ("n_sites", c_uint32),
        ("n_loaders", c_uint32),
        ("in_join", c_uint32),
        ("initialised", c_uint64),  # calls of init_process_group
        ("device_total_bytes", c_uint64),
        ("device_peak_bytes", c_uint64),
        ("witness", c_uint32),  # path of the worker server's socket
        ("trace_signal", c_int32),  # this signal makes C code write all stacks to r<rank>.trace; 0 = none
        ("counted_ns", c_uint64),  # when the pulse last read the groups' counters
        ("gc_ns", c_uint64),  # time of full garbage collections
        ("gc_count", c_uint64),
        ("gc_off", c_uint64),  # 1: gc.disable() was called
        ("tools", c_uint64),  # that are on: 1 torch.profiler, 2 autograd's anomaly detection, 4 tracemalloc
        # of the Python threads but the main one and ours, the one that computed most in the newest second
        ("thread", c_uint32),  # its name
        ("thread_permille", c_uint32),  # share of that second in which it was on a CPU
        ("thread_site", c_uint64),
        ("store_key", c_char * KEY_BYTES),  # that the main thread waits for in a store; empty: it waits for none
        ("store_set", c_char * KEY_BYTES),  # that the script's main thread has set last
        ("store_set_site", c_uint64),
        ("n_store", c_uint64),  # keys that it has set, got or found so far
        ("store_asked_ns", c_uint64),  # when it last asked for `store_key` without waiting for it; 0: it waits
    ]


class GroupSlot(Structure):
    _fields_ = [
        ("name", c_uint32),
        ("description", c_uint32),
        ("backend", c_uint32),
        ("ranks", c_uint32),  # "0-3,8"
        ("generation", c_uint32),
        ("destroyed", c_uint32),
        ("enqueued", c_int64),  # newest collective issued
        ("completed", c_int64),  # newest completed, from the flight recorder; -1 not known
        ("flight_recorder_id", c_int64),
        ("offset", c_int64),  # the backend's current sequence number minus the number of collectives
    ]


class PeerSlot(Structure):
    _fields_ = [("group", c_uint32), ("send", c_uint32), ("peer", c_int32), ("tag", c_int32), ("count", c_uint64)]


BARRIER_PEER = -3  # `PeerSlot.peer` of a slot that counts monitored barriers, for the life of the job


class SiteSlot(Structure):
    _fields_ = [("site", c_uint32), ("op", c_uint32), ("count", c_uint64)]


EPOCH_SAMPLES = 32


class LoaderSlot(Structure):
    _fields_ = [
        ("site", c_uint32),
        ("length", c_int64),
        ("dataset_length", c_int64),
        ("batch_size", c_int64),
        ("drop_last", c_int32),
        ("distributed_sampler", c_int32),  # 1: its rank and num_replicas are those of the process; 2: they differ
        ("sampler_epoch", c_int64),
        ("sampler_seed", c_int64),
        ("shuffle", c_int32),
        ("workers", c_int32),
        ("iterations", c_uint64),
        ("batches", c_uint64),
        ("given", c_uint64),  # batches of all epochs; the C hooks rely on this order
        ("elements", c_uint64),  # of the first tensor of each of them
        ("exhausted", c_uint32),
        ("in_training", c_uint32),
        ("n_first", c_uint32),
        ("first", c_uint64 * 6),
        ("n_previous", c_uint32),
        ("previous", c_uint64 * 6),  # fingerprints as `first`, of the pass before; if `fed`: of later batches (`LATER`)
        ("wait_ns", c_uint64),
        ("persistent_workers", c_int32),  # -1: not known
        ("promised", c_uint32),  # the job declared how many batches it takes
        ("polls", c_uint32),  # polls of its workers; 0: not known
        ("fetching_permille", c_uint32),  # recent share of its workers that fetch a batch; the others wait
        ("fed", c_uint32),  # no loader: what a DDP module was given in steps without one
        # the epoch, of those counted by `iterations`, of the next field; 0: none; bit 32: it has indices that a sampler has drawn, not values
        ("sampled_epoch", c_uint64),
        # of the samples in it, those with the lowest hashes: the hash (high 32 bits), which workers gave it (bit i of 16: worker i), and how
        # often it came (low 16 bits)
        ("epoch_samples", c_uint64 * EPOCH_SAMPLES),
        ("previous_batches", c_uint64),  # of the epoch before
        # under a DistributedSampler: hash of some elements of the data set's index (files, `Subset.indices`), bit 32; bit 33: a Subset; 0: unknown
        ("data_set_index", c_uint64),
    ]


class ModelSlot(Structure):
    _fields_ = [
        ("name", c_uint32),
        ("group", c_uint32),
        ("site", c_uint32),
        ("parameters", c_uint32),
        ("parameter_elements", c_uint64),
        ("shape_hash", c_uint64),
        # of the names and shapes of its parameters, by whose positions DDP exchanges them: a hash in any order (high 32 bits), and in theirs
        ("parameter_order", c_uint64),
        ("buffer_order", c_uint64),
        ("find_unused", c_int32),  # 1 set by the script, 2 set by a library that wraps the model; -1 not known yet
        ("static_graph", c_int32),
        ("broadcast_buffers", c_int32),
        ("forwards", c_uint64),  # with gradients
        ("synced_backwards", c_uint64),
        ("vain_no_syncs", c_uint64),  # of these in `no_sync()`, which their forward was not in
        ("unused_checks", c_uint64),
        ("unused_hits", c_uint64),
        ("unused", c_uint32),  # JSON list of [name, elements]
        ("unused_step", c_uint64),
        ("frozen", c_uint32),  # number of parameters with requires_grad False
        ("search_ns", c_uint64),  # time of DDP's searches for unused parameters
        ("searches", c_uint64),
        ("unused_site", c_uint32),
        ("never_called", c_uint32),  # JSON list of their modules that the first forward did not enter; 0: not seen
        ("frozen_names", c_uint32),  # JSON list of [name, elements]
        ("never_trained", c_uint32),  # JSON list of [name, elements] without gradient at every check so far
        ("buckets", c_uint32),  # JSON object: bytes, buckets, bucket_bytes, …; 0: not known yet
        ("evaluating", c_uint32),  # the module that it wraps is in eval mode
        ("frozen_later", c_uint32),  # 1 if all of `unused` were frozen after DDP was built
        ("without_graph", c_uint32),  # 1 if the first forward entered the modules of `unused` with gradients off only
        ("batch", c_uint64),  # first dimension of the first tensor that entered it in forwards 1, 2, 3, 5, 9, …
    ]


class CallRecord(Structure):
    _fields_ = [
        ("number", c_uint64),  # 1-based; written last, so that a half-written record is recognised
        ("op", c_uint32),
        ("group", c_uint32),
        ("seq", c_int64),
        ("nth", c_uint64),
        ("peer", c_int32),  # root or peer, global rank; -1 none; -2 any
        ("tag", c_int32),
        ("dtype", c_uint32),
        ("site", c_uint32),
        ("ndim", c_int32),  # number of dimensions; -1 not known
        ("shape", c_int64 * 6),
        ("elements", c_int64),
        ("bytes", c_int64),
        ("received", c_int64),  # elements that an all_to_all receives from all ranks together; -1 not known
        ("entered_ns", c_uint64),
        ("wait_ns", c_uint64),  # time the host spent waiting in it
        ("left_ns", c_uint64),  # 0 while in flight on the host
        ("flags", c_uint8),  # ASYNC, ROOTED, …
        ("step", c_uint64),
    ]


class StepRecord(Structure):
    _fields_ = [
        ("number", c_uint64),
        ("step", c_uint64),
        ("epoch", c_int64),
        ("start_ns", c_uint64),
        ("end_ns", c_uint64),
        ("data_ns", c_uint64),
        ("h2d_ns", c_uint64),
        ("forward_ns", c_uint64),
        ("backward_ns", c_uint64),
        ("optimizer_ns", c_uint64),
        ("wait_ns", c_uint64),
        ("ready_ns", c_uint64),  # when this rank was ready for the step's (last) synchronisation; 0 unknown
        ("samples", c_uint64),
        ("batch", c_uint64),  # local batch size of the (first) batch
        ("loss", c_double),
        ("loss_known", c_uint64),
        ("device_bytes", c_uint64),
        ("forward_wait_ns", c_uint64),  # part of wait_ns in forward: DDP's broadcast of buffers
        # when this rank arrived at the step's first synchronisation; 0: before the last, none
        ("arrived_ns", c_uint64),
        ("optimizer_wait_ns", c_uint64),  # part of wait_ns in optimizer steps: in collectives that they call
        ("elements", c_uint64),  # of the first tensor of its batches
    ]


class SampleKind(IntEnum):
    PARAMETERS = 1  # checksum of sampled parameter elements after an optimizer step
    BUFFERS = 2
    NONFINITE_LOSS = 3
    NONFINITE_GRADIENT = 4
    NONFINITE_LOCAL_GRADIENT = 6  # before it was averaged: on the rank where it began
    # elements reduced over all ranks during the step (also by reduce_scatter), divided by those of the parameters with gradients; key: the elements
    REDUCED = 5
    AVERAGED = 7  # maximum between two steps so far
    # a collective called by a rank outside its group, which returned at once; `name` is the operation
    NOT_A_MEMBER = 10
    UNFROZEN = 11  # parameters with gradients that were frozen when DDP was built; `name` is the first of them
    OUTSIDE_DDP = 14  # checksum of parameters that an optimizer steps and no DDP module was built with; `name`: their number and the first shape
    # without DDP: the same of parameters that FSDP over all ranks does not shard, beside those that it does; also of before the first step
    OUTSIDE_FSDP = 26
    THREAD_ENDED = 13  # a thread of the script ended by an exception; `name` is its text
    DROPPED_LOSS = 15  # NaN, the fourth after which the next update had finite gradients
    INFINITE_LOSS = 12  # several in a row, all with finite gradients
    NAN_INPUT = 8  # the batch of a non-finite loss contains NaN
    # of the optimizer's first group whose rate is not 0, where a checksum is taken (all are 0, and others step: none); its key: how often
    # the compared parameters were written in place so far (low 32 bits), whether parameters are sharded (bit 32), a hash of the groups' sizes
    LEARNING_RATE = 9
    # checksum of the buffers that are saved with the model, without running statistics; `name`: of the only one, or how many
    STATE = 18
    # number of the optimizer's trained parameters that had no gradient at any sampled step, or of all if none has one now; its key is
    # the number of all (low 32 bits; 0: the same), and the share of their elements, in millionths; `name`: the first one's shape
    NO_GRADIENTS = 17
    # number of parameters of DDP's modules, or without DDP of those that a step calls, that have a gradient, are in no optimizer that steps, and
    # have not changed; its key: the optimizer's that no module has; bit 32: those of modules that DDP does not have; `name`: of the first ones
    NOT_STEPPED = 19
    GRADIENTS = 20  # sum of the magnitudes of sampled elements of the gradients with which the optimizer has stepped
    # without DDP: checksum of the parameters of all modules of a class, `name`; also of before the first step. Its key: how many; bit 32: all
    # begin with one value in all their elements; bit 33: all have sparse gradients; from bit 34 on: their elements
    LAYERS = 22
    # checksum of parameters of DDP's modules that no gradient trains, or that were put there since DDP was built; `name`: as of STATE
    FROZEN = 27
    # checksum of parameters (or, without these, of constant buffers) of modules outside DDP that a step calls and no gradient trains;
    # `name`: these modules
    UNTRAINED = 21
    # number of parameters whose autograd node is no longer that on which DDP has put its hook; the key: of how many; `name`: the first
    HOOKS_LOST = 23
    OPTIMIZER_STEPS = 24  # that the optimizer's state has counted, also before it was loaded; where Python can read that without a device
    # checksum of the parameters after a step and an averaging of as many elements, which has not changed them; after times 1, 2, 4, 8, …
    # (key, bit 32: this one has)
    NOT_WRITTEN_BACK = 25
    BEGAN_AGAIN = 28  # steps are counted from 0 again: `step` of them were this rank's alone, before the first DDP module of all ranks was built
    EVAL_MODE = 16  # number of dropout and batch-norm layers of DDP's modules that are in eval mode after a step; key: of all such layers


class SampleRecord(Structure):
    _fields_ = [
        ("number", c_uint64),
        ("kind", c_uint32),
        ("step", c_uint64),
        ("value", c_double),
        # of a checksum: what was sampled (low 32 bits), and the number of synchronised backward passes before it (high bits)
        ("key", c_uint64),
        ("name", c_uint32),
        ("site", c_uint32),
        ("t_ns", c_uint64),
    ]


class ScalarRecord(Structure):
    _fields_ = [("number", c_uint64), ("name", c_uint32), ("step", c_uint64), ("value", c_double), ("t_ns", c_uint64)]


class DdpTimeRecord(Structure):
    """One backward pass of a DDP module as its reducer timed it."""

    _fields_ = [
        ("number", c_uint64),
        ("model", c_uint64),  # index of the module's slot
        ("began_ns", c_uint64),  # when the backward pass began
        ("per_step", c_uint64),  # such passes per step; 0: not known, or it varies
        ("comm_ns", c_uint64),  # from the first bucket's start to the last bucket's end
        ("overlap_ns", c_uint64),  # the part that overlaps with the computation of gradients
        ("backward_ns", c_uint64),  # until the last gradient was computed
    ]


class Page(Structure):
    _fields_ = [
        ("header", Header),
        ("groups", GroupSlot * GROUPS),
        ("peers", PeerSlot * PEERS),
        ("sites", SiteSlot * SITES),
        ("loaders", LoaderSlot * LOADERS),
        ("models", ModelSlot * MODELS),
        ("calls", CallRecord * CALLS),
        ("steps", StepRecord * STEPS),
        ("samples", SampleRecord * SAMPLES),
        ("scalars", ScalarRecord * SCALARS),
        ("ddp_times", DdpTimeRecord * DDP_TIMES),
        ("heap", c_uint8 * HEAP_BYTES),
    ]


PAGE_BYTES = ctypes.sizeof(Page)
# Reads a whole record except `number` in one call: ctypes takes as long for each single field.
CALL_FORMAT = struct.Struct("=QIIqQiiIIi4x6q3q3QB7xQ")
assert CALL_FORMAT.size == ctypes.sizeof(CallRecord)


def word(field: str) -> int:
    """Return the index in `PageWriter.words` of a 64-bit header field."""
    at = getattr(Header, field)
    assert at.offset % 8 == 0 and at.size % 8 == 0, field
    return at.offset // 8


NEWS = slice(word("life"), word("n_models") + 1)


NO_GROUP = 0xFFFFFFFF  # CallRecord.group of init_process_group / new_group: members folded into `dtype`
ASYNC, ROOTED, P2P, FAILED_CALL, OTHER_THREAD = 1, 2, 4, 8, 16
EVEN = 64  # an all_gather into a list of equal tensors, for which a device backend requires that size on every rank
ON_DEVICE = 32  # the host's call, or its wait(), returned before the operation was complete


def page_path(pages: Path, rank: int) -> Path:
    return pages / f"rank_{rank:05d}.page"
