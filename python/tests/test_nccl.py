"""Passes over GPUs through NCCL against the same in one process. As a script, with a folder and perhaps names of
checks: a rank for each of two GPUs, which run the checks and write what they found.

In one process ranks are threads that hand tensors over: the passes are the same, and so must be their bits.
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
if torch.cuda.device_count() < 2 or not dist.is_nccl_available():
    pytest.skip("there are no two GPUs with NCCL", allow_module_level=True)
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
    """What `work` returns for every rank, each a thread with the same stream."""
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
        self.borders, self.options, self.rank = (0, border, vocab), options, dist.get_rank()
        self.h, self.w = draw(tokens, dim, dtype=dtype), 0.3 * draw(vocab, dim, dtype=dtype)
        self.bias, self.class_weights, self.token_weights = draw(vocab, dtype=dtype), draw(vocab).abs(), draw(tokens)
        self.token_weights = self.token_weights.abs()
        self.targets = torch.arange(tokens).cuda() * 389 % vocab
        self.targets[:3] = torch.tensor([max(border, 1) - 1, min(border, vocab - 1), -100])
        self.dloss = draw(tokens) if options.get("reduction") == "none" else torch.tensor(0.7).cuda()
        given = dict(bias=self.bias, class_weights=self.class_weights, token_weights=self.token_weights)
        self.problem = etalon.problem("linear_cross_entropy", h=self.h, w=self.w, **given, **options)
        self.inputs = dict(h=self.h, w=self.w, targets=self.targets, **given)
        self.own = slice(*self.borders[self.rank : self.rank + 2])

    def whole(self):
        """One pass over all classes, and the rank's rows of it."""
        loss, dh, dw, dbias = (torch.empty_like(x) for x in (self.dloss, self.h, self.w, self.bias))
        _device.run(self.problem, "forward", self.inputs, dict(loss=loss))
        gradients = dict(dh=dh, dw=dw, dbias=dbias)
        _device.run(self.problem, "backward", self.inputs | {"dloss": self.dloss}, gradients)
        return dict(loss=loss, dh=dh, dw=dw[self.own], dbias=dbias[self.own])

    def alone(self, by_nodes):
        """Both shards in this process, and the rank's rows of them."""

        def work(thread):
            start, end = self.borders[thread.own : thread.own + 2]
            call = Loss(thread, [y - x for x, y in zip(self.borders, self.borders[1:])], self.problem, by_nodes)
            tensors = (self.h, self.w[start:end], self.bias[start:end], self.targets)
            tensors += (self.class_weights, self.token_weights)
            loss, kept = call.forward(*tensors)
            return (loss, *call.backward((True,) * 3 + (False,) * 3, *tensors, *kept, self.dloss)[:3])

        return dict(zip(("loss", "dh", "dw", "dbias"), in_one_process(work)[self.rank]))

    def sharded(self, group=None, **keywords):
        leaves = [x.clone().requires_grad_() for x in (self.h, self.w[self.own], self.bias[self.own])]
        h, w, bias = leaves
        given = dict(class_weights=self.class_weights, token_weights=self.token_weights, **self.options, **keywords)
        loss = D.vocab_parallel_cross_entropy(h, w, self.targets, group=group, bias_shard=bias, **given)
        gradients = torch.autograd.grad(loss, leaves, self.dloss)
        return dict(zip(("loss", "dh", "dw", "dbias"), (loss.detach(), *gradients)))


# The tree over nine tiles of 256 classes has quarters of this many.
QUARTER = 1024


def compared(loss, by_nodes=False, is_whole=True):
    """Fails unless a loss of both GPUs has the bits of its shards in one process, and those of all classes at once."""
    found, alone = loss.sharded(dh_by_nodes=by_nodes), loss.alone(by_nodes)
    for name, x in alone.items():
        same(found[name], x, f"{name} of {loss.borders} in {loss.h.dtype}")
    whole = loss.whole() if is_whole else {}
    for name, x in whole.items():
        if name == "dh" and loss.borders[1] % QUARTER:
            close(found[name], x, name, units=8)
        else:
            same(found[name], x, f"{name} of all classes in {loss.h.dtype}")
    return found


@check
def a_loss_has_the_bits_of_its_shards_in_one_process():
    compared(Classes(QUARTER, torch.float32, softcap=3.0, lse_square_scale=0.01))
    compared(Classes(QUARTER, torch.bfloat16, reduction="none", label_smoothing=0.1))
    compared(Classes(2 * QUARTER, torch.float16, reduction="sum", logit_scale=1.3))


