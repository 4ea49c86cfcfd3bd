"""Small training programs that between them do what real ones do, each as its author would write it.

A case is a model, an optimizer, data and one complete training step. None of them knows about legroom. Data comes from
a generator of its own, so the global random state belongs to the model alone (dropout, RReLU). A step keeps nothing
alive: it returns the loss detached. Sizes: several activations of 64 KiB and more, 2 to 10 MiB saved, parameters small
beside them, 5 to 40 ms a step on two cores.

To add a case, write its model, then a line in `ZOO`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from torch.utils.checkpoint import checkpoint

Batch = Any
Build = Callable[[], tuple[nn.Module, Optimizer]]


@dataclass(frozen=True)
class Case:
    name: str
    build: Build  # seeds torch itself: the same bits at every call
    batch: Callable[[int], Batch]  # step index -> data, fresh and deterministic; a step leaves it as it was
    step: Callable[[nn.Module, Optimizer, Batch], Tensor]  # one training step; returns the loss, detached
    steady: bool = True  # every step runs the same ops on the same shapes


def built(make_model: Callable[[], nn.Module], make_optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]) -> Build:
    def build() -> tuple[nn.Module, Optimizer]:
        torch.manual_seed(0)
        model = make_model().train()
        return model, make_optimizer([p for p in model.parameters() if p.requires_grad])

    return build


sgd = partial(SGD, lr=0.01, momentum=0.9)
nesterov = partial(SGD, lr=0.01, momentum=0.9, nesterov=True, weight_decay=1e-4)
adam = partial(Adam, lr=1e-3)
adamw = partial(AdamW, lr=1e-3)
rmsprop = partial(RMSprop, lr=1e-3, momentum=0.9)


# --- data -------------------------------------------------------------------------------------------------------------


def generator(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 + step)


def features(*shape: int, classes: int, targets: tuple[int, ...] | None = None) -> Callable[[int], Batch]:
    """Normal features and class labels, one for each row unless `targets` says another shape."""

    def batch(step: int) -> Batch:
        g = generator(step)
        labels = torch.randint(classes, targets if targets is not None else shape[:1], generator=g)
        return torch.randn(*shape, generator=g), labels

    return batch


def pairs(x_shape: tuple[int, ...], y_shape: tuple[int, ...]) -> Callable[[int], Batch]:
    def batch(step: int) -> Batch:
        g = generator(step)
        return torch.randn(*x_shape, generator=g), torch.randn(*y_shape, generator=g)

    return batch


def tokens(rows: int, length: int, vocabulary: int) -> Callable[[int], Batch]:
    """Ids and the ids that follow them."""

    def batch(step: int) -> Batch:
        ids = torch.randint(vocabulary, (rows, length + 1), generator=generator(step))
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    return batch


# --- steps that many cases share --------------------------------------------------------------------------------------


def classify(model: nn.Module, optimizer: Optimizer, batch: Batch) -> Tensor:
    x, y = batch
    optimizer.zero_grad()
    logits = model(x)
    loss = F.cross_entropy(logits.flatten(0, -2), y.flatten())
    loss.backward()
    optimizer.step()
    return loss.detach()


def regress(model: nn.Module, optimizer: Optimizer, batch: Batch) -> Tensor:
    """Clears the gradients at the end of the step, so that none is alive in forward."""
    x, y = batch
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


# --- plain nets -------------------------------------------------------------------------------------------------------


def mlp() -> Case:
    def make() -> nn.Module:
        hidden = [layer for _ in range(8) for layer in (nn.Linear(128, 128), nn.GELU())]
        return nn.Sequential(nn.Linear(64, 128), nn.GELU(), *hidden, nn.Linear(128, 10))

    return Case("mlp", built(make, sgd), features(512, 64, classes=10), classify)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, *, manual: bool) -> None:
        super().__init__()
        self.heads, self.manual = heads, manual
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if self.manual:
            causal = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
            scores = (q @ k.transpose(-2, -1)) / math.sqrt(q.shape[-1])
            scores = scores.masked_fill(~causal, float("-inf"))
            y = F.dropout(scores.softmax(-1), 0.1, self.training) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(rows, length, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, *, manual: bool = False) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, manual=manual)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    def __init__(self, *, manual: bool, layers: int = 2, width: int = 64, vocabulary: int = 128) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(128, width)
        self.dropout = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(Block(width, 4, manual=manual) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.token.weight
        nn.init.normal_(self.token.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.dropout(self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device)))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def gpt_sdpa() -> Case:
    return Case("gpt_sdpa", built(partial(GPT, manual=False), adamw), tokens(4, 128, 128), classify)


def gpt_manual() -> Case:
    return Case("gpt_manual", built(partial(GPT, manual=True), adamw), tokens(4, 96, 128), classify)


def cnn() -> Case:
    def stage(inputs: int, outputs: int) -> list[nn.Module]:
        conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        return [conv, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]

    def make() -> nn.Module:
        return nn.Sequential(
            *stage(3, 16), *stage(16, 16), nn.MaxPool2d(2),
            *stage(16, 32), *stage(32, 32), nn.MaxPool2d(2),
            *stage(32, 32), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
        )  # fmt: skip

    return Case("cnn", built(make, nesterov), features(8, 3, 32, 32, classes=10), classify)


class StochasticDepth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.SiLU()) for _ in range(6)
        )
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor, chance: random.Random) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            if chance.random() < 0.7:
                x = x + block(x)
        return self.head(x.mean((2, 3)))


def stochastic_depth() -> Case:
    def batch(step: int) -> Batch:
        return *features(8, 3, 24, 24, classes=10)(step), step

    def step(model: nn.Module, optimizer: Optimizer, batch: Batch) -> Tensor:
        x, y, seed = batch
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x, random.Random(seed)), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Case("stochastic_depth", built(StochasticDepth, sgd), batch, step, steady=False)


def convolutions(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.SiLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.SiLU(),
    )  # fmt: skip


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.bottom = convolutions(3, 8), convolutions(8, 16), convolutions(16, 32)
        self.rise2, self.rise1 = nn.ConvTranspose2d(32, 16, 2, stride=2), nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.up2, self.up1 = convolutions(32, 16), convolutions(16, 8)
        self.out = nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip1 = self.down1(x)
        skip2 = self.down2(F.avg_pool2d(skip1, 2))
        x = self.bottom(F.max_pool2d(skip2, 2))
        x = self.up2(torch.cat([self.rise2(x), skip2], 1))
        return self.out(self.up1(torch.cat([self.rise1(x), skip1], 1)))


def unet() -> Case:
    return Case("unet", built(UNet, adam), pairs((4, 3, 32, 32), (4, 3, 32, 32)), regress)


def channels_last() -> Case:
    def make() -> nn.Module:
        return UNet().to(memory_format=torch.channels_last)

    def batch(step: int) -> Batch:
        return tuple(t.to(memory_format=torch.channels_last) for t in pairs((4, 3, 32, 32), (4, 3, 32, 32))(step))

    return Case("channels_last", built(make, adam), batch, regress)


class DenseNet(nn.Module):
    def __init__(self, layers: int = 5, growth: int = 12) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 24, 3, padding=1)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm2d(24 + growth * i), nn.ReLU(inplace=True), nn.Conv2d(24 + growth * i, growth, 3, padding=1)
            )
            for i in range(layers)
        )
        self.head = nn.Linear(24 + growth * layers, 10)

    def forward(self, x: Tensor) -> Tensor:
        found = [self.stem(x)]
        for layer in self.layers:
            found.append(layer(torch.cat(found, 1)))
        return self.head(torch.cat(found, 1).mean((2, 3)))


def densenet() -> Case:
    return Case("densenet", built(DenseNet, sgd), features(8, 3, 16, 16, classes=10), classify)


# --- recurrent nets ---------------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.core = kind(32, 64, num_layers=2, dropout=0.2)
        self.head = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.core(x)[0])


def lstm() -> Case:
    return Case("lstm", built(partial(Recurrent, nn.LSTM), rmsprop), pairs((16, 64, 32), (16, 64, 32)), regress)


def gru() -> Case:
    return Case("gru", built(partial(Recurrent, nn.GRU), rmsprop), pairs((12, 64, 32), (12, 64, 32)), regress)


class HandMadeLSTM(nn.Module):
    """Gates are activated in place on chunks that share a storage but no version counter, as in ATen's own cell."""

    def __init__(self, inputs: int = 64, width: int = 128) -> None:
        super().__init__()
        self.width = width
        self.wx, self.wh = nn.Linear(inputs, 4 * width), nn.Linear(width, 4 * width, bias=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(x.shape[1], self.width)
        for row in x:
            gates = self.wx(row) + self.wh(h)
            i, f, g, o = torch.unsafe_chunk(gates, 4, 1)
            c = f.sigmoid_() * c + i.sigmoid_() * g.tanh_()
            h = o.sigmoid_() * c.tanh()
        return self.head(h)


def lstm_cell() -> Case:
    return Case("lstm_cell", built(HandMadeLSTM, adam), features(6, 128, 64, classes=10, targets=(128,)), classify)


# --- Hugging Face, from configurations --------------------------------------------------------------------------------


def hugging_face(model: nn.Module, optimizer: Optimizer, batch: Batch) -> Tensor:
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def language(rows: int, length: int) -> Callable[[int], Batch]:
    def batch(step: int) -> Batch:
        ids = torch.randint(128, (rows, length), generator=generator(step))
        return {"input_ids": ids, "labels": ids}

    return batch


def hf_gpt2(attention: str) -> Case:
    def make() -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=128, n_positions=64, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0,
                attn_implementation=attention,
            )
        )  # fmt: skip

    return Case(f"hf_gpt2_{attention}", built(make, adamw), language(6, 64), hugging_face)


