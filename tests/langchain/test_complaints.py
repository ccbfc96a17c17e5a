"""What users of LangChain and Chroma complained about elsewhere, as tests: the store and what is found.

The table lists all 40 complaints that we collected from public threads, by number, and the tests that
hold them off; where no file is named they are in this one. `models` and `state` are
test_complaints_models.py and test_complaints_state.py beside it, `words` is test_plain_text.py; `lc`
stands for tests/langchain, `li` for tests/llamaindex.

 1 distance or similarity ......... lc/test_retriever scores_are_there; retrieval/test_index scores_fall
 2 other spaces, other lengths .... scores_of_embeddings_of_any_length; test_index somebody_else_is_refused
 3 scores None or zero ............ li/test_complaints no_score_is_none
 4 start_char_idx ................. li/test_node_parser offsets_are_exact
 5 start_index -1 ................. places_are_exact_for_any_text; lc/test_splitter start_indices
 6 offsets of many-byte letters ... places_are_exact_for_any_text; engine/test_chunking, test_tokens
 7 metadata longer than a chunk ... li/test_complaints our_metadata_is_read_by_nobody
 8 None in metadata ............... lc/test_ingest scalars_and_lists; li/test_complaints none_lists
 9 lists, dicts, NaN in metadata .. any_metadata_comes_back, numbers_that_are_none
10 no metadata .................... lc/test_ingest without_metadata
11 doubles on ingesting again ..... the_same_chunk_twice; lc/test_ingest known_by_their_source
12 old rows after an edit ......... lc/test_ingest edited_document; test_ingest nothing_old_is_left;
                                    state edited_texts_are_asked_anew
13 deletes that leave rows ........ what_is_deleted_by_its_source; test_ingest deleting_removes_everything
14 batches too large .............. more_nuggets_than_chroma_takes; retrieval/test_index batch_limit
15 too many SQL variables ......... as_many_values_as_sqlite_takes
16 gone between two stages ........ what_goes_between_the_stages, what_goes_before_the_answer
17 filters ........................ conditions_reach_every_way; retrieval/test_filters; li/test_filters
18 k > rows, empty store .......... more_than_there_is; lc/test_retriever, test_chain empty_store
19 two processes .................. retrieval/test_folder; faults/readers
20 races at the first creation .... state a_new_store_may_be_opened; engine/store/test_lock; test_folder
21 another embedding function ..... another_embedding_model_is_refused; test_index by_our_embedder
22 telemetry ...................... nothing_is_sent_anywhere; conftest (loopback only)
23 a blocked event loop ........... models the_event_loop_stays_free, cancelling_stops; lc/test_retriever,
                                    test_chain, test_chat_model event_loop
24 no stop ........................ models options_of_a_call; li/test_complaints models_stop_at_every_token
25 options ignored ................ models options_of_a_call, unknown_options, unknown_fields
26 two tokens at the beginning .... models a_prompt_begins_once; engine/test_chat tokens_are_those
27 errors while generating ........ models an_error_while_generating
28 streaming that is none ......... models the_first_piece_comes_first, letters_of_several_tokens
29 wrong device or dtype .......... engine/test_engine opened_only_as_it_was_built, bf16_and_fp16
30 threads ........................ state many_threads; lc/test_chat_model batches_and_threads
31 copies and pickles ............. state copies_share_the_engine
32 a cache that is written into ... state what_is_stored_is_the_same; engine/test_prefix not_touched
33 answers of another model ....... state answers_of_other_weights, edited_texts_are_asked_anew,
                                    passages_that_come_as_objects; lc/test_chat_model not_mixed_up
34 tokens counted by GPT-2 ........ lc/test_chat_model tokens_are_the_models_own; lc/test_llm
35 windows ........................ models what_does_not_fit; li/test_complaints shorter_than_the_window
36 others' collections ............ tests/migration; retrieval/test_index somebody_else_is_refused
37 sources ........................ state sources_are_there; li/test_complaints sources
38 braces and look-alikes ......... words (all); lc/test_chain braces; engine/test_prompt, test_chat
39 checkpoints .................... state documents_survive_a_checkpoint; lc/test_chat_model artifacts
40 was the cache used? ............ state every_answer_says; li/test_complaints every_answer_says
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings

from coinrag_integrations.engine import Engine, EngineConfig, LoadedModel
from coinrag_integrations.errors import ConfigError, DocumentError, SpanIndexError
from coinrag_integrations.langchain import (
    ChatCoinRAG,
    CoinRAGGenerator,
    CoinRAGRetriever,
    LangChainEmbedder,
    NuggetTextSplitter,
    add_documents,
    create_coinrag_chain,
)
from coinrag_integrations.langchain._convert import nuggets_of, text_of
from coinrag_integrations.nuggets import RuleProposer
from coinrag_integrations.rag import CoinRAG
from coinrag_integrations.retrieval import SpanIndex, open_client
from tests.adapters import QUESTION, TEXTS, run_python
from tests.tiny import HashEmbedder

EXACT = "The lighthouse of Sorn is white."


class Loud(Embeddings):
    """Vectors of length seven."""

    def __init__(self, model: str = "loud") -> None:
        self.model = model

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [(7 * row).tolist() for row in HashEmbedder().embed_documents(texts)]

    def embed_query(self, text: str) -> list[float]:
        return self.embed_documents([text])[0]


def users(document: Document) -> dict[str, Any]:
    """Metadata that are not ours."""
    return {k: v for k, v in document.metadata.items() if not k.startswith("coinrag_")}


def sources(found: list[Document]) -> set[str]:
    return {document.metadata["source"] for document in found}


def test_scores_of_embeddings_of_any_length_are_cosines(engine: Engine, documents: list[Document]):
    """LC 22732, 6481: scores of -16. No `score` is a distance, whatever the vectors' lengths."""
    index = SpanIndex(open_client(None), LangChainEmbedder(Loud()), f"t{uuid4().hex}")
    rag = CoinRAG(engine, index)
    add_documents(rag, documents)
    found = CoinRAGRetriever(rag=rag, k=50, n_chunks=50).invoke(EXACT)
    scores = [document.metadata["coinrag_score"] for document in found]
    assert text_of(found[0]) == EXACT
    assert scores[0] == pytest.approx(1.0, abs=1e-5)
    assert all(-1.0 <= score <= 1.0 + 1e-5 for score in scores)
    assert len({round(score, 3) for score in scores}) > 3
    assert scores == pytest.approx(sorted(scores, reverse=True), abs=1e-6)


