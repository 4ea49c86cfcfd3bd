"""Normalisations in one pass from their statistics: PyTorch's own bits, or they are not used."""

from __future__ import annotations

import pytest
import torch

from legroom.runtime import fused

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

_BITS = {2: torch.int16, 4: torch.int32}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(_BITS[tensor.element_size()])


def values(*shape: int, dtype: torch.dtype, odd: bool) -> torch.Tensor:
    torch.manual_seed(0)
    tensor = (torch.randn(*shape, device="cuda") * 3).to(dtype)
    if odd:
        flat = tensor.view(-1)
        flat[::7] = 0.0
        flat[1::11] = -0.0
        flat[2::13] *= 1e-30
        flat[3::17] *= 1e2  # more than that is infinite in 16 bits
    return tensor


@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(4096, 1024), (32, 128, 768), (333, 1000), (77, 1001), (5, 8), (3, 16384)])
def test_layer_norm(shape: tuple[int, ...], dtype: torch.dtype, odd: bool) -> None:
    op = torch.ops.aten.native_layer_norm.default
    x = values(*shape, dtype=dtype, odd=odd)
    weight, bias = (torch.randn(shape[-1], device="cuda", dtype=dtype) for _ in range(2))
    args = x, [shape[-1]], weight, bias, 1e-5
    y, mean, scale = op(*args)

    short = fused.normalised(op, args, mean, scale)
    assert short is not None
    assert torch.equal(bits(short.into(dtype)), bits(y))
    if dtype is torch.float32:
        for half in (torch.bfloat16, torch.float16):
            cast = short.after(torch.ops.aten._to_copy.default, {"dtype": half})
            assert cast is not None and torch.equal(bits(cast), bits(y.to(half)))
    expected = y.clone()
    assert fused.proven(op, args, (y, mean, scale)) and torch.equal(bits(y), bits(expected))


@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(32, 64, 28, 28), (8, 256, 14, 14), (8, 2048, 7, 7), (3, 5, 9, 11), (2, 1000, 3, 3)])
def test_batch_norm(shape: tuple[int, ...], dtype: torch.dtype, odd: bool) -> None:
    op = torch.ops.aten.native_batch_norm.default
    x = values(*shape, dtype=dtype, odd=odd).to(memory_format=torch.channels_last)
    weight, bias, moved, spread = (torch.randn(shape[1], device="cuda") for _ in range(4))
    args = x, weight, bias, moved, spread.abs(), True, 0.1, 1e-5
    y, mean, scale = op(*args)

    short = fused.normalised(op, args, mean, scale)
    assert short is not None
    assert torch.equal(short.into(dtype), y)
    positive = short.after(torch.ops.aten.relu_.default, {})
    assert positive is not None and torch.equal(positive, y.relu()) and positive.stride() == y.stride()
    expected = y.clone()
    assert fused.proven(op, args, (y, mean, scale)) and torch.equal(y, expected)
