"""Trains one decoder by several contenders, who take turns step by step, from equal weights on equal batches.

    python train.py                                   # softmax attention: every contender
    python train.py --mixer lazy --contenders eager,compile,etalon
    python train.py --memory                          # peak memory, each contender in a process of its own

A contender is a name of `operators.CONTENDERS`: whose mixer, whose loss, compiled or not. Losses are written as lines
of JSON for plot.py. README.md has the commands of the published figures.
"""

import argparse
import dataclasses
import json
import sys
import time

import numpy as np
import torch

import etalon.torch
import measure
import tokenizer
from model import Config, Decoder
from operators import CONTENDERS, available

QUICK = dict(layers=2, heads=2, dim=16, hidden=88, tokens=128, vocab=512, bias_width=32, steps=20, warm_up=4, lr=1e-2)


def arguments(given=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in dataclasses.fields(Config):
        p.add_argument(f"--{field.name.replace('_', '-')}", type=field.type, default=field.default)
    p.add_argument("--contenders", default=None, help="names with commas between them; all but etalon-mixer")
    p.add_argument("--batch", type=int, default=1, help="sequences of a step")
    p.add_argument("--steps", type=int, default=20)
    p.add_argument("--lr", type=float, default=1e-3, help="the highest rate; a cosine to a tenth of it follows")
    p.add_argument("--warm-up", type=int, default=50, help="steps to the highest rate")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--threads", type=int, default=None, help="of PyTorch and etalon; as many as PyTorch takes")
    p.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    p.add_argument("--text", nargs="+", default=[], metavar="PATH", help="files or folders; the crates of Cargo.lock")
    p.add_argument("--cache", default=tokenizer.CACHE, metavar="FOLDER", help="tokens of texts, for the next time")
    p.add_argument("--log", default=None, help="the file for lines of JSON")
    p.add_argument("--mmap-threshold", type=int, default=None, metavar="BYTES", help="fixes that bound of glibc")
    p.add_argument("--memory", action="store_true", help="peak memory in place of speed")
    p.add_argument("--profile", action="store_true", help="operators of each contender's last step")
    p.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    p.add_argument("--quick", action="store_true", help="a tiny model, in seconds")
    if "--quick" in (sys.argv if given is None else given):
        p.set_defaults(**QUICK)
    a = p.parse_args(given)
    known = [name for name in CONTENDERS if available(name) and (name != "chunked" or a.mixer == "softmax")]
    usual = [name for name in known if name != "etalon-mixer"]
    a.contenders = usual if a.contenders is None else a.contenders.split(",")
    for name in set(a.contenders) - set(known):
        p.error(f"--contenders: {name} is not one of {', '.join(known)} with --mixer {a.mixer} and this PyTorch")
    return a


class Contender:
    """A model with an optimizer, and what its steps have taken."""

    def __init__(self, name, config, a):
        mixer, loss, is_compiled = CONTENDERS[name]
        torch.manual_seed(a.seed)
        self.name, self.a = name, a
        self.model = Decoder(config, mixer, loss)
        self.function = torch.compile(self.model, fullgraph=True, dynamic=False) if is_compiled else self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=a.lr, betas=(0.9, 0.95), fused=True)
        self.seconds, self.losses = [], []

    def gradients(self, x, y):
        with torch.autocast("cpu", torch.bfloat16, enabled=self.a.bf16):
            loss = self.function(x, y)
        loss.backward()
        return loss

    def warm(self, x, y):
        """Compiles and touches memory: gradients of one batch, without a step. Returns the seconds."""
        begun = time.perf_counter()
        self.gradients(x, y)
        self.optimizer.zero_grad(set_to_none=True)
        return time.perf_counter() - begun

    def step(self, x, y, rate):
        begun = time.perf_counter()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss = self.gradients(x, y)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.losses.append(loss.item())
        self.seconds.append(time.perf_counter() - begun)


def batches(ids, a):
    """Batches of whole windows of the text, [batch, tokens + 1], none twice before all were there."""
    count = (len(ids) - 1) // a.tokens
    if count < a.batch:
        raise SystemExit(
            f"too little text: {len(ids)} tokens are {count} windows of {a.tokens}, a batch has {a.batch}"
        )
    source, left = np.random.default_rng(a.seed), []
    while True:
        while len(left) < a.batch:
            left += list(source.permutation(count))
        at, left = left[: a.batch], left[a.batch :]
        rows = [ids[i * a.tokens : (i + 1) * a.tokens + 1] for i in at]
        xy = torch.from_numpy(np.stack(rows).astype(np.int64))
        yield xy[:, :-1].contiguous(), xy[:, 1:].contiguous()