@check
def shards_of_several_nodes_and_without_classes_have_them_too():
    loss = Classes(768, torch.float32, softcap=3.0, lse_square_scale=0.01, tokens=10)
    same(compared(loss, by_nodes=True)["dh"], loss.whole()["dh"], "dh by nodes")
    compared(Classes(768, torch.bfloat16, tokens=64))
    for border in (0, 2125):
        compared(Classes(border, torch.bfloat16, reduction="none", label_smoothing=0.1))


@check
def other_cuts_lie_within_the_bounds():
    for dtype in TYPES[:2]:
        loss = Classes(700, dtype, label_smoothing=0.1, reduction="none")
        found = compared(loss, is_whole=False)
        for name in ("dw", "dbias"):
            found[name] = cpu.together(None, found[name], (700, 1425), 0)
        inputs = {name: x.cpu() for name, x in (loss.inputs | {"dloss": loss.dloss}).items()}
        found = {name: x.cpu() for name, x in found.items()}
        report = etalon.check(loss.problem, inputs, found, "forward_backward", only=tuple(found))
        assert report, str(report)


class Sequence:
    """Tensors of a sequence, of which rank after rank has so many tokens."""

    def __init__(self, lengths, dtype):
        self.lengths, self.rank, n = lengths, dist.get_rank(), sum(lengths)
        tensors = [draw(2, heads, n, 64, dtype=dtype, seed=seed) for seed, heads in enumerate((4, 2, 2, 4))]
        self.q, self.k, self.v, self.dout = tensors

    def own(self, x, rank=None):
        rank = self.rank if rank is None else rank
        return x.narrow(2, sum(self.lengths[:rank]), self.lengths[rank])

    def whole(self, x):
        return cpu.together(None, x, self.lengths, 2).cpu()


MASKS = [dict(causal=True), dict(), dict(window=(90, 20)), dict(window=(40, 0), softcap=3.0, scale=0.2)]


def attention(x, options, sinks, dlse):
    """o, lse and gradients by name, of the rank's queries on both GPUs."""
    leaves = dict(q=x.own(x.q), k=x.own(x.k), v=x.own(x.v)) | ({} if sinks is None else {"sinks": sinks})
    leaves = {name: y.clone().requires_grad_() for name, y in leaves.items()}
    o, lse = D.sequence_parallel_attention(**leaves, **options, return_lse=True)
    gradients = torch.autograd.grad((o, lse), list(leaves.values()), (x.own(x.dout), x.own(dlse)))
    names = ("o", "lse", *("d" + name for name in leaves))
    return dict(zip(names, (o.detach(), lse.detach(), *gradients)))


def attention_alone(x, options, sinks, dlse):
    options = dict(options)
    ends = (None, 0) if options.pop("causal", False) else options.pop("window", (None, None))

    def work(thread):
        call = Blocks(thread, x.lengths, ends, options.get("scale"), options.get("softcap"))
        tensors = (*(x.own(y, thread.own) for y in (x.q, x.k, x.v)), sinks)
        (o, lse), kept = call.forward(*tensors)
        cotangents = x.own(x.dout, thread.own), x.own(dlse, thread.own)
        return (o, lse, *call.backward((True, True, True, sinks is not None), *tensors, *kept, *cotangents))

    return dict(zip(("o", "lse", "dq", "dk", "dv", "dsinks"), in_one_process(work)[x.rank]))


@check
def attention_of_chunks_has_the_bits_of_one_process_and_lies_within_the_bounds():
    cases = [(x, torch.bfloat16, (150, 106)) for x in MASKS] + [(MASKS[0], torch.float32, (70, 58))]
    cases += [(MASKS[3], torch.float32, (70, 58)), (MASKS[0], torch.float16, (130, 0))]
    for options, dtype, lengths in cases:
        x = Sequence(lengths, dtype)
        sinks, dlse = (draw(4) if "softcap" in options else None), draw(2, 4, sum(lengths))
        found = attention(x, options, sinks, dlse)
        for name, y in attention_alone(x, options, sinks, dlse).items():
            if y is not None:
                same(found[name], y, f"{name} of {options} in {dtype}")
        if sinks is not None:
            dist.all_reduce(found["dsinks"])
        found = {name: y.cpu() if name == "dsinks" else x.whole(y) for name, y in found.items()}
        inputs = dict(q=x.q.cpu(), k=x.k.cpu(), v=x.v.cpu(), sinks=None if sinks is None else sinks.cpu())
        problem = etalon.problem("attention", **inputs, **options)
        outputs = {name: found.pop(name) for name in ("o", "lse")}
        report = etalon.check(problem, inputs, outputs)
        assert report, f"{options} in {dtype}: {report}"
        inputs |= outputs | {"dout": x.dout.cpu(), "dlse": dlse.cpu()}
        report = etalon.check(problem, inputs, found, "backward")
        assert report, f"{options} in {dtype}: {report}"


