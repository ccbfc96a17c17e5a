"""A LlamaIndex node parser whose nodes are the store's own chunks, with their nuggets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.callbacks import CallbackManager
from llama_index.core.llms import LLM
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
from coinrag_integrations.engine.chunking import chunk_document
from coinrag_integrations.engine.tokens import TextTokenizer
from coinrag_integrations.errors import ConfigError
from coinrag_integrations.llamaindex._convert import complete_with, describe_chunk, nuggets_of
from coinrag_integrations.nuggets import LLMProposer, NuggetProposer, extract_nuggets
from coinrag_integrations.rag import CoinRAG
from coinrag_integrations.types import Chunk, Document, Scope


@dataclass(frozen=True, slots=True)
class _Cutter:
    """All that cutting takes of a store: no model, so that it travels to other processes."""

    tokenizer: TextTokenizer
    chunk_tokens: int
    scope: Scope
    proposer: NuggetProposer

    def chunks(self, document: Document) -> list[Chunk]:
        chunks = chunk_document(document, self.tokenizer, self.chunk_tokens, self.scope)
        return [extract_nuggets(chunk, self.proposer) for chunk in chunks]

    def __deepcopy__(self, _: object) -> _Cutter:
        """The same: nothing in it changes."""
        return self


class NuggetNodeParser(NodeParser):
    """Cuts documents into the chunks that a store would make of them.

    A node's text is the chunk's exact text, its id the chunk's id (unless `id_func` is given), and
    its nuggets are in the metadata. With `nugget_nodes` each of them is also a node behind its chunk's,
    which is its parent. It can be pickled, for pipelines with `num_workers`, unless its proposer
    cannot. The fields below name all that decides about chunks and nuggets, so that a pipeline's cache
    notices a change.

        >>> nodes = NuggetNodeParser.from_defaults(rag=rag).get_nodes_from_documents(documents)
    """

    proposer_id: str = Field(description="Names the proposer of nuggets and its options.")
    chunk_tokens: int = Field(description="Tokens of a chunk.")
    tokenizer_digest: str = Field(description="SHA-256 of the tokenizer's definition.")
    nugget_nodes: bool = Field(default=False, description="Whether nuggets are nodes as well.")
    _cutter: _Cutter | None = PrivateAttr()

    def __init__(
        self, *, rag: CoinRAG | None = None, proposer: NuggetProposer | None = None, **data: Any
    ) -> None:
        """Prefer `from_defaults`. Without `rag` the parser can be kept, but not used."""
        super().__init__(**data)
        self._cutter = None
        if rag is not None:
            tokenizer, n_tokens = rag.engine.model.tokenizer, rag.engine.config.chunk_tokens
            self._cutter = _Cutter(tokenizer, n_tokens, rag.engine.scope, proposer or rag.proposer)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Unlike the base class, keep what is no field."""
        super().__setstate__(state)
        self._cutter = (state.get("__pydantic_private__") or {}).get("_cutter")

    @classmethod
    def class_name(cls) -> str:
        """The name under which the parser is serialised."""
        return "NuggetNodeParser"

    @classmethod
    def from_defaults(
        cls,
        *,
        rag: CoinRAG,
        llm: LLM | None = None,
        proposer: NuggetProposer | None = None,
        nugget_nodes: bool = False,
        include_metadata: bool = True,
        include_prev_next_rel: bool = True,
        callback_manager: CallbackManager | None = None,
        id_func: Callable[[int, BaseNode], str] | None = None,
    ) -> Self:
        """A parser with the tokenizer and the chunk size of `rag`.

        Nuggets are proposed by `llm` (any of LlamaIndex's), by `proposer`, or as the store does it.

        Raises:
            ConfigError: both `llm` and `proposer` are given.
        """
        if llm is not None:
            if proposer is not None:
                raise ConfigError("give llm or proposer, not both")
            proposer = LLMProposer(complete=complete_with(llm), model_id=llm.metadata.model_name)
        return cls(
            rag=rag,
            proposer=proposer,
            nugget_nodes=nugget_nodes,
            include_metadata=include_metadata,
            include_prev_next_rel=include_prev_next_rel,
            callback_manager=callback_manager or CallbackManager([]),
            id_func=id_func or default_id_func,
            **_settings(rag, proposer),
        )

    @classmethod
    def from_dict(cls, data: dict[str, Any], **kwargs: Any) -> Self:
        """The inverse of `to_dict`; give `rag` to be able to parse, and the `proposer` there was.

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
            own = _settings(rag, data.get("proposer"))
            differing = [k for k, v in own.items() if data.get(k, v) != v]
            if differing:
                raise ConfigError(
                    f"the parser was saved with another {' and '.join(differing)} than this "
                    "CoinRAG has: open the store that it was made for, or make a new parser"
                )
            data |= own
        return super().from_dict(data)

    def _parse_nodes(
        self, nodes: Sequence[BaseNode], show_progress: bool = False, **kwargs: Any
    ) -> list[BaseNode]:
        parsed: list[BaseNode] = []
        for node in get_tqdm_iterable(nodes, show_progress, "Parsing nodes"):
            parsed += self._nodes_of(node, self._chunks(node))
        return parsed

    async def _aparse_nodes(
        self, nodes: Sequence[BaseNode], show_progress: bool = False, **kwargs: Any
    ) -> list[BaseNode]:
        return await asyncio.to_thread(self._parse_nodes, nodes, show_progress, **kwargs)

    def _chunks(self, node: BaseNode) -> list[Chunk]:
        if self._cutter is None:
            raise ConfigError(
                "this NuggetNodeParser was read back without its CoinRAG, or pickled with a proposer that "
                "cannot be: use NuggetNodeParser.from_dict(parser.to_dict(), rag=rag), and num_workers=1"
            )
        text = node.get_content(metadata_mode=MetadataMode.NONE)
        return self._cutter.chunks(Document(document_id=node.node_id, text=text))

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
        if not self.nugget_nodes:
            return nodes
        return [it for node in _texts(nodes) for it in (node, *_nugget_nodes(node))]


def _nugget_nodes(parent: TextNode) -> list[BaseNode]:
    """A node for each nugget of a chunk's node, related to it in both directions."""
    begin = parent.start_char_idx
    nodes: list[BaseNode] = []
    for nugget in nuggets_of(parent):
        span = _adapters.nugget_span(parent.metadata, nugget)
        node = TextNode(
            id_=_adapters.span_id(span.ref),
            text=nugget.text,
            start_char_idx=None if begin is None else begin + nugget.char_start,
            end_char_idx=None if begin is None else begin + nugget.char_stop,
            metadata=_adapters.span_metadata(span),
            excluded_embed_metadata_keys=list(parent.excluded_embed_metadata_keys),
            excluded_llm_metadata_keys=list(parent.excluded_llm_metadata_keys),
            relationships={NodeRelationship.PARENT: RelatedNodeInfo(node_id=parent.node_id)},
        )
        if (source := parent.relationships.get(NodeRelationship.SOURCE)) is not None:
            node.relationships[NodeRelationship.SOURCE] = source
        nodes.append(node)
    parent.relationships[NodeRelationship.CHILD] = [
        RelatedNodeInfo(node_id=node.node_id) for node in nodes
    ]
    return nodes


def _settings(rag: CoinRAG, proposer: NuggetProposer | None) -> dict[str, Any]:
    return {
        "proposer_id": (proposer or rag.proposer).proposer_id,
        "chunk_tokens": rag.engine.config.chunk_tokens,
        "tokenizer_digest": rag.engine.model.tokenizer.digest,
    }


def _texts(nodes: Sequence[BaseNode]) -> list[TextNode]:
    return [node for node in nodes if isinstance(node, TextNode)]
