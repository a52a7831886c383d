"""Passes over ranks on GPUs. In one process, on one GPU, ranks are threads that hand tensors over: their results are
judged, and compared with those of the whole. Those of two GPUs through NCCL must have the same bits.

As a script, with a folder and perhaps names of checks: a rank for each of two GPUs, which run the checks and write
what they found.
"""

import datetime
import importlib.util
import json
import os
import runpy
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)
import etalon  # noqa: E402
import etalon.distributed as D  # noqa: E402
from etalon import _device  # noqa: E402
from etalon._sequence_parallel import Blocks, States  # noqa: E402
from etalon._vocab_parallel import Loss  # noqa: E402


def beside(name):
    """Another file of tests as a module, however pytest imports them."""
    spec = importlib.util.spec_from_file_location(f"etalon_{name}", Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


cpu = beside("test_distributed")
same, close, raises = cpu.same, cpu.close, cpu.raises
WORLD = 2
TYPES = (torch.float32, torch.bfloat16, torch.float16)
CHECKS = {}


def check(function):
    CHECKS[function.__name__] = function
    return function


def draw(*shape, dtype=torch.float32, seed=0):
    return cpu.draw(*shape, dtype=dtype, seed=seed).cuda()


class Thread:
    """A rank that is a thread of this process: what `Ranks` of a group send, it hands over."""

    def __init__(self, own, places, barrier):
        self.own, self.count, self.places, self.barrier = own, len(places), places, barrier
        self.function, self.device = "a function", torch.device("cuda", torch.cuda.current_device())

    def all(self, x):
        self.places[self.own] = x
        self.barrier.wait()
        found = list(self.places)
        self.barrier.wait()
        return found

    def gather(self, x):
        return torch.stack(self.all(x))

    def exchange(self, x):
        return torch.stack([sent[self.own] for sent in self.all(x)])

    def pass_on(self, tensors, shapes, tag=0):
        found = self.all(tensors)[self.own - 1]
        assert [x.shape for x in found] == [torch.Size(shape) for shape in shapes]
        return lambda: found


def in_one_process(work):
    """The results of `work` for every rank, each a thread with the same stream."""
    places, barrier, device = [None] * WORLD, threading.Barrier(WORLD, timeout=60), torch.cuda.current_device()
    found = [None] * WORLD

    def run(own):
        torch.cuda.set_device(device)
        try:
            found[own] = work(Thread(own, places, barrier))
        except BaseException as error:
            found[own] = error
            barrier.abort()

    threads = [threading.Thread(target=run, args=(own,)) for own in range(WORLD)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in found:
        if isinstance(result, BaseException):
            raise result
    return found


class Classes:
    """A loss of all classes and in two shards with this border, with every tensor that it may have."""

    def __init__(self, border, dtype, tokens=133, dim=64, vocab=2125, **options):
        self.borders, self.options = (0, border, vocab), options
        self.h, self.w = draw(tokens, dim, dtype=dtype), 0.3 * draw(vocab, dim, dtype=dtype)
        self.bias, self.class_weights, self.token_weights = draw(vocab, dtype=dtype), draw(vocab).abs(), draw(tokens)
        self.token_weights = self.token_weights.abs()
        self.targets = torch.arange(tokens).cuda() * 389 % vocab
        self.targets[:3] = torch.tensor([max(border, 1) - 1, min(border, vocab - 1), -100])
        self.dloss = draw(tokens) if options.get("reduction") == "none" else torch.tensor(0.7).cuda()
        given = dict(bias=self.bias, class_weights=self.class_weights, token_weights=self.token_weights)
        self.problem = etalon.problem("linear_cross_entropy", h=self.h, w=self.w, **given, **options)
        self.inputs = dict(h=self.h, w=self.w, targets=self.targets, **given)

    def own(self, x, rank):
        return x[slice(*self.borders[rank : rank + 2])]

    def whole(self):
        """One pass over all classes."""
        loss, dh, dw, dbias = (torch.empty_like(x) for x in (self.dloss, self.h, self.w, self.bias))
        _device.run(self.problem, "forward", self.inputs, dict(loss=loss))
        gradients = dict(dh=dh, dw=dw, dbias=dbias)
        _device.run(self.problem, "backward", self.inputs | {"dloss": self.dloss}, gradients)
        return dict(loss=loss, dh=dh, dw=dw, dbias=dbias)

    def alone(self, by_nodes=False):
        """The results of both shards in this process."""

        def work(thread):
            call = Loss(thread, [y - x for x, y in zip(self.borders, self.borders[1:])], self.problem, by_nodes)
            tensors = (self.h, self.own(self.w, thread.own), self.own(self.bias, thread.own), self.targets)
            tensors += (self.class_weights, self.token_weights)
            loss, kept = call.forward(*tensors)
            gradients = call.backward((True,) * 3 + (False,) * 3, *tensors, *kept, self.dloss)
            return dict(zip(("loss", "dh", "dw", "dbias"), (loss, *gradients)))

        return in_one_process(work)

    def on_a_rank(self, **keywords):
        """The results of this rank of the group."""
        rank = dist.get_rank()
        leaves = [x.clone().requires_grad_() for x in (self.h, self.own(self.w, rank), self.own(self.bias, rank))]
        h, w, bias = leaves
        given = dict(class_weights=self.class_weights, token_weights=self.token_weights, **self.options, **keywords)
        loss = D.vocab_parallel_cross_entropy(h, w, self.targets, bias_shard=bias, **given)
        gradients = torch.autograd.grad(loss, leaves, self.dloss)
        return dict(zip(("loss", "dh", "dw", "dbias"), (loss.detach(), *gradients)))


# The tree over nine tiles of 256 classes has quarters of this many, at which tensor cores begin a sum of dh.
QUARTER = 1024
# Losses, and whether ranks send the sum of every node.
NODES = [
    (2 * QUARTER, torch.float32, False, dict(softcap=3.0, lse_square_scale=0.01)),
    (QUARTER, torch.bfloat16, False, dict(reduction="none", label_smoothing=0.1)),
    (2 * QUARTER, torch.float16, False, dict(reduction="sum", logit_scale=1.3)),
    (768, torch.float32, True, dict(softcap=3.0, lse_square_scale=0.01)),
]
TILES = [
    (768, torch.bfloat16, False, dict(reduction="none", label_smoothing=0.1)),
    (0, torch.bfloat16, False, dict(reduction="none", label_smoothing=0.1)),
    (2125, torch.bfloat16, False, dict(reduction="none", label_smoothing=0.1)),
]
ANYWHERE = [(700, dtype, False, dict(label_smoothing=0.1, reduction="none")) for dtype in TYPES[:2]]


@pytest.mark.parametrize(("border", "dtype", "by_nodes", "options"), NODES + TILES)
def test_shards_in_one_process_have_the_bits_of_the_whole(border, dtype, by_nodes, options):
    loss = Classes(border, dtype, **options)
    whole = loss.whole()
    for rank, found in enumerate(loss.alone(by_nodes)):
        for name, x in found.items():
            expected = whole[name] if name in ("loss", "dh") else loss.own(whole[name], rank)
            if name == "dh" and (border, dtype, by_nodes, options) in TILES:
                close(x, expected, name, units=8)
            else:
                same(x, expected, name)


@pytest.mark.parametrize(("border", "dtype", "by_nodes", "options"), ANYWHERE)
def test_other_cuts_in_one_process_lie_within_the_bounds(border, dtype, by_nodes, options):
    loss = Classes(border, dtype, **options)
    found, other = loss.alone(by_nodes)
    for name in ("loss", "dh"):
        same(found[name], other[name], name)
    found |= {name: torch.cat([found[name], other[name]]) for name in ("dw", "dbias")}
    inputs = {name: x.cpu() for name, x in (loss.inputs | {"dloss": loss.dloss}).items()}
    found = {name: x.cpu() for name, x in found.items()}
    assert etalon.check(loss.problem, inputs, found, "forward_backward", only=tuple(found)).require()


@check
def a_loss_in_shards_has_the_bits_of_one_process():
    for border, dtype, by_nodes, options in NODES + TILES + ANYWHERE:
        loss = Classes(border, dtype, **options)
        found, alone = loss.on_a_rank(dh_by_nodes=by_nodes), loss.alone(by_nodes)[dist.get_rank()]
        for name, x in alone.items():
            same(found[name], x, f"{name} of {loss.borders} in {dtype}")


class Sequence:
    """Tensors of a sequence, of which rank after rank has so many tokens."""

    def __init__(self, lengths, dtype):
        self.lengths, n = lengths, sum(lengths)
        tensors = [draw(2, heads, n, 64, dtype=dtype, seed=seed) for seed, heads in enumerate((4, 2, 2, 4))]
        self.q, self.k, self.v, self.dout = tensors

    def own(self, x, rank):
        return x.narrow(2, sum(self.lengths[:rank]), self.lengths[rank])


def joined(results, own):
    """Results of both ranks side by side on the CPU, and the sum of those that every rank has its share of, `own`."""
    both = {name: [found[name].cpu() for found in results] for name in results[0] if results[0][name] is not None}
    return {name: sum(pair) if name in own else torch.cat(pair, 2) for name, pair in both.items()}


def judged(problem, inputs, outputs, cotangents, gradients):
    """Fails unless results lie within their bounds."""
    assert etalon.check(problem, inputs, outputs).require()
    inputs = inputs | {name: x for name, x in outputs.items() if name in ("o", "lse")} | cotangents
    inputs = {name: x for name, x in inputs.items() if name in {x for x, *_ in problem.operands("backward")}}
    assert etalon.check(problem, inputs, gradients, "backward", only=tuple(gradients)).require()


MASKS = [dict(causal=True), dict(), dict(window=(90, 20)), dict(window=(40, 0), softcap=3.0, scale=0.2)]
BLOCKS = [(x, torch.bfloat16, (150, 106)) for x in MASKS] + [(MASKS[0], torch.float32, (70, 58))]
BLOCKS += [(MASKS[3], torch.float32, (70, 58)), (MASKS[0], torch.float16, (130, 0))]


class Attention(Sequence):
    """Attention of chunks, with sinks where there is a soft cap."""

    def __init__(self, options, dtype, lengths):
        super().__init__(lengths, dtype)
        self.options, self.dlse = options, draw(2, 4, sum(lengths))
        self.sinks = draw(4) if "softcap" in options else None

    def alone(self):
        options = dict(self.options)
        ends = (None, 0) if options.pop("causal", False) else options.pop("window", (None, None))

        def work(thread):
            call = Blocks(thread, self.lengths, ends, options.get("scale"), options.get("softcap"))
            tensors = (*(self.own(x, thread.own) for x in (self.q, self.k, self.v)), self.sinks)
            (o, lse), kept = call.forward(*tensors)
            cotangents = self.own(self.dout, thread.own), self.own(self.dlse, thread.own)
            gradients = call.backward((True, True, True, self.sinks is not None), *tensors, *kept, *cotangents)
            return dict(zip(("o", "lse", "dq", "dk", "dv", "dsinks"), (o, lse, *gradients)))

        return in_one_process(work)

    def on_a_rank(self):
        rank = dist.get_rank()
        leaves = {name: self.own(x, rank) for name, x in (("q", self.q), ("k", self.k), ("v", self.v))}
        leaves |= {} if self.sinks is None else {"sinks": self.sinks}
        leaves = {name: y.clone().requires_grad_() for name, y in leaves.items()}
        o, lse = D.sequence_parallel_attention(**leaves, **self.options, return_lse=True)
        cotangents = self.own(self.dout, rank), self.own(self.dlse, rank)
        gradients = torch.autograd.grad((o, lse), list(leaves.values()), cotangents)
        names = ("o", "lse", *("d" + name for name in leaves))
        return dict(zip(names, (o.detach(), lse.detach(), *gradients)))


@pytest.mark.parametrize(("options", "dtype", "lengths"), BLOCKS)
def test_chunks_of_attention_in_one_process_lie_within_the_bounds(options, dtype, lengths):
    x = Attention(options, dtype, lengths)
    found = joined(x.alone(), own=("dsinks",))
    inputs = dict(q=x.q.cpu(), k=x.k.cpu(), v=x.v.cpu()) | ({} if x.sinks is None else {"sinks": x.sinks.cpu()})
    problem = etalon.problem("attention", **inputs, **options)
    outputs = {name: found.pop(name) for name in ("o", "lse")}
    judged(problem, inputs, outputs, {"dout": x.dout.cpu(), "dlse": x.dlse.cpu()}, found)


@check
def attention_of_chunks_has_the_bits_of_one_process():
    for options, dtype, lengths in BLOCKS:
        x = Attention(options, dtype, lengths)
        found = x.on_a_rank()
        for name, y in x.alone()[dist.get_rank()].items():
            if y is not None:
                same(found[name], y, f"{name} of {options} in {dtype}")


DECAYS = ["per_token", "per_head"]
CHUNKS = [(torch.float32, (70, 58)), (torch.bfloat16, (150, 106)), (torch.float16, (130, 0))]


class Linear(Sequence):
    """Linear attention of chunks, from a state with decays of each token, and from zero with one of each head."""

    def __init__(self, decays, dtype, lengths):
        super().__init__(lengths, dtype)
        g = -0.1 * draw(2, 2, sum(lengths)).abs()
        given = dict(g=g, initial_state=draw(2, 2, 64, 64, seed=5))
        self.given = given if decays == "per_token" else dict(g_gamma=-0.1 * draw(2).abs())
        self.dstate = draw(2, 2, 64, 64)

    def tensors(self, rank):
        """Tensors of a rank by name."""
        found = {name: self.own(x, rank) for name, x in (("q", self.q), ("k", self.k), ("v", self.v))}
        found |= {name: self.own(x, rank) if name == "g" else x for name, x in self.given.items()}
        return {name: x for name, x in found.items() if name != "initial_state" or not rank}

    def alone(self):
        def work(thread):
            call, own = States(thread, 0.1), self.tensors(thread.own)
            tensors = [own.get(name) for name in ("q", "k", "v", "g_gamma", "g", "initial_state")]
            (o, state), kept = call.forward(*tensors)
            cotangents = self.own(self.dout, thread.own), self.dstate if thread.own == WORLD - 1 else None
            gradients = call.backward([x is not None for x in tensors], *tensors, *kept, *cotangents)
            names = ("o", "state", "dq", "dk", "dv", "dg_gamma", "dg", "dinitial_state")
            return dict(zip(names, (o, state, *gradients)))

        return in_one_process(work)

    def on_a_rank(self):
        rank = dist.get_rank()
        leaves = {name: y.clone().requires_grad_() for name, y in self.tensors(rank).items()}
        o, state = D.sequence_parallel_linear_attention(**leaves, scale=0.1, return_final_state=True)
        ys, cotangents = [o], [self.own(self.dout, rank)]
        if rank == WORLD - 1:
            ys, cotangents = [o, state], [*cotangents, self.dstate]
        gradients = torch.autograd.grad(ys, list(leaves.values()), cotangents)
        names = ("o", "state", *("d" + name for name in leaves))
        return dict(zip(names, (o.detach(), state.detach(), *gradients)))


@pytest.mark.parametrize("decays", DECAYS)
@pytest.mark.parametrize(("dtype", "lengths"), CHUNKS)
def test_chunks_of_linear_attention_in_one_process_lie_within_the_bounds(decays, dtype, lengths):
    x = Linear(decays, dtype, lengths)
    first, last = x.alone()
    outputs, dstate = {"final_state": last.pop("state").cpu()}, first.pop("dinitial_state")
    found = joined(
        [{name: y for name, y in part.items() if name in last} for part in (first, last)], own=("dg_gamma",)
    )
    outputs["o"] = found.pop("o")
    found |= {} if dstate is None else {"dinitial_state": dstate.cpu()}
    inputs = {name: y.cpu() for name, y in dict(q=x.q, k=x.k, v=x.v, **x.given).items()}
    problem = etalon.problem("linear_attention", **inputs, return_final_state=True, scale=0.1)
    judged(problem, inputs, outputs, {"dout": x.dout.cpu(), "dfinal_state": x.dstate.cpu()}, found)


@check
def linear_attention_of_chunks_has_the_bits_of_one_process():
    for dtype, lengths in CHUNKS:
        for decays in DECAYS:
            x = Linear(decays, dtype, lengths)
            found = x.on_a_rank()
            for name, y in x.alone()[dist.get_rank()].items():
                if y is not None:
                    same(found[name], y, f"{name} with decays {decays} in {dtype}")


@check
def wrong_calls_of_one_rank_raise_on_all():
    rank, f = dist.get_rank(), D.vocab_parallel_cross_entropy
    h, w, targets = draw(6, 64).requires_grad_(), draw(300, 64), torch.arange(6).cuda()
    raises(ValueError, r"`targets\[2\]` must be a class below 600", lambda: f(h, w, targets + 598 * (targets == 2)))
    raises(ValueError, "`targets` must be the same on every rank", lambda: f(h, w, targets + rank))
    loss = f(h, w, targets)
    raises(ValueError, "cotangent of the loss must be the same", lambda: torch.autograd.grad((1 + rank) * loss, h))
    q = draw(1, 2, 3, 64)
    attention, linear = D.sequence_parallel_attention, D.sequence_parallel_linear_attention
    raises(
        ValueError, f"`k` must be on cuda:{rank} as the first tensor is, found cpu", lambda: attention(q, q.cpu(), q)
    )
    raises(ValueError, "`v` must be on", lambda: linear(q, q, q.to(f"cuda:{1 - rank}")))
    raises(ValueError, "`targets` must be on", lambda: f(h, w, targets.cpu()))
    error, text = (RuntimeError, "has failed on rank 1") if rank == 0 else (ValueError, "backend gloo for `q`")
    x = q.cpu() if rank else q
    raises(error, text, lambda: attention(x, x, x))
    raises(TypeError, "`q` must hold float32 or", lambda: linear(*[q.double()] * 3))
    raises(TypeError, "`h` must hold float32 or", lambda: f(h.double(), w.double(), targets))
    raises(ValueError, "`g_gamma` must be at most 0", lambda: linear(q, q, q, g_gamma=draw(2).abs()))
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        y = q + 1
        raises(NotImplementedError, "no graph captures it", lambda: attention(q, q, q))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, q + 1)


@check
def groups_for_both_devices_take_both_and_gloo_takes_no_gpu():
    rank, q = dist.get_rank(), draw(1, 2, 3, 64).requires_grad_()
    both, gloo = dist.new_group(backend="cpu:gloo,cuda:nccl"), dist.new_group(backend="gloo")
    for group, x in ((both, q), (both, q.detach().cpu().requires_grad_()), (None, q)):
        o = D.sequence_parallel_attention(x, x, x, group=group)
        (dx,) = torch.autograd.grad(o.sum(), x)
        assert o.device == x.device and dx.abs().max() > 0
    x = q.cpu() if rank else q
    raises(
        ValueError,
        "whether tensors are on a GPU must be the same",
        lambda: D.sequence_parallel_attention(x, x, x, group=both),
    )
    raises(ValueError, "backend nccl for `q`", lambda: D.sequence_parallel_attention(q, q, q, group=gloo))


@check
def what_has_no_derivative_raises():
    h, w, targets = draw(6, 64).requires_grad_(), draw(300, 64).requires_grad_(), torch.arange(6).cuda()
    q = draw(1, 2, 3, 64).requires_grad_()
    for function, x in (
        (lambda h: D.vocab_parallel_cross_entropy(h, w, targets), h),
        (lambda q: D.sequence_parallel_attention(q, q, q), q),
        (lambda q: D.sequence_parallel_linear_attention(q, q, q), q),
    ):
        (first,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
        assert first.requires_grad
        raises(NotImplementedError, "a second derivative of", lambda: torch.autograd.grad(first.sum(), x))


@check
def a_call_waits_for_its_stream_and_bits_do_not_change_from_run_to_run():
    x = Sequence((150, 106), torch.bfloat16)

    def run():
        q, k, v = (x.own(y, dist.get_rank()).clone().requires_grad_() for y in (x.q, x.k, x.v))
        torch.cuda._sleep(20_000_000)
        late = [y * 2 / 2 for y in (q, k, v)]
        o = D.sequence_parallel_attention(*late, causal=True)
        y = D.sequence_parallel_linear_attention(*late, scale=0.1)
        return torch.autograd.grad((o.float() + y).square().sum(), (q, k, v)) + (o.detach(), y.detach())

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    expected = run()
    with torch.cuda.stream(stream):
        others = [run() for _ in range(3)]
    stream.synchronize()
    for found in others:
        for y, z in zip(found, expected):
            same(y, z, "a result")


@check
def data_parallel_training_has_the_gradients_of_the_batch():
    torch.manual_seed(0)
    rank = dist.get_rank()
    model = cpu.Model().cuda()
    x, targets = draw(4, 7, 8), (torch.arange(28).view(4, 7) % 11).cuda()
    expected = torch.autograd.grad(model(x, targets), list(model.parameters()))
    parallel = torch.nn.parallel.DistributedDataParallel(model, device_ids=[rank])
    own = slice(2 * rank, 2 * rank + 2)
    parallel(x[own], targets[own]).backward()
    for (name, parameter), gradient in zip(model.named_parameters(), expected):
        close(parameter.grad, gradient, name, units=8)


@check
def the_example_learns_as_one_process_does():
    path = Path(__file__).resolve().parents[2] / "examples/distributed/train.py"
    example = types.SimpleNamespace(**runpy.run_path(str(path)))
    alone = [dist.new_group([own]) for own in range(WORLD)][dist.get_rank()]
    device = torch.device("cuda", dist.get_rank())
    losses, expected = example.train(4, device=device), example.train(4, alone, device=device)
    assert losses[-1] < 0.9 * losses[0]
    close(torch.tensor(losses), torch.tensor(expected), "the losses", units=1000)


def work(rank, folder, names):
    """A rank: writes of every check what it found, and stops at the first that fails, as the other then does."""
    torch.cuda.set_device(rank)
    wait = datetime.timedelta(seconds=90)
    given = dict(init_method=f"file://{folder}/store", rank=rank, world_size=WORLD, timeout=wait)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank), **given)
    report = open(f"{folder}/{rank}.jsonl", "w")
    for name in names:
        error = None
        try:
            CHECKS[name]()
            torch.cuda.synchronize()
        except BaseException as found:
            where = traceback.extract_tb(found.__traceback__)[-1]
            error = f"{type(found).__name__} on rank {rank}: {found} ({where.filename}:{where.lineno})"
        print(json.dumps([name, error]), file=report, flush=True)
        if error is not None:
            os._exit(1)
    dist.destroy_process_group()


def main(folder, *names):
    arguments = (os.path.abspath(folder), names or tuple(CHECKS))
    torch.multiprocessing.start_processes(work, arguments, nprocs=WORLD, start_method="spawn")


@pytest.fixture(scope="module")
def reports():
    """The findings of both ranks, by check."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        environment["GLOO_SOCKET_IFNAME"] = "lo"
        command = [sys.executable, __file__, folder]
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
        found = {}
        for file in Path(folder).glob("*.jsonl"):
            for name, error in map(json.loads, file.read_text().splitlines()):
                found.setdefault(name, []).append(error)
        return found, ran.stderr[-3000:]


@pytest.mark.skipif(torch.cuda.device_count() < 2 or not dist.is_nccl_available(), reason="needs two GPUs and NCCL")
@pytest.mark.parametrize("name", CHECKS)
def test_on_two_gpus(name, reports):
    found, output = reports
    errors = found.get(name, [])
    wrong = [error for error in errors if error is not None]
    assert not wrong, "\n".join(wrong)
    assert len(errors) == WORLD, f"not run on both ranks:\n{output}"


if __name__ == "__main__":
    main(*sys.argv[1:])
