"""Passes over several processes against one. As a script, with a folder and perhaps names of checks: four ranks, which
run the checks and write what they found.

Checks run on groups of four, three and two of the ranks, in one set of processes, since each takes seconds to start.
"""

import datetime
import functools
import json
import os
import runpy
import subprocess
import sys
import tempfile
import types
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
import etalon  # noqa: E402
import etalon.distributed as D  # noqa: E402
import etalon.torch as E  # noqa: E402

WORLD = 4
CHECKS = {}
TYPES = (torch.float32, torch.bfloat16, torch.float16)


def check(*groups):
    """A check that runs on groups of the first so many ranks."""

    def add(function):
        CHECKS[function.__name__] = (function, groups)
        return function

    return add


def draw(*shape, dtype=torch.float32, seed=0):
    source = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, dtype=torch.float64, generator=source).to(dtype)


def same(found, expected, name):
    assert found.dtype == expected.dtype and found.shape == expected.shape, name
    bits = [x.contiguous().view(-1).view(torch.uint8) for x in (found, expected)]
    assert torch.equal(*bits), f"{name} has other bits: off by {(found - expected).abs().max().item()}"


def close(found, expected, name, units):
    """Within so many units in the last place of the largest element."""
    assert found.shape == expected.shape, name
    scale = expected.abs().max().clamp(min=1e-3) if expected.numel() else 1
    off = (found.double() - expected.double()).abs().max().item() if found.numel() else 0
    assert off <= units * torch.finfo(found.dtype).eps * scale, f"{name} is off by {off}"


def raises(error, text, function):
    with pytest.raises(error, match=text):
        function()


class Loss:
    """A loss of all classes, in one process and in shards with these borders."""

    def __init__(self, group, borders, dtype=torch.float32, tokens=13, dim=6, **options):
        self.group, self.rank, self.borders, self.options = group, dist.get_rank(group), borders, options
        self.start, self.end = borders[self.rank : self.rank + 2]
        vocab = borders[-1]
        self.h, self.w = draw(tokens, dim, dtype=dtype), draw(vocab, dim, dtype=dtype)
        self.bias = draw(vocab, dtype=dtype)
        self.weights = {"class_weights": draw(vocab).abs(), "token_weights": draw(tokens).abs()}
        # Targets in every shard, at its ends too, and ignored ones.
        self.targets = torch.arange(tokens) * 389 % vocab
        self.targets[: len(borders) - 1] = torch.tensor(borders[1:]).clamp(min=1) - 1
        self.targets[[5, tokens - 1]] = -100
        self.each = options.get("reduction") == "none"
        self.dloss = draw(tokens) if self.each else torch.tensor(0.7)

    def whole(self, tier="auto"):
        given = dict(bias=self.bias, **self.weights)
        self.problem = etalon.problem("linear_cross_entropy", h=self.h, w=self.w, **given, **self.options)
        self.inputs = dict(h=self.h, w=self.w, targets=self.targets, dloss=self.dloss, **given)
        places = dict(loss=self.dloss, dh=self.h, dw=self.w, dbias=self.bias)
        places = {name: torch.empty_like(x) for name, x in places.items()}
        self.problem.run("forward_backward", self.inputs, places)
        own = slice(self.start, self.end)
        return places | {name: places[name][own] for name in ("dw", "dbias")}

    def sharded(self, **keywords):
        h, w, bias = (x.clone().requires_grad_() for x in (self.h, self.w[self.start : self.end], self.shard_of_bias))
        given = dict(bias_shard=bias, **self.weights, **self.options, **keywords)
        loss = D.vocab_parallel_cross_entropy(h, w, self.targets, group=self.group, **given)
        gradients = torch.autograd.grad(loss, (h, w, bias), self.dloss)
        return dict(zip(("loss", "dh", "dw", "dbias"), (loss.detach(), *gradients)))

    @property
    def shard_of_bias(self):
        return self.bias[self.start : self.end]


