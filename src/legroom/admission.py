"""What is settled before a room trains: the device, a plan from a file, and whether the budget can be met at all."""

from __future__ import annotations

import os
from collections import Counter

import torch

from legroom.errors import BudgetError, DeviceError, LegroomError, PlanError
from legroom.jsonio import read_text
from legroom.plan import Plan
from legroom.plan import from_json as plan_from_json
from legroom.probing import memory_bytes
from legroom.runtime.census import state_bytes
from legroom.runtime.device import CpuDevice, Device
from legroom.runtime.steps import ShelteredStep
from legroom.units import format_bytes, parse_bytes


def open_device(
    device_type: str, spill_dir: str | os.PathLike[str] | None, host_budget: int | str | None = None
) -> Device:
    """host_budget: pinned memory on CUDA, at most; half of what main memory has free where none is named."""
    folder = os.fspath(spill_dir) if spill_dir is not None else None
    if device_type == "cpu":
        if host_budget is not None:
            raise LegroomError(
                "host_budget limits the pinned memory of a GPU; on the CPU swapped tensors go to files in spill_dir"
            )
        return CpuDevice(folder)
    from legroom.runtime.cuda import CudaDevice

    host_bytes = parse_bytes(host_budget) if host_budget is not None else memory_bytes()[1] // 2
    return CudaDevice(torch.cuda.current_device(), host_budget_bytes=host_bytes, spill_dir=folder)


def given_plan(plan: Plan | str | os.PathLike[str] | None) -> Plan | None:
    if plan is None or isinstance(plan, Plan):
        return plan
    text = read_text(plan, error=PlanError)
    try:
        return plan_from_json(text)
    except PlanError as error:
        raise PlanError(f"{os.fspath(plan)}: {error}") from None


def find_device_type(
    model: torch.nn.Module | None, optimizer: torch.optim.Optimizer | None, device: str | torch.device | None
) -> str:
    """The device named, or the one that the model and the optimizer lie on."""
    found: set[str] = set()
    if model is not None:
        if not isinstance(model, torch.nn.Module):
            raise LegroomError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        found |= {t.device.type for t in (*model.parameters(), *model.buffers())}
    if optimizer is not None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise LegroomError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
        found |= {p.device.type for group in optimizer.param_groups for p in group["params"]}
    named = torch.device(device).type if device is not None else None
    if len(found) > 1:
        raise DeviceError(
            f"the model lies on several devices ({', '.join(sorted(found))}); move it to one with model.to(...)"
        )
    if named is not None and found and found != {named}:
        raise DeviceError(
            f"device={named!r} was asked for, but the model lies on {found.pop()!r}; move it with model.to({named!r})"
        )
    chosen = named or (found.pop() if found else "cpu")
    if chosen not in ("cpu", "cuda") or (chosen == "cuda" and not torch.cuda.is_available()):
        raise DeviceError(f"legroom works on 'cpu' and on 'cuda' where there is one, not on {chosen!r}")
    return chosen


def device_bytes(device_type: str) -> tuple[int, int]:
    """(what the device has, what of it others take)."""
    if device_type == "cuda":
        from legroom.runtime.cuda import foreign_bytes

        index = torch.cuda.current_device()
        return torch.cuda.get_device_properties(index).total_memory, foreign_bytes(index)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), 0


def check_budget(
    budget_bytes: int,
    model: torch.nn.Module | None,
    optimizer: torch.optim.Optimizer | None,
    device_type: str,
    *,
    total: int,
    foreign: int,
) -> None:
    """Refuse at once what no step can meet: more than the device has, or less than the state that stays."""
    if budget_bytes > total - foreign:
        others = f", of which {format_bytes(foreign)} are taken by CUDA itself and by others" if foreign else ""
        raise BudgetError(
            f"the budget is {format_bytes(budget_bytes)}, but the device has {format_bytes(total)}{others}; "
            f"name at most {format_bytes(total - foreign)}",
            budget_bytes=budget_bytes,
        )
    parts = state_bytes(model, optimizer, device_type)
    needed = sum(nbytes for _, nbytes in parts)
    if needed > budget_bytes:
        listed = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in parts)
        raise BudgetError(
            f"{listed} alone take {format_bytes(needed)}, the budget is {format_bytes(budget_bytes)}; "
            "raise the budget, or train fewer or smaller parameters",
            budget_bytes=budget_bytes,
            floor_bytes=needed,
            breakdown=tuple(sorted(parts, key=lambda part: -part[1])),
        )


def over_budget(budget_bytes: int, run: ShelteredStep, sizes: tuple[int, ...] = ()) -> BudgetError:
    """The refusal after a sheltered step: nothing takes less than it did. sizes: of the inputs, where they vary."""
    peak = run.needed_bytes()
    parts = _parts(run, peak)
    return BudgetError(
        f"{_step(sizes)} needs {format_bytes(peak)} even with everything saved swapped out ({_listed(parts)}), the "
        f"budget is {format_bytes(budget_bytes)}; the smallest budget seen so far that works is {format_bytes(peak)} "
        f"({peak} bytes). Raise the budget or make the batch smaller",
        budget_bytes=budget_bytes,
        floor_bytes=peak,
        breakdown=parts,
    )


def out_of_memory(
    budget_bytes: int, run: ShelteredStep, error: torch.OutOfMemoryError, sizes: tuple[int, ...] = ()
) -> BudgetError:
    """The same where the allocator's cap ended the step: how much it needs is not known, only that it is more."""
    parts = _parts(run, 0)
    return BudgetError(
        f"{_step(sizes)} needs more than the budget of {format_bytes(budget_bytes)} even with everything saved swapped "
        f"out (alive before it: {_listed(parts)}): {_tried(error)}. Nothing was changed. Raise the budget or "
        "make the batch smaller",
        budget_bytes=budget_bytes,
        breakdown=parts,
    )


def _step(sizes: tuple[int, ...]) -> str:
    return f"the step with an input of sizes ({', '.join(map(str, sizes))})" if sizes else "the step"


def _tried(error: torch.OutOfMemoryError) -> str:
    """What the allocator was asked for, in its words."""
    return next((part for part in str(error).split(". ") if part.startswith("Tried")), "out of memory")


def _parts(run: ShelteredStep, peak_bytes: int) -> tuple[tuple[str, int], ...]:
    kinds = Counter[str]()
    census = run.census
    for key, kind in census.kinds.items() if census is not None else ():
        kinds[kind] += census.nbytes[key] if census is not None else 0
    kinds["activations in use, gradients and workspace"] = max(0, peak_bytes - sum(kinds.values()))
    return tuple((name, nbytes) for name, nbytes in kinds.most_common() if nbytes)


def _listed(parts: tuple[tuple[str, int], ...]) -> str:
    return ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in parts)
