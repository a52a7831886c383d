"""etalon in the place of PyTorch's attention, and in models of transformers."""

import functools
import warnings

import pytest

torch = pytest.importorskip("torch")
import etalon.torch as E  # noqa: E402
from etalon import _operators, _sdpa  # noqa: E402

F = torch.nn.functional


def calls():
    """Calls of PyTorch's attention: tensors and keywords."""
    draw = lambda *shape: torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))
    q, k, v = draw(2, 4, 9, 8), draw(2, 4, 9, 8), draw(2, 4, 9, 8)
    mask = draw(2, 1, 9, 9) > -0.5
    mask[..., 0] = True
    return {
        "plain": ((q, k, v), {}),
        "causal": ((q, k, v), {"is_causal": True}),
        "longer": ((q, draw(2, 4, 12, 8), draw(2, 4, 12, 8)), {"is_causal": True}),
        "scale": ((q, k, v), {"scale": 0.2}),
        "grouped": ((q, k[:, :2], v[:, :2]), {"enable_gqa": True}),
        "mask": ((q, k, v), {"attn_mask": mask}),
        "flat_mask": ((q, k, v), {"attn_mask": mask[0, 0]}),
        "bias": ((q, k, v), {"attn_mask": draw(1, 4, 9, 9)}),
        "three_axes": ((q[:, 0], k[:, 0], v[:, 0]), {"is_causal": True}),
    }


@pytest.mark.parametrize("name", calls())
def test_results_and_gradients_are_those_of_pytorch(name):
    tensors, keywords = calls()[name]
    found = []
    for replaced in (False, True):
        given = [x.clone().requires_grad_() for x in tensors]
        bias = keywords.get("attn_mask")
        if bias is not None and bias.is_floating_point():
            given.append(bias.clone().requires_grad_())
            keywords = keywords | {"attn_mask": given[-1]}
        with E.replace_sdpa(strict=True) if replaced else warnings.catch_warnings():
            y = F.scaled_dot_product_attention(*given[:3], **keywords)
        found.append((y, *torch.autograd.grad(y.square().sum(), given)))
    for x, z in zip(*found):
        torch.testing.assert_close(x, z, rtol=1e-4, atol=1e-5)


def test_what_is_not_taken_is_left_to_pytorch_with_one_warning_or_raises():
    (q, k, v), _ = calls()["plain"]
    own = F.scaled_dot_product_attention
    _sdpa.WARNED.clear()
    with E.replace_sdpa(), pytest.warns(UserWarning, match="attention is left to PyTorch: it has dropout") as seen:
        for _ in range(3):
            F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
    assert len(seen) == 1
    with E.replace_sdpa(strict=True), pytest.raises(NotImplementedError, match="it has dropout"):
        F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
    assert F.scaled_dot_product_attention is own, "an error leaves PyTorch's in its place"


def test_autocast_narrows_as_pytorch_does():
    (q, k, v), _ = calls()["causal"]
    with torch.autocast("cpu", torch.bfloat16), E.replace_sdpa(strict=True):
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert o.dtype == torch.bfloat16