# Of 8.3 tiles: shards that are nodes of the tree, with ranks that have no classes; and of several nodes.
NODES = {4: (0, 1024, 1536, 2048, 2125), 3: (0, 2048, 2048, 2125), 2: (0, 2048, 2125)}
TILES = {4: (0, 768, 768, 1792, 2125), 3: (0, 256, 1792, 2125), 2: (0, 768, 2125)}
EMPTY = {4: (0, 0, 2125, 2125, 2125), 3: (0, 0, 0, 2125), 2: (0, 2125, 2125)}
ANYWHERE = {4: (0, 100, 101, 1500, 2125), 3: (0, 700, 800, 2125), 2: (0, 2124, 2125)}


@check(4, 2)
def shards_that_are_nodes_have_the_bits_of_one_process(group):
    borders = NODES[dist.get_world_size(group)]
    options = [dict(), dict(reduction="sum", softcap=3.0, lse_square_scale=0.01)]
    options += [dict(reduction="none", label_smoothing=0.1, temperature=0.7, logit_scale=1.3)]
    for dtype, options in zip(TYPES, options):
        loss = Loss(group, borders, dtype, **options)
        found, expected = loss.sharded(), loss.whole()
        for name, x in expected.items():
            same(found[name], x, f"{name} in {dtype}")


@check(3)
def shards_without_classes_take_part(group):
    for borders in (NODES[3], EMPTY[3]):
        loss = Loss(group, borders, label_smoothing=0.1)
        found, expected = loss.sharded(), loss.whole()
        for name, x in expected.items():
            same(found[name], x, name)


@check(4, 2)
def shards_of_several_nodes_have_them_too_where_these_are_sent(group):
    loss = Loss(group, TILES[dist.get_world_size(group)], torch.bfloat16, tokens=10)
    found, by_nodes, expected = loss.sharded(), loss.sharded(dh_by_nodes=True), loss.whole()
    for name, x in expected.items():
        same(by_nodes[name], x, name)
        if name == "dh":
            close(found[name], x, name, units=2)
        else:
            same(found[name], x, name)


@check(4)
def other_cuts_lie_within_the_bounds(group):
    for dtype in TYPES[:2]:
        loss = Loss(group, ANYWHERE[4], dtype, label_smoothing=0.1, softcap=3.0)
        found = loss.sharded()
        loss.whole()
        sizes = [end - start for start, end in zip(loss.borders, loss.borders[1:])]
        for name in ("dw", "dbias"):
            found[name] = together(group, found[name], sizes, 0)
        report = etalon.check(loss.problem, loss.inputs, found, "forward_backward", only=tuple(found))
        assert report, str(report)


def together(group, x, sizes, axis):
    """The chunks of all ranks, side by side."""
    padded = x.new_zeros((*x.shape[:axis], max(sizes), *x.shape[axis + 1 :]))
    padded.narrow(axis, 0, x.shape[axis]).copy_(x)
    chunks = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(chunks, padded, group=group)
    return torch.cat([chunk.narrow(axis, 0, size) for chunk, size in zip(chunks, sizes)], axis)