def hf_bert() -> Case:
    def make() -> nn.Module:
        from transformers import BertConfig, BertForSequenceClassification

        return BertForSequenceClassification(
            BertConfig(
                vocab_size=128, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
                max_position_embeddings=64, num_labels=3,
            )
        )  # fmt: skip

    def batch(step: int) -> Batch:
        g = generator(step)
        mask = torch.arange(64) < torch.randint(32, 65, (8, 1), generator=g)
        return {
            "input_ids": torch.randint(128, (8, 64), generator=g),
            "attention_mask": mask.long(),
            "labels": torch.randint(3, (8,), generator=g),
        }

    return Case("hf_bert", built(make, adamw), batch, hugging_face)


def hf_t5() -> Case:
    def make() -> nn.Module:
        from transformers import T5Config, T5ForConditionalGeneration

        return T5ForConditionalGeneration(
            T5Config(
                vocab_size=128, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_decoder_layers=1, num_heads=4,
                decoder_start_token_id=0,
            )
        )  # fmt: skip

    def batch(step: int) -> Batch:
        g = generator(step)
        return {
            "input_ids": torch.randint(128, (6, 44), generator=g),
            "labels": torch.randint(128, (6, 44), generator=g),
        }

    return Case("hf_t5", built(make, adam), batch, hugging_face)


