"""Trained link tokens: embeddings of ids behind the vocabulary, for what is computed online (KVLink).

A model is given them by a wrapper around its input embeddings, which shares the table; its head does
not know them, so they are never said. What encodes chunks stays the base model.
"""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load
from torch import nn
from transformers import PreTrainedModel

from coinrag_integrations.engine import packed
from coinrag_integrations.engine.model import LoadedModel
from coinrag_integrations.errors import ModelError
from coinrag_integrations.files import write_tensors, write_text

CONFIG_FILE, WEIGHTS_FILE = "coinrag_links.json", "links.safetensors"
_NAME = "links"
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, SafetensorError)


class _Linked(nn.Module):
    """Input embeddings [V, hidden], and those of the ids V, V + 1, … behind them."""

    def __init__(self, table: nn.Embedding, links: torch.Tensor) -> None:
        super().__init__()
        self.table, self.links = table, links  # links [n, hidden]

    @property
    def weight(self) -> torch.Tensor:
        """The table's: what the head may be tied to."""
        return self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Ids [...] -> [..., hidden]."""
        n = self.table.num_embeddings
        words = self.table(ids.clamp(max=n - 1))
        links = self.links[(ids - n).clamp(min=0)].to(words.dtype)
        return torch.where((ids >= n)[..., None], links, words)


def link_ids(model: LoadedModel) -> tuple[int, ...]:
    """The ids of a model's trained link tokens; none if it has none."""
    embeddings = model.hf.get_input_embeddings()
    if not isinstance(embeddings, _Linked):
        return ()
    n = embeddings.table.num_embeddings
    return tuple(range(n, n + len(embeddings.links)))


def line_breaks(model: LoadedModel, n: int) -> torch.Tensor:
    """What trained links begin as: n times the embedding of a line break, fp32 [n, hidden]."""
    (line_break, *_) = model.tokenizer.encode("\n").ids
    with torch.no_grad():
        one = model.hf.get_input_embeddings()(torch.tensor([line_break], device=model.device))
    return one.float().repeat(n, 1)  # type: ignore[no-any-return]  # transformers is untyped here


def with_links(model: LoadedModel, links: torch.Tensor, digest: str = "") -> LoadedModel:
    """The model with link tokens; shares all of its weights. `digest` names them beside an adapter's.

    Raises:
        ModelError: it has some already, or its embeddings are no table of this width.
    """
    table = model.hf.get_input_embeddings()
    if not isinstance(table, nn.Embedding) or links.shape[-1] != table.weight.shape[-1]:
        raise ModelError(
            f"link tokens of {links.shape[-1]} dimensions cannot be added to {model.name!r}, whose "
            f"embeddings are {type(table).__name__} {tuple(table.weight.shape)}"
        )
    shared: dict[int, Any] = {id(p): p for p in (*model.hf.parameters(), *model.hf.buffers())}
    reader: PreTrainedModel = copy.deepcopy(model.hf, shared).eval()
    reader.set_input_embeddings(_Linked(reader.get_input_embeddings(), links))
    if packed.is_packed(model.hf):
        packed.pack_linears(reader)
    return replace(model, hf=reader, adapter=f"{model.adapter or ''}+links:{digest}")


def save_links(
    folder: Path, links: torch.Tensor, model: LoadedModel, noted: dict[str, Any]
) -> None:
    """Write links [n, hidden], and that they belong to a model; `noted` goes beside them."""
    tensor = links.detach().float().cpu().contiguous()
    write_tensors(folder / WEIGHTS_FILE, {_NAME: tensor})
    owner = {"weights": model.weights, "dtype": str(model.layout.dtype), "adapter": model.adapter}
    write_text(folder / CONFIG_FILE, json.dumps({**owner, **noted}, indent=1) + "\n")


def load_links(folder: str | Path, model: LoadedModel) -> LoadedModel:
    """The model (or a reader: the model with its adapter) with the link tokens in a folder.

    Raises:
        ModelError: there are none that can be read, or they were trained for another model or reader.
    """
    folder = Path(folder).expanduser()
    try:
        owner = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        content = (folder / WEIGHTS_FILE).read_bytes()
        links = load(content)[_NAME]
        trained = (str(owner["weights"]), str(owner["dtype"]), owner["adapter"])
    except _UNREADABLE as error:
        raise ModelError(
            f"there are no link tokens in {folder} that can be read ({type(error).__name__}: {error}): "
            f"expected {CONFIG_FILE} and {WEIGHTS_FILE}, as `coinrag train links` writes them"
        ) from error
    dtype = str(model.layout.dtype)
    others = trained[1] == dtype and trained[0] != model.weights
    if others or trained[2] != model.adapter:
        raise ModelError(
            f"the link tokens in {folder} were trained for other weights than those of "
            f"{model.name!r}{' with its adapter' if model.adapter else ''}: use the model (and the "
            "adapter, or none) that they were trained with, or train them anew"
        )
    return with_links(model, links.to(model.device), xxhash.xxh3_128(content).hexdigest())
