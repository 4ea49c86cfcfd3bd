"""The models that benchmarks train: real shapes, random data, no downloads.

A workload is a model, an optimizer and a function that runs forward and gives the loss. `blocks` are the modules that
checkpointing peers wrap, in the order in which they run. Each lies on the device that is named, a GPU unless said
otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.networks import LstmModel, Plain20, UNet


@dataclass(frozen=True, slots=True)
class Workload:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[int], Tensor]  # of step number i
    blocks: list[nn.Module]
    varies: bool = False  # steps differ in size, so that only the same steps can be compared


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (a.view(b, t, self.heads, -1).transpose(1, 2) for a in self.qkv(x).split(c, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, t, c))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _bfloat16(device: str) -> torch.autocast:
    # Processors without instructions for it take seconds for what takes milliseconds in float32.
    return torch.autocast(device, torch.bfloat16, enabled=device == "cuda")


def gpt(
    *,
    batch: int = 24,
    layers: int = 24,
    width: int = 1024,
    length: int = 1024,
    vocabulary: int = 32000,
    device: str = "cuda",
) -> Workload:
    model = Gpt(layers, width, width // 64, vocabulary, length).to(device)
    ids = torch.randint(vocabulary, (batch, length + 1), device=device)

    def loss(step: int) -> Tensor:
        with _bfloat16(device):
            logits = model(ids[:, :-1])
            return F.cross_entropy(logits.view(-1, vocabulary), ids[:, 1:].reshape(-1))

    return Workload(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True), loss, list(model.blocks))


def gpt_batch4(*, device: str = "cuda") -> Workload:
    """The same with so little to compute that launching is the bottleneck."""
    return gpt(batch=4, device=device)


def tiny(*, device: str = "cuda") -> Workload:
    """A GPT that a CPU trains in a fraction of a second, to try the benchmark itself."""
    return gpt(batch=4, layers=2, width=64, length=64, vocabulary=256, device=device)


def resnet152(*, batch: int = 192, pixels: int = 224, device: str = "cuda") -> Workload:
    from torchvision.models import resnet152 as build

    return _residual(build(num_classes=1000), batch=batch, pixels=pixels, device=device)


def resnet50(*, batch: int = 768, pixels: int = 224, device: str = "cuda") -> Workload:
    """With so much to compute in each op that a host that is slow for a while is still ahead of the device."""
    from torchvision.models import resnet50 as build

    return _residual(build(num_classes=1000), batch=batch, pixels=pixels, device=device)


def resnet152_batch384(*, device: str = "cuda") -> Workload:
    """The same for the deeper net: its ops are small at half of that, and plans were compared by what the host did."""
    return resnet152(batch=384, device=device)


def _residual(model: Any, *, batch: int, pixels: int, device: str) -> Workload:
    blocks = [block for layer in (model.layer1, model.layer2, model.layer3, model.layer4) for block in layer]
    return _images(model, blocks, batch=batch, pixels=pixels, classes=1000, device=device)


def bert(*, batch: int = 64, length: int = 512, device: str = "cuda") -> Workload:
    """BERT-base at one length; `bert_lengths` is the one that changes."""
    return _bert(batch, [length], device)


def bert_lengths(*, batch: int = 64, device: str = "cuda") -> Workload:
    """BERT-base with another length from 32 to 512 at each step."""
    generator = torch.Generator().manual_seed(0)
    return _bert(batch, torch.randint(32, 513, (997,), generator=generator).tolist(), device)


def _bert(batch: int, lengths: list[int], device: str) -> Workload:
    from transformers import BertConfig, BertForSequenceClassification

    model = BertForSequenceClassification(BertConfig(attn_implementation="sdpa")).to(device)
    ids = torch.randint(30000, (batch, max(lengths)), device=device)
    labels = torch.randint(2, (batch,), device=device)

    def loss(step: int) -> Tensor:
        with _bfloat16(device):
            return model(input_ids=ids[:, : lengths[step % len(lengths)]], labels=labels).loss

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return Workload(model, optimizer, loss, list(model.bert.encoder.layer), varies=len(lengths) > 1)


def bert_at(
    lengths: Sequence[int],
    *,
    batch: int = 64,
    layers: int = 12,
    width: int = 768,
    vocabulary: int = 30522,
    device: str = "cuda",
) -> Workload:
    """BERT-base unless said otherwise; step i has the i-th of these lengths."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers,
        num_attention_heads=max(1, width // 64), max_position_embeddings=max(512, *lengths),
        attn_implementation="sdpa",
    )  # fmt: skip
    model = BertForSequenceClassification(config).to(device)
    ids = torch.randint(vocabulary - 2, (batch * max(lengths),), device=device)
    labels = torch.randint(2, (batch,), device=device)

    def loss(step: int) -> Tensor:
        length = lengths[step % len(lengths)]
        # Cut from one row: a batch lies in one piece at any length, as one from a loader does.
        given = ids[: batch * length].view(batch, length)
        with _bfloat16(device):
            return model(input_ids=given, labels=labels).loss

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return Workload(model, optimizer, loss, list(model.bert.encoder.layer), varies=True)