SMALL = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    pad_token_id=0,
)
MODELS = {
    "Llama": {},
    "Mistral": {"sliding_window": 5},
    "Gemma2": {"sliding_window": 5, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    "GptOss": {"sliding_window": 5, "num_local_experts": 2, "num_experts_per_tok": 1},
}


@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers(name, monkeypatch):
    transformers = pytest.importorskip("transformers")
    import etalon.transformers

    calls, own = [], _operators.attention
    monkeypatch.setattr(_operators, "attention", lambda *x, **options: calls.append(options) or own(*x, **options))

    etalon.transformers.register(strict=True)
    models = []
    for implementation in ("eager", "etalon"):
        torch.manual_seed(0)
        # Each has a configuration of its own, which says later, too, who computes.
        config = getattr(transformers, f"{name}Config")(**SMALL, **MODELS[name])
        model = getattr(transformers, f"{name}ForCausalLM")._from_config(config, attn_implementation=implementation)
        models.append(model.float().eval())
    ids = torch.randint(1, 64, (2, 17), generator=torch.Generator().manual_seed(1))
    padding = torch.ones_like(ids)
    padding[0, :6] = 0  # on the left
    for attention_mask in (None, padding):
        found = []
        for model in models:
            logits = model(ids, attention_mask=attention_mask).logits
            seen = logits if attention_mask is None else logits[attention_mask.bool()]
            model.zero_grad()
            seen.square().mean().backward()
            found.append([seen, *(x.grad for x in model.parameters() if x.grad is not None)])
        assert len(found[0]) == len(found[1]) > 10
        for x, z in zip(*found):
            torch.testing.assert_close(x, z, rtol=2e-4, atol=2e-5)
    tokens = [
        model.generate(ids, attention_mask=padding, max_new_tokens=9, do_sample=False, use_cache=True)
        for model in models
    ]
    assert torch.equal(*tokens), "decoding with a cache"
    # Two passes and one for each new token, of two layers.
    assert len(calls) == 2 * (2 + 9)


LOSSES = {
    "Llama": {"tie_word_embeddings": True},
    "Gemma2": {"final_logit_softcapping": 0.5},
    "Cohere": {"logit_scale": 0.25},
    "Granite": {"logits_scaling": 3.0},
    "Mixtral": {"num_local_experts": 2, "num_experts_per_tok": 1, "output_router_logits": True},
}


def small_model(name, **more):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    options = {**SMALL, **more}
    if name == "Cohere":
        options.pop("head_dim")
    return getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**options)).float()


def labelled():
    ids = torch.randint(1, 64, (2, 17), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :6] = -100
    return ids, labels


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("more", [{}, {"num_items_in_batch": 40}], ids=["mean", "sum"])
def test_a_fused_loss_is_that_of_the_model(name, more):
    model = small_model(name, **LOSSES[name]).train()
    import etalon.transformers

    ids, labels = labelled()
    found = []
    for fused in (False, True):
        handle = etalon.transformers.fuse_loss(model, strict=True) if fused else None
        model.zero_grad()
        output = model(input_ids=ids, labels=labels, **more)
        assert (output.logits is None) == fused
        output.loss.backward()
        found.append([output.loss.detach(), *(x.grad.clone() for x in model.parameters() if x.grad is not None)])
    for x, z in zip(*found, strict=True):
        torch.testing.assert_close(x, z, rtol=1e-4, atol=1e-6)
    assert model(ids).logits.shape == (2, 17, 64), "without labels"
    assert model.eval()(ids, labels=labels).logits is not None, "an evaluation"
    handle.remove()
    assert model.train()(ids, labels=labels).logits is not None


def test_a_fused_loss_refuses_what_it_does_not_know(monkeypatch):
    model = small_model("Llama").train()
    import etalon.transformers

    ids, labels = labelled()
    own = type(model).forward

    @functools.wraps(own)
    def squared(self, *arguments, **keywords):
        output = own(self, *arguments, **keywords)
        output.logits = output.logits**2
        return output

    with monkeypatch.context() as patch:
        patch.setattr(type(model), "forward", squared)
        handle = etalon.transformers.fuse_loss(model)
        with pytest.raises(NotImplementedError, match="LlamaForCausalLM changes its logits"):
            model(input_ids=ids, labels=labels)
        handle.remove()
    etalon.transformers.fuse_loss(model, strict=True)
    with pytest.raises(NotImplementedError, match="some logits are to be kept"):
        model(input_ids=ids, labels=labels, logits_to_keep=3)
    with pytest.raises(TypeError, match="`model` must take labels"):
        etalon.transformers.fuse_loss(model.model)
    model.loss_function = lambda logits, labels, vocab_size: logits.sum()
    with pytest.raises(NotImplementedError, match="the loss of the model"):
        model(input_ids=ids, labels=labels)
