"""Words for replicas that differ: templates, and a row for each way in which parameters or buffers come apart."""

from __future__ import annotations

from dataclasses import dataclass, replace

from distdiag.diagnosis import kinds
from distdiag.diagnosis.model.findings import Severity
from distdiag.diagnosis.text.template import Template

kind = kinds.REPLICA_DRIFT

DRIFT = Template(
    kind, "gradients_not_synced",
    "replicas drift apart since step {step} or earlier{equal}: {what} (checksums differ by {spread:.3g} at step {last})", "{cost}", "{do}",
    proved=True)  # fmt: skip
LOGGED = Template(kind, "logged",
    "the logged value {name} was equal on all ranks in {n} steps, and differs since step {step}: {each}",
    "what all ranks had in common until then is no longer equal",
    "look for what one rank did alone in step {step}: a scheduler, a reduction or a decision by its own data",
    severity=Severity.WARNING)  # fmt: skip
LAYERS = Template(kind, "gradients_not_synced",
    "nothing reduces the{sparse} gradients of {drift}: these parameters agreed on all ranks before the first step and differ since step {step} or "
    "earlier, while those of {equal} stay equal",
    "each rank trains its own copy of these parameters",
    "all_reduce the gradients of {drift}, too{how}; if each rank is to have its own, ignore this", severity=Severity.WARNING)  # fmt: skip
DENSE_DO = ": each rank computes them from its own part of the batch or of the sequence"
SPARSE_DO = (
    ": sparse ones are left out where only dense ones are collected (`grad.layout`, `is_sparse`); all_reduce them coalesced or as `to_dense()`, or "
    "build these layers with `sparse=False`"
)
SPLIT_LAYERS = Template(kind, "gradients_not_synced",
    "{drift} agreed on all ranks before the first step and differ between {sets} since step {step} or earlier, while each of these sets stays "
    "equal: data parallel ranks, it seems, of a model that {group} split between them ({own})",
    "what each rank of the split model has whole is no longer the same: its parts compute with different values",
    "clip by the norm of the whole model: all_reduce the squared norm of the split parameters over the group that splits them, as "
    "`clip_grad_norm_` over a rank's own parts scales each rank differently; and all_reduce the gradients of {drift} over that group, if each "
    "rank computes a part of them; if these sets train models of their own, ignore this", severity=Severity.WARNING)  # fmt: skip
CROSSED = Template(kind, "gradients_not_synced",
    "{sets} average the gradients of all parameters, each among themselves only, although ranks that average began with different parameters; "
    "those with equal ones, {peers}, exchange nothing in most steps",
    "gradients of different parameters are averaged, and those of equal ones are not",
    "average among ranks that hold the same part of the model, {peers}: see how the groups are made (the order of the dimensions in "
    "`arange(world).view(…)` or of a mesh, `//` or `%`); if each of these sets trains a model of its own, broadcast its parameters from one of its "
    "ranks first", severity=Severity.WARNING)  # fmt: skip
RATES = Template(kind, "learning_rates",
    "learning rates differ between the ranks since step {step} or earlier ({each} at step {newest}{kept}), and each rank steps a part of the "
    "model: {how}",
    "parts of one model train at different rates",
    "call the scheduler's `step()` on all ranks, not under `if rank == 0`, and with the same input: a reduced metric, steps instead of a rank's "
    "samples; and load the same optimizer state on all ranks", severity=Severity.WARNING)  # fmt: skip
MODES = Template(kind, "mode",
    "{culprits} {culprits:trains|train} with {n} dropout or batch-norm layer{n:|s} in eval mode since step {step} or earlier, the others with {usual}",
    "in eval mode dropout is off, and batch norm uses its running statistics and does not update them: the ranks do not train the same way",
    "call `model.{call}()` on all ranks at the same step: after an evaluation that only some ranks run, it is often left out",
    severity=Severity.WARNING, proved=True)  # fmt: skip
LEFT_IN_EVAL = Template(kind, "mode",
    "all ranks train with their {n} dropout and batch-norm layer{n:|s} in eval mode since step {step} or earlier; at step {before} none was",
    "in eval mode dropout is off, and batch norm uses its running statistics and does not update them",
    "call `model.train()` at the end of each evaluation, or at the start of each step: it may be left out after one within the epoch; if these layers "
    "are to stay so, ignore this", severity=Severity.WARNING)  # fmt: skip