@pytest.fixture(scope="module")
def splitter(
    model: LoadedModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[NuggetTextSplitter]:
    with Engine(model, tmp_path_factory.mktemp("split"), EngineConfig(chunk_tokens=16)) as engine:
        yield NuggetTextSplitter(engine, RuleProposer())


@given(
    st.lists(
        st.sampled_from(["The tide", "é", "👩‍👩‍👧", "灯台", " ", "\n\n", ". ", "🫖", "x" * 9])
    ),
    st.integers(1, 4),
)
def test_places_are_exact_for_any_text(splitter: NuggetTextSplitter, words: list[str], n: int):
    """LC 17642, 16579: `start_index` of -1, or of the first of several places with that text."""
    text, at = "".join(words) * n, 0
    for piece in splitter.split_documents([Document(text, metadata={"source": "s"})]):
        assert piece.metadata["start_index"] == at
        for nugget in nuggets_of(piece):
            assert text[at + nugget.char_start : at + nugget.char_stop] == nugget.text
        at += len(piece.page_content)
        assert text[at - len(piece.page_content) : at] == piece.page_content
    assert at == len(text)


def test_any_metadata_comes_back_and_scalars_can_be_filtered_by(rag: CoinRAG):
    """LC 8556, CH 1552: lists, dicts and empty lists break Chroma."""
    metadata = {
        "source": "a",
        "names": ["a", "ö"],
        "tags": [],
        "nested": {},
        "pair": (1, 2),
        "deep": {"a": [{"b": None}]},
        "day": datetime.date(1923, 5, 1),
        "long": "word " * 3000,
        "n": 3,
        "ratio": 0.5,
        "open": True,
    }
    other = Document("The mill is red too.", metadata={"source": "b", "n": 4, "open": False})
    add_documents(rag, [Document("The mill is red.", metadata=metadata), other])
    for condition in (
        {"n": 3},
        {"ratio": {"$lt": 0.6}},
        {"open": True},
        {"names": {"$contains": "ö"}},
    ):
        (found,) = CoinRAGRetriever(rag=rag).invoke("mill", filter=condition)
        assert users(found) == {
            **metadata,
            "tags": "[]",
            "nested": "{}",
            "pair": "[1, 2]",
            "deep": '{"a": [{"b": null}]}',
            "day": "1923-05-01",
        }


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1 << 70])
def test_numbers_that_are_none_are_refused_before_anything_is_written(rag: CoinRAG, value: float):
    """Chroma takes NaN and infinity, and gives them back as nothing."""
    with pytest.raises(DocumentError, match="score"):
        add_documents(rag, [Document("The mill.", id="a", metadata={"score": value})])
    assert rag.engine.catalog.documents() == []
    assert rag.index.counts() == {"chunks": 0, "nuggets": 0}


