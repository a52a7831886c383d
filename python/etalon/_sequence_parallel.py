"""Linear and softmax attention with their tokens in chunks, one for each rank."""

import itertools

import torch

from . import _problems
from ._operators import compute, like, mask_like, wide
from ._ranks import KINDS, Forward, Ranks, check_tensor, checksum, checksum_of_text, is_differentiated


def _check_rows(ranks, q, k, v, dtypes):
    """Fails unless q, k and v are chunks of one sequence."""
    check_tensor(ranks, "q", q, (None,) * 4, dtypes)
    b, heads, n, d = q.shape
    check_tensor(ranks, "k", k, (b, None, n, d), (q.dtype,))
    check_tensor(ranks, "v", v, (b, k.shape[1], n, None), (q.dtype,))
    if not k.shape[1] or heads % k.shape[1]:
        raise ValueError(f"`q` must have a multiple of the {k.shape[1]} heads of `k`, found {heads}")


def _same_rows(q, k, v):
    """Extents and type that chunks of one sequence have in common."""
    names = ("the batch", "the number of query heads", "the number of key heads", "the extent D", "the extent E")
    extents = (q.shape[0], q.shape[1], k.shape[1], q.shape[3], v.shape[3])
    return dict(zip(names, extents)) | {"the type of `q`": KINDS.index(q.dtype)}


class States:
    """Linear attention of chunks: states and their gradients are handed on by their decays."""

    def __init__(self, ranks, scale):
        self.ranks, self.scale = ranks, scale

    def problem(self, q, k, v, g_gamma, g):
        given = dict(g_gamma=g_gamma, g=g, initial_state=True, return_final_state=True)
        return _problems.of_linear_attention(q, k, v, scale=self.scale, **given)

    def decays(self, q, k, g_gamma, g):
        """The share of a state that is left behind the tokens of this rank: [B, Hk], float64."""
        logs = q.new_zeros((q.shape[0], k.shape[1]), dtype=torch.float64)
        if g_gamma is not None:
            logs = logs + q.shape[2] * g_gamma.double()
        if g is not None:
            logs = logs + g.double().sum(2)
        return logs.exp()

    def forward(self, q, k, v, g_gamma, g, initial_state):
        problem = self.problem(q, k, v, g_gamma, g)
        own = named(q=q, k=k, v=v, g_gamma=g_gamma, g=g)
        first = q.new_zeros((q.shape[0], k.shape[1], k.shape[3], v.shape[3]), dtype=wide(q))
        before = first if initial_state is None else initial_state
        state = torch.empty_like(first)
        compute(problem, "forward", {**own, "initial_state": before}, {"final_state": state})
        decays = self.ranks.gather(self.decays(q, k, g_gamma, g))
        states = self.ranks.gather(state)
        if self.ranks.own:
            before = handed_on(states, decays, range(self.ranks.own))
        o = like(q, (*q.shape[:3], v.shape[3]))
        compute(problem, "forward", {**own, "initial_state": before}, {"o": o, "final_state": state})
        return (o, state), (before, decays)

    def backward(self, needs, *tensors):
        q, k, v, g_gamma, g, initial_state, before, decays, dout, dstate = tensors
        problem = self.problem(q, k, v, g_gamma, g)
        own = named(q=q, k=k, v=v, g_gamma=g_gamma, g=g, initial_state=before)
        own["dout"] = q.new_zeros((*q.shape[:3], v.shape[3])) if dout is None else dout
        dstate = torch.zeros_like(before) if dstate is None else dstate
        dbefore = torch.empty_like(before)
        compute(problem, "backward", {**own, "dfinal_state": dstate}, {"dinitial_state": dbefore})
        states = self.ranks.gather(dbefore)
        later = range(self.ranks.count - 1, self.ranks.own, -1)
        if later:
            dstate = (dstate.double() + handed_on(states, decays, later).double()).to(dstate.dtype)
        names = ("dq", "dk", "dv", "dg_gamma", "dg", "dinitial_state")
        wanted = {name: like(x, x.shape) for name, x, need in zip(names, tensors, needs) if need and x is not None}
        compute(problem, "backward", {**own, "dfinal_state": dstate}, wanted)
        return tuple(wanted.get(name) for name in names)


