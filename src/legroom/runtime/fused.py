"""Normalisations made again without their statistics, in one pass with the cast or the relu that follows.

Most of what a layer norm or a batch norm takes goes into means and deviations, and autograd keeps those. A replay that
has them needs the last line of the formula only: it reads the input, writes the output, and where the output goes
straight into a cast to 16 bits or a relu, writes that in its place. 131 microseconds became 38 for a layer norm of
32768 x 768 and its cast on an H200. The bits are PyTorch's own, or it is not done: the step that proves replays
compares them, with the same arguments.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU build of torch comes without
    triton = None

_LAYER_NORM = torch.ops.aten.native_layer_norm.default
_BATCH_NORM = torch.ops.aten.native_batch_norm.default
CAST = torch.ops.aten._to_copy.default
_RELUS = torch.ops.aten.relu_.default, torch.ops.aten.relu.default
FOLLOWERS = (CAST, *_RELUS)  # what may run in the same pass
STATISTICS = {str(_LAYER_NORM): (1, 2), str(_BATCH_NORM): (1, 2)}  # which outputs they are
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_HALVES = (torch.bfloat16, torch.float16)
_MOST_COLUMNS = 16384  # a row of a layer norm is one block
_MOST_BYTES = 2**20  # of a statistic: what is larger may be moved, and is not ours to hold
_SAMPLE_ROWS = 16
_COLUMNS_AT_ONCE, _VALUES_AT_ONCE = 128, 4096  # in a block of a batch norm


class Normalised(NamedTuple):
    """The result of a normalisation, not written out yet."""

    source: torch.Tensor
    mean: torch.Tensor
    scale: torch.Tensor  # one over the deviation
    weight: torch.Tensor
    bias: torch.Tensor
    by_column: bool  # statistics: of each column (batch norm, channels last) or of each row (layer norm)
    columns: int

    def write(self, out: torch.Tensor, *, relu: bool = False) -> None:
        """`out` lies in memory as the source does, or as its first rows."""
        _launch(self, out, relu)

    def reads(self, tensor: torch.Tensor) -> bool:
        """Whether it is made from these bytes."""
        key = tensor.untyped_storage()._cdata
        mine = self.source, self.mean, self.scale, self.weight, self.bias
        return any(t.untyped_storage()._cdata == key for t in mine)

    def into(self, dtype: torch.dtype, *, relu: bool = False) -> torch.Tensor:
        out = torch.empty_like(self.source, dtype=dtype)
        self.write(out, relu=relu)
        return out

    def after(self, func: Any, kwargs: dict[str, Any]) -> torch.Tensor | None:
        """What an op makes of it, in one pass; None where that is not known."""
        if func in _RELUS and self.by_column:
            return self.into(self.source.dtype, relu=True)
        if func is not CAST or self.by_column or self.source.dtype is not torch.float32:
            return None  # not what was proven
        dtype = kwargs.get("dtype")
        plain = all(name == "dtype" or value in _UNSAID.get(name, ()) for name, value in kwargs.items())
        return self.into(dtype) if plain and dtype in _HALVES else None


# Arguments of a cast that say nothing.
_UNSAID: dict[str, tuple[Any, ...]] = {
    "layout": (None, torch.strided),
    "pin_memory": (None, False),
    "non_blocking": (None, False),
    "memory_format": (None, torch.preserve_format),
}


def _runs_on(device: torch.device) -> bool:
    if _broken or torch.version.hip is not None:  # whose compiler tells more things apart than `_launch` does
        return False
    # Kernels go to the current device, whatever they are given.
    return triton is not None and device.type == "cuda" and device.index == torch.cuda.current_device()


def normalised(func: Any, args: Any, mean: torch.Tensor, scale: torch.Tensor) -> Normalised | None:
    """The result of a call of this op without its work; None where the op, or how its tensors lie, is not known."""
    if func is _LAYER_NORM:
        source, shape, weight, bias, _ = args
        columns, by_column = math.prod(shape), False
        lies = source.is_contiguous() and columns <= _MOST_COLUMNS
    elif func is _BATCH_NORM:
        source, weight, bias, _, _, training, _, _ = args
        columns, by_column = source.shape[1] if source.dim() == 4 else 0, True
        # With one column or one pixel a tensor lies in both ways, and PyTorch takes the other.
        lies = training and source.dim() == 4 and not source.is_contiguous()
        lies = lies and source.is_contiguous(memory_format=torch.channels_last)
    else:
        return None
    if not lies or weight is None or bias is None or not source.numel() or not _runs_on(source.device):
        return None
    statistics = mean, scale
    tensors = source, weight, bias
    if any(t.dtype not in _FLOATS for t in tensors) or source.numel() >= 2**31:
        return None
    if any(t.dtype is not torch.float32 or not t.is_contiguous() or t.nbytes > _MOST_BYTES for t in statistics):
        return None
    if not weight.is_contiguous() or not bias.is_contiguous() or weight.numel() != columns:
        return None
    if mean.numel() != scale.numel() or mean.numel() != (columns if by_column else source.numel() // columns):
        return None
    return Normalised(source, mean, scale, weight, bias, by_column, columns)


def proven(func: Any, args: Any, result: Any) -> bool:
    """Write the result once more, over the first one, for the caller to compare.

    False where it cannot be done, or what is made of the result in the same pass is not what PyTorch makes of it.
    """
    global _broken
    short = normalised(func, args, result[1], result[2]) if str(func) in STATISTICS else None
    if short is None:
        return False
    try:
        return _same(short, result[0])
    except torch.OutOfMemoryError:
        return False
    except Exception:  # no compiler, or a device that Triton does not know: training goes on without
        _broken = True
        return False


_broken = False  # whether kernels cannot be run here, once that has been tried


def _same(short: Normalised, out: torch.Tensor) -> bool:
    alike = out.dtype is short.source.dtype and out.stride() == short.source.stride()
    if not alike or out.untyped_storage().nbytes() != out.nbytes:
        return False
    out.view(_INTEGERS[out.element_size()]).bitwise_not_()  # so that what is left unwritten shows
    short.write(out)
    # Rounding and comparing with zero go value by value: a few rows are as good as all, and take no memory.
    lying = out.permute(0, 2, 3, 1) if short.by_column else out
    rows = lying.reshape(-1, short.columns)[:_SAMPLE_ROWS]
    if short.by_column:
        positive, bits = torch.empty_like(rows), _INTEGERS[out.element_size()]
        short.write(positive, relu=True)
        return torch.equal(positive.view(bits), rows.relu().view(bits))
    for dtype in _HALVES if out.dtype is torch.float32 else ():
        cast = torch.empty_like(rows, dtype=dtype)
        short.write(cast)
        if not torch.equal(cast.view(torch.int16), rows.to(dtype).view(torch.int16)):
            return False
    return True


_INTEGERS = {2: torch.int16, 4: torch.int32}


_compiled: dict[tuple[Any, ...], Any] = {}  # kernels, by all that Triton tells apart


def _launch(value: Normalised, out: torch.Tensor, relu: bool) -> None:
    """As `kernel[grid](...)`, which works out at every launch what it was compiled for, on a host that is behind."""
    source, weight, bias, columns = value.source, value.weight, value.bias, value.columns
    rows = out.numel() // columns
    tensors = source, value.mean, value.scale, weight, bias, out
    addresses = [tensor.data_ptr() for tensor in tensors]
    # What a kernel is compiled for, beside its constants: types, the device, and what is a multiple of 16.
    types = source.get_device(), source.dtype, weight.dtype, bias.dtype, out.dtype
    aligned = tuple([address % 16 == 0 for address in addresses])
    block = triton.next_power_of_2(columns)
    kernel: Any
    numbers: tuple[int, ...]
    constants: tuple[int, ...]
    if value.by_column:
        block = min(block, _COLUMNS_AT_ONCE)
        high = _VALUES_AT_ONCE // block
        grid = triton.cdiv(rows, high), triton.cdiv(columns, block), 1
        kernel, numbers, constants, warps = _by_column_kernel, (rows, columns), (relu, high, block), 4
        key = True, columns, relu, types, aligned, rows % 16 == 0, rows == 1
    else:
        grid = rows, 1, 1
        kernel, numbers, constants, warps = _by_row_kernel, (columns,), (block,), 4 if block <= 4096 else 16
        key = False, columns, False, types, aligned, False, False
    found = _compiled.get(key)
    if found is None:
        found = _compiled[key] = kernel.warmup(*tensors, *numbers, *constants, grid=grid, num_warps=warps)
    found[grid](*addresses, *numbers, *constants)


if triton is not None:

    @triton.jit
    def _by_row_kernel(  # type: ignore[no-untyped-def]
        source, mean, scale, weight, bias, out, columns, BLOCK: tl.constexpr
    ):
        row = tl.program_id(0).to(tl.int64)
        column = tl.arange(0, BLOCK)
        inside = column < columns
        centre, factor = tl.load(mean + row), tl.load(scale + row)
        value = tl.load(source + row * columns + column, mask=inside).to(tl.float32)
        slope = tl.load(weight + column, mask=inside).to(tl.float32)
        offset = tl.load(bias + column, mask=inside).to(tl.float32)
        result = tl.fma(slope, factor * (value - centre), offset)
        tl.store(out + row * columns + column, result.to(out.dtype.element_ty), mask=inside)

    @triton.jit
    def _by_column_kernel(  # type: ignore[no-untyped-def]
        source, mean, scale, weight, bias, out, rows, columns, RELU: tl.constexpr, ROWS: tl.constexpr,
        BLOCK: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS).to(tl.int64)
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        known = column < columns
        inside = (row < rows)[:, None] & known[None, :]
        centre = tl.load(mean + column, mask=known)[None, :]
        factor = tl.load(scale + column, mask=known)[None, :]
        slope = tl.load(weight + column, mask=known).to(tl.float32)[None, :]
        offset = tl.load(bias + column, mask=known).to(tl.float32)[None, :]
        place = row[:, None] * columns + column[None, :]
        value = tl.load(source + place, mask=inside).to(tl.float32)
        factor, offset = tl.broadcast_to(factor, value.shape), tl.broadcast_to(offset, value.shape)
        result = tl.fma(slope * (value - centre), factor, offset)
        result = result.to(out.dtype.element_ty)
        if RELU:
            result = tl.where(result <= 0, 0.0, result).to(out.dtype.element_ty)
        tl.store(out + place, result, mask=inside)
