"""Linear cross-entropy with its classes in shards, one for each rank."""

import itertools

import torch

from . import _problems
from ._algorithms import OPTIONS_OF_LOSS, decoded, encoded
from ._etalon import count_nodes, run_shard
from ._operators import refuse_gradients
from ._ranks import (
    KINDS,
    Forward,
    Ranks,
    check_tensor,
    checksum,
    checksum_of_text,
    is_differentiated,
)

# Classes of a tile, at whose multiples shards have the bits of the whole, and the numbers of a partial.
TILE, WORDS = 256, 10


def shard_of_classes(vocab, ranks, rank):
    """The first class of a rank's shard and the one behind its last: whole tiles of 256 classes, shared out evenly.

    With such shards `vocab_parallel_cross_entropy` has the bits of one process. A rank may get no classes.
    """
    if not 0 <= rank < ranks:
        raise ValueError(f"`rank` must be below {ranks}, found {rank}")
    tiles = -(-vocab // TILE)
    return tuple(min(vocab, tiles * at // ranks * TILE) for at in (rank, rank + 1))


class Loss:
    """A call on all ranks: their classes, and the problem of all classes together."""

    def __init__(self, ranks, classes, problem, by_nodes):
        self.ranks, self.problem, self.by_nodes = ranks, problem, by_nodes
        self.shape_of_loss = next(shape for name, _, shape, _ in problem.operands() if name == "loss")
        ends = list(itertools.accumulate(classes, initial=0))
        self.shards = list(zip(ends, ends[1:]))
        self.own = self.shards[ranks.own]
        self.nodes = [count_nodes(problem, *shard) for shard in self.shards]

    def run(self, step, inputs, outputs):
        shards = self.shards if step.startswith("combine") else [self.own]
        if self.ranks.device.type == "cpu":
            run_shard(self.problem, step, shards, inputs, outputs)
            return
        from . import _device

        _device.run(self.problem, step, inputs, outputs, shards)

    def empty(self, *shape):
        return torch.empty(shape, dtype=torch.float32, device=self.ranks.device)

    def forward(self, *tensors):
        h, inputs = tensors[0], named(tensors)
        partials, own = self.empty(max(self.nodes), len(h), WORDS), self.nodes[self.ranks.own]
        partials[own:] = 0
        # A CPU writes, and reads, what is behind the partials of the nodes, too: there is nothing to add.
        is_cpu = partials.is_cpu
        self.run("forward", inputs, {"partials": partials if is_cpu else partials[:own]})
        all_, totals = self.ranks.gather(partials), self.empty(len(h), WORDS)
        self.run("combine", {"partials": all_ if is_cpu else in_a_row(all_, self.nodes)}, {"totals": totals})
        loss = self.empty(*self.shape_of_loss)
        self.run("output", {**inputs, "totals": totals}, {"loss": loss})
        return loss, (totals,)

    def backward(self, needs, *tensors):
        *tensors, totals, dloss = tensors
        dloss = self.same(dloss)
        h, w, bias = tensors[:3]
        places, (by_h, by_w, by_bias, *_) = {}, needs
        if by_w:
            places["dw"] = torch.empty_like(w)
        if by_bias:
            places["dbias"] = torch.empty_like(bias)
        if by_h:
            parts, places["dh"] = self.parts(h)
        self.run("backward", {**named(tensors), "totals": totals, "dloss": dloss}, places)
        dh = self.sum_of(parts, h) if by_h else None
        return (dh, places.get("dw"), places.get("dbias"), None, None, None)

    @property
    def sums_nodes(self):
        """True where ranks send a matrix of dh for each of their nodes."""
        return self.by_nodes and max(self.nodes) > 1

    def same(self, dloss):
        """The cotangent of the loss. Fails on all ranks unless it is the same on each."""
        dloss = dloss.contiguous()
        bits = self.ranks.gather(dloss).view(torch.int32)
        if not (bits == bits[0]).all():
            raise ValueError("the cotangent of the loss must be the same on every rank, found others")
        return dloss

    def parts(self, h):
        """Memory for the rank's part of dh, [matrices, tokens, D], and what of it is written.

        It has one size on all ranks, and as many tokens as they can share out.
        """
        count = self.nodes[self.ranks.own] if self.sums_nodes else 1
        tokens = -(-len(h) // self.ranks.count) * self.ranks.count
        parts = self.empty(max(self.nodes) if self.sums_nodes else 1, tokens, h.shape[1])
        parts[count:] = 0
        parts[:, len(h) :] = 0
        return parts, parts[:count, : len(h)]

    def sum_of(self, parts, h):
        """dh of the parts of all ranks. Each adds up some tokens along the tree, and sends their rows to all."""
        matrices, tokens, dim = parts.shape
        share = tokens // self.ranks.count
        by_rank = parts.view(matrices, self.ranks.count, share, dim).transpose(0, 1)
        received = self.ranks.exchange(by_rank.contiguous())
        if not received.is_cpu:
            received = in_a_row(received, self.nodes if self.sums_nodes else [min(1, n) for n in self.nodes])
        rows = h.new_empty((share, dim))
        self.run("combine_dh", {"parts": received}, {"dh": rows})
        return self.ranks.gather(rows).view(tokens, dim)[: len(h)]


def in_a_row(parts, counts):
    """The first so many matrices of every rank, one behind the other."""
    return torch.cat([own[:count] for own, count in zip(parts, counts)])


def named(tensors):
    """The tensors of a call by name, those that are there."""
    names = ("h", "w", "bias", "targets", "class_weights", "token_weights")
    return {name: x for name, x in zip(names, tensors) if x is not None}


def check(ranks, h, w, bias, targets, class_weights, token_weights):
    """Fails unless the tensors of this rank fit together, apart from the number of all classes."""
    check_tensor(ranks, "h", h, (None, None), KINDS[:3])
    check_tensor(ranks, "w_shard", w, (None, h.shape[1]), (h.dtype,))
    check_tensor(ranks, "targets", targets, (len(h),), (torch.int64, torch.int32))
    if bias is not None:
        check_tensor(ranks, "bias_shard", bias, (len(w),), (h.dtype,))
    if class_weights is not None:
        check_tensor(ranks, "class_weights", class_weights, (None,), (torch.float32,))
    if token_weights is not None:
        check_tensor(ranks, "token_weights", token_weights, (len(h),), (torch.float32,))
    refuse_gradients(class_weights=class_weights, token_weights=token_weights)


def check_classes(problem, targets):
    """Fails at a target that is no class: on a GPU, whose kernels make it NaN. The steps on a CPU look themselves."""
    if targets.is_cpu:
        return
    vocab, ignored = problem.extent("V"), problem.options.get("ignore_index", -100)
    wrong = (targets != ignored) & ((targets < 0) | (targets >= vocab))
    if wrong.any():
        at = int(wrong.int().argmax())
        expected = f"a class below {vocab} or the ignored {ignored}"
        raise ValueError(f"`targets[{at}]` must be {expected}, found {int(targets[at])}")


def _facts(ranks, tensors, values, dh_by_nodes):
    """The classes of this rank, what must be the same on all, and the options."""
    options = encoded(OPTIONS_OF_LOSS, values)
    check(ranks, *tensors)
    h, w, bias, targets, class_weights, token_weights = tensors
    same = {
        "the number of tokens": len(h),
        "the extent D": h.shape[1],
        "the type of `h`": KINDS.index(h.dtype),
        "`targets`": checksum(targets.long()),
        "`class_weights`": checksum(class_weights),
        "`token_weights`": checksum(token_weights),
        "whether there is a `bias_shard`": bias is not None,
        "an option": checksum_of_text(f"{options} {bool(dh_by_nodes)}"),
        "whether `h` needs a gradient": is_differentiated(h),
        "whether a gradient is needed": is_differentiated(h, w, bias),
    }
    return {"classes": len(w)}, same, options


def vocab_parallel_cross_entropy(
    h,
    w_shard,
    targets,
    *,
    group=None,
    bias_shard=None,
    class_weights=None,
    token_weights=None,
    reduction=None,
    ignore_index=None,
    label_smoothing=None,
    lse_square_scale=None,
    softcap=None,
    temperature=None,
    logit_scale=None,
    dh_by_nodes=False,
):
    """The cross-entropy of logits h wᵀ + bias whose classes are in shards, one for each rank of `group`: the loss.

    Rank after rank holds the rows `w_shard` [classes of the rank, D] of w, and of the bias; none is a shard, too.
    Everything else is whole and the same on every rank: `h` [T, D], `targets` [T], numbers of all classes, weights and
    options, those of `etalon.torch.linear_cross_entropy`. So are the loss and the cotangent that comes back to it.
    Every rank gets all of dh, and dw and dbias of its classes. dh is not to be added up over ranks: an h that was
    gathered from chunks of tokens takes its chunk of dh.

    With shards that begin at multiples of 256 (`shard_of_classes`) the loss, dw and dbias have the bits of one
    process, at the same instruction set or on GPUs of one kind. So has dh where shards are nodes of the tree over
    tiles, and everywhere with `dh_by_nodes`: ranks then send a matrix of float32 for each of their nodes in place of
    one; on tensor cores where shards begin at quarters of the tree. Other cuts agree up to rounding. All bits are the
    same from run to run, on all ranks, and as those of the same shards in one process.

    Raises on all ranks where one finds its arguments wrong (TypeError, ValueError), or where what must be the same is
    not; h and the elements of w are not compared. A second derivative and float64 are not there.
    Equations: docs/linear_cross_entropy.md, "Shards of classes".
    """
    ranks = Ranks("vocab_parallel_cross_entropy", group, h)
    tensors = (h, w_shard, bias_shard, targets, class_weights, token_weights)
    values = (reduction, ignore_index, label_smoothing, lse_square_scale, softcap, temperature, logit_scale)
    options, numbers = ranks.agree(lambda: _facts(ranks, tensors, values, dh_by_nodes))
    classes = [x["classes"] for x in numbers]
    flags = {name: True for name in ("bias", "class_weights", "token_weights") if name in named(tensors)}
    keys = dict(algorithm="linear_cross_entropy", tokens=len(h), dim=h.shape[1], vocab=sum(classes), **flags)
    problem = _problems.known(_problems.text_of(keys | decoded(options)))
    check_classes(problem, targets)
    return Forward.apply(Loss(ranks, classes, problem, dh_by_nodes), *tensors)