def handed_on(states, decays, order):
    """The sum of the states that some ranks add, one behind the other, each time what decays leave of it."""
    total = states.new_zeros(states.shape[1:], dtype=torch.float64)
    for rank in order:
        total = total * decays[rank][..., None, None] + states[rank]
    return total.to(states.dtype)


def named(**tensors):
    """The tensors that are there."""
    return {name: x for name, x in tensors.items() if x is not None}


def _facts_of_states(ranks, q, k, v, g_gamma, g, initial_state, scale):
    # Of float64 there are no kernels on a GPU.
    _check_rows(ranks, q, k, v, KINDS if ranks.device.type == "cpu" else KINDS[:3])
    b, heads, n, d = q.shape
    hk, sums = k.shape[1], (wide(q),)
    if g_gamma is not None and g is not None:
        raise TypeError("`g_gamma` (a decay of each head) and `g` (of each token) exclude each other")
    if g_gamma is not None:
        check_tensor(ranks, "g_gamma", g_gamma, (hk,), sums)
    if g is not None:
        check_tensor(ranks, "g", g, (b, hk, n), sums)
    if initial_state is not None:
        check_tensor(ranks, "initial_state", initial_state, (b, hk, d, v.shape[3]), sums)
        if ranks.own:
            raise ValueError(f"`initial_state` must be None but on the first rank, found one on rank {ranks.own}")
    for name, x in (("g_gamma", g_gamma), ("g", g)):
        if x is not None and not (x <= 0).all():
            raise ValueError(f"`{name}` must be at most 0, found {x.max().item()}")
    same = _same_rows(q, k, v) | {
        "`g_gamma`": checksum(g_gamma),
        "whether there is a `g`": g is not None,
        "an option": checksum_of_text(repr(scale)),
        "whether a gradient is needed": is_differentiated(q, k, v, g_gamma, g),
    }
    return {}, same, None


def sequence_parallel_linear_attention(
    q, k, v, *, group=None, g_gamma=None, g=None, initial_state=None, scale=None, return_final_state=False
):
    """Linear attention over tokens in chunks, one for each rank of `group`: the rank's o [B, Hq, N, E].

    `q` [B, Hq, N, D], `k` [B, Hk, N, D], `v` [B, Hk, N, E] and `g` [B, Hk, N] are those of the rank's N tokens, which
    follow those of the rank before; N may differ, and be 0. `g_gamma` [Hk] is the same on every rank. The first rank
    may hand in `initial_state` [B, Hk, D, E]. With `return_final_state` there is also the state behind the rank's
    tokens: that of the last rank is that of the whole.

    Every rank computes its state from zero, all ranks exchange states, and each adds up those before it, times their
    decays, before it computes o: ranks work at the same time, and the price is a second sum of kᵀv, forward, and the
    same backward. What is sent is a state of each rank, forward and backward, whatever N is.

    Gradients are those of the sum of what all ranks differentiate: that of `g_gamma` has the rank's tokens alone, and
    wants to be added up over ranks, as gradients of parameters are. Results agree with those of one process up to
    rounding, and have the same bits from run to run.

    Raises on all ranks where one finds its arguments wrong (TypeError, ValueError). A second derivative is not there.
    """
    ranks = Ranks("sequence_parallel_linear_attention", group, q)
    ranks.agree(lambda: _facts_of_states(ranks, q, k, v, g_gamma, g, initial_state, scale))
    o, state = Forward.apply(States(ranks, scale), q, k, v, g_gamma, g, initial_state)
    return (o, state) if return_final_state else o


