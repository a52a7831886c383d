"""The loss of causal language models of transformers, from hidden states in place of logits."""

import inspect

import torch
from transformers.loss.loss_utils import ForCausalLMLoss

from . import _operators
from ._etalon import DevicePass
from ._sdpa import refuse

# Stand-ins for logits: what a model makes of them tells how it changes logits.
PROBE = (-50.0, -1.0, 0.5, 50.0)


class FusedLoss:
    """The forward pass of one model, in the place of its own until `remove()`."""

    def __init__(self, model, strict):
        self.model, self.strict, self.own = model, strict, model.forward
        # True once it was seen what the model makes of logits.
        self.known = False
        self.signature = inspect.signature(self.own)
        if "labels" not in self.signature.parameters:
            raise TypeError(f"`model` must take labels, found a {type(model).__name__}, whose forward pass does not")
        self.head = model.get_output_embeddings()
        config = model.config.get_text_config()
        scaling = getattr(config, "logits_scaling", None)
        self.scale = getattr(config, "logit_scale", None) or (1 / scaling if scaling else None)
        self.softcap = getattr(config, "final_logit_softcapping", None)
        model.forward = self

    def remove(self):
        """Gives the model its own forward pass back."""
        if self.model.__dict__.get("forward") is self:
            del self.model.forward

    def __call__(self, *arguments, **keywords):
        given = self.signature.bind(*arguments, **keywords)
        more = given.kwargs
        labels = given.arguments.get("labels")
        if labels is None or not self.model.training:
            return self.own(*arguments, **keywords)
        reason = self.unsupported(given.arguments, more)
        if reason is not None:
            refuse(reason, self.strict, "loss")
            return self.own(*arguments, **keywords)
        given.arguments["labels"] = None
        output, hidden = self.without_logits(given)
        loss = self.loss(hidden, labels, **{name: more[name] for name in OF_LOSS if name in more})
        if output.get("aux_loss") is not None:
            loss = loss + self.model.router_aux_loss_coef * output.aux_loss
        return type(output)(**{**output, "loss": loss, "logits": None})

    def unsupported(self, given, more):
        """Why the loss is left to the model, if it is."""
        if self.model.loss_function is not ForCausalLMLoss:
            return "the loss of the model is not that of causal language models"
        if type(self.head) is not torch.nn.Linear:
            return f"its head is a {type(self.head).__name__}, not a Linear"
        if self.head.weight.device.type not in ("cpu", "cuda"):
            return "its tensors are not on the CPU, nor on a GPU"
        if self.head.weight.is_cuda and DevicePass.absent:
            return DevicePass.absent
        if isinstance(keep := given.get("logits_to_keep", 0), torch.Tensor) or keep:
            return "some logits are to be kept"
        if more.get("return_dict") is False or self.model.config.return_dict is False:
            return "a tuple is to be returned"
        return None

    def without_logits(self, given):
        """The output of the model with stand-ins for logits, and what its head has read."""
        read = []

        def head(hidden):
            read.append(hidden)
            return hidden.new_tensor(PROBE, dtype=torch.float32).expand(*hidden.shape[:-1], len(PROBE))

        self.head.forward = head
        try:
            output = self.own(*given.args, **given.kwargs)
        finally:
            del self.head.forward
        probe = torch.tensor(PROBE) * (self.scale or 1.0)
        expected = probe if self.softcap is None else self.softcap * torch.tanh(probe / self.softcap)
        if not self.known and (len(read) != 1 or not torch.allclose(output.logits.float().cpu(), expected)):
            raise NotImplementedError(
                f"{type(self.model).__name__} changes its logits in a way that the fused loss does not know"
            )
        self.known = True
        return output, read[0]

    def loss(self, hidden, labels, num_items_in_batch=None, ignore_index=-100, shift_labels=None):
        """The loss of the next tokens: hidden [B, N, D], labels [B, N]."""
        if shift_labels is None:
            shift_labels = torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        weight, bias = self.head.weight, self.head.bias
        if torch.is_autocast_enabled(weight.device.type):
            weight, hidden = (x.to(torch.get_autocast_dtype(weight.device.type)) for x in (weight, hidden))
        loss = _operators.linear_cross_entropy(
            hidden.reshape(-1, hidden.shape[-1]),
            weight,
            shift_labels.reshape(-1),
            bias=None if bias is None else bias.to(weight.dtype),
            reduction="mean" if num_items_in_batch is None else "sum",
            ignore_index=ignore_index,
            softcap=self.softcap,
            logit_scale=self.scale,
        )
        return loss if num_items_in_batch is None else loss / num_items_in_batch


# Keywords of the loss, which transformers hands through the forward pass.
OF_LOSS = ("num_items_in_batch", "ignore_index", "shift_labels")
