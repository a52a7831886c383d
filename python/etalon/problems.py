"""Problems as dataclasses, for editors and type checkers: whatever takes a problem takes one of these.

The keys are those of a problem file; extents are numbers of rows, heads and columns.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from . import _problems
from ._etalon import Problem


class Description:
    """The common base of the problems of all algorithms."""

    _algorithm: ClassVar[str]

    def problem(self) -> Problem:
        """The problem. Raises ValueError where a key does not fit, and names it."""
        keys = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # type: ignore[arg-type]
        arrays = keys.pop("arrays")
        keys = {name: value for name, value in keys.items() if value is not None and value is not False}
        return _problems.problem(self._algorithm, arrays=arrays, **keys)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Scores(Description):
    batch: int
    query_heads: int
    key_heads: int
    queries: int
    keys: int
    dim: int
    mask: Any = None
    sequences: Any = None
    softmax_scale: float | None = None
    arrays: Mapping[str, Any] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionLse(_Scores):
    """The log-sum-exp of attention's scores. Equations: docs/attention_lse.md."""

    _algorithm: ClassVar[str] = "attention_lse"
    softcap: float | None = None
    sinks: bool = False
    bias: Mapping[str, int] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attention(AttentionLse):
    """Softmax attention. Equations: docs/attention.md."""

    _algorithm: ClassVar[str] = "attention"
    value_dim: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LazyAttention(_Scores):
    """Lazy attention with Elastic-Softmax. Equations: docs/lazy_attention.md."""

    _algorithm: ClassVar[str] = "lazy_attention"
    value_dim: int | None = None
    bias: Mapping[str, Any] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearAttention(Description):
    """Linear attention with decays. Equations: docs/linear_attention.md."""

    _algorithm: ClassVar[str] = "linear_attention"
    batch: int
    query_heads: int
    key_heads: int
    tokens: int
    dim: int
    value_dim: int | None = None
    decay: str | None = None
    initial_state: bool = False
    final_state: bool = False
    scale: float | None = None
    sequences: Any = None
    arrays: Mapping[str, Any] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearCrossEntropy(Description):
    """The cross-entropy of logits h wᵀ. Equations: docs/linear_cross_entropy.md."""

    _algorithm: ClassVar[str] = "linear_cross_entropy"
    tokens: int
    dim: int
    vocab: int
    bias: bool = False
    class_weights: bool = False
    token_weights: bool = False
    logit_scale: float | None = None
    softcap: float | None = None
    temperature: float | None = None
    ignore_index: int | None = None
    label_smoothing: float | None = None
    lse_square_scale: float | None = None
    lse_square_weight: str | None = None
    reduction: str | None = None
    nothing_left: str | None = None
    outputs: Mapping[str, bool] | None = None
    wide_gradients: bool = False
    arrays: Mapping[str, Any] | None = None