UNFROZEN = Template(
    kind, "gradients_not_synced",
    "{n:,} parameter{n:|s} ({name}{n:|, …}) had requires_grad False when DDP was built{site} and {n:gets|get} gradients since step "
    "{step} or earlier: DDP does not average them",
    "each rank trains these parameters on its own; only one of the replicas is saved",
    "unfreeze them before wrapping in DDP, or wrap the module again after it (and build a new optimizer)")  # fmt: skip
ORDER = Template(kind, "different_init",
    "the ranks register the same {what}s of {name} in different orders ({sides}), and DDP exchanges them by position: {does}",
    "the replicas differ, although checksums, which are compared by position, agree; only one of them is saved",
    "register them in one order on all ranks: go over a list, `dict.fromkeys(…)` or `sorted(…)`, not over a set, whose order of texts is another in each "
    "process (unless all have one PYTHONHASHSEED)", proved=True)  # fmt: skip
ORDER_DOES = {
    "parameter": "it makes equal, and averages, parameters of different names",
    "buffer": "it overwrites a buffer with another one of its first rank",
}
OVERWRITTEN = Template(kind, "buffers",
    "buffers that are saved with the model ({name}) differ between the ranks after their steps, since step {step} or earlier{passed}: each rank "
    "updates them from its own batches, and DDP's next forward overwrites them with those of rank 0 (broadcast_buffers)",
    "what the other ranks add to these buffers is lost: they learn from the batches of rank 0 only",
    "all_reduce what updates these buffers (counts, sums, means) before the update; if the batches of rank 0 are enough for them, ignore this",
    severity=Severity.WARNING)  # fmt: skip


@dataclass(frozen=True)
class Words:
    """How one way to come apart is reported."""

    what: str
    do: str
    cost: str = "each rank trains a different model; only one of them is saved"
    cause: str = ""  # of the kind, if it is not the name of the row
    # Of which line this is evidence: "averaging" of gradients, "all_reduce" (the same, by hand only), "wrap" in DDP, or of the first phase that
    # is sampled: "optimizer" (its step), "backward". Empty: of none.
    place: str = "averaging"