def test_the_same_chunk_twice_in_a_text_is_two_chunks(rag: CoinRAG):
    """LI 13162, CH 2588: DuplicateIDError, or one row for two places."""
    document = Document("x" * 32 * 4, metadata={"source": "x"})
    add_documents(rag, [document])
    chunks = list(rag.engine.catalog.chunks())
    assert len({chunk.text for chunk in chunks}) == 1 < len({chunk.chunk_id for chunk in chunks})
    before = rag.index.counts()
    assert before["chunks"] == 4
    report = add_documents(rag, [document, document])
    assert (report.n_unchanged, report.n_encoded, rag.index.counts()) == (2, 0, before)
    found = CoinRAGRetriever(rag=rag, k=99, n_chunks=99).invoke(chunks[0].text)
    places = {document.metadata["coinrag_char_start"] for document in found}
    assert len({document.id for document in found}) == len(found) == len(places) >= 4


def test_what_is_deleted_by_its_source_is_gone_everywhere(filled: CoinRAG):
    """LC 4519: documents that were deleted are found again."""
    before = filled.index.counts()
    pages = [
        Document(f"The organ is on page {i}.", metadata={"source": "a.pdf", "page": i})
        for i in range(2)
    ]
    add_documents(filled, pages)
    gone = filled.engine.catalog.chunk_ids("a.pdf#0")
    assert filled.delete(["a.pdf#0", "never there"]) == 1
    assert not any(chunk_id in filled.engine.store for chunk_id in gone)
    found = CoinRAGRetriever(rag=filled, k=99).invoke("organ page 0")
    assert {it.metadata["page"] for it in found if it.metadata["source"] == "a.pdf"} == {1}
    assert filled.delete(["a.pdf#1"]) == 1
    assert filled.index.counts() == before


class EveryWord:
    """Each word is a nugget."""

    proposer_id = "every-word"

    def propose(self, text: str) -> list[str]:
        return re.findall(r"\S+", text)


