"""reduced_config: the same architecture at sizes that a laptop verifies in seconds."""

import copy
from typing import Any

from shardc.models.overrides import pattern_length, per_layer_lists

_VOCAB = 101  # prime: no tp divides it
_WINDOW = 6  # sliding window, in tokens: shorter than any batch that verify runs
_POSITIONS = 128  # rows of a learned position table
_MAX_PATTERN = 12  # layers; a longer pattern is sampled
_HEAD_DIM = 16


def reduced_config(config: Any, pp: int, tp: int) -> Any:
    """A small config of the same class that shards as `config` does.

    Kept: heads : KV heads and whether tp shards or replicates the KV heads, ties, biases, norms, rope, dropout,
    the pattern of layer types (every distinct layer stays), hidden size unequal to heads * head_dim where it is.
    Changed: at least pp + 1 layers, few heads of even size, vocabulary 101, sliding window 6.
    A size that tp does not divide stays such, so that the same plan is refused.
    """
    kind = type(config)
    fields = copy.deepcopy(config.to_dict())
    alias = getattr(kind, "attribute_map", {})
    _reduce_layers(fields, alias.get("num_hidden_layers", "num_hidden_layers"), pp)
    heads, kv_heads = _heads(config, tp)
    head_dim = _HEAD_DIM if heads <= 32 else _HEAD_DIM // 2
    old_head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    hidden = heads * _even(head_dim * config.hidden_size / (config.num_attention_heads * old_head_dim))
    sizes = {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": _VOCAB,
        "word_embed_proj_dim": hidden
        if getattr(config, "word_embed_proj_dim", None) == config.hidden_size
        else hidden // 2,
        "query_pre_attn_scalar": head_dim
        if getattr(config, "query_pre_attn_scalar", None) == old_head_dim
        else head_dim + 2,
        "sliding_window": _WINDOW,
    }
    sizes |= {
        key: _ffn(fields[key], hidden, tp) for key in ("intermediate_size", "ffn_dim", "n_inner") if fields.get(key)
    }
    for key, value in sizes.items():
        key = alias.get(key, key)
        if fields.get(key) is not None:
            fields[key] = value
    if fields.get("rope_parameters") is None:
        positions = alias.get("max_position_embeddings", "max_position_embeddings")
        fields[positions] = min(fields[positions], _POSITIONS)
    else:
        _resample_rope(fields["rope_parameters"], head_dim)
    for key in [k for k in fields if k.endswith("_token_id")]:
        fields[key] = _token(fields[key])
    return kind.from_dict(fields)


def _reduce_layers(fields: dict, layers_key: str, pp: int) -> None:
    """Shortens the stack to max(pp + 1, one pattern) layers and every per-layer list with it."""
    old = fields[layers_key]
    lists = per_layer_lists(fields, old)
    rows = list(zip(*(fields[key] for key in lists), strict=True)) if lists else [()] * old
    pattern = pattern_length(rows)
    if pattern <= _MAX_PATTERN:
        new = max(pp + 1, pattern)
        picks = [i % pattern for i in range(new)]
    else:  # no short pattern: keep each distinct layer, then spread over the stack
        first_of_kind = {rows.index(row) for row in rows}
        new = max(pp + 1, len(first_of_kind), min(old, 4))
        spread = [i * (old - 1) // (new - 1) for i in range(new)]
        picks = sorted([*first_of_kind, *[i for i in spread if i not in first_of_kind][: new - len(first_of_kind)]])
        picks += [picks[-1]] * (new - len(picks))
    fields[layers_key] = new
    for key in lists:
        fields[key] = [fields[key][i] for i in picks]


def _heads(config: Any, tp: int) -> tuple[int, int]:
    """(query heads, KV heads): the same ratio, and the same relation of the KV heads to tp."""
    old_heads = config.num_attention_heads
    old_kv = getattr(config, "num_key_value_heads", None) or old_heads
    group = old_heads // old_kv
    if old_kv % tp == 0:
        kv = 2 * tp if old_kv >= 2 * tp and 2 * tp * group <= 32 else tp
    elif tp % old_kv == 0:
        kv = old_kv
    else:
        return old_heads, old_kv  # tp fits neither way: keep what will be refused
    return group * kv, kv


def _ffn(old: int, hidden: int, tp: int) -> int:
    """About 1.5 * hidden; a multiple of 2 tp where tp divides the model's own width, and none where it does not."""
    width = 2 * tp * max(1, round(1.5 * hidden / (2 * tp)))
    return width if old % tp == 0 else width + 1


def _resample_rope(rope: dict, head_dim: int) -> None:
    """Scaling factors a frequency (longrope) are lists over half of the rotated dims: keep as many as are left."""
    for value in rope.values():
        if isinstance(value, dict):
            _resample_rope(value, head_dim)
    rotated = int(head_dim * rope.get("partial_rotary_factor", 1.0)) // 2
    for key in ("short_factor", "long_factor"):
        if factors := rope.get(key):
            rope[key] = [factors[i * len(factors) // rotated] for i in range(rotated)]


def _token(value: Any) -> Any:
    """A special token id inside the small vocabulary."""
    if isinstance(value, list):
        return sorted({_token(one) for one in value})
    return min(value, _VOCAB - 1) if isinstance(value, int) else value


def _even(size: float) -> int:
    return max(2, 2 * round(size / 2))