class Blocks:
    """Softmax attention of chunks: keys and values go round, and every rank adds up what its queries see of them."""

    def __init__(self, ranks, lengths, window, scale, softcap):
        self.ranks, self.lengths = ranks, lengths
        self.window, self.scale, self.softcap = window, scale, softcap
        self.starts = list(itertools.accumulate(lengths, initial=0))

    def problem(self, q, k, v, source, sinks):
        """The problem of the rank's queries and the keys of a rank, None where all keys are hidden, and a mask whose
        elements a GPU reads."""
        shift = self.starts[self.ranks.own] - self.starts[source]
        mask, elements = mask_of(shift, q.shape[2], k.shape[2], self.window, q.device), None
        if isinstance(mask, str):
            return None, None
        if isinstance(mask, torch.Tensor) and not mask.is_cpu:
            mask, elements = mask_like(mask), mask
        given = dict(mask=mask, scale=self.scale, softcap=self.softcap, sinks=sinks)
        return _problems.of_scores("attention", q, k, v, **given), elements

    def sources(self, tensors):
        """Rank after rank, from this one back, whose blocks come by: its number and its tensors.

        While one is used, the next is on its way.
        """
        own, count = self.ranks.own, self.ranks.count
        for step in range(count):
            last = step + 1 == count
            shapes = [self.shaped(x, (own - step - 1) % count) for x in tensors]
            wait = None if last else self.ranks.pass_on(tensors, shapes)
            yield (own - step) % count, tensors
            tensors = None if last else wait()

    def shaped(self, x, source):
        """The shape of a tensor of keys on another rank."""
        return (*x.shape[:2], self.lengths[source], x.shape[3])

    def parts(self, tensors):
        """Rank after rank the problem of the queries and its keys, None where they are hidden, and their tensors."""
        q, k, v, sinks = tensors
        for source, (keys, values) in self.sources((k.contiguous(), v.contiguous())):
            own = sinks if source == self.ranks.own else None
            problem, mask = self.problem(q, keys, values, source, own)
            yield source, problem, named(k=computed(keys), v=computed(values), sinks=own, mask=mask)

    def forward(self, *tensors):
        q, v = tensors[0], tensors[2]
        o = q.new_zeros((*q.shape[:3], v.shape[3]), dtype=torch.float32)
        lse, queries = q.new_full(q.shape[:3], -torch.inf, dtype=torch.float32), computed(q)
        part, part_lse = torch.empty_like(o, dtype=queries.dtype), torch.empty_like(lse)
        for _, problem, inputs in self.parts(tensors):
            if problem is not None:
                compute(problem, "forward", {"q": queries, **inputs}, {"o": part, "lse": part_lse})
                merge(o, lse, part.float(), part_lse)
        result = like(q, o.shape).copy_(o)
        return (result, lse), (result, lse)

    def backward(self, needs, *tensors):
        *tensors, o, lse, dout, dlse = tensors
        q, k, v, sinks = tensors
        dout = torch.zeros_like(o) if dout is None else dout
        rows = named(q=computed(q), o=computed(o), lse=lse, dout=computed(dout), dlse=dlse)
        dq, dk, dv = (x.new_zeros(x.shape, dtype=torch.float32) for x in (q, k, v))
        dsinks = None if sinks is None else torch.zeros_like(sinks)
        for source, problem, inputs in self.parts(tensors):
            if problem is not None:
                sums = dict(dq=dq, dk=dk, dv=dv)
                parts = {name: torch.empty_like(x, dtype=rows["q"].dtype) for name, x in sums.items()}
                parts |= {"dsinks": dsinks} if "sinks" in inputs else {}
                compute(problem, "backward", rows | inputs, parts)
                for total, name in ((dq, "dq"), (dk, "dk"), (dv, "dv")):
                    total += parts[name]
            # The sums go on with their keys, to come home from the rank behind this one.
            following = (source - 1) % self.ranks.count
            shapes = [self.shaped(x, following) for x in (dk, dv)]
            dk, dv = self.ranks.pass_on((dk, dv), shapes, tag=1)()
        found = zip(needs, (dq, dk, dv, dsinks), (q, k, v, sinks))
        return tuple(like(x, x.shape).copy_(dx) if need else None for need, dx, x in found)


def computed(x):
    """x in the type that its block is computed in: that of the kernels of a GPU is its own, that of a CPU float32."""
    return x if x.is_cuda else x.float()


