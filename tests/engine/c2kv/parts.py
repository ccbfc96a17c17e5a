"""C2KV's pass as the paper draws it, in one go and with plain loops: what extraction must equal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import transformers

from coinrag_integrations.engine import LoadedModel, hf
from coinrag_integrations.engine.c2kv import Blocks, Extractor
from coinrag_integrations.engine.c2kv.extractor import projections


def trained(model: LoadedModel, rank: int = 3, *, copies: bool = False, **options) -> Extractor:
    """An extractor with weights of its own, as training might leave them; or with `copies`, biases too."""
    random = torch.Generator().manual_seed(5)
    untrained = Extractor.untrained(model, **options)
    pairs = {}
    for name, layer in projections(model).items():
        n_out, n_in = layer.weight.shape
        a, b = (
            torch.randn((rank, n_in), generator=random),
            torch.randn((n_out, rank), generator=random),
        )
        pairs[name] = (0.3 * a, 0.3 * b)
    shared = untrained.shared + 0.2 * torch.randn(untrained.shared.shape, generator=random)
    if copies:
        own = dict(model.hf.named_parameters())
        copied = {f"{name}.weight": 0.5 * b @ a for name, (a, b) in pairs.items()}
        for name in [f"{name}.bias" for name in pairs if f"{name}.bias" in own]:
            copied[name] = torch.randn(own[name].shape, generator=random)
        weights = {name: (own[name] + 0.3 * it).detach() for name, it in copied.items()}
        untrained, pairs = replace(untrained, copies=weights), {}
    return replace(untrained, pairs=pairs, shared=shared, scale=0.5, ratios=(4,), digest="test")


def allowed(token: int, slot: int, length: int, blocks: Blocks) -> bool:
    """Whether a slot sees a token, by the paper's words."""
    k = blocks.ratio
    first, stop = slot * k - blocks.overlap, (slot + 1) * k
    return token < length and (token < k or first <= token < stop)


def one_pass(
    model: LoadedModel, extractor: Extractor, ids: Sequence[int], blocks: Blocks
) -> torch.Tensor:
    """Keys (rotated) and values of a document and, behind it, its slots: [L, 2, 1, H, T + S, D]."""
    n, n_slots = len(ids), blocks.n_slots(len(ids))
    last = [min((j + 1) * blocks.ratio, n) - 1 for j in range(n_slots)]
    words = model.hf.get_input_embeddings()
    with torch.no_grad():
        tokens = words(torch.tensor(ids))
        own = {
            "last": tokens[last],
            "eos": torch.zeros_like(tokens[last]),
            "mean": torch.stack(
                [tokens[j * blocks.ratio : (j + 1) * blocks.ratio].mean(0) for j in range(n_slots)]
            ),
        }[extractor.init]
    inputs = torch.cat((tokens, own + extractor.shared))[None]
    at = [*range(n), *last]
    seen = torch.zeros(n + n_slots, n + n_slots, dtype=torch.bool)
    for row in range(n + n_slots):
        for column in range(n + n_slots):
            if row < n:
                seen[row, column] = column <= row
            elif column < n:
                seen[row, column] = allowed(column, row - n, n, blocks)
            else:
                seen[row, column] = column <= row
    where = torch.tensor(at)
    distance = where[:, None] - where[None, :]
    masks = {
        w: (seen if w is None else seen & (distance < w))[None, None] for w in model.layer_windows
    }
    is_slot = (torch.arange(n + n_slots) >= n)[None, :, None]
    hooks = []
    for name, layer in projections(model).items():
        if name in extractor.pairs:
            a, b = extractor.pairs[name]

            def add(_module, given, out, a=a, b=b):
                return out + is_slot * extractor.scale * (given[0] @ a.T @ b.T)

            hooks.append(layer.register_forward_hook(add))
        elif f"{name}.weight" in extractor.copies:
            own = [extractor.copies.get(f"{name}.{part}") for part in ("weight", "bias")]

            def swap(_module, given, out, own=own):
                return torch.where(is_slot, torch.nn.functional.linear(given[0], *own), out)

            hooks.append(layer.register_forward_hook(swap))
    past = transformers.DynamicCache()
    try:
        with torch.no_grad():
            model.hf.base_model(
                inputs_embeds=inputs,
                attention_mask=hf.attention_mask(model.hf, masks),
                position_ids=where[None],
                use_cache=True,
                **{hf.cache_argument(model.hf.base_model): past},
            )
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack([torch.stack((x.keys, x.values)) for x in past.layers])
