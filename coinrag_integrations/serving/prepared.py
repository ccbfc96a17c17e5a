"""What a server has to know of a model without loading it: written once by whoever has the engine.

    tenants/<tenant>/<collection>/serving/<fingerprint>/prepared.json     fingerprint and rotations
    tenants/<tenant>/<collection>/serving/<fingerprint>/ab/ab34….safetensors   entries of one head

A head is the text before the first span: the prompt's opening. Its entries lie in a chunk file, named by
its token ids, so they are checked like all others when they are read.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch

from coinrag_integrations.engine import Engine
from coinrag_integrations.engine.encoder import encode
from coinrag_integrations.engine.fingerprint import Fingerprint
from coinrag_integrations.engine.layout import KVLayout
from coinrag_integrations.engine.rope import RopeTable, Rotary
from coinrag_integrations.engine.store import KVStore, scope_folder
from coinrag_integrations.errors import StoreError
from coinrag_integrations.files import share_all, write_text
from coinrag_integrations.types import ChunkId, Scope, Span, SpanRef

FOLDER, NOTE = "serving", "prepared.json"
_FORMAT = 1
MAX_HEADS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A fingerprint's rotations, and the entries of heads, as they lie in a store.

    `forms` are the fingerprints of all that is stored of a chunk, by ratio: its entries' own (1), and
    those of C2KV's slots.
    """

    forms: Mapping[int, Fingerprint]
    layout: KVLayout
    rope: RopeTable
    heads: KVStore

    @classmethod
    def open(cls, root: Path, scope: Scope, fingerprint: str | None = None) -> Self:
        """What was prepared for a scope of the store in `root`.

        `fingerprint` are the first digits of the digest that is meant, where several were prepared.

        Raises:
            StoreError: nothing was prepared, or several are there, or it cannot be read.
        """
        folder = scope_folder(root, scope) / FOLDER
        found = sorted(folder.glob(f"{fingerprint or ''}*/{NOTE}"))
        if len(found) != 1:
            names = ", ".join(path.parent.name for path in found) or "none"
            raise StoreError(
                f"{folder} holds not one prepared fingerprint but {names}: run "
                "coinrag_integrations.serving.prepare, or say which one is meant"
            )
        try:
            value: dict[str, Any] = json.loads(found[0].read_text(encoding="utf-8"))
            if value["format"] != _FORMAT:
                raise ValueError(f"its format is {value['format']!r:.40}, expected {_FORMAT}")
            said = [Fingerprint.from_dict(it) for it in value["forms"]]
            forms = {it.ratio: it for it in said}
            meant = forms[1]
            layout = KVLayout.parse(meant.layout, meant.dtype)
            rope = _rope(value["rope"])
            if rope.digest != meant.rope:
                raise ValueError("its rotations are not those of its fingerprint")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise StoreError(f"{found[0]} cannot be read: {error}. Prepare it anew") from error
        heads = _heads(found[0].parent, meant)
        return cls(forms=forms, layout=layout, rope=rope, heads=heads)

    @property
    def fingerprint(self) -> Fingerprint:
        """That of the entries."""
        return self.forms[1]

    def has_head(self, ids: Sequence[int]) -> bool:
        """Whether there is a file for a head. It is checked when it is read."""
        return head_id(ids) in self.heads

    def head(self, ids: Sequence[int]) -> torch.Tensor:
        """The entries of a head: [P, L, 2, H, D].

        Raises:
            StoreError: they are not there, or cannot be trusted.
        """
        stage = self.heads.stage([SpanRef(head_id(ids), 0, len(ids))])
        for error in self.heads.read(stage).errors.values():
            raise error
        entries = stage.entries(slice(0, 1))
        assert isinstance(entries, torch.Tensor)
        return entries


def prepare(engine: Engine, heads: Sequence[Sequence[int]] = ()) -> Path:
    """Write down what a server needs for an engine's store: its folder. What is there stays as it is.

    The prompt's head is always among `heads`, which are token ids.

    Raises:
        StoreError: the disk refuses.
    """
    fingerprint, rope = engine.fingerprint, engine.model.rope
    folder = engine.folder / FOLDER / fingerprint.digest[:16]
    forms = [it.to_dict() for it in _forms(engine)]
    note = {"format": _FORMAT, "forms": forms, "rope": asdict(rope)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / NOTE, json.dumps(note, indent=1))
    except OSError as error:
        raise StoreError(f"cannot write {folder / NOTE}: {error}") from error
    with _heads(folder, fingerprint) as store:
        for ids in (engine.prompt.head, *map(tuple, heads)):
            if ids and head_id(ids) not in store:
                kv = encode(engine.model, [ids])[0].cpu().contiguous()
                store.put(head_id(ids), kv, [Span(0, len(ids))])
    return folder


class Heads:
    """Whether there is a head for a server; of those that are not there, some are made when asked for.

    A store gets at most `max_heads` of them: prompts in which everything differs from the first word on
    are answered as text. May be used by many threads.
    """

    def __init__(self, engine: Engine, max_heads: int = MAX_HEADS) -> None:
        """Prepare the prompt's own head.

        Raises:
            StoreError: the disk refuses.
        """
        self._engine, self._max_heads, self._lock = engine, max_heads, threading.Lock()
        self._there = {engine.prompt.head}
        self._folder = prepare(engine)

    def __call__(self, ids: tuple[int, ...]) -> bool:
        """Whether a server can have a prefix behind these tokens.

        Raises:
            StoreError: the disk refuses.
        """
        with self._lock:
            if not ids or ids in self._there:
                return True
            is_file = (self._folder / head_id(ids)[:2] / f"{head_id(ids)}.safetensors").is_file()
            if not is_file and len(list(self._folder.glob("??/*"))) >= self._max_heads:
                return False
            prepare(self._engine, [ids])
            self._there.add(ids)
            return True


def save_reader(engine: Engine, folder: Path) -> None:
    """Save the model that an engine answers with, any adapter merged in, as vLLM loads it.

    Raises:
        StoreError: the disk refuses.
    """
    try:
        engine.reader.hf.save_pretrained(folder)
        share_all(folder)
        engine.reader.tokenizer.hf.save_pretrained(folder)
    except OSError as error:
        raise StoreError(f"cannot save the model in {folder}: {error}") from error


def _forms(engine: Engine) -> list[Fingerprint]:
    """The fingerprints of all that an engine stores of a chunk, that of the entries first."""
    stores = engine.forms.stores
    return [stores[ratio].fingerprint for ratio in sorted(stores)]


def head_id(ids: Sequence[int]) -> ChunkId:
    """The name of a head: a hash of its tokens, of the form of a chunk's."""
    return ChunkId(hashlib.sha256(json.dumps(list(ids)).encode()).hexdigest()[:32])


def _heads(folder: Path, fingerprint: Fingerprint) -> KVStore:
    """The heads' files: never as codes, whatever chunks are stored as."""
    plain = replace(fingerprint, codec="none")
    layout = KVLayout.parse(plain.layout, plain.dtype)
    return KVStore(folder, layout, plain, n_threads=1)


def _rope(value: dict[str, Any]) -> RopeTable:
    rotaries = [
        Rotary(inv_freq=tuple(it["inv_freq"]), attention_scaling=it["attention_scaling"])
        for it in value["rotaries"]
    ]
    return RopeTable(
        rotaries=tuple(rotaries), layers=tuple(value["layers"]), interleaved=value["interleaved"]
    )