def mask_of(shift, queries, keys, window, device):
    """The mask of a block: query i sees keys from i + shift − left to i + shift + right, of those of the block.

    "hidden" where no query sees a key, None where all see all.
    """
    left, right = window
    low, high = left is not None, right is not None
    if not queries or not keys or (high and queries - 1 + shift + right < 0) or (low and shift - left >= keys):
        return "hidden"
    low = low and queries - 1 + shift - left > 0
    high = high and shift + right < keys - 1
    if not low and not high:
        return None
    ends = {"left": left - shift} if low else {}
    ends |= {"right": right + shift} if high else {}
    if min(ends.values()) >= 0:
        return {"window": {**ends, "align": "top_left"}}
    # A window that begins or ends beside the block.
    distance = torch.arange(keys, device=device) - torch.arange(queries, device=device)[:, None] - shift
    seen = torch.ones((queries, keys), dtype=torch.bool, device=device)
    seen &= distance >= -left if low else True
    seen &= distance <= right if high else True
    return seen[None, None]


def merge(o, lse, part, part_lse):
    """Adds what queries see of other keys: o and lse of both, in place."""
    both = torch.logaddexp(lse, part_lse)
    for x, own in ((o, lse), (part, part_lse)):
        weight = torch.where(both == -torch.inf, 0.0, (own - both).exp())[..., None]
        x.mul_(weight)
    o.add_(part)
    lse.copy_(both)


def _window(causal, window):
    """Both ends of a window, None where open."""
    if causal and window is not None:
        raise TypeError("`causal` and `window` exclude each other: window=(left, 0) is both")
    left, right = (None, 0) if causal else (None, None) if window is None else tuple(window)
    for end in (left, right):
        if end is not None and (int(end) != end or end < 0):
            raise ValueError(f"`window` must have whole ends of at least 0, None where open, found {window}")
    return left, right


def _facts_of_blocks(ranks, q, k, v, sinks, causal, window, options):
    # Of float64 the reference has the gradients, which takes no lse of keys elsewhere.
    _check_rows(ranks, q, k, v, KINDS[:3])
    if sinks is not None:
        check_tensor(ranks, "sinks", sinks, (q.shape[1],), (wide(q),))
    window = _window(causal, window)
    same = _same_rows(q, k, v) | {
        "`sinks`": checksum(sinks),
        "an option": checksum_of_text(repr((window, options))),
        "whether a gradient is needed": is_differentiated(q, k, v, sinks),
    }
    return {"tokens": q.shape[2]}, same, window


def sequence_parallel_attention(
    q, k, v, *, group=None, causal=False, window=None, scale=None, softcap=None, sinks=None, return_lse=False
):
    """Softmax attention over tokens in chunks, one for each rank of `group`: the rank's o [B, Hq, N, E], and with
    `return_lse` lse [B, Hq, N].

    `q` [B, Hq, N, D], `k` [B, Hk, N, D], `v` [B, Hk, N, E] are those of the rank's N tokens, which follow those of the
    rank before; N may differ, and be 0. `causal`, `window`, `scale`, `softcap` and `sinks` [Hq] are those of
    `etalon.torch.attention`, of places in the whole sequence, and the same on every rank.

    Keys and values go round from rank to rank while each computes o and lse of its queries on those that it has, and
    merges them. Backward they go round again with their gradients. A rank holds two blocks of keys and values, and
    sums in float32; what a GPU computes of a block is rounded to the type of q before it is added. Blocks that a mask
    hides are sent, but not computed: with `causal` the last rank has as many as there are ranks, the first has one.
    A window that begins or ends beside a block is a mask of N times N bytes there.

    Gradients are those of the sum of what all ranks differentiate: that of `sinks` has the rank's queries alone, and
    wants to be added up over ranks, as gradients of parameters are. Results agree with those of one process up to
    rounding, and have the same bits from run to run.

    Raises on all ranks where one finds its arguments wrong (TypeError, ValueError). A second derivative, other masks
    an additive bias and float64 are not there. Equations: docs/attention.md.
    """
    ranks = Ranks("sequence_parallel_attention", group, q)
    facts = lambda: _facts_of_blocks(ranks, q, k, v, sinks, causal, window, (scale, softcap))
    ends, numbers = ranks.agree(facts)
    lengths = [x["tokens"] for x in numbers]
    o, lse = Forward.apply(Blocks(ranks, lengths, ends, scale, softcap), q, k, v, sinks)
    return (o, lse) if return_lse else o