@check(2)
def wrong_calls_of_one_rank_raise_on_all(group):
    rank, f = dist.get_rank(group), functools.partial(D.vocab_parallel_cross_entropy, group=group)
    h, w, targets = draw(6, 4).requires_grad_(), draw(300, 4), torch.arange(6)
    raises(ValueError, r"`targets\[2\]` must be a class below 600", lambda: f(h, w, targets + 598 * (targets == 2)))
    raises(ValueError, "`targets` must be the same on every rank", lambda: f(h, w, targets + rank))
    raises(ValueError, "an option must be the same", lambda: f(h, w, targets, softcap=1.0 + rank))
    raises(ValueError, "whether `h` needs a gradient", lambda: f(h.detach() if rank else h, w, targets))
    raises(ValueError, "`class_weights` must have shape", lambda: f(h, w, targets, class_weights=torch.ones(5)))
    raises(ValueError, "`reduction`|unknown variant", lambda: f(h, w, targets, reduction="average"))
    error, text = (RuntimeError, "has failed on rank 1") if rank == 0 else (ValueError, r"`w_shard` .* \[any, 4\]")
    raises(error, text, lambda: f(h, w if rank == 0 else w[:, :3], targets))
    error, text = (RuntimeError, "has failed on rank 1") if rank == 0 else (TypeError, "`h` must hold float32 or")
    raises(error, text, lambda: f(h.double() if rank else h, w, targets))
    raises(
        NotImplementedError,
        "`class_weights`",
        lambda: f(h, w, targets, class_weights=torch.ones(600).requires_grad_()),
    )
    loss = f(h, w, targets)
    raises(ValueError, "cotangent of the loss must be the same", lambda: torch.autograd.grad((1 + rank) * loss, h))
    q = draw(1, 2, 3, 4)
    attention = functools.partial(D.sequence_parallel_attention, group=group)
    linear = functools.partial(D.sequence_parallel_linear_attention, group=group)
    raises(TypeError, "exclude each other", lambda: attention(q, q, q, causal=True, window=(1, 0)))
    raises(ValueError, "`window` must have whole ends", lambda: attention(q, q, q, window=(-1, 0)))
    raises(TypeError, "`q` must hold float32 or", lambda: attention(*[q.double()] * 3))
    raises(ValueError, "an option must be the same", lambda: attention(q, q, q, scale=1.0 + rank))
    raises(ValueError, "`k` must have shape", lambda: attention(q, q[:, :, :2], q))
    raises(ValueError, "multiple of the 3 heads", lambda: attention(q, draw(1, 3, 3, 4), draw(1, 3, 3, 4)))
    raises(TypeError, "exclude each other", lambda: linear(q, q, q, g=-draw(1, 2, 3).abs(), g_gamma=-draw(2).abs()))
    raises(ValueError, "`g_gamma` must be at most 0", lambda: linear(q, q, q, g_gamma=draw(2).abs()))
    error, text = (RuntimeError, "rank 1") if rank == 0 else (ValueError, "`initial_state` must be None but")
    raises(error, text, lambda: linear(q, q, q, initial_state=draw(1, 2, 4, 4)))


@check(2)
def what_has_no_derivative_raises(group):
    f = functools.partial(D.vocab_parallel_cross_entropy, group=group)
    h, w, targets = draw(6, 4).requires_grad_(), draw(300, 4).requires_grad_(), torch.arange(6)
    q = draw(1, 2, 3, 4).requires_grad_()
    attention = lambda q: D.sequence_parallel_attention(q, q, q, group=group)
    linear = lambda q: D.sequence_parallel_linear_attention(q, q, q, group=group)
    for function, x in ((lambda h: f(h, w, targets), h), (attention, q), (linear, q)):
        (first,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
        assert first.requires_grad
        raises(NotImplementedError, "a second derivative of", lambda: torch.autograd.grad(first.sum(), x))
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x.detach(), torch.ones_like(x))
            raises((NotImplementedError, RuntimeError), "forward", lambda: function(dual))
        transformed = torch.func.grad(lambda x: function(x).sum())
        raises(NotImplementedError, "under transforms of torch.func", lambda: transformed(x.detach()))
        with torch.no_grad():
            assert not function(x).requires_grad


LENGTHS = {4: (7, 5, 0, 9), 3: (4, 4, 4), 2: (1, 12)}


