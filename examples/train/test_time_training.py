"""Training through an inner loop: weights that learn while they are used, and the gradient of how well they learn.

A task is a hidden layer of attention: all tasks look at tokens in one way, and each reads out something else. The
inner loop takes gradient steps on one half of a task (the fast weights); the outer loss is the error on the other
half, differentiated through these steps (`create_graph=True`), by the first weights and by the rates of the steps.
That takes the second derivative of attention, which PyTorch has in its math path alone: it stores the weights of all
pairs, where etalon computes them again.

    python test_time_training.py --log ttt.jsonl      # the curve of both, in turns; plot.py draws it
    python test_time_training.py --memory             # peak memory, each in a process of its own
"""

import argparse
import json
import sys
import time

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import etalon.torch
import measure


def by_etalon(q, k, v):
    return etalon.torch.attention(q, k, v, causal=True)


def by_flash(q, k, v):
    """Without gradients, to draw tasks: the flash kernel of PyTorch has no second derivative."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def by_math(q, k, v):
    with sdpa_kernel([SDPBackend.MATH]):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


CONTENDERS = {"etalon": by_etalon, "math": by_math}


def layer(attention, weights, x, heads):
    """Attention of x [1, N, E] with weights q, k, v and out, each [E, E]."""
    q, k, v = ((x @ w).unflatten(-1, (heads, -1)).transpose(1, 2) for w in weights[:3])
    return attention(q, k, v).transpose(1, 2).flatten(2) @ weights[3]


class Tasks:
    """Pairs x, y [1, N, E]: y is a layer whose last weights are others in each task."""

    def __init__(self, a):
        self.a, self.source = a, torch.Generator().manual_seed(a.seed)
        self.common = [1.5 * self.weights() for _ in range(3)]

    def weights(self):
        return torch.randn(self.a.width, self.a.width, generator=self.source) / self.a.width**0.5

    @torch.no_grad()
    def draw(self):
        hidden = [*self.common, self.weights()]
        x = torch.randn(2, 1, self.a.tokens, self.a.width, generator=self.source)
        y = [layer(by_flash, hidden, half, self.a.heads) for half in x]
        return [(half, result / result.std()) for half, result in zip(x, y)]


class Learner:
    """First weights and the rate of inner steps, learned by Adam."""

    def __init__(self, attention, a):
        source = torch.Generator().manual_seed(a.seed + 1)
        shape = (a.width, a.width)
        self.a, self.attention = a, attention
        self.weights = [(torch.randn(shape, generator=source) / a.width**0.5).requires_grad_() for _ in range(4)]
        # Steps of each weight, relative to the width: the error is a mean over it.
        self.log_rates = torch.full((4,), -1.0).requires_grad_()
        self.optimizer = torch.optim.Adam([*self.weights, self.log_rates], lr=a.lr)
        self.seconds, self.losses = [], []

    def error(self, weights, x, y):
        return F.mse_loss(layer(self.attention, weights, x, self.a.heads), y)

    def adapted(self, x, y):
        """The weights after the inner steps, as a function of the first weights."""
        fast = self.weights
        for _ in range(self.a.inner):
            gradients = torch.autograd.grad(self.error(fast, x, y), fast, create_graph=True)
            rates = self.a.width * self.log_rates.exp()
            fast = [w - rate * g for w, rate, g in zip(fast, rates, gradients)]
        return fast

    def step(self, task):
        begun = time.perf_counter()
        (x, y), other = task
        loss = self.error(self.adapted(x, y), *other)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.losses.append(loss.item())
        self.seconds.append(time.perf_counter() - begun)


def arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--tokens", type=int, default=2048)
    p.add_argument("--width", type=int, default=256)
    p.add_argument("--heads", type=int, default=4)
    p.add_argument("--inner", type=int, default=1, help="inner steps")
    p.add_argument("--steps", type=int, default=100, help="outer steps")
    p.add_argument("--lr", type=float, default=1e-2)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--contenders", default="etalon,math")
    p.add_argument("--log", default=None)
    p.add_argument("--memory", action="store_true")
    p.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    p.add_argument("--quick", action="store_true", help="small, in seconds")
    if "--quick" in sys.argv:
        p.set_defaults(tokens=64, width=16, heads=2, steps=30, lr=2e-2)
    a = p.parse_args()
    a.contenders = a.contenders.split(",")
    for name in set(a.contenders) - set(CONTENDERS):
        p.error(f"--contenders: {name} is not one of {', '.join(CONTENDERS)}")
    return a


def peak(a):
    """The peak of resident memory of one contender above what the imports take."""
    name, base = a.contenders[0], measure.resident()
    measure.reset_peak()
    learner, task = Learner(CONTENDERS[name], a), Tasks(a).draw()
    for _ in range(3):
        learner.step(task)
    return {"contender": name, "peak_mb": round(measure.resident("VmHWM") - base)}


def race(a, say):
    learners = {name: Learner(CONTENDERS[name], a) for name in a.contenders}
    tasks = Tasks(a)
    say({"machine": measure.machine(), "arguments": vars(a)})
    for step in range(a.steps):
        task = tasks.draw()
        for name in measure.rotated(a.contenders, step):
            c = learners[name]
            c.step(task)
            taken = {"seconds": round(c.seconds[-1], 4), "total": round(sum(c.seconds), 3)}
            say({"contender": name, "step": step, "loss": round(c.losses[-1], 6)} | taken)
    for name, c in learners.items():
        own, other = tasks.draw()
        errors = {"error_before": c.error(c.weights, *other), "error_after": c.error(c.adapted(*own), *other)}
        rounded = {key: round(x.item(), 4) for key, x in errors.items()}
        say({"contender": name, "median_s": round(measure.median(c.seconds), 4)} | rounded)


def main():
    a = arguments()
    etalon.torch.use_threads_of_torch()
    if a.alone:
        print(json.dumps(peak(a)))
    elif a.memory:
        rest = [x for x in sys.argv[1:] if x != "--memory"]
        for name in a.contenders:
            print(json.dumps(measure.alone(__file__, [*rest, "--alone", "--contenders", name])), flush=True)
    else:
        with measure.Log(a.log) as say:
            race(a, say)


if __name__ == "__main__":
    main()
