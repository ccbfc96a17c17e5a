"""What both framework adapters share, so that they cannot disagree. Imports no framework.

A span or chunk travels through a framework as its text with flat metadata under `coinrag_`: the
triple, where the text stands in its document, and a digest of the text. The digest is what makes a
text that was changed on the way (masked, cut again) an error instead of an answer from other words.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, replace
from typing import Any, Protocol

from coinrag_integrations.engine import Answer, GenerationConfig, Timings, Usage
from coinrag_integrations.engine.handles import Reason
from coinrag_integrations.errors import ConfigError, DocumentError
from coinrag_integrations.rag import CoinRAG
from coinrag_integrations.reply import ReplyStream
from coinrag_integrations.retrieval import Condition, RetrievalConfig, is_list
from coinrag_integrations.retrieval.config import Form
from coinrag_integrations.retrieval.filters import all_of, where_of
from coinrag_integrations.types import Chunk, ChunkId, Nugget, ScoredSpan, Span, SpanRef

logger = logging.getLogger(__name__)

PREFIX = "coinrag_"
NUGGETS = "coinrag_nuggets"
SCORE = "coinrag_score"
SPAN_KEYS = (
    "coinrag_chunk_id",
    "coinrag_start",
    "coinrag_stop",
    "coinrag_document_id",
    "coinrag_char_start",
    "coinrag_char_stop",
    "coinrag_digest",
)
RATIO = "coinrag_ratio"  # of spans that are read as slots
KEYS = (*SPAN_KEYS, RATIO, NUGGETS, SCORE)
# What LlamaIndex keeps of a document beside text and metadata: where it came from, what is shown.
REF_DOC_ID = "ref_doc_id"
NODE = "_llamaindex"
HIDDEN = (*KEYS, NODE, REF_DOC_ID)  # not for models to read
_NODE_DEFAULTS: dict[str, Any] = {
    "excluded_llm_metadata_keys": [],
    "excluded_embed_metadata_keys": [],
    "metadata_template": "{key}: {value}",
    "metadata_separator": "\n",
    "text_template": "{metadata_str}\n\n{content}",
}
_DECODING = ("max_tokens", "temperature", "top_p", "top_k", "seed", "use_kv")
_NOTHING = Answer(
    text="",
    finish_reason="empty",
    spans=(),
    recomputed=(),
    usage=Usage(cached=0, online=0, generated=0),
    timings=Timings(),
)


def span_id(ref: SpanRef) -> str:
    """The id of a span's node or document: the same span always has the same."""
    return ":".join(map(str, plain_ref(ref)))


def plain_ref(ref: SpanRef) -> list[Any]:
    """A span's chunk, start and stop; and its ratio, if it is read as slots."""
    return [ref.chunk_id, ref.start, ref.stop, *([ref.ratio] if ref.ratio > 1 else [])]


def ref_of(metadata: Mapping[str, Any]) -> SpanRef:
    """The span that metadata name.

    Raises:
        KeyError, TypeError, ValueError: they name none.
    """
    chunk_id, start, stop = (metadata[key] for key in SPAN_KEYS[:3])
    ratio = int(metadata.get(RATIO, 1))
    return SpanRef(ChunkId(str(chunk_id)), int(start), int(stop), ratio)


def span_metadata(span: ScoredSpan) -> dict[str, Any]:
    """The document's metadata, in one order (Chroma has none), and our keys."""
    values = (
        span.ref.chunk_id,
        span.ref.start,
        span.ref.stop,
        span.document_id,
        span.char_start,
        span.char_stop,
        digest(span.text),
    )
    own = dict(zip(SPAN_KEYS, values, strict=True))
    if span.ref.ratio > 1:
        own[RATIO] = span.ref.ratio
    return {**dict(sorted(span.metadata.items())), **own}


def nugget_span(metadata: Mapping[str, Any], nugget: Nugget) -> ScoredSpan:
    """A nugget as a span, given the metadata that `chunk_metadata` wrote of its chunk."""
    begin = int(metadata["coinrag_char_start"])
    return ScoredSpan(
        ref=SpanRef(ChunkId(metadata["coinrag_chunk_id"]), nugget.span.start, nugget.span.stop),
        text=nugget.text,
        score=1.0,
        document_id=str(metadata["coinrag_document_id"]),
        char_start=begin + nugget.char_start,
        char_stop=begin + nugget.char_stop,
        metadata={k: v for k, v in metadata.items() if not k.startswith(PREFIX)},
    )