class Sequence:
    """Tensors of a whole sequence, and those of a rank's chunk."""

    def __init__(self, group, dtype):
        self.group, self.rank, self.count = group, dist.get_rank(group), dist.get_world_size(group)
        self.lengths = LENGTHS[self.count]
        self.start, n = sum(self.lengths[: self.rank]), sum(self.lengths)
        self.wide = torch.float64 if dtype == torch.float64 else torch.float32
        tensors = draw(2, 4, n, 6), draw(2, 2, n, 6, seed=1), draw(2, 2, n, 5), draw(2, 4, n, 5, seed=2)
        self.q, self.k, self.v, self.dout = (x.to(dtype) for x in tensors)

    def own(self, x):
        return x.narrow(2, self.start, self.lengths[self.rank])

    def chunks(self, *tensors):
        """The rank's chunks of tensors, to be differentiated."""
        return [self.own(x).clone().requires_grad_() for x in tensors]

    def whole(self, x):
        return together(self.group, x, self.lengths, 2)

    def is_last(self):
        return self.rank == self.count - 1


MASKS = [dict(causal=True), dict(), dict(window=(3, 2)), dict(window=(8, 0), softcap=3.0, scale=0.7)]


@check(4, 2)
def attention_of_chunks_lies_within_the_bounds(group):
    for dtype, options in [(torch.float32, x) for x in MASKS] + [(torch.bfloat16, MASKS[0])]:
        x = Sequence(group, dtype)
        q, k, v = x.chunks(x.q, x.k, x.v)
        sinks, dlse = (draw(4).requires_grad_() if "window" in options else None), draw(2, 4, sum(x.lengths))
        o, lse = D.sequence_parallel_attention(q, k, v, group=group, sinks=sinks, return_lse=True, **options)
        leaves = [q, k, v] if sinks is None else [q, k, v, sinks]
        dq, dk, dv, *dsinks = torch.autograd.grad((o, lse), leaves, (x.own(x.dout), x.own(dlse)))
        outputs = {"o": x.whole(o.detach()), "lse": x.whole(lse.detach())}
        inputs = dict(q=x.q, k=x.k, v=x.v, sinks=None if sinks is None else sinks.detach())
        problem = etalon.problem("attention", **inputs, **options)
        report = etalon.check(problem, inputs, outputs)
        assert report, f"{options}: {report}"
        gradients = {"dq": x.whole(dq), "dk": x.whole(dk), "dv": x.whole(dv)}
        for total in dsinks:
            dist.all_reduce(total, group=group)
            gradients["dsinks"] = total
        report = etalon.check(problem, {**inputs, **outputs, "dout": x.dout, "dlse": dlse}, gradients, "backward")
        assert report, f"{options}: {report}"


def linear(x, options, is_whole):
    """o, the last state, and gradients by name, of the whole sequence in one process or of chunks."""
    part = (lambda y: y) if is_whole else x.own
    leaves = {name: part(y).clone().requires_grad_() for name, y in (("q", x.q), ("k", x.k), ("v", x.v))}
    options = dict(options)
    for name in ("g", "g_gamma", "initial_state"):
        if name in options and (name != "initial_state" or is_whole or x.rank == 0):
            given = options[name].to(x.wide)
            leaves[name] = (part(given) if name == "g" else given).clone().requires_grad_()
        options.pop(name, None)
    function = (
        E.linear_attention if is_whole else functools.partial(D.sequence_parallel_linear_attention, group=x.group)
    )
    o, state = function(**leaves, **options, return_final_state=True)
    loss = (o * part(x.dout)).sum(dtype=x.wide)
    if is_whole or x.is_last():
        loss = loss + (state * draw(*state.shape, dtype=x.wide)).sum()
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    return dict(zip(("o", "state", *("d" + name for name in leaves)), (o.detach(), state.detach(), *gradients)))


