"""One decoding step of Llama, Qwen2 and Qwen3 in as few operations as their equations need.

The transformers forward spends 2 ms per token of a 3-layer model in module calls and small
operations, as much as the arithmetic of 256 rows. This one takes the same weights, uncopied.

Legend: B rows, D model width, H heads, G key/value heads, d head size, C cache columns.

    h = x + Wo attention(rope(norm(Wq n(x))), rope(norm(Wk n(x))), Wv n(x))
    x' = h + Wdown (silu(Wgate n(h)) * Wup n(h)),  n = RMSNorm; inner norm in Qwen3 only
"""

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from xrpo_fast.rollouts.kv_cache import RowCache, single_query_attention

_STATIC_ROPE = {"default", "linear", "llama3", "yarn"}


class _Linear(NamedTuple):
    weight: torch.Tensor
    bias: torch.Tensor | None


class _Norm(NamedTuple):
    weight: torch.Tensor
    eps: float


class _Layer(NamedTuple):
    """A layer's weights, looked up once: attribute access through modules costs as much as math."""

    input_norm: _Norm
    query: _Linear
    key: _Linear
    value: _Linear
    output: _Linear
    query_norm: _Norm | None
    key_norm: _Norm | None
    inner_norm: _Norm
    gate: _Linear
    up: _Linear
    down: _Linear


class LeanDecoder:
    """Logits of one new token per row; see supports() for the models that it takes."""

    def __init__(self, model: Any, num_positions: int) -> None:
        attention = model.model.layers[0].self_attn
        self.head_size, self.scale = attention.head_dim, attention.scaling
        self.embedding = model.model.embed_tokens.weight
        self.layers = [_layer(layer) for layer in model.model.layers]
        self.norm = _norm_weights(model.model.norm)
        self.head = _linear_weights(model.lm_head)
        positions = torch.arange(num_positions, device=self.embedding.device)[None]
        cos, sin = model.model.rotary_emb(self.embedding[:1], positions)
        # rotate_half(x) sin = roll(x, d/2) signed_sin, which saves the negation and the join.
        half = self.head_size // 2
        self.cos = cos[0, :, None]
        self.signed_sin = torch.cat((-sin[0, :, None, :half], sin[0, :, None, half:]), -1)

    def __call__(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor | None,
        cache: RowCache,
    ) -> torch.Tensor:
        """(B, V) logits from tokens (B,), positions (B,) and an additive mask (B, 1, 1, C)."""
        cos, sin = self.cos[positions], self.signed_sin[positions]
        x = F.embedding(tokens, self.embedding)
        for index, layer in enumerate(self.layers):
            normed = _norm(layer.input_norm, x)
            query = self._rotated(layer.query, layer.query_norm, normed, cos, sin)
            key = self._rotated(layer.key, layer.key_norm, normed, cos, sin)
            value = F.linear(normed, *layer.value).view(*key.shape)
            keys, values = cache.update(key[:, :, None], value[:, :, None], index)
            out = single_query_attention(query, keys, values, mask, self.scale)
            x = x + F.linear(out, *layer.output)
            normed = _norm(layer.inner_norm, x)
            gate = F.silu(F.linear(normed, *layer.gate))
            x = x + F.linear(gate.mul_(F.linear(normed, *layer.up)), *layer.down)
        return F.linear(_norm(self.norm, x), *self.head)

    def _rotated(
        self,
        linear: _Linear,
        norm: _Norm | None,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> torch.Tensor:
        """(B, heads, d) rotated queries or keys."""
        heads = F.linear(x, *linear).view(len(x), -1, self.head_size)
        if norm is not None:
            heads = _norm(norm, heads)
        return torch.addcmul(heads * cos, heads.roll(self.head_size // 2, -1), sin)


def _layer(layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    return _Layer(
        input_norm=_norm_weights(layer.input_layernorm),
        query=_linear_weights(attention.q_proj),
        key=_linear_weights(attention.k_proj),
        value=_linear_weights(attention.v_proj),
        output=_linear_weights(attention.o_proj),
        query_norm=_norm_weights(attention.q_norm) if hasattr(attention, "q_norm") else None,
        key_norm=_norm_weights(attention.k_norm) if hasattr(attention, "k_norm") else None,
        inner_norm=_norm_weights(layer.post_attention_layernorm),
        gate=_linear_weights(mlp.gate_proj),
        up=_linear_weights(mlp.up_proj),
        down=_linear_weights(mlp.down_proj),
    )


def _linear_weights(module: nn.Linear) -> _Linear:
    return _Linear(module.weight, module.bias)


def _norm_weights(module: Any) -> _Norm:
    return _Norm(module.weight, module.variance_epsilon)


def _norm(norm: _Norm, x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, norm.weight.shape, norm.weight, norm.eps)


def supports(model: Any) -> bool:
    """True for the three architectures as they come: float32, plain linear layers, no hooks or
    adapters, rotary angles that do not depend on the length."""
    from transformers import LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM

    if type(model) not in (LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM):
        return False
    config = model.config
    rope = getattr(config, "rope_parameters", None) or {}
    if config.hidden_act != "silu" or rope.get("rope_type", "default") not in _STATIC_ROPE:
        return False
    if any(parameter.dtype != torch.float32 for parameter in model.parameters()):
        return False
    return all(_is_plain(module) for module in model.modules())


def _is_plain(module: nn.Module) -> bool:
    """No hook, no patched forward, and where it is a projection, nothing but its product."""
    if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
        return False
    return all(
        type(child) is nn.Linear
        for name, child in module.named_children()
        if name == "lm_head" or name.endswith("_proj")
    )
