"""A decoder language model: RMSNorm, rotary positions, SwiGLU, tied embeddings, and one of three mixers."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from operators import LOSSES, MIXERS


@dataclass
class Config:
    """Sizes of a model. `hidden` is the width of the SwiGLU, `bias_width` the distances that lazy attention learns."""

    mixer: str = "softmax"
    layers: int = 8
    heads: int = 8
    dim: int = 64
    hidden: int = 1408
    tokens: int = 2048
    vocab: int = 32000
    bias_width: int = 512

    @property
    def width(self):
        return self.heads * self.dim


def narrow(x):
    """`x` in the type of autocast, where that is on: operators that autocast does not know take one type."""
    return x.to(torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") else x


class Norm(nn.Module):
    """RMSNorm over the last axis."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return F.rms_norm(x, (x.shape[-1],), self.weight, 1e-6)


class Mixer(nn.Module):
    """Tokens look at earlier tokens: softmax attention, linear attention with a decay per head, or lazy attention."""

    def __init__(self, config, operator):
        super().__init__()
        self.config, self.operator = config, operator
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)
        if config.mixer == "linear":
            # Half-lives from 1.4 to 177 tokens with 8 heads, by the rule of lightning attention.
            slopes = 2.0 ** (-8 * torch.arange(1, config.heads + 1) / config.heads)
            self.register_buffer("decay", -slopes, persistent=False)
            self.norm = Norm(config.dim)
        if config.mixer == "lazy":
            self.theta = nn.Parameter(torch.zeros(config.heads))
            self.bias = nn.Parameter(torch.zeros(config.heads, config.bias_width))

    def forward(self, x, rotary):
        b, n, width = x.shape
        heads, dim = self.config.heads, self.config.dim
        qk, v = self.qkv(x).split((2 * width, width), -1)
        qk, v = qk.view(b, n, 2 * heads, dim), v.view(b, n, heads, dim).transpose(1, 2)
        # Positive features: a weight that may be 0 would leave nothing to normalise.
        qk = F.elu(qk) + 1 if self.config.mixer == "linear" else rotate(qk, *rotary)
        q, k = qk.transpose(1, 2).split(heads, 1)
        if self.config.mixer == "softmax":
            o = self.operator(q, k, v)
        elif self.config.mixer == "linear":
            o = self.norm(self.operator(q, k, v, self.decay))
        else:
            o = self.operator(q, k, v, -(self.theta + 1).abs(), self.bias)
        return self.out(o.transpose(1, 2).reshape(b, n, width))


def rotate(x, cos, sin):
    """Rotary positions: pairs of elements of x [B, N, heads, D], half of D apart, turn by angles [N, 1, D / 2]."""
    a, b = x.chunk(2, -1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


class Block(nn.Module):
    """A mixer and a SwiGLU, each beside the residual stream."""

    def __init__(self, config, operator):
        super().__init__()
        self.mixer = Mixer(config, operator)
        self.norms = nn.ModuleList(Norm(config.width) for _ in range(2))
        self.up = nn.Linear(config.width, 2 * config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x, rotary):
        x = x + self.mixer(self.norms[0](x), rotary)
        gate, up = self.up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Decoder(nn.Module):
    """The loss of targets y [B, N] after tokens x [B, N]. `mixer` and `loss` say whose operators compute it."""

    def __init__(self, config, mixer="etalon", loss="etalon"):
        super().__init__()
        self.loss = LOSSES[loss]
        self.embedding = nn.Embedding(config.vocab, config.width)
        self.blocks = nn.ModuleList(Block(config, MIXERS[config.mixer][mixer]) for _ in range(config.layers))
        self.norm = Norm(config.width)
        frequencies = 10000.0 ** (-torch.arange(0, config.dim, 2) / config.dim)
        angles = torch.outer(torch.arange(config.tokens), frequencies)[:, None]
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.reset(config)

    def reset(self, config):
        """Draws the weights: a deviation of 0.02, less where a block adds to the residual stream."""
        for name, weight in self.named_parameters():
            if weight.dim() == 2 and not name.endswith("bias"):
                adds = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(weight, std=0.02 / (2 * config.layers) ** 0.5 if adds else 0.02)

    def forward(self, x, y):
        x = narrow(self.embedding(x))
        n = x.shape[1]
        for block in self.blocks:
            x = block(x, (self.cos[:n], self.sin[:n]))
        h = self.norm(x).flatten(0, 1)
        return self.loss(narrow(h), narrow(self.embedding.weight), y.flatten())
