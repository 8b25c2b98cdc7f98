"""Torch meanings of operators on sequences: recurrent cells and attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weft.models.operators.rules.meanings import Meaning, TorchNode, TorchTensor

_ACTIVATIONS = {"lstm": ("sigmoid", "tanh", "tanh"), "gru": ("sigmoid", "tanh"), "rnn_tanh": ("tanh",)}
"""The activations of one direction by default, which files may spell out."""


def recurrent(name: str, gates: Sequence[int]) -> Meaning:
    """The meaning of a recurrent layer by torch's ``lstm``, ``gru`` or ``rnn_tanh``, whose gates have another order.

    gates: for each of torch's gates, its index in ONNX's order. Inputs are named as in the standard: weights *w* and
    *r* of input and state, biases *b*.
    """

    def meaning(
        t: TorchNode, x: TorchTensor, w: TorchTensor, r: TorchTensor, b: TorchTensor = None,
        lengths: TorchTensor = None, *states: TorchTensor,
    ) -> tuple[TorchTensor, ...]:  # fmt: skip
        direction = t.get("direction", "forward")
        hidden, directions = t.get("hidden_size", r.shape[-1]), w.shape[0]
        usual = _ACTIVATIONS[name] * directions
        activations = tuple(_lower(activation) for activation in t.get("activations") or usual)
        rectified = name == "rnn_tanh" and activations == ("relu",) * directions
        given_states = [state for state in states[:2] if state is not None]
        t.refuse(
            lengths is not None or len(states) > 2 or t.get("layout", 0) or t.get("clip")
            or (activations != usual and not rectified),
            "a recurrent layer with lengths, peepholes, another layout or other activations",
        )  # fmt: skip
        t.refuse(name == "gru" and not t.get("linear_before_reset", 0), "a GRU that resets before its product")
        x = x.flip(0) if direction == "reverse" else x
        zeros = x.new_zeros(directions, x.shape[1], hidden)
        state_count = 2 if name == "lstm" else 1
        initial = [*given_states, *[zeros] * (state_count - len(given_states))]
        weights = []
        for direction_number in range(directions):
            biases = () if b is None else b[direction_number].chunk(2)  # of the input and of the state
            parameters = [w[direction_number], r[direction_number], *biases]
            weights += [_order_gates(t, parameter, gates) for parameter in parameters]
        state = tuple(initial) if name == "lstm" else initial[0]
        run = getattr(t.torch, "rnn_relu" if rectified else name)
        # after the weights: has_biases, num_layers, dropout, train, bidirectional, batch_first
        steps, *final_states = run(x, state, weights, b is not None, 1, 0.0, False, directions == 2, False)
        steps = steps.reshape(x.shape[0], x.shape[1], directions, hidden).transpose(1, 2)
        return (steps.flip(0) if direction == "reverse" else steps, *final_states)[: t.outputs]

    return meaning


def _lower(activation: str | bytes) -> str:
    """The name of an activation, whose case does not matter."""
    return (activation.decode() if isinstance(activation, bytes) else activation).lower()


def _order_gates(t: TorchNode, parameter: TorchTensor, gates: Sequence[int]) -> TorchTensor:
    """Reorder the gates of a weight or bias from ONNX's to torch's order."""
    parts = parameter.chunk(len(gates))
    return t.torch.cat([parts[gate] for gate in gates])


_ATTENTION = {  # attributes that ``attention`` handles or refuses by value
    "is_causal",
    "kv_num_heads",
    "q_num_heads",
    "qk_matmul_output_mode",
    "scale",
    "softcap",
    "softmax_precision",
}


def attention(t: TorchNode, q: TorchTensor, k: TorchTensor, v: TorchTensor, *others: TorchTensor) -> TorchTensor:
    """The standard's Attention without a cache; inputs of 3 axes have the heads side by side, of 4 axes on axis 1.

    others: an optional mask, and inputs of a cache, with which the meaning is refused.
    """
    mask = others[0] if others else None
    t.refuse(set(t.attributes) - _ATTENTION, "attention within a window, or with other attributes")
    t.refuse(
        t.outputs > 1 or any(other is not None for other in others[1:]) or t.get("softcap", 0.0),
        "attention with a cache, a cap or its scores given out",
    )
    t.refuse(mask is not None and t.get("is_causal", 0), "attention with a mask that is causal too")
    joined = q.dim() == 3
    if joined:
        q = _split_heads(q, t.get("q_num_heads"))
        k, v = (_split_heads(tensor, t.get("kv_num_heads")) for tensor in (k, v))
    return _attention(t, q, k, v, mask, joined)


def multi_head_attention(t: TorchNode, q: TorchTensor, k: Any = None, v: Any = None, *others: Any) -> TorchTensor:
    """com.microsoft MultiHeadAttention of separate queries, keys and values; *others*: a bias, and refused inputs."""
    bias = others[0] if others else None
    t.refuse(
        k is None or v is None or q.dim() != 3 or k.dim() != 3 or v.dim() != 3 or t.outputs > 1
        or any(other is not None for other in others[1:]) or t.get("unidirectional", 0),
        "attention with a mask, a cache or packed inputs",
    )  # fmt: skip
    if bias is not None:
        parts = bias.split([q.shape[-1], q.shape[-1], v.shape[-1]])
        q, k, v = (tensor + part for tensor, part in zip((q, k, v), parts, strict=True))
    q, k, v = (_split_heads(tensor, t.get("num_heads")) for tensor in (q, k, v))
    return _attention(t, q, k, v, None, True)


def packed_attention(t: TorchNode, x: TorchTensor, weight: TorchTensor, bias: Any = None, *others: Any) -> TorchTensor:
    """com.microsoft Attention: one weight projects to queries, keys and values."""
    t.refuse(
        t.outputs > 1 or any(other is not None for other in others) or t.get("do_rotary", 0),
        "attention with a mask, a cache or rotary positions",
    )
    sizes = list(t.get("qkv_hidden_sizes") or [weight.shape[1] // 3] * 3)
    projected = x @ weight if bias is None else t.nn.linear(x, weight.t(), bias)
    q, k, v = (_split_heads(part, t.get("num_heads")) for part in projected.split(sizes, dim=-1))
    causal = TorchNode(t.torch, {"scale": t.get("scale"), "is_causal": t.get("unidirectional", 0)})
    return _attention(causal, q, k, v, None, True)


def _split_heads(x: TorchTensor, heads: int) -> TorchTensor:
    """(batch, positions, width) -> (batch, heads, positions, width of a head)."""
    return x.reshape(*x.shape[:2], heads, -1).transpose(1, 2)


def _attention(t: TorchNode, q: Any, k: Any, v: Any, mask: Any, joined: bool) -> TorchTensor:
    """Attention by head; *joined*: return the heads side by side, as (batch, positions, width)."""
    result = t.nn.scaled_dot_product_attention(
        q, k, v, mask, is_causal=bool(t.get("is_causal", 0)), scale=t.get("scale") or None,
        enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip
    return result.transpose(1, 2).flatten(2) if joined else result
