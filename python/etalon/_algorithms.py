"""The algorithms as operators of a framework see them: their tensors by name, and how problems follow from them."""

import functools

from . import _problems


# Options of linear cross-entropy that operators take.
OPTIONS_OF_LOSS = (
    "reduction",
    "ignore_index",
    "label_smoothing",
    "lse_square_scale",
    "softcap",
    "temperature",
    "logit_scale",
)


class Algorithm:
    """An algorithm: its tensors, and how its problem follows from them.

    `inputs` are the names of the tensors of its forward pass, `optional` says which may be absent, and `fixed` are
    those without derivatives. An output is read again by later passes if it is in `saved`; its cotangent may be absent
    unless it is in `needed`. `problem(tensors, options)` is the problem of tensors by name and the text of `encoded`.
    """

    def __init__(self, name):
        row = TABLE[name]
        self.name, self.problem, self.outputs = name, row["problem"], row["outputs"]
        self.inputs = [x.rstrip("?") for x in row["inputs"]]
        self.optional = [x.endswith("?") for x in row["inputs"]]
        self.saved, self.needed, self.fixed = row["saved"], row["needed"], row["fixed"]
        self.is_forward_mode = name in ("attention", "attention_lse")
        self.smooth = [x for x in self.inputs if x not in self.fixed]
        self.cotangents = [{"o": "dout", "final_state": "dfinal_state"}.get(y, "d" + y) for y in self.outputs]
        self.second_gradients = ["g" + x for x in self.smooth + self.cotangents]
        given = self.inputs + self.saved + self.cotangents
        # The tensors that each pass reads, in their order.
        self.reads = {
            "forward": self.inputs,
            "forward_backward": self.inputs,
            "backward": given,
            "double_backward": given + ["dd" + x for x in self.smooth],
            "jvp": self.inputs + self.saved + ["t" + x for x in self.smooth],
        }


@functools.lru_cache(maxsize=512)
def encoded(names, values):
    """Options as text, without those that are None."""
    return _problems.text_of({name: value for name, value in zip(names, values) if value is not None})


@functools.lru_cache(maxsize=512)
def decoded(options):
    """The options of a text."""
    import json

    return json.loads(options)


def encoded_part(part):
    """A mask or sequences of a problem file as text."""
    return None if part is None else _problems.text_of(_problems.listed(part))


def tree_of(options, key):
    """A part of a problem file among the options of a text: a mask or sequences."""
    part = decoded(options).get(key)
    return None if part is None else decoded(part)


def _of_scores(name):
    def problem(tensors, options):
        keywords = dict(decoded(options))
        given = {x: tensors.get(x) for x in ("bias", "sinks", "mask")}
        given["mask"] = given["mask"] if keywords.pop("tree", None) is None else tree_of(options, "tree")
        if "sequences" in keywords:
            keywords["sequences"] = tree_of(options, "sequences")
        return _problems.of_scores(name, tensors["q"], tensors["k"], tensors.get("v"), **given, **keywords)

    return problem


def _of_tokens(tensors, options):
    given = {name: tensors.get(name) for name in ("g_gamma", "g", "initial_state")}
    given |= decoded(options) | {"sequences": tree_of(options, "sequences")}
    return _problems.of_linear_attention(tensors["q"], tensors["k"], tensors["v"], return_final_state=True, **given)


def _of_classes(tensors, options):
    given = {name: tensors.get(name) for name in ("bias", "class_weights", "token_weights")}
    return _problems.of_linear_cross_entropy(tensors["h"], tensors["w"], **given, **decoded(options))


# Of each algorithm the tensors of its forward pass, with "?" those that may be absent, and what `Algorithm` says.
TABLE = {
    "attention": dict(
        inputs=["q", "k", "v", "sinks?", "bias?", "mask?"],
        outputs=["o", "lse"],
        saved=["o", "lse"],
        needed=["o"],
        problem=_of_scores("attention"),
        fixed=["mask"],
    ),
    "attention_lse": dict(
        inputs=["q", "k", "sinks?", "bias?", "mask?"],
        outputs=["lse"],
        saved=["lse"],
        needed=["lse"],
        problem=_of_scores("attention_lse"),
        fixed=["mask"],
    ),
    "lazy_attention": dict(
        inputs=["q", "k", "v", "tau", "bias?", "mask?"],
        outputs=["o", "lse"],
        saved=["lse"],
        needed=["o"],
        problem=_of_scores("lazy_attention"),
        fixed=["mask"],
    ),
    "linear_attention": dict(
        inputs=["q", "k", "v", "g_gamma?", "g?", "initial_state?"],
        outputs=["o", "final_state"],
        saved=[],
        needed=["o", "final_state"],
        problem=_of_tokens,
        fixed=[],
    ),
    "linear_cross_entropy": dict(
        inputs=["h", "w", "targets", "bias?", "class_weights?", "token_weights?"],
        outputs=["loss"],
        saved=[],
        needed=["loss"],
        problem=_of_classes,
        fixed=["targets", "class_weights", "token_weights"],
    ),
}
