"""The door to shards of classes: bits of the whole, and errors that name the tensor."""

import numpy as np
import pytest

import etalon
from etalon._etalon import count_nodes, run_shard

SHARDS = [(0, 512), (512, 512), (512, 700)]


def operands(draw, dtype=np.float32, tokens=9, dim=5, vocab=700):
    targets = np.arange(tokens) * 97 % vocab
    targets[3] = -100
    h, w = draw(tokens, dim, dtype=dtype), draw(vocab, dim, dtype=dtype)
    problem = etalon.problem("linear_cross_entropy", h=h, w=w, lse_square_scale=0.01, softcap=5.0)
    return problem, h, w, targets


def of_shard(h, w, targets, start, end):
    return {"h": h, "w": w[start:end], "targets": targets}


def totals_of(problem, h, w, targets):
    parts = max(count_nodes(problem, *shard) for shard in SHARDS) + 1
    partials = np.empty((len(SHARDS), parts, len(h), 10), np.float32)
    for place, shard in zip(partials, SHARDS):
        run_shard(problem, "forward", [shard], of_shard(h, w, targets, *shard), {"partials": place})
    totals = np.empty((len(h), 10), np.float32)
    run_shard(problem, "combine", SHARDS, {"partials": partials}, {"totals": totals})
    return totals


def test_shards_have_the_bits_of_the_whole(draw, dtype):
    if dtype == np.float64:
        pytest.skip("shards are of the SIMD kernels, which have no float64")
    problem, h, w, targets = operands(draw, dtype)
    totals, dloss = totals_of(problem, h, w, targets), np.array(0.7, np.float32)
    loss = np.empty((), np.float32)
    inputs = of_shard(h, w, targets, *SHARDS[0]) | {"totals": totals}
    run_shard(problem, "output", [SHARDS[0]], inputs, {"loss": loss})
    parts, dw = np.empty((len(SHARDS), 1, *h.shape), np.float32), np.empty_like(w)
    for part, (start, end) in zip(parts, SHARDS):
        inputs = of_shard(h, w, targets, start, end) | {"totals": totals, "dloss": dloss}
        run_shard(problem, "backward", [(start, end)], inputs, {"dh": part, "dw": dw[start:end]}, memory_budget=0)
    dh = np.empty_like(h)
    for some in (slice(0, 4), slice(4, None)):
        run_shard(problem, "combine_dh", SHARDS, {"parts": parts[:, :, some]}, {"dh": dh[some]})
    inputs = dict(h=h, w=w, targets=targets, dloss=dloss)
    whole = etalon.run(problem, "forward_backward", inputs, names=("loss", "dh", "dw"))
    for name, found in (("loss", loss), ("dh", dh), ("dw", dw)):
        assert found.tobytes() == np.asarray(whole[name]).tobytes(), name


def test_errors_of_shards_name_what_is_wrong(draw):
    problem, h, w, targets = operands(draw)
    inputs, place = of_shard(h, w, targets, 0, 512), np.full((1, 9, 10), 7, np.float32)

    def complain(error, match, step="forward", shards=((0, 512),), given=inputs, places={"partials": place}):
        with pytest.raises(error, match=match):
            run_shard(problem, step, shards, given, places)

    complain(ValueError, "`step` must be one of forward, combine", step="sideways")
    complain(ValueError, "`classes` must be one range", shards=SHARDS)
    complain(ValueError, r"`classes` must be a range within 0\.\.700, found 0\.\.701", shards=[(0, 701)])
    complain(ValueError, r"`w` must have shape \[700, 5\], found \[512, 5\]", shards=[(0, 700)])
    complain(TypeError, "`targets` is missing", given={"h": h, "w": w[:512]})
    complain(TypeError, "`w` must hold f32", given=inputs | {"w": w[:512].astype(np.float16)})
    complain(ValueError, r"`targets\[0\]` must be a class below 700", given=inputs | {"targets": targets + 700})
    complain(TypeError, "`dloss` was given", given=inputs | {"dloss": np.ones((), np.float32)})
    complain(ValueError, r"`partials` must have shape \[1, 9, 10\]", places={"partials": place[:, :, :9]})
    complain(
        ValueError, "`partials` is written and must share no memory with `h`", given=inputs | {"h": place[0, :, :5]}
    )
    wide = {name: x if name == "targets" else x.astype(np.float64) for name, x in inputs.items()}
    complain((TypeError, NotImplementedError), "f64", given=wide)
    totals = totals_of(problem, h, w, targets)
    complain(TypeError, "`totals` is missing", step="backward", places={"dw": np.empty_like(w[:512])})
    wrong = inputs | {"totals": totals[:, ::-1]}
    complain(ValueError, "partial|totals", step="output", given=wrong, places={"loss": np.empty((), np.float32)})
    complain(
        ValueError, "`shards` must be all 700", "combine", [(0, 512)], {"partials": place[None]}, {"totals": totals}
    )
    assert (place == 7).all()
    scores = etalon.problem("attention_lse", batch=1, query_heads=1, key_heads=1, queries=2, keys=2, dim=2)
    with pytest.raises(ValueError, match="`algorithm` must be linear_cross_entropy, found attention_lse"):
        run_shard(scores, "forward", [(0, 1)], {}, {})
    with pytest.raises(ValueError, match="`classes` must be a range"):
        count_nodes(problem, 5, 3)