def rate(step, a):
    """The learning rate: it rises in a line, and falls in half a cosine to a tenth."""
    if step < a.warm_up:
        return a.lr * (step + 1) / a.warm_up
    done = (step - a.warm_up) / max(a.steps - a.warm_up, 1)
    return a.lr * (0.55 + 0.45 * float(np.cos(np.pi * done)))


def race(a, config, ids, say):
    """Trains every contender, in turns."""
    stream = batches(ids, a)
    batch = next(stream)
    contenders = {name: Contender(name, config, a) for name in a.contenders}
    parameters = sum(x.numel() for x in contenders[a.contenders[0]].model.parameters())
    sizes = dataclasses.asdict(config) | {"batch": a.batch, "bf16": a.bf16, "parameters": parameters}
    say({"machine": measure.machine(), "model": sizes})
    for name, contender in contenders.items():
        say({"contender": name, "warm": round(contender.warm(*batch), 2)})
    for step in range(a.steps):
        x, y = next(stream)
        for name in measure.rotated(a.contenders, step):
            c = contenders[name]
            c.step(x, y, rate(step, a))
            taken = {"seconds": round(c.seconds[-1], 4), "total": round(sum(c.seconds), 3)}
            say({"contender": name, "step": step, "loss": round(c.losses[-1], 5)} | taken)
    return contenders


def summary(contenders, a):
    """Tokens a second by the median step, relative to PyTorch's best, and how far losses lie apart."""
    speed = {name: a.batch * a.tokens / measure.median(c.seconds) for name, c in contenders.items()}
    torchs = [speed[name] for name in speed if not name.startswith("etalon")]
    first = contenders[a.contenders[0]]
    for name, c in contenders.items():
        apart = max(abs(x - y) for x, y in zip(c.losses, first.losses))
        row = {"contender": name, "tokens_per_second": round(speed[name], 1), "loss": round(c.losses[-1], 4)}
        if torchs:
            row["of_best_of_torch"] = round(speed[name] / max(torchs), 3)
        yield row | {"farthest_loss": round(apart, 5)}


def peak(a, config, ids):
    """The peak of resident memory of one contender above what the imports take."""
    base = measure.resident()
    stream = batches(ids, a)
    c = Contender(a.contenders[0], config, a)
    c.warm(*next(stream))
    start = measure.resident("VmHWM")
    measure.reset_peak()
    for step in range(max(a.steps, 1)):
        c.step(*next(stream), rate(step, a))
    steps = measure.resident("VmHWM")
    found = {"imports_mb": base, "first_mb": start - base, "peak_mb": steps - base}
    return {"contender": c.name} | {key: round(x) for key, x in found.items()}


def profile(contender, batch, a):
    """A table of the operators of one step, by their own time."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds, profile_memory=True) as found:
        contender.step(*batch, rate(a.steps, a))
    return found.key_averages().table(sort_by="self_cpu_time_total", row_limit=16, max_name_column_width=60)


def main():
    a = arguments()
    if a.threads:
        torch.set_num_threads(a.threads)
    if a.mmap_threshold:
        measure.fix_mmap_threshold(a.mmap_threshold)
    etalon.torch.use_threads_of_torch()
    etalon.set_precision("flash" if a.bf16 else "strict")  # products in bfloat16, as PyTorch has them
    names = [field.name for field in dataclasses.fields(Config)]
    config = Config(**{name: getattr(a, name) for name in names})
    if a.memory and not a.alone:
        rest = [x for x in sys.argv[1:] if x != "--memory"]
        for name in a.contenders:
            print(json.dumps(measure.alone(__file__, [*rest, "--alone", "--contenders", name])), flush=True)
        return
    ids, text = tokenizer.load(a.text, a.vocab, a.cache, 200_000 if a.quick else 24_000_000)
    if a.alone:
        print(json.dumps(peak(a, config, ids)))
        return
    with measure.Log(a.log) as say:
        say({"text": text, "tokens": len(ids), "arguments": {key: str(x) for key, x in vars(a).items()}})
        contenders = race(a, config, ids, say)
        for row in summary(contenders, a):
            say(row)
        for name in contenders if a.profile else ():
            print(f"{name}\n{profile(contenders[name], next(batches(ids, a)), a)}")


if __name__ == "__main__":
    main()
