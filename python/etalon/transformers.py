"""etalon's attention in models of the package transformers.

    import etalon.transformers
    model = AutoModelForCausalLM.from_config(config, attn_implementation="etalon")

    etalon.transformers.fuse_loss(model)

The import registers the implementation. It takes causal, padded and sliding masks, grouped heads, caches, soft caps
and sinks, with gradients. Dropout and biases by position go to PyTorch with one warning, or raise
after `etalon.transformers.register(strict=True)`. `fuse_loss` computes the loss of a causal language model without its
logits.
"""

from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from . import _operators
from ._causal_loss import FusedLoss
from ._sdpa import TOP_LEFT, masked, refuse, unsupported

__all__ = ["fuse_loss", "register"]


def fuse_loss(model, *, strict=False):
    """Computes the loss of a causal language model from its hidden states, while it trains and is given labels: logits
    are never stored, and the output has none. Soft caps and scales of logits and losses of routers are taken over; a
    model that changes its logits otherwise raises NotImplementedError.

    Returns a handle whose `remove()` undoes it. Calls that it does not take (another loss, a head that is no Linear,
    `logits_to_keep`) go to the model with one warning, or raise where `strict` is set.
    """
    return FusedLoss(model, strict)


def register(*, strict=False):
    """Makes `attn_implementation="etalon"` known, in place of an earlier registration."""

    def forward(module, query, key, value, attention_mask, dropout=0.0, scaling=None, is_causal=None, **more):
        reason = unsupported(query, key, value, attention_mask, dropout)
        if more.get("position_bias") is not None:
            reason = reason or "it has a bias by position"
        if more.get("output_attentions"):
            reason = reason or "weights are to be returned"
        if reason is not None:
            refuse(reason, strict)
            return sdpa_attention_forward(
                module,
                query,
                key,
                value,
                attention_mask,
                dropout=dropout,
                scaling=scaling,
                is_causal=is_causal,
                **more,
            )
        options = {"scale": scaling, "softcap": more.get("softcap"), "sinks": more.get("s_aux")}
        if options["sinks"] is not None:
            options["sinks"] = options["sinks"].to(_operators.wide(query))
        is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if attention_mask is not None:
            options |= masked(attention_mask, query, key)
        elif is_causal and query.shape[2] > 1:
            # As of PyTorch's kernel, which the mask was left out for.
            options["mask"] = TOP_LEFT
        o = _operators.attention(query, key, value, **options)
        return o.transpose(1, 2).contiguous(), None

    AttentionInterface.register("etalon", forward)
    AttentionMaskInterface.register("etalon", sdpa_mask)


register()