@check(4, 2)
def linear_attention_of_chunks_is_that_of_the_whole(group):
    for dtype in (torch.float64, *TYPES):
        x = Sequence(group, dtype)
        n = sum(x.lengths)
        decays = -0.1 * draw(2, 2, n).abs()
        decays[1, 0, n // 2] = -torch.inf
        state = draw(2, 2, 6, 5)
        cases = [dict(g=decays, initial_state=state, scale=0.4), dict(g_gamma=-0.1 * draw(2).abs()), dict()]
        for options in cases[: 2 if dtype in TYPES[:2] else 3]:
            expected, found = linear(x, options, True), linear(x, options, False)
            if "dg_gamma" in found:
                dist.all_reduce(found["dg_gamma"], group=group)
            for name, y in found.items():
                if name == "state" and not x.is_last():
                    continue
                z = x.own(expected[name]) if name in ("o", "dq", "dk", "dv", "dg") else expected[name]
                close(y, z, f"{name} in {dtype} of {sorted(options)}", units=16)


@check(4)
def a_process_outside_of_a_group_is_refused(group):
    alone, q = dist.new_group([1]), draw(1, 2, 3, 4)
    if dist.get_rank() == 1:
        close(D.sequence_parallel_attention(q, q, q, group=alone), E.attention(q, q, q), "o", units=4)
    else:
        raises(ValueError, "`group` must have", lambda: D.sequence_parallel_attention(q, q, q, group=alone))


def of_first_rank(group, x):
    x = x.clone()
    dist.broadcast(x, 0, group=group)
    return x


@check(4)
def bits_do_not_change_from_run_to_run(group):
    x = Sequence(group, torch.float32)

    def run():
        q, k, v = x.chunks(x.q, x.k, x.v)
        o = D.sequence_parallel_attention(q, k, v, causal=True, group=group)
        y = D.sequence_parallel_linear_attention(q, k, v, group=group)
        return torch.autograd.grad((o + y).square().sum(), (q, k, v)) + (o.detach(), y.detach())

    for found, expected in zip(run(), run()):
        same(found, expected, "a result")
    loss = Loss(group, ANYWHERE[4])
    first = loss.sharded()
    for name, y in loss.sharded().items():
        same(y, first[name], name)
    same(of_first_rank(group, first["dh"]), first["dh"], "dh of the first rank")


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.head = torch.nn.Linear(8, 24), torch.nn.Linear(8, 11, bias=False)

    def forward(self, x, targets):
        q, k, v = (y.transpose(1, 2) for y in self.qkv(x).view(*x.shape[:2], 3, 2, 4).unbind(2))
        y = E.attention(q, k, v, causal=True) + E.linear_attention(q, k, v)
        y = y.transpose(1, 2).flatten(2)
        return E.linear_cross_entropy(y.flatten(0, 1), self.head.weight, targets.flatten())


@check(2)
def data_parallel_training_has_the_gradients_of_the_batch(group):
    torch.manual_seed(0)
    model, rank = Model(), dist.get_rank(group)
    x, targets = draw(4, 7, 8), torch.arange(28).view(4, 7) % 11
    expected = torch.autograd.grad(model(x, targets), list(model.parameters()))
    parallel = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
    own = slice(2 * rank, 2 * rank + 2)
    parallel(x[own], targets[own]).backward()
    for (name, parameter), gradient in zip(model.named_parameters(), expected):
        close(parameter.grad, gradient, name, units=8)


@check(4)
def the_example_learns_as_one_process_does(group):
    path = Path(__file__).resolve().parents[2] / "examples/distributed/train.py"
    example = types.SimpleNamespace(**runpy.run_path(str(path)))
    losses, alone = example.train(4, group), example.train(4, ALONE[dist.get_rank()])
    assert losses[-1] < 0.9 * losses[0]
    # Adam divides by the size of a gradient, so that the rounding of small ones shows.
    close(torch.tensor(losses), torch.tensor(alone), "the losses", units=1000)


ALONE = {}


def work(rank, folder, names):
    """A rank: writes of every check what it found, and stops at the first that fails, as the others then do."""
    torch.set_num_threads(1)
    etalon.set_num_threads(1)
    wait = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD, timeout=wait)
    groups = {count: dist.new_group(range(count)) for count in (4, 3, 2)}
    ALONE.update({own: dist.new_group([own]) for own in range(WORLD)})
    report = open(f"{folder}/{rank}.jsonl", "w")
    for name, (function, counts) in CHECKS.items():
        for count in counts if name in names else ():
            error = None
            try:
                if rank < count:
                    function(groups[count])
            except BaseException as found:
                error = f"{type(found).__name__} on rank {rank} of {count}: {found}"
            print(json.dumps([name, count, error]), file=report, flush=True)
            if error is not None:
                os._exit(1)
    dist.barrier()
    dist.destroy_process_group()