def chunk_metadata(chunk: Chunk) -> dict[str, Any]:
    """Our keys for a whole chunk, its nuggets among them as one JSON text."""
    whole = ScoredSpan(
        ref=chunk.ref(),
        text=chunk.text,
        score=1.0,
        document_id=chunk.document_id,
        char_start=chunk.char_start,
        char_stop=chunk.char_start + len(chunk.text),
    )
    rows = [
        [n.span.start, n.span.stop, n.char_start, n.char_stop, n.match, n.similarity]
        for n in chunk.nuggets
    ]
    return {**span_metadata(whole), NUGGETS: json.dumps(rows, separators=(",", ":"))}


def read_span(metadata: Mapping[str, Any], text: str, owner: str, score: float = 0.0) -> ScoredSpan:
    """The span that `metadata` describes; `owner` names its bearer in errors.

    Raises:
        ConfigError: the metadata is not ours, or `text` is not the text that it was made for.
    """
    try:
        ref = ref_of(metadata)
        document_id, char_start, char_stop, expected = (metadata[key] for key in SPAN_KEYS[3:])
        bounds = int(char_start), int(char_stop)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{owner} carries no span of a CoinRAG store ({type(error).__name__}: {error}), so "
            "there is no KV to answer from: take it from a CoinRAG retriever or splitter"
        ) from error
    if expected != digest(text):
        raise ConfigError(
            f"the text of {owner} was changed after it was retrieved or split, but its KV was not: "
            "leave out the step that rewrites or cuts texts"
        )
    return ScoredSpan(
        ref=ref,
        text=text,
        score=score,
        document_id=str(document_id),
        char_start=bounds[0],
        char_stop=bounds[1],
        metadata={k: v for k, v in metadata.items() if not k.startswith(PREFIX)},
    )


def is_span(metadata: Mapping[str, Any]) -> bool:
    """Whether metadata are of a span or chunk of ours."""
    return all(key in metadata for key in SPAN_KEYS)


def span_or_text(
    metadata: Mapping[str, Any], text: str, owner: str, score: float = 0.0
) -> ScoredSpan | str:
    """The span that `metadata` describes, if it does and the text is its own; else the text."""
    try:
        return read_span(metadata, text, owner, score)
    except ConfigError as error:
        logger.info("read as text: %s", error)
        return text


def altered(
    found: Sequence[ScoredSpan | str], metadata: Sequence[Mapping[str, Any]]
) -> dict[Reason, int]:
    """How many texts are read as text although their metadata say that they are spans."""
    pairs = zip(found, metadata, strict=True)
    n = sum(isinstance(it, str) and is_span(described) for it, described in pairs)
    return {"altered": n} if n else {}


def read_nuggets(metadata: Mapping[str, Any], text: str, owner: str) -> tuple[Nugget, ...]:
    """The nuggets that `chunk_metadata` wrote down.

    Raises:
        ConfigError: there are none written, or not in our form.
    """
    try:
        return tuple(
            Nugget(
                text=text[char_start:char_stop],
                span=Span(start, stop),
                char_start=char_start,
                char_stop=char_stop,
                match=match,
                similarity=similarity,
            )
            for start, stop, char_start, char_stop, match, similarity in json.loads(
                metadata[NUGGETS]
            )
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{owner} carries no nuggets ({type(error).__name__}: {error}): take it from a CoinRAG "
            "node parser or splitter"
        ) from error


def flat_metadata(metadata: Mapping[Any, Any], document_id: str) -> dict[str, Any]:
    """`metadata` as Chroma keeps it: None is left out, nested values become JSON, others their text.

    Lists of text, of numbers or of booleans stay lists.

    Raises:
        DocumentError: a number that is not finite; Chroma would lose it silently.
    """
    flat: dict[str, Any] = {}
    for key, value in metadata.items():
        if value is None or str(key).startswith(PREFIX):
            continue
        if isinstance(value, float) and not math.isfinite(value):
            raise DocumentError(
                f"metadata {key!r} of document {document_id!r} is {value}: leave it out, or make "
                "it a finite number"
            )
        if is_list(value):
            flat[str(key)] = value
        elif isinstance(value, Mapping | list | tuple):
            flat[str(key)] = json.dumps(value, ensure_ascii=False, default=str)
        else:
            flat[str(key)] = value if isinstance(value, str | int | float) else str(value)
    return flat


def node_metadata(fields: Mapping[str, Any]) -> dict[str, str]:
    """The fields of a LlamaIndex node that are not what they usually are, as metadata to store."""
    own = {}
    for name, usual in _NODE_DEFAULTS.items():
        value = fields.get(name, usual)
        if isinstance(usual, list):
            value = [key for key in value if key not in HIDDEN]
        if value != usual:
            own[name] = value
    return {NODE: json.dumps(own, ensure_ascii=False)} if own else {}