def hf_llama() -> Case:
    """Keeps the model's output, and with it the key and value cache, in a name until the step ends."""

    def make() -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, max_position_embeddings=128,
            )
        )  # fmt: skip

    def step(model: nn.Module, optimizer: Optimizer, batch: Batch) -> Tensor:
        optimizer.zero_grad()
        outputs = model(**batch)
        outputs.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return outputs.loss.detach()

    return Case("hf_llama", built(make, adamw), language(6, 64), step)


def hf_vit() -> Case:
    def make() -> nn.Module:
        from transformers import ViTConfig, ViTForImageClassification

        return ViTForImageClassification(
            ViTConfig(
                hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, image_size=32,
                patch_size=4, num_labels=10, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1,
            )
        )  # fmt: skip

    def batch(step: int) -> Batch:
        x, y = features(6, 3, 32, 32, classes=10)(step)
        return {"pixel_values": x, "labels": y}

    return Case("hf_vit", built(make, sgd), batch, hugging_face)


# --- what autograd allows ---------------------------------------------------------------------------------------------


class GatedSwish(torch.autograd.Function):
    """Saves both inputs and an intermediate."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor) -> Tensor:
        s = torch.sigmoid(x)
        ctx.save_for_backward(x, gate, s)
        return x * s * gate

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, gate, s = ctx.saved_tensors
        return grad * gate * (s + x * s * (1 - s)), grad * x * s


class TopHalf(torch.autograd.Function):
    """Keeps a tensor as an attribute of the context, where no hook sees it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mask = x > x.mean(-1, keepdim=True)
        return x * ctx.mask

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.mask