def t5_at(
    lengths: Sequence[tuple[int, int]],
    *,
    batch: int = 16,
    layers: int = 12,
    width: int = 768,
    vocabulary: int = 32128,
    device: str = "cuda",
) -> Workload:
    """T5-base unless said otherwise; step i has the i-th of these lengths of source and target."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=vocabulary, d_model=width, d_kv=min(64, width), d_ff=4 * width, num_layers=layers,
        num_heads=max(1, width // 64), decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip
    model = T5ForConditionalGeneration(config).to(device)
    sources = torch.randint(2, vocabulary, (batch * max(source for source, _ in lengths),), device=device)
    targets = torch.randint(2, vocabulary, (batch * max(target for _, target in lengths),), device=device)

    def loss(step: int) -> Tensor:
        source, target = lengths[step % len(lengths)]
        # In one piece at any length, as above; the model asks for that, too.
        ids, labels = sources[: batch * source].view(batch, source), targets[: batch * target].view(batch, target)
        with _bfloat16(device):
            return model(input_ids=ids, labels=labels).loss

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    blocks = [*model.encoder.block, *model.decoder.block]
    return Workload(model, optimizer, loss, blocks, varies=True)


def vit(*, batch: int = 128, pixels: int = 224, device: str = "cuda") -> Workload:
    from torchvision.models import vit_b_16

    model = vit_b_16(image_size=pixels).to(device)
    images = torch.randn(batch, 3, pixels, pixels, device=device)
    labels = torch.randint(1000, (batch,), device=device)

    def loss(step: int) -> Tensor:
        with _bfloat16(device):
            return F.cross_entropy(model(images), labels)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return Workload(model, optimizer, loss, list(model.encoder.layers))


def llama(*, batch: int = 8, length: int = 2048, device: str = "cuda") -> Workload:
    """A decoder with RMS norm, rotary positions and SwiGLU, in pure bfloat16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=16, num_attention_heads=16,
        num_key_value_heads=4, max_position_embeddings=length, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(device).to(torch.bfloat16)
    ids = torch.randint(32000, (batch, length), device=device)

    def loss(step: int) -> Tensor:
        return model(input_ids=ids, labels=ids).loss

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return Workload(model, optimizer, loss, list(model.model.layers))


def vgg16(*, batch: int = 192, pixels: int = 224, device: str = "cuda") -> Workload:
    from torchvision.models import vgg16 as build

    model = build(num_classes=1000)
    return _images(model, list(model.features), batch=batch, pixels=pixels, classes=1000, device=device)


def mobilenet(*, batch: int = 256, pixels: int = 224, device: str = "cuda") -> Workload:
    """MobileNetV2."""
    from torchvision.models import mobilenet_v2

    model = mobilenet_v2(num_classes=1000)
    return _images(model, list(model.features), batch=batch, pixels=pixels, classes=1000, device=device)


def inception(*, batch: int = 128, pixels: int = 299, device: str = "cuda") -> Workload:
    """InceptionV3 with its auxiliary head, as it is trained."""
    from torchvision.models import inception_v3

    # Its own initialisation draws from a truncated normal on the CPU, for minutes.
    model = inception_v3(num_classes=1000, aux_logits=True, init_weights=False)
    blocks = [module for name, module in model.named_children() if name.startswith("Mixed")]
    return _images(model, blocks, batch=batch, pixels=pixels, classes=1000, device=device)


def squeezenet(*, batch: int = 512, pixels: int = 224, device: str = "cuda") -> Workload:
    """SqueezeNet 1.1 in float32, as HOME's paper trains it."""
    from torchvision.models import squeezenet1_1

    model = squeezenet1_1(num_classes=1000)
    return _images(
        model, list(model.features), batch=batch, pixels=pixels, classes=1000, device=device, single_precision=True
    )


def plain20(*, batch: int = 1024, width: int = 64, device: str = "cuda") -> Workload:
    """In float32 on images of CIFAR's size. HOME's paper fits 1040 of them into 11 GB, which this width comes near."""
    model = Plain20(width, classes=10)
    return _images(model, list(model.layers), batch=batch, pixels=32, classes=10, device=device, single_precision=True)