def test_more_nuggets_than_chroma_takes_at_once_are_ingested(engine: Engine):
    """LC 18105, 25437: "Cannot submit more than 5,461 embeddings at once"."""
    index = SpanIndex(open_client(None), HashEmbedder(), f"t{uuid4().hex}")
    rag = CoinRAG(engine, index, proposer=EveryWord())
    limit = open_client(None).get_max_batch_size()
    many = Document("a b c d e f g h " * (limit // 8 + 40), metadata={"source": "many"})
    report = add_documents(rag, [many])
    assert report.n_nuggets == index.counts()["nuggets"] > limit
    assert text_of(CoinRAGRetriever(rag=rag, k=1).invoke("g")[0]) == "g"
    assert rag.delete(["many"]) == 1
    assert index.counts() == {"chunks": 0, "nuggets": 0}


def test_as_many_values_as_sqlite_takes_may_be_in_a_filter(filled: CoinRAG):
    """CH 1861, 2762: "too many SQL variables" is at least said by an error of ours."""
    retriever = CoinRAGRetriever(rag=filled, k=3)

    def among(n: int) -> list[Document]:
        names = ["organ", *(f"other {i}" for i in range(n))]
        return retriever.invoke(QUESTION, filter={"source": {"$in": names}})

    assert sources(among(30_000)) == {"organ"}
    with pytest.raises(SpanIndexError, match="too many SQL variables"):
        among(40_000)
    assert sources(among(3)) == {"organ"}


def test_what_goes_between_the_stages_is_not_found(
    filled: CoinRAG, monkeypatch: pytest.MonkeyPatch
):
    """Chroma raises "Error finding id" for rows that are gone; here there is one document less."""
    catalog, live = filled.engine.catalog, filled.engine.catalog.live

    def going(chunk_ids: Any) -> Any:  # asked between the two stages
        found = live(chunk_ids)
        monkeypatch.setattr(catalog, "live", live)
        filled.delete(["organ"])
        return found

    monkeypatch.setattr(catalog, "live", going)
    found = CoinRAGRetriever(rag=filled, k=99).invoke(QUESTION)
    assert sources(found) == set(TEXTS) - {"organ"}


@pytest.mark.parametrize("edited", [False, True])
async def test_what_goes_before_the_answer_is_read_as_text(filled: CoinRAG, edited: bool):
    """Documents in a state outlive those of the store: their words are there, their KV is not."""
    found = CoinRAGRetriever(rag=filled, k=99).invoke(QUESTION)
    n_gone = sum(document.metadata["source"] == "organ" for document in found)
    filled.delete(["organ"])
    if edited:
        new = f"New. {TEXTS['organ']}"
        add_documents(filled, [Document(new, metadata={"source": "organ"})])
    value = {"question": QUESTION, "documents": found}
    texts = [text_of(d) if d.metadata["source"] == "organ" else d for d in found]
    plain = [Document(it) if isinstance(it, str) else it for it in texts]
    generator = CoinRAGGenerator(rag=filled)
    assert generator.invoke(value) == generator.invoke({**value, "documents": plain}) != ""
    assert await generator.ainvoke(value) == generator.invoke(value)
    chain = create_coinrag_chain(filled, CoinRAGRetriever(rag=filled) | (lambda _: found))
    assert chain.invoke(QUESTION)["coinrag"]["refused"] == {"unknown": n_gone}
    prompt = "\n".join(document.page_content for document in found)
    said = ChatCoinRAG(rag=filled, max_tokens=2).invoke(f"{prompt} Who?").response_metadata
    assert said["coinrag"]["refused"] == {"unknown": n_gone}


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ({"source": "organ", "title": "Organ"}, {"organ"}),
        ({"source": "organ", "title": "Light"}, set()),
        ({"$or": [{"source": "organ"}, {"$and": [{"title": "Light"}]}]}, {"organ", "light"}),
        ({"source": {"$in": []}}, set()),
        ({"source": {"$nin": ["organ", "light"]}}, {"café", "wheel"}),
        ({"source": {"$ne": "organ"}, "title": {"$in": ["Organ", "Wheel"]}}, {"wheel"}),
        ({}, set(TEXTS)),
    ],
)
async def test_conditions_reach_every_way_of_asking(
    filled: CoinRAG, condition: dict[str, Any], expected: set[str]
):
    """LC 26767: two keys need `$and`; LC 7169, 25120: filters that are silently dropped."""
    for_good = CoinRAGRetriever(rag=filled, k=99, filter=condition)
    for_once = CoinRAGRetriever(rag=filled, k=99)
    for found in (
        for_good.invoke(QUESTION),
        for_once.invoke(QUESTION, filter=condition),
        await for_once.ainvoke(QUESTION, filter=condition),
        for_good.invoke(QUESTION, filter=condition),
        for_once.batch([QUESTION], filter=condition)[0],
        create_coinrag_chain(filled, for_good).invoke(QUESTION)["context"],
    ):
        assert sources(found) == expected
    both = for_good.invoke(QUESTION, filter={"source": "organ"})
    assert sources(both) == expected & {"organ"}