class Activated(nn.Module):
    """Linear layers with `activation` between them."""

    def __init__(self, activation: Callable[[Tensor], Tensor], *, layers: int = 6, width: int = 128) -> None:
        super().__init__()
        self.activation = activation
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.activation(layer(x))
        return self.head(x)


def custom_function() -> Case:
    def activation(x: Tensor) -> Tensor:
        return GatedSwish.apply(x, x.tanh())

    return Case(
        "custom_function", built(partial(Activated, activation), adam), features(384, 128, classes=10), classify
    )


def custom_attribute() -> Case:
    def activation(x: Tensor) -> Tensor:
        return TopHalf.apply(F.softplus(x))

    return Case(
        "custom_attribute", built(partial(Activated, activation), sgd), features(384, 128, classes=10), classify
    )


class InPlaceViews(nn.Module):
    """Writes into slices, selections, masks and indices of tensors that autograd follows."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(width, width) for _ in range(3))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        a, b = self.first(x), self.second(x)
        board = torch.zeros(rows, length, width)
        board[:, : length // 2] = a[:, : length // 2]
        board[:, length // 2 :] += b[:, length // 2 :]
        board.select(1, 0).add_(b.select(1, 1), alpha=0.5)
        board[:, ::3] *= 1.5
        board.masked_fill_(x > 1.5, 0.0)
        where = torch.arange(0, length, 5)
        board.index_put_((torch.zeros_like(where), where), a[1, where], accumulate=True)
        board.diagonal(dim1=1, dim2=2).copy_(b[:, :width, 0])
        y = self.third(board.tanh()).transpose(1, 2)
        y[:, 1::2].neg_()
        z = (y.exp() + 0.5).clamp_(max=4.0)
        w = z.clone()
        w[:, :, -1] = 0
        w.narrow(2, 2, 8).zero_()
        return self.head((w * z).log1p().transpose_(1, 2))


def inplace_views() -> Case:
    return Case(
        "inplace_views", built(InPlaceViews, adam), features(8, 128, 64, classes=10, targets=(8, 128)), classify
    )


class Annealed(nn.Module):
    """Every step has other Python numbers in it; ops and shapes stay."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(5))
        self.head = nn.Linear(128, 10)

    def forward(self, x: Tensor, step: int) -> Tensor:
        scale, temperature = 1.0 + 0.25 * step, 2.0 / (1 + step)
        for layer in self.layers:
            x = F.leaky_relu(layer(x) * scale, 0.01 * (step + 1))
            x = F.dropout(x, 0.05 * (step % 5), self.training)
            x = (x.abs() + 0.1).pow(1.0 + 0.05 * step).clamp(max=3.0 + step) - step
            x = x / (1e-3 + x.std(-1, keepdim=True))
        return self.head(x) / temperature


def changing_constants() -> Case:
    def batch(step: int) -> Batch:
        return *features(256, 128, classes=10)(step), step

    def step(model: nn.Module, optimizer: Optimizer, batch: Batch) -> Tensor:
        x, y, index = batch
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 / (1 + index)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x, index), y, label_smoothing=0.01 * index) * (1.0 - 0.01 * index)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Case("changing_constants", built(Annealed, adam), batch, step)


def frozen() -> Case:
    def make() -> nn.Module:
        layers = [layer for _ in range(6) for layer in (nn.Linear(128, 128), nn.LayerNorm(128), nn.Tanh())]
        model = nn.Sequential(*layers, nn.Linear(128, 10))
        for index in (0, 1, 3, 9, 10, 12):  # a frozen start, and frozen layers that gradients pass through
            model[index].requires_grad_(False)
        return model

    return Case("frozen", built(make, sgd), features(512, 128, classes=10), classify)


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.core, self.norm, self.head = nn.Linear(128, 128), nn.LayerNorm(128), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + F.gelu(self.core(self.norm(x)))
        return self.head(x)