def node_fields(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a LlamaIndex node, of metadata that `node_metadata` wrote or of any other."""
    try:
        own = json.loads(metadata.get(NODE, "{}"))
        kept = {k: own[k] for k, v in _NODE_DEFAULTS.items() if isinstance(own.get(k), type(v))}
    except (TypeError, ValueError, AttributeError):  # somebody else's key
        kept = {}
    return {**deepcopy(_NODE_DEFAULTS), **kept}


def retrieval_config(
    rag: CoinRAG,
    n_chunks: int | None,
    n_nuggets: int | None,
    where: Condition | None = None,
    form: Form | None = None,
    ratio: int | None = None,
    n_raw: int | None = None,
) -> RetrievalConfig:
    """The store's own widths and form, but for those that are given; `where` holds beside its condition.

    Raises:
        ConfigError: a width below 1, a form that is none, an `n_raw` below 0, or a condition that Chroma
            cannot check.
    """
    return replace(
        rag.retrieval,
        where=all_of([where_of(rag.retrieval.where), where_of(where)]),
        n_chunks=rag.retrieval.n_chunks if n_chunks is None else n_chunks,
        n_nuggets=rag.retrieval.n_nuggets if n_nuggets is None else n_nuggets,
        form=rag.retrieval.form if form is None else form,
        ratio=rag.retrieval.ratio if ratio is None else ratio,
        n_raw=rag.retrieval.n_raw if n_raw is None else n_raw,
    )


def report(stream: ReplyStream | None, retrieve_ms: float = 0.0) -> dict[str, Any]:
    """What an answer says of itself, as plain values; of no answer (None) the same keys."""
    if stream is None:
        return {**report_of(_NOTHING), "timings": asdict(Timings(retrieve_ms=retrieve_ms))}
    return report_of(stream.reply.answer)


def report_of(answer: Answer) -> dict[str, Any]:
    """What an answer says of itself, as plain values."""
    return {
        "spans": [plain_ref(ref) for ref in answer.spans],
        "recomputed": [plain_ref(ref) for ref in answer.recomputed],
        "refused": dict(answer.refused),
        "finish_reason": answer.finish_reason,
        "usage": asdict(answer.usage),
        "timings": asdict(answer.timings),
    }


def call_options(model: Any, given: Mapping[str, Any], also: Sequence[str] = ()) -> dict[str, Any]:
    """What decides about an answer: the fields of a framework's model, unless a call says otherwise.

    None says nothing.

    Raises:
        ConfigError: a call gives something else.
    """
    known = (*_DECODING, *also)
    if unknown := given.keys() - known:
        raise ConfigError(
            f"{', '.join(sorted(unknown))}: no such option. A call takes stop, {', '.join(known)}"
        )
    said = {name: value for name, value in given.items() if value is not None}
    return {name: said.get(name, getattr(model, name)) for name in known}


def generation_of(options: Mapping[str, Any], stop: Sequence[str] | str | None) -> GenerationConfig:
    """How to decode, of what `call_options` gives.

    Raises:
        ConfigError: a value outside its range.
    """
    return GenerationConfig(
        max_new_tokens=options["max_tokens"],
        temperature=options["temperature"],
        top_p=options["top_p"],
        top_k=options["top_k"],
        seed=options["seed"],
        stop=(stop,) if isinstance(stop, str) else tuple(stop or ()),
    )


def token_counts(answer: Answer) -> dict[str, int]:
    """Tokens as frameworks count them, whether they were computed or taken from a cache, and ours."""
    usage = answer.usage
    n_prompt = usage.cached + usage.online
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": usage.generated,
        "total_tokens": n_prompt + usage.generated,
        "coinrag_cached_tokens": usage.cached,
        "coinrag_online_tokens": usage.online,
    }


class Pieces(Protocol):
    """An answer's text, a piece at a time."""

    def __next__(self) -> str:
        """The next piece."""
        ...

    def close(self) -> None:
        """Stop generating."""
        ...


async def off_loop(stream: Pieces) -> AsyncGenerator[str, None]:
    """The pieces of `stream`, each computed in a thread. Leaving early stops the generation."""
    step: asyncio.Future[str | None] | None = None
    try:
        while True:
            step = asyncio.ensure_future(asyncio.to_thread(next, stream, None))
            # Cancelling a thread's future would not stop the thread: shielded, we know when it ends.
            piece = await asyncio.shield(step)
            if piece is None:
                return
            yield piece
    finally:
        if step is None or step.done():
            stream.close()
        else:
            step.add_done_callback(_closing(stream))


def _closing(stream: Pieces) -> Callable[[asyncio.Future[str | None]], None]:
    def close(step: asyncio.Future[str | None]) -> None:
        if not step.cancelled():
            step.exception()  # nobody waits for it any more
        stream.close()

    return close


def digest(text: str) -> str:
    """A short hash of a text."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