def linear(x, given, options):
    """o, the state and gradients by name, of the rank's tokens on both GPUs: the last state counts, too."""
    leaves = dict(q=x.own(x.q), k=x.own(x.k), v=x.own(x.v))
    leaves |= {name: x.own(y) if name == "g" else y for name, y in given.items() if y is not None}
    if x.rank:
        leaves.pop("initial_state", None)
    leaves = {name: y.clone().requires_grad_() for name, y in leaves.items()}
    o, state = D.sequence_parallel_linear_attention(**leaves, **options, return_final_state=True)
    ys, cotangents = [o], [x.own(x.dout)]
    if x.rank == WORLD - 1:
        ys, cotangents = [o, state], [cotangents[0], draw(*state.shape)]
    gradients = torch.autograd.grad(ys, list(leaves.values()), cotangents)
    names = ("o", "state", *("d" + name for name in leaves))
    return dict(zip(names, (o.detach(), state.detach(), *gradients)))


def linear_alone(x, given, options):
    def work(thread):
        call = States(thread, options.get("scale"))
        own = [x.own(y, thread.own) for y in (x.q, x.k, x.v)]
        g, state = given.get("g"), None if thread.own else given.get("initial_state")
        tensors = (*own, given.get("g_gamma"), None if g is None else x.own(g, thread.own), state)
        (o, last), kept = call.forward(*tensors)
        dlast = draw(*last.shape) if thread.own == WORLD - 1 else None
        needs = [y is not None for y in tensors]
        return (o, last, *call.backward(needs, *tensors, *kept, x.own(x.dout, thread.own), dlast))

    names = ("o", "state", "dq", "dk", "dv", "dg_gamma", "dg", "dinitial_state")
    return dict(zip(names, in_one_process(work)[x.rank]))


@check
def linear_attention_of_chunks_has_the_bits_of_one_process_and_is_that_of_the_whole():
    for dtype, lengths in ((torch.float32, (70, 58)), (torch.bfloat16, (150, 106)), (torch.float16, (130, 0))):
        x, n = Sequence(lengths, dtype), sum(lengths)
        decays = -0.1 * draw(2, 2, n).abs()
        state = draw(2, 2, 64, 64)
        for given, options in (
            (dict(g=decays, initial_state=state), dict(scale=0.1)),
            (dict(g_gamma=-0.1 * draw(2).abs()), dict(scale=0.1)),
        ):
            found = linear(x, given, options)
            for name, y in linear_alone(x, given, options).items():
                if y is not None:
                    same(found[name], y, f"{name} of {sorted(given)} in {dtype}")
            judge_linear(x, given, options, found)


def judge_linear(x, given, options, found):
    """Fails unless chunks are within the bounds of the whole."""
    if "dg_gamma" in found:
        dist.all_reduce(found["dg_gamma"])
    state = found.pop("state")
    dstate = found.pop("dinitial_state", torch.zeros_like(state))
    dist.broadcast(state, WORLD - 1)
    dist.broadcast(dstate, 0)
    shared = {"dg_gamma"}
    found = {
        name: y.cpu() if name in shared else x.whole(y[..., None])[..., 0] if name == "dg" else x.whole(y)
        for name, y in found.items()
    }
    inputs = {name: y.cpu() for name, y in dict(q=x.q, k=x.k, v=x.v, **given).items()}
    problem = etalon.problem("linear_attention", **inputs, return_final_state=True, **options)
    outputs = {"o": found.pop("o"), "final_state": state.cpu()}
    report = etalon.check(problem, inputs, outputs)
    assert report, f"{sorted(given)} in {x.q.dtype}: {report}"
    if "initial_state" in given:
        found["dinitial_state"] = dstate.cpu()
    inputs |= {"dout": x.dout.cpu(), "dfinal_state": draw(*state.shape).cpu()}
    report = etalon.check(problem, inputs, found, "backward", only=tuple(found))
    assert report, f"{sorted(given)} in {x.q.dtype}: {report}"


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
        q, k, v = (x.own(y).clone().requires_grad_() for y in (x.q, x.k, x.v))
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


@pytest.mark.parametrize("name", CHECKS)
def test_on_two_gpus(name, reports):
    found, output = reports
    errors = found.get(name, [])
    wrong = [error for error in errors if error is not None]
    assert not wrong, "\n".join(wrong)
    assert len(errors) == WORLD, f"not run on both ranks:\n{output}"


if __name__ == "__main__":
    main(*sys.argv[1:])