def shared() -> Case:
    return Case("shared", built(Shared, adamw), features(512, 128, classes=10), classify)


def accumulation() -> Case:
    def make() -> nn.Module:
        return Activated(F.silu, layers=6)

    def batch(step: int) -> Batch:
        return [features(256, 128, classes=10)(100 * step + part) for part in range(4)]

    def step(model: nn.Module, optimizer: Optimizer, batch: Batch) -> Tensor:
        optimizer.zero_grad()
        total = torch.zeros(())
        for x, y in batch:
            loss = F.cross_entropy(model(x), y) / len(batch)
            loss.backward()
            total += loss.detach()
        optimizer.step()
        return total

    return Case("accumulation", built(make, adamw), batch, step)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(128, 128), nn.GELU())])
        self.label, self.value = nn.Linear(128, 10), nn.Linear(128, 128)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = F.dropout(self.trunk(x), 0.1, self.training)
        return self.label(h), self.value(h)


def retain_graph() -> Case:
    def step(model: nn.Module, optimizer: Optimizer, batch: Batch) -> Tensor:
        x, y = batch
        optimizer.zero_grad()
        label, value = model(x)
        first, second = F.cross_entropy(label, y), F.smooth_l1_loss(value, x)
        first.backward(retain_graph=True)
        second.backward()
        optimizer.step()
        return first.detach() + second.detach()

    return Case("retain_graph", built(TwoHeads, adam), features(384, 128, classes=10), step)


def gradient_penalty() -> Case:
    def make() -> nn.Module:
        layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Softplus())]
        return nn.Sequential(*layers, nn.Linear(64, 1))

    def step(model: nn.Module, optimizer: Optimizer, batch: Batch) -> Tensor:
        x, y = batch
        x = x.detach().requires_grad_()
        optimizer.zero_grad()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        loss = F.mse_loss(out, y) + 0.1 * (slope.norm(2, dim=1) - 1).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Case("gradient_penalty", built(make, adam), pairs((512, 64), (512, 1)), step)


class Mixed(nn.Module):
    """Narrow, because a CPU without bfloat16 instructions multiplies matrices of it 200 times slower than float32."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer(x)
            x = F.gelu(h) * h.float().tanh() + h.exp().log1p()
            x = F.dropout(self.norm(x).softmax(-1) * x, 0.1, self.training)
        return self.head(x)


def autocast_step(model: nn.Module, optimizer: Optimizer, batch: Batch) -> Tensor:
    x, y = batch
    optimizer.zero_grad()
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


def autocast() -> Case:
    return Case("autocast", built(Mixed, adamw), features(2048, 16, classes=4), autocast_step)


class Branches(nn.Module):
    """Several layers over one input, each of which has autocast cast it again; and casts that the program makes."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.gate, self.up, self.down = (nn.Linear(width, width) for _ in range(3))
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        for norm in self.norms:
            h = norm(x)
            q, k, v = self.q(h), self.k(h), self.v(h)
            x = x + F.dropout(self.out(torch.softmax(q * k, -1) * v), 0.1, self.training)
            x = x + self.down(F.silu(self.gate(x)) * self.up(x))
        halves = [x.bfloat16().sin(), x.bfloat16().cos(), x.half().float().sin()]
        x = x.mul(0.5)
        x.add_(sum(halves))
        return self.head(x.bfloat16() * x.bfloat16())


