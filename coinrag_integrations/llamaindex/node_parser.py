"""A LlamaIndex node parser whose nodes are the store's own chunks, with their nuggets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Self

from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.callbacks import CallbackManager
from llama_index.core.node_parser import NodeParser
from llama_index.core.node_parser.node_utils import build_nodes_from_splits, default_id_func
from llama_index.core.schema import (
    BaseNode,
    MetadataMode,
    NodeRelationship,
    RelatedNodeInfo,
    TextNode,
)
from llama_index.core.schema import Document as LlamaDocument
from llama_index.core.utils import get_tqdm_iterable

from coinrag_integrations import _adapters
from coinrag_integrations.errors import ConfigError
from coinrag_integrations.llamaindex._convert import describe_chunk
from coinrag_integrations.nuggets import extract_nuggets
from coinrag_integrations.rag import CoinRAG
from coinrag_integrations.types import Chunk, Document


class _Bound:
    """The CoinRAG behind a parser: copies of the parser share it, pickles leave it behind."""

    def __init__(self, rag: CoinRAG | None) -> None:
        self.rag = rag

    def chunks(self, node: BaseNode) -> list[Chunk]:
        if self.rag is None:
            raise ConfigError(
                "this NuggetNodeParser was loaded or unpickled without its CoinRAG: use "
                "NuggetNodeParser.from_dict(parser.to_dict(), rag=rag), and num_workers=1 in "
                "pipelines"
            )
        text = node.get_content(metadata_mode=MetadataMode.NONE)
        chunks = self.rag.engine.chunk(Document(document_id=node.node_id, text=text))
        return [extract_nuggets(chunk, self.rag.proposer) for chunk in chunks]

    def __deepcopy__(self, _: object) -> _Bound:
        return self

    def __reduce__(self) -> tuple[type[_Bound], tuple[None]]:
        return (_Bound, (None,))


class NuggetNodeParser(NodeParser):
    """Cuts documents into the chunks that a store would make of them.

    A node's text is the chunk's exact text, its id the chunk's id (unless `id_func` is given), and
    its nuggets are in the metadata. The fields below name all that decides about chunks and
    nuggets, so that a pipeline's cache notices a change.

        >>> nodes = NuggetNodeParser.from_defaults(rag=rag).get_nodes_from_documents(documents)
    """

    proposer_id: str = Field(description="Names the proposer of nuggets and its options.")
    chunk_tokens: int = Field(description="Tokens of a chunk.")
    tokenizer_digest: str = Field(description="SHA-256 of the tokenizer's definition.")
    _bound: _Bound = PrivateAttr()

    def __init__(self, *, rag: CoinRAG | None = None, **data: Any) -> None:
        """Prefer `from_defaults`. Without `rag` the parser can be kept, but not used."""
        super().__init__(**data)
        self._bound = _Bound(rag)

    @classmethod
    def class_name(cls) -> str:
        """The name under which the parser is serialised."""
        return "NuggetNodeParser"

    @classmethod
    def from_defaults(
        cls,
        *,
        rag: CoinRAG,
        include_metadata: bool = True,
        include_prev_next_rel: bool = True,
        callback_manager: CallbackManager | None = None,
        id_func: Callable[[int, BaseNode], str] | None = None,
    ) -> Self:
        """A parser with the tokenizer, the chunk size and the proposer of `rag`."""
        return cls(
            rag=rag,
            include_metadata=include_metadata,
            include_prev_next_rel=include_prev_next_rel,
            callback_manager=callback_manager or CallbackManager([]),
            id_func=id_func or default_id_func,
            **_settings(rag),
        )

    @classmethod
    def from_dict(cls, data: dict[str, Any], **kwargs: Any) -> Self:
        """The inverse of `to_dict`; give `rag` to be able to parse.

        Raises:
            ConfigError: `rag` would make other chunks or nuggets than the parser that was saved, or
                that parser had an `id_func` of its own, which has to be given again.
        """
        data = {**data, **kwargs}
        saved = data.get("id_func")
        if isinstance(saved, dict):  # LlamaIndex writes the name of a function it cannot read back
            if saved.get("id_func_name") != default_id_func.__name__:
                raise ConfigError(
                    f"the parser was saved with the id_func {saved.get('id_func_name')!r}, which "
                    "cannot be read back: give it again as from_dict(data, id_func=...)"
                )
            del data["id_func"]
        if rag := data.get("rag"):
            differing = [k for k, v in _settings(rag).items() if data.get(k, v) != v]
            if differing:
                raise ConfigError(
                    f"the parser was saved with another {' and '.join(differing)} than this "
                    "CoinRAG has: open the store that it was made for, or make a new parser"
                )
            data |= _settings(rag)
        return super().from_dict(data)

    def _parse_nodes(
        self, nodes: Sequence[BaseNode], show_progress: bool = False, **kwargs: Any
    ) -> list[BaseNode]:
        parsed: list[BaseNode] = []
        for node in get_tqdm_iterable(nodes, show_progress, "Parsing nodes"):
            parsed += self._nodes_of(node, self._bound.chunks(node))
        return parsed

    async def _aparse_nodes(
        self, nodes: Sequence[BaseNode], show_progress: bool = False, **kwargs: Any
    ) -> list[BaseNode]:
        return await asyncio.to_thread(self._parse_nodes, nodes, show_progress, **kwargs)

    def _nodes_of(self, parent: BaseNode, chunks: Sequence[Chunk]) -> list[TextNode]:
        own_ids = self.id_func is default_id_func
        made = build_nodes_from_splits(
            [chunk.text for chunk in chunks],
            parent,
            id_func=(lambda i, _: chunks[i].chunk_id) if own_ids else self.id_func,
        )
        # A parent that is itself a piece of a document: count from where the document starts, if
        # that is known.
        is_piece = parent.source_node is not None
        begin = getattr(parent, "start_char_idx", None) if is_piece else 0
        for node, chunk in zip(made, chunks, strict=True):
            if begin is not None:
                node.start_char_idx = begin + chunk.char_start
                node.end_char_idx = node.start_char_idx + len(chunk.text)
            describe_chunk(node, chunk)
        return made

    def _postprocess_parsed_nodes(
        self, nodes: list[BaseNode], parent_doc_map: dict[str, LlamaDocument]
    ) -> list[BaseNode]:
        # The base class searches each text again and overwrites the offsets; ours are exact.
        exact = [(node, node.start_char_idx, node.end_char_idx) for node in _texts(nodes)]
        nodes = super()._postprocess_parsed_nodes(nodes, parent_doc_map)
        for node, start, end in exact:
            node.start_char_idx, node.end_char_idx = start, end
            # It also copies the neighbours' metadata: their nuggets are not needed twice more.
            for side in (NodeRelationship.PREVIOUS, NodeRelationship.NEXT):
                neighbour = node.relationships.get(side)
                if isinstance(neighbour, RelatedNodeInfo):
                    neighbour.metadata = {
                        k: v for k, v in neighbour.metadata.items() if k != _adapters.NUGGETS
                    }
        return nodes


def _settings(rag: CoinRAG) -> dict[str, Any]:
    return {
        "proposer_id": rag.proposer.proposer_id,
        "chunk_tokens": rag.engine.config.chunk_tokens,
        "tokenizer_digest": rag.engine.model.tokenizer.digest,
    }


def _texts(nodes: Sequence[BaseNode]) -> list[TextNode]:
    return [node for node in nodes if isinstance(node, TextNode)]
