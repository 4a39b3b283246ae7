"""The states that are saved: a training with AdamW, many small tensors, a frozen base with adapters."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

LAYERS = 14
_HEADS = 8
_CONTEXT = 64
# Of AdamW: the parameter, and two averages of it, 4 bytes each.
_BYTES_PER_PARAMETER = 12


class Block(nn.Module):
    """Attention and a feed-forward network, each behind a norm: twelve tensors."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count, length, width = x.shape
        split = self.attention(self.before(x)).view(count, length, 3, _HEADS, width // _HEADS).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*split.unbind(0), is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(count, length, width))
        return x + self.narrow(functional.gelu(self.widen(self.between(x))))


class Network(nn.Module):
    """A small language model; with AdamW a state of `tensor_count(layers)` tensors."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(50 * width, width), nn.Embedding(_CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.words(tokens) + self.places(places))))


class Training:
    """Hold a network and its optimizer after one update, and make further ones.

    Args:
        size_bytes: What parameters and averages take together, about.
        layers: Blocks of the network; 14 make a state of 522 tensors.
        tokens: Tokens of one update.
    """

    def __init__(self, size_bytes: int, *, layers: int = LAYERS, tokens: int = _CONTEXT) -> None:
        torch.manual_seed(0)
        self.model = Network(width_of(size_bytes, layers), layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self.tokens = tokens
        self.compute()
        self.optimizer.step()

    @property
    def items(self) -> dict[str, object]:
        """Return what a manager is given."""
        return {"model": self.model, "optimizer": self.optimizer}

    def compute(self) -> None:
        """Make the gradients of the next update."""
        self.optimizer.zero_grad(set_to_none=False)
        batch = max(1, self.tokens // _CONTEXT)
        tokens = torch.randint(0, self.model.words.num_embeddings, (batch, min(self.tokens, _CONTEXT)))
        found = self.model(tokens)
        functional.cross_entropy(found.flatten(0, 1), tokens.flatten() % 256).backward()

    def touch(self) -> None:
        """Make an update of the gradients that there are, so that no save meets the bytes of the one before."""
        self.optimizer.step()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the live tensors by name, as the other libraries are given them.

        The optimizer's counters, one number for each parameter, are one tensor here: as tensors of their own they would
        cost the other libraries time that has nothing to do with bytes.
        """
        found = {f"model.{name}": tensor.detach() for name, tensor in self.model.named_parameters()}
        steps = []
        for name, parameter in self.model.named_parameters():
            held = self.optimizer.state[parameter]
            steps.append(held["step"].clone())
            found[f"optimizer.{name}.exp_avg"] = held["exp_avg"]
            found[f"optimizer.{name}.exp_avg_sq"] = held["exp_avg_sq"]
        return {**found, "optimizer.steps": torch.stack(steps)}


def width_of(size_bytes: int, layers: int) -> int:
    """Return the width of the network whose training state has about so many bytes."""
    # 12 width² for a block, 50 width² for the words.
    width = math.sqrt(size_bytes / _BYTES_PER_PARAMETER / (12 * layers + 50))
    return max(_HEADS, round(width / _HEADS) * _HEADS)


def size_of(tensors: dict[str, torch.Tensor]) -> int:
    """Return the bytes of all tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def small_tensors(count: int, *, least: int = 4 << 10, greatest: int = 64 << 10) -> dict[str, torch.Tensor]:
    """Return tensors of float32 whose sizes lie evenly between two numbers of bytes."""
    chance = torch.Generator().manual_seed(0)
    sizes = torch.randint(least // 4, greatest // 4 + 1, (count,), generator=chance).tolist()
    return {f"part.{number}": torch.randn(size, generator=chance) for number, size in enumerate(sizes)}


class Adapted:
    """Hold a frozen base, and adapters with AdamW that are one hundredth of the whole.

    Args:
        size_bytes: What base, adapters and averages take together, about.
        layers: Pairs of base and adapter.
    """

    def __init__(self, size_bytes: int, *, layers: int = 48) -> None:
        torch.manual_seed(0)
        side = max(16, round(math.sqrt(0.99 * size_bytes / layers / 4)))
        rank = max(1, round(0.01 * size_bytes / layers / _BYTES_PER_PARAMETER / (2 * side)))
        self.model = nn.ModuleDict(
            {
                "base": nn.ParameterList(torch.randn(side, side) for _ in range(layers)).requires_grad_(False),
                "down": nn.ParameterList(torch.randn(rank, side) for _ in range(layers)),
                "up": nn.ParameterList(torch.randn(side, rank) for _ in range(layers)),
            }
        )
        self.adapters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.adapters, lr=1e-5, fused=True)
        for parameter in self.adapters:
            parameter.grad = torch.randn_like(parameter)
        self.touch()

    @property
    def items(self) -> dict[str, object]:
        """Return what a manager is given."""
        return {"model": self.model, "optimizer": self.optimizer}

    def touch(self) -> None:
        """Make an update: the adapters change, and their averages; the base does not."""
        self.optimizer.step()