def autocast_branches() -> Case:
    return Case("autocast_branches", built(Branches, adamw), features(4096, 16, classes=4), autocast_step)


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.stem, self.head = nn.Linear(64, 64), nn.Linear(64, 10)
        self.blocks = nn.ModuleList(Block(64, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks[:2]:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        for block in self.blocks[2:]:
            x = block(x)
        return self.head(x)


def checkpointed(reentrant: bool) -> Case:
    name = "checkpoint_reentrant" if reentrant else "checkpoint"
    data = features(4, 96, 64, classes=10, targets=(4, 96))
    return Case(name, built(partial(Checkpointed, reentrant=reentrant), adamw), data, classify)


# --- modules that write into parameters and buffers in forward --------------------------------------------------------


def parametrised(name: str, norm: Callable[[nn.Module], nn.Module]) -> Case:
    def make() -> nn.Module:
        layers = [layer for _ in range(5) for layer in (norm(nn.Linear(128, 128)), nn.ELU())]
        return nn.Sequential(*layers, nn.Linear(128, 10))

    return Case(name, built(make, adam), features(384, 128, classes=10), classify)


class RunningMean(nn.Module):
    """Centres by a running mean that it moves in forward: the value it used is gone when backward begins."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(*shape))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        y = x - self.mean
        self.mean.mul_(0.9).add_(x.detach().mean(tuple(range(x.dim() - self.mean.dim()))), alpha=0.1)
        return y * y.sigmoid()


class Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.centre = RunningMean(128)
        self.wide = RunningMean(128, 128)  # 64 KiB: not small enough to be copied without a thought
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(4))
        self.head = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.wide(self.centre(layer(x)))
        return self.head(x)


def ema_buffer() -> Case:
    data = features(3, 128, 128, classes=10, targets=(3, 128))
    return Case("ema_buffer", built(Centred, sgd), data, classify)


class Renormed(nn.Module):
    """An embedding that rescales rows of its own weight in forward, twice in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, 64, max_norm=1.0)
        self.mix, self.head = nn.Linear(128, 128), nn.Linear(128, 128)

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.cat([self.embedding(ids), self.embedding(ids.roll(1, 1))], -1)
        return self.head(F.gelu(self.mix(x.exp())))


def embedding_max_norm() -> Case:
    return Case("embedding_max_norm", built(Renormed, rmsprop), tokens(12, 96, 128), classify)


def rrelu() -> Case:
    def make() -> nn.Module:
        return Activated(nn.RReLU(), layers=5)

    return Case("rrelu", built(make, sgd), features(384, 128, classes=10), classify)


# --- programs that change from step to step, odd shapes, hazards ------------------------------------------------------


class Experts(nn.Module):
    """Each token goes to one expert; an expert without tokens does not run and gets no gradient.

    Routes by a fixed projection of the data, so that the shapes of a step depend on its batch alone.
    """

    def __init__(self, experts: int = 5, width: int = 64) -> None:
        super().__init__()
        self.register_buffer("router", torch.randn(width, experts))
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 128), nn.GELU(), nn.Linear(128, width)) for _ in range(experts)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        choice = (x @ self.router).argmax(-1)
        x = self.norm(x)
        weight = self.gate(x).softmax(-1).gather(1, choice[:, None])
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (choice == index).nonzero().squeeze(1)
            if len(rows):
                out[rows] = weight[rows] * expert(x[rows])
        return self.head(x + out)


def moe() -> Case:
    def batch(step: int) -> Batch:
        x, y = features(1024, 64, classes=10)(step)
        centre = torch.randn(64, generator=generator(step + 500)) * 4  # the tokens are alike: some experts are idle
        return x + centre, y

    return Case("moe", built(Experts, adamw), batch, classify, steady=False)


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(53, 131), nn.Linear(131, 127), nn.Linear(127, 7)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).relu()
        nothing = h[:, :0]
        h = torch.cat([nothing.exp(), self.second(h).tanh(), nothing[:, :, None].sum(-1)], 1)
        return self.third(h * h.expand(1, *h.shape).squeeze(0).sigmoid()) + nothing.sum()


def odd_shapes() -> Case:
    return Case("odd_shapes", built(Odd, sgd), features(1021, 53, classes=7), classify)


class OneSeries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv1d(1 if i == 0 else 13, 13, 5, padding=2) for i in range(5))
        self.head = nn.Conv1d(13, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.hardswish(F.instance_norm(layer(x)))
        return self.head(x)


def batch_of_one() -> Case:
    return Case("batch_of_one", built(OneSeries, adam), pairs((1, 1, 4099), (1, 1, 4099)), regress)


class Chain(nn.Module):
    """1,100 ops that save nothing before a tensor that is saved: longer than Python's stack is deep."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for i in range(1100):
            x = x + 1e-4 * (i % 3)
        x = x.exp().log1p().sin() * x.sigmoid().square()
        return self.second(x).tanh().cos() * x


def deep_chain() -> Case:
    return Case("deep_chain", built(Chain, sgd), pairs((768, 64), (768, 64)), regress)


class HiddenWrite(nn.Module):
    """Writes a fresh tensor through numpy: no op, no version, no trace of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(4))
        self.head = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            window = torch.zeros(x.shape)
            window.numpy()[:, index::2] = 0.5 + index
            x = (layer(x) * window).cos() + x
        return self.head(x)


