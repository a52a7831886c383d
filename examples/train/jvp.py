"""A generator that draws in one step, trained by forward mode: MeanFlow (Geng et al., 2025) on clouds of points.

The network u(z, r, t) is the mean velocity of a flow between the times r and t. Its training target contains the
derivative of u along the path, d u / d t = ∂u/∂z · v + ∂u/∂t, which forward mode computes in the same sweep as u.
Through attention that takes `torch.func.jvp`; PyTorch's flash attention has none, its math path does.

    python jvp.py                    # checks the derivative, times one step of both, trains and draws points
"""

import argparse
import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import etalon.torch
import measure


def by_etalon(q, k, v):
    return etalon.torch.attention(q, k, v)


def by_math(q, k, v):
    with sdpa_kernel([SDPBackend.MATH]):
        return F.scaled_dot_product_attention(q, k, v)


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, attention):
        q, k, v = self.qkv(normed(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()
        x = x + self.out(attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(normed(x))))


def normed(x):
    """RMSNorm in plain operations, which all have a forward mode."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class Velocity(nn.Module):
    """The mean velocity of clouds z [B, N, 2] between times r and t [B, 1, 1]; points see each other."""

    def __init__(self, a):
        super().__init__()
        self.start = nn.Linear(2 + 2 * 16, a.width)
        self.blocks = nn.ModuleList(Block(a.width, a.heads) for _ in range(a.layers))
        self.end = nn.Linear(a.width, 2)
        self.register_buffer("frequencies", torch.arange(1, 9) * torch.pi / 2)

    def forward(self, z, r, t, attention=by_etalon):
        angles = torch.cat([time * self.frequencies for time in (t, t - r)], -1)
        times = torch.cat((angles.sin(), angles.cos()), -1).expand(*z.shape[:2], -1)
        x = self.start(torch.cat((z, times), -1))
        for block in self.blocks:
            x = block(x, attention)
        return self.end(normed(x))


def clouds(a, source):
    """Points [B, N, 2] on two turns of a spiral."""
    return spiral(torch.rand(a.batch, a.points, generator=source).sqrt())


def spiral(s):
    """The point of the spiral at each s from 0 to 1."""
    angle = 4 * torch.pi * s
    return 1.5 * s[..., None] * torch.stack((angle.cos(), angle.sin()), -1)


def draw(a, source):
    """Noise z = (1 − t) x + t e on the path from a cloud x to noise e, its velocity v = e − x, and times r ≤ t.

    Half of the clouds have r = t, where the target is v alone.
    """
    x = clouds(a, source)
    e = torch.randn(x.shape, generator=source)
    r, t = torch.rand(2, a.batch, 1, 1, generator=source).sort(0).values
    r = torch.where(torch.rand(r.shape, generator=source) < 0.5, t, r)
    return (1 - t) * x + t * e, e - x, r, t


def along_the_path(model, z, v, r, t, attention=by_etalon):
    """u and its derivative d u / d t along the path, whose velocity is v."""
    u = lambda z, t: model(z, r, t, attention)
    return torch.func.jvp(u, (z, t), (v, torch.ones_like(t)))


def loss_of(model, z, v, r, t, attention=by_etalon):
    """The MeanFlow loss: u should be v − (t − r) d u / d t, a target that counts as constant.

    The error of each cloud is divided by itself, so that a few large derivatives do not rule the gradient.
    """
    u, du = along_the_path(model, z, v, r, t, attention)
    error = (u - (v - (t - r) * du).detach()).square().mean((1, 2))
    return (error / (error.detach() + 0.1)).mean(), error.detach().mean()


def check(model, a, source):
    """How far the derivative lies from PyTorch's math path, and from a central difference in float64."""
    z, v, r, t = draw(a, source)
    with torch.no_grad():
        du, math = (along_the_path(model, z, v, r, t, by)[1] for by in (by_etalon, by_math))
        exact = lambda x: x.double()
        wide, z, v, r, t = model.double(), *map(exact, (z, v, r, t))
        ends = [wide(z + h * v, r, t + h, by_math) for h in (1e-5, -1e-5)]
        difference = (ends[0] - ends[1]) / 2e-5
        model.float()
    far = lambda x: round(((du - x).norm() / x.norm()).item(), 8)
    return {"from_math_path": far(math), "from_difference": far(difference)}


def train(model, a, source, say):
    """Trains, and says how far points that are drawn in one step lie from the spiral, at ten times."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=a.lr, betas=(0.9, 0.95), fused=True)
    for step in range(a.steps):
        if step % max(a.steps // 10, 1) == 0:
            say({"distance": distance(model, a), "after": step})
        loss, error = loss_of(model, *draw(a, source))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        say({"contender": "etalon", "step": step, "loss": round(error.item(), 5)})
    say({"distance": distance(model, a), "after": a.steps})


@torch.no_grad()
def distance(model, a):
    """The mean distance of points that one step draws from noise to the spiral."""
    z = torch.randn(a.batch, a.points, 2, generator=torch.Generator().manual_seed(a.seed + 1))
    drawn = z - model(z, torch.zeros(a.batch, 1, 1), torch.ones(a.batch, 1, 1))
    near = torch.cdist(drawn.flatten(0, 1), spiral(torch.linspace(0, 1, 400))).amin(-1)
    return round(near.mean().item(), 4)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in dict(points=256, width=64, heads=2, layers=3, batch=8, steps=400, rounds=5, seed=0).items():
        p.add_argument(f"--{name}", type=int, default=value)
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--log", default=None)
    p.add_argument("--quick", action="store_true", help="small, in seconds")
    if "--quick" in sys.argv:
        p.set_defaults(points=48, width=32, layers=2, batch=4, steps=40, rounds=2)
    a = p.parse_args()
    etalon.torch.use_threads_of_torch()
    torch.manual_seed(a.seed)
    source = torch.Generator().manual_seed(a.seed)
    model = Velocity(a)
    with measure.Log(a.log) as say:
        say({"machine": measure.machine(), "arguments": vars(a)})
        say(check(model, a, source))
        sample = draw(a, source)
        steps = {"etalon": by_etalon, "math": by_math}
        steps = {name: lambda by=by: loss_of(model, *sample, by)[0].backward() for name, by in steps.items()}
        times = measure.take_turns(steps, a.rounds)
        say({name: round(measure.median(found), 4) for name, found in times.items()} | {"unit": "seconds a step"})
        model.zero_grad()
        train(model, a, source, say)


if __name__ == "__main__":
    main()