# fmt: off
WAYS = {
    "gradients_not_synced": Words(
        "their gradients are not averaged",
        "call the DDP-wrapped model, not model.module, in the training step; step the parameters that DDP wraps",
    ),
    "some_steps": Words(
        "DDP averages gradients before some of the optimizer steps only: {passes:,} backward passes in {steps:,} steps",
        "let the last backward pass before each optimizer step average, outside `no_sync()` and through the DDP-wrapped model: "
        "also where the end of an epoch cuts an accumulation short",
    ),
    "never_synced": Words(
        "their gradients are not averaged: DDP's forward runs, but no backward pass averages, as in `no_sync()`",
        "let the last backward pass before each optimizer step run outside `no_sync()`: the condition that ends the accumulation "
        "is never true on any rank; or look for `require_backward_grad_sync = False`",
    ),
    "hooks_lost": Words(
        "DDP's hooks are no longer on {hooks} ({name}, …), so no gradient of these is averaged: DDP put them on autograd nodes that are "
        "replaced when parameters get another dtype or device",
        "convert or move a copy of the module (`copy.deepcopy(model.module).half()`), or only its outputs, or use autocast; or convert "
        "it before DDP wraps it, and wrap it again after each `.half()`, `.double()`, `.float()` or `.to()` that changes its parameters",
        cause="gradients_not_synced", place="",
    ),
    "never_averaged": Words(
        "nothing averages their gradients: no DDP, and no collective that exchanges a tensor",
        "wrap the model in DistributedDataParallel: the loader splits the data by rank, so each rank trains its own model on its "
        "part of the data",
    ),
    "some_reduced": Words(
        "{share:share} of the gradients' elements are reduced in each step",
        "average the gradients of all parameters: look for a filter by name, by group or by `p.grad is not None` where they are "
        "collected; if the others are to be each rank's own (experts, personal layers), ignore this",
    ),
    "partly_averaged": Words(
        "all gradients were averaged before, but not those of the parameters that have been trained since",
        "average the gradients of all parameters that are trained: rebuild the list or bucket of gradients after parameters were "
        "added or unfrozen",
    ),
    "not_written_back": Words(
        "after some steps all ranks reduce as many elements as the parameters have, but these are the same before and after it: the "
        "averages do not reach them",
        "copy the averages into the parameters (`with torch.no_grad(): p.copy_(averaged)`) after each all_reduce: `.to(dtype)`, `.clone()`, "
        "`cat` and `flatten` may make copies, which alone are averaged; or see whether what is averaged is always zero (`state_dict()` gives the live "
        "tensors: a copy to compare with needs `.clone()`); if the averages are for an evaluation only, ignore this",
        cause="gradients_not_synced",
    ),
    "outside_ddp": Words(
        "an optimizer steps {name} that no DDP module had when it was built, so nothing averages their gradients",
        "put these parameters into the module before DDP wraps it (wrap it again after a layer was added), or wrap the module that "
        "holds them in DDP, too, or all_reduce their gradients by hand; if each rank is to have its own, ignore this",
        cost=UNFROZEN.cost, place="optimizer",
    ),
    "outside_fsdp": Words(
        "an optimizer steps {name} that FSDP does not shard, beside those that it does (`ignored_params`, `ignored_modules`): FSDP does not "
        "average their gradients",
        "all_reduce their gradients (`dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)`) between backward and the optimizer step, or let FSDP shard "
        "them, too (`fully_shard` takes a parameter of one element as `torch.full((1,), …)`, not one without a dimension); if each rank is to have "
        "its own, ignore this",
        cost=UNFROZEN.cost, cause="gradients_not_synced", place="optimizer",
    ),
    "beside_fsdp": Words(
        "an optimizer steps {name} that FSDP does not shard, and the ranks' copies do not stay equal, although the script reduces gradients in each step",
        "clip by the norm of the whole model: a norm of a rank's own shards (`to_local()`) scales each rank differently, so all_reduce the squared "
        "norm, or give `clip_grad_norm_` the sharded gradients (DTensor); check that the script reduces these gradients, too, before anything "
        "changes them; if each rank is to have its own, ignore this",
        cost=UNFROZEN.cost, cause="update", place="optimizer",
    ),
    "untrained": Words(
        "parameters or buffers of {name} differ between the ranks: the training step calls this module, no gradient trains it, and it is not "
        "in DDP",
        "make them equal: build this module with the same seed on all ranks, copy it from the model after DDP has wrapped that (its constructor "
        "makes the replicas equal), or broadcast its parameters and buffers once; if each rank is to have its own, ignore this",
        cost="each rank computes its loss with another module", cause="different_init", place="",
    ),
    "frozen": Words(
        "parameters of the model that no gradient trains ({name}) are updated from each rank's own batches, and DDP does not average them",
        "all_reduce what updates them (counts, sums, means) before the update; if each rank is to have its own, ignore this",
        cost="each rank computes with other values, and only those of one rank are saved",
        cause="update", place="",
    ),
    "local": Words(
        "gradients are averaged in every step, but those with which the optimizer steps differ between the ranks: the averaged "
        "values do not reach `p.grad`, or a rank changes them there",
        "copy the averaged values into the gradients (`p.grad.copy_(averaged)`: `grad = averaged` changes only a name); reduce "
        "after backward, and wait for it (`work.wait()`) before the optimizer steps; check whether one rank alone clips, scales or "
        "adds to its gradients, or a communication hook averages nothing",
        cause="gradients_not_synced",
    ),
    "different_init": Words(
        "gradients are averaged, but the replicas began with different values",
        "broadcast the parameters from rank 0 once after building the model (or use the same seed, or DDP)",
        place="",
    ),
    "different_init in DDP": Words(
        "gradients are averaged, but the replicas began with different values",
        "load the same weights on all ranks before the model is wrapped: DDP makes replicas equal only then",
        cause="different_init", place="",
    ),
    "split_module": Words(
        "they split one module between them (DTensor), and differ in the parameters that each of them has whole",
        "give these ranks the same batches: seed and shard the data by the data parallel rank, not by the global one, or broadcast "
        "each batch among them; and begin with equal values (the same seed), also of dropout",
        cost="the ranks hold parts of one module that do not fit together: its output and its gradients are wrong", place="",
    ),
    "buffers": Words(
        "their buffers differ, and broadcast_buffers is off",
        "leave broadcast_buffers=True, or reduce the buffers by hand",
        place="wrap",
    ),
    "state": Words(
        "buffers that are saved with the model ({name}) are updated from each rank's own batches, and broadcast_buffers is off",
        "all_reduce what updates these buffers (counts, sums, means) before the update; if each rank is to have its own, register "
        "them with `persistent=False`",
        cost="each rank computes with other values, and only those of one rank are saved",
        cause="buffers", place="wrap",
    ),
    "mild": Words(
        "their buffers agreed before and differ now, and broadcast_buffers is off",
        "leave broadcast_buffers=True, or reduce the buffers by hand",
        cost="none, if these buffers may differ", cause="buffers", place="wrap",
    ),
    "optimizer_state": Words(
        "gradients are averaged, but the states of the optimizers have counted different numbers of steps",
        "load one checkpoint on all ranks, with the optimizer's state and the epoch to start from: they have loaded different ones, or only those "
        "that have counted more steps have loaded one; DDP makes only the model equal, when it is built",
        cause="update", place="optimizer",
    ),
    "skipped_steps": Words(
        "gradients are averaged, but optimizer.step() was left out after different numbers of backward passes",
        "look for where a rank alone skips a step, or makes a backward pass more; let all ranks decide together: all_reduce the flag, or decide "
        "by an averaged loss",
        cause="update", place="optimizer backward",
    ),
    "learning_rates": Words(
        "gradients are averaged, but learning rates differ",
        "give the scheduler the same input on all ranks: a reduced metric, steps instead of a rank's samples or tokens, the same "
        "epoch length; and load the same optimizer state on all ranks",
        place="optimizer",
    ),
    "update": Words(
        "gradients are averaged and the replicas agreed within rounding before, but {apart}",
        "check whether one rank alone decides to load weights, or to skip, clip or scale a step; let all ranks decide together "
        "(all_reduce, broadcast), and reduce in the same order on all ranks: a set is ordered differently on each",
        place="all_reduce",
    ),
    "written": Words(
        "gradients are averaged and the replicas agreed within rounding before, but {apart}",
        "look for what one rank alone puts into its model between two steps: a checkpoint (load the model and the optimizer's state on all "
        "ranks), or averaged (EMA) weights for a validation (put the trained ones back on every path: `try … finally`)",
        cause="update", place="",
    ),
    "first_update": Words(
        "gradients are averaged, but from the first steps on not every rank updates its parameters in the same way",
        "load the same optimizer state on all ranks (DDP makes only the model equal, when it is built); and check whether one rank "
        "alone loads weights, has other learning rates, skips, clips or scales a step, or a communication hook that averages "
        "nothing",
        cause="update", place="",
    ),
    "not_waited": Words(
        "so far as is seen, no rank waits for the asynchronous all_reduce of its gradients{site}, so the optimizer may step with what is not "
        "reduced yet",
        "keep what `all_reduce(…, async_op=True)` returns, and call its `wait()` before the tensor is read, divided, copied or filled again",
        cause="gradients_not_synced",
    ),
    "unequal": Words(
        "gradients are reduced in every step, but the replicas do not keep one distance: their updates differ",
        "begin with the same parameters and the same optimizer state on all ranks (a checkpoint that all load, or a broadcast); "
        "wait for every all_reduce (`work.wait()`) before the optimizer steps; reduce a gradient once backward has finished it, in "
        "the same order on all ranks",
        cause="update",
    ),
    "accumulated": Words(
        "the replicas agreed within rounding before, and gradients are averaged in one of several backward passes per step: those of the "
        "passes after it stay local, or not every rank updates its parameters in the same way",
        "leave `no_sync()` for the last backward pass before the optimizer step, which averages the sum of all; if it is so "
        "already, check whether one rank alone decides to load weights, or to skip, clip or scale a step",
    ),
    "added": Words(
        "DDP averages in one of about {in_all:.0f} passes, and the gradients with which the optimizer steps differ between the ranks: passes after "
        "that one may add each rank's own, or a rank changes them there",
        "leave `no_sync()` for the LAST backward pass before each optimizer step (`(i + 1) % n == 0`), not for the first (`i % n == 0`): it "
        "averages the sum of all; if it is so already, check whether one rank alone clips, scales or adds to its gradients, or a communication "
        "hook averages nothing",
        cause="update",
    ),
}
WAYS["changed"] = replace(WAYS["local"], cause="update")  # after the replicas agreed
WAYS["changed in DDP"] = Words(
    "DDP averages gradients in every step, but those with which the optimizer steps differ between the ranks: a rank changes its own between "
    "backward and the optimizer step",
    "look for what scales, clips or adds to `p.grad` there by a rank's own numbers: a GradScaler (load its state on all ranks: DDP makes only the "
    "model equal), a clip or noise on one rank alone, a second backward that does not go through the DDP-wrapped model",
    cause="update", place="optimizer backward",
)
# fmt: on