def main(folder, *names):
    how = "fork" if sys.platform == "linux" else "spawn"
    torch.multiprocessing.start_processes(
        work, (os.path.abspath(folder), names or tuple(CHECKS)), nprocs=WORLD, start_method=how
    )


@pytest.fixture(scope="module")
def reports():
    """The findings of every rank, by check and number of ranks."""
    with tempfile.TemporaryDirectory() as folder:
        paths = os.pathsep.join(path for path in sys.path if path)
        environment = os.environ | {"PYTHONPATH": paths, "GLOO_SOCKET_IFNAME": "lo"}
        command = [sys.executable, __file__, folder]
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        found = {}
        for file in Path(folder).glob("*.jsonl"):
            for name, count, error in map(json.loads, file.read_text().splitlines()):
                found.setdefault((name, count), []).append(error)
        return found, ran.stderr[-3000:]


@pytest.mark.parametrize(("name", "count"), [(name, n) for name, (_, counts) in CHECKS.items() for n in counts])
def test_on_ranks(name, count, reports):
    found, output = reports
    errors = found.get((name, count), [])
    wrong = [error for error in errors if error is not None]
    assert not wrong, "\n".join(wrong)
    assert len(errors) == WORLD, f"not run on all ranks:\n{output}"


def test_shards_of_classes_are_whole_tiles():
    for vocab, ranks in ((50257, 4), (2125, 3), (100, 4), (1024, 4), (0, 2)):
        shards = [D.shard_of_classes(vocab, ranks, rank) for rank in range(ranks)]
        assert shards[0][0] == 0 and shards[-1][1] == vocab
        assert all(end == start for (_, end), (start, _) in zip(shards, shards[1:]))
        sizes = [end - start for start, end in shards]
        assert all(start % 256 == 0 or start == vocab for start, _ in shards)
        assert max(sizes) - min(sizes) <= 2 * 256
    with pytest.raises(ValueError, match="`rank` must be below 4"):
        D.shard_of_classes(1024, 4, 4)


def test_one_process_needs_a_group_and_may_be_one(tmp_path):
    h, w, targets = draw(6, 4).requires_grad_(), draw(300, 4).requires_grad_(), torch.arange(6)
    with pytest.raises(RuntimeError, match="vocab_parallel_cross_entropy needs a process group"):
        D.vocab_parallel_cross_entropy(h, w, targets)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        found, expected = D.vocab_parallel_cross_entropy(h, w, targets), E.linear_cross_entropy(h, w, targets)
        same(found, expected, "loss")
        for x, y in zip(torch.autograd.grad(found, (h, w)), torch.autograd.grad(expected, (h, w))):
            same(x, y, "a gradient")
        q, k, v = (draw(1, 2, 9, 4, seed=seed).requires_grad_() for seed in range(3))
        for own, one in (
            (D.sequence_parallel_attention(q, k, v, causal=True), E.attention(q, k, v, causal=True)),
            (D.sequence_parallel_linear_attention(q, k, v), E.linear_attention(q, k, v)),
        ):
            close(own, one, "o", units=4)
            for x, y in zip(torch.autograd.grad(own.sum(), (q, k, v)), torch.autograd.grad(one.sum(), (q, k, v))):
                close(x, y, "a gradient", units=8)
        compiled = torch.compile(D.vocab_parallel_cross_entropy, fullgraph=True, backend="eager")
        with pytest.raises(Exception, match="torch.compile"):
            compiled(h, w, targets)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