def unet(*, batch: int = 48, pixels: int = 256, width: int = 64, levels: int = 4, device: str = "cuda") -> Workload:
    model = UNet(width, levels, classes=8).to(device).to(memory_format=torch.channels_last)
    images = torch.randn(batch, 3, pixels, pixels, device=device).to(memory_format=torch.channels_last)
    labels = torch.randint(8, (batch, pixels, pixels), device=device)

    def loss(step: int) -> Tensor:
        with _bfloat16(device):
            return F.cross_entropy(model(images), labels)

    blocks = [*model.down, model.bottom, *model.up]
    return Workload(model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9), loss, blocks)


def lstm(
    *,
    batch: int = 256,
    length: int = 256,
    width: int = 1024,
    layers: int = 4,
    vocabulary: int = 8192,
    device: str = "cuda",
) -> Workload:
    """A language model in float32."""
    model = LstmModel(vocabulary, width, layers).to(device)
    ids = torch.randint(vocabulary, (batch, length + 1), device=device)

    def loss(step: int) -> Tensor:
        return F.cross_entropy(model(ids[:, :-1]).view(-1, vocabulary), ids[:, 1:].reshape(-1))

    return Workload(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True), loss, list(model.layers))


def tiny_plain20(*, device: str = "cuda") -> Workload:
    return plain20(batch=16, width=8, device=device)


def tiny_unet(*, device: str = "cuda") -> Workload:
    return unet(batch=2, pixels=64, width=8, levels=2, device=device)


def tiny_lstm(*, device: str = "cuda") -> Workload:
    return lstm(batch=8, length=32, width=64, layers=2, vocabulary=256, device=device)


def _images(
    model: nn.Module,
    blocks: list[nn.Module],
    *,
    batch: int,
    pixels: int,
    classes: int,
    device: str,
    single_precision: bool = False,
) -> Workload:
    """Training of a classifier: channels last and bfloat16, or, in single precision, as torch has it by itself."""
    layout = torch.contiguous_format if single_precision else torch.channels_last
    model.to(device).to(memory_format=layout)
    images = torch.randn(batch, 3, pixels, pixels, device=device).to(memory_format=layout)
    labels = torch.randint(classes, (batch,), device=device)

    def loss(step: int) -> Tensor:
        with contextlib.nullcontext() if single_precision else _bfloat16(device):
            out = model(images)
            if isinstance(out, Tensor):
                return F.cross_entropy(out, labels)
            return F.cross_entropy(out.logits, labels) + 0.4 * F.cross_entropy(out.aux_logits, labels)

    return Workload(model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9), loss, blocks)


def train_step(workload: Workload, step: int, *, saving: AbstractContextManager[Any] | None = None) -> Tensor:
    """One step. `saving`: a context for forward, which decides what becomes of saved tensors."""
    with saving or contextlib.nullcontext():
        loss = workload.loss(step)
    loss.backward()
    workload.optimizer.step()
    workload.optimizer.zero_grad()
    return loss.detach()


WORKLOADS: dict[str, Callable[..., Workload]] = {
    "gpt": gpt,
    "gpt_batch4": gpt_batch4,
    "resnet152": resnet152,
    "resnet152_batch384": resnet152_batch384,
    "resnet50": resnet50,
    "bert": bert,
    "bert_lengths": bert_lengths,
    "vit": vit,
    "llama": llama,
    "vgg16": vgg16,
    "mobilenet": mobilenet,
    "inception": inception,
    "squeezenet": squeezenet,
    "plain20": plain20,
    "unet": unet,
    "lstm": lstm,
    "tiny": tiny,
    "tiny_plain20": tiny_plain20,
    "tiny_unet": tiny_unet,
    "tiny_lstm": tiny_lstm,
}
# One step of each is kept in tests/traces/; `bench/record.py` makes them and `bench/evaluator.py` runs them.
RECORDED = (
    "gpt", "resnet152", "bert", "vgg16", "mobilenet", "unet", "lstm", "inception", "squeezenet", "plain20",
)  # fmt: skip
TINY = ("tiny", "tiny_plain20", "tiny_unet", "tiny_lstm")


def names_of(text: str) -> list[str]:
    """The workloads of a comma-separated list, as an option of a script has it."""
    out = [name.strip() for name in text.split(",")]
    for name in out:
        if name not in WORKLOADS:
            raise argparse.ArgumentTypeError(f"no workload {name!r}; there are {', '.join(WORKLOADS)}")
    return out