def test_conditions_that_chroma_cannot_check_are_named(filled: CoinRAG):
    for odd, named in [({"$not": {"a": 1}}, r"\$not"), ({"a": {"$like": "b"}}, r"\$like")]:
        with pytest.raises(ConfigError, match=named):
            CoinRAGRetriever(rag=filled).invoke(QUESTION, filter=odd)
        with pytest.raises(ConfigError, match=named):
            CoinRAGRetriever(rag=filled, filter=odd).invoke(QUESTION)


def test_more_than_there_is_is_all_there_is(filled: CoinRAG):
    """LC 3674, CH 342: "Number of requested results 4 cannot be greater than …"."""
    everything = CoinRAGRetriever(rag=filled, k=5000, n_chunks=5000).invoke(QUESTION)
    counts = filled.index.counts()
    assert len(everything) >= counts["nuggets"] > 10
    assert sources(everything) == set(TEXTS)


def test_another_embedding_model_is_refused_before_anything_is_written(
    model: LoadedModel, tmp_path: Path
):
    """CH 886: an index of two models' vectors finds anything."""
    with CoinRAG.open(tmp_path, model=model, embedder=LangChainEmbedder(Loud("a"))) as rag:
        add_documents(rag, [Document(EXACT, metadata={"source": "a"})])
        before = rag.index.counts()
    with pytest.raises(SpanIndexError, match="belongs to the embedder 'Loud:a'"):
        CoinRAG.open(tmp_path, model=model, embedder=LangChainEmbedder(Loud("b")))
    with CoinRAG.open(tmp_path, model=model, embedder=LangChainEmbedder(Loud("a"))) as rag:
        assert rag.index.counts() == before
        assert text_of(CoinRAGRetriever(rag=rag).invoke(EXACT)[0]) == EXACT


def test_nothing_is_sent_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """CH 4966, 6098: telemetry. Names that are looked up count, and what background threads do."""
    for name in ("LANGSMITH_TRACING", "LANGSMITH_TRACING_V2", "LANGCHAIN_TRACING_V2"):
        monkeypatch.delenv(name, raising=False)  # traces are sent where a user asks for them
    done = run_python(f"""
        import atexit, socket

        tried = []
        atexit.register(lambda: print(tried))  # the first to register is the last to run

        def refuse(*args, **_):
            address = args[-1] if isinstance(args[0], socket.socket) else args[0]
            if not (isinstance(address, str) and address.startswith("/")):
                tried.append(address)
            raise OSError("no network")

        socket.getaddrinfo = socket.create_connection = refuse
        socket.socket.connect = socket.socket.connect_ex = refuse

        from langchain_core.documents import Document
        from coinrag_integrations.langchain import ChatCoinRAG, add_documents, create_coinrag_chain
        from coinrag_integrations.rag import CoinRAG
        from tests.tiny import HashEmbedder, tiny_model

        with CoinRAG.open({str(tmp_path)!r}, model=tiny_model(), embedder=HashEmbedder()) as rag:
            add_documents(rag, [Document("The mill is red.", metadata={{"source": "mill"}})])
            assert create_coinrag_chain(rag).invoke("mill?")["context"]
            model = ChatCoinRAG(rag=rag, max_tokens=2)
            model.invoke("mill?")
            model.get_num_tokens("The mill is red.")
    """)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