def hidden_write() -> Case:
    return Case("hidden_write", built(HiddenWrite, sgd), features(384, 128, classes=10), classify)


class OwnNoise(nn.Module):
    """Draws from an explicit generator and from the global one in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(4))
        self.head = nn.Linear(128, 10)

    def forward(self, x: Tensor, noise: torch.Generator) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            x = x * torch.rand(x.shape, generator=noise) + torch.randn_like(x) * 0.1
            x = F.dropout(x.tanh(), 0.1, self.training)
        return self.head(x)


def own_generator() -> Case:
    def batch(step: int) -> Batch:
        return *features(384, 128, classes=10)(step), step + 900

    def step(model: nn.Module, optimizer: Optimizer, batch: Batch) -> Tensor:
        x, y, seed = batch
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x, generator(seed)), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Case("own_generator", built(OwnNoise, adam), batch, step)


class Spectral(nn.Module):
    """Complex values, conjugate views and real views of them."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(33, dtype=torch.complex64) * 0.1 + 1)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.head = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            f = torch.fft.rfft(layer(x)) * self.filter
            power = (f * f.conj()).real
            x = torch.fft.irfft(f.conj() * torch.rsqrt(1 + power), n=64).tanh()
        return self.head(x)


def complex_values() -> Case:
    return Case("complex_values", built(Spectral, adam), pairs((512, 64), (512, 64)), regress)


class FanOut(nn.Module):
    """One tensor with many readers, and ops whose backward has several formulas (prod, cumprod, where, amax)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        a, b, c, d = h.sin(), h.cos(), torch.where(h > 0, h, h.exp()), h * h.amax(1, keepdim=True)
        y = torch.stack([a, b + 1.5, c, d + 1]).prod(0) + (1 + 0.01 * a).cumprod(1)
        return self.head(self.second(y).sort(-1).values + h)


def fan_out() -> Case:
    return Case("fan_out", built(FanOut, sgd), features(768, 64, classes=10), classify)


ZOO: dict[str, Callable[[], Case]] = {
    "mlp": mlp,
    "gpt_sdpa": gpt_sdpa,
    "gpt_manual": gpt_manual,
    "cnn": cnn,
    "stochastic_depth": stochastic_depth,
    "unet": unet,
    "channels_last": channels_last,
    "densenet": densenet,
    "lstm": lstm,
    "gru": gru,
    "lstm_cell": lstm_cell,
    "hf_gpt2_sdpa": partial(hf_gpt2, "sdpa"),
    "hf_gpt2_eager": partial(hf_gpt2, "eager"),
    "hf_bert": hf_bert,
    "hf_t5": hf_t5,
    "hf_llama": hf_llama,
    "hf_vit": hf_vit,
    "custom_function": custom_function,
    "custom_attribute": custom_attribute,
    "inplace_views": inplace_views,
    "changing_constants": changing_constants,
    "frozen": frozen,
    "shared": shared,
    "accumulation": accumulation,
    "retain_graph": retain_graph,
    "gradient_penalty": gradient_penalty,
    "autocast": autocast,
    "autocast_branches": autocast_branches,
    "checkpoint": partial(checkpointed, reentrant=False),
    "checkpoint_reentrant": partial(checkpointed, reentrant=True),
    "spectral_norm": partial(parametrised, "spectral_norm", parametrizations.spectral_norm),
    "weight_norm": partial(parametrised, "weight_norm", parametrizations.weight_norm),
    "ema_buffer": ema_buffer,
    "embedding_max_norm": embedding_max_norm,
    "rrelu": rrelu,
    "moe": moe,
    "odd_shapes": odd_shapes,
    "batch_of_one": batch_of_one,
    "deep_chain": deep_chain,
    "hidden_write": hidden_write,
    "own_generator": own_generator,
    "complex_values": complex_values,
    "fan_out": fan_out,
}
