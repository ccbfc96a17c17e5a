"""What users of LlamaIndex complained about elsewhere, as tests; the numbers are those of public threads.

LI is run-llama/llama_index, HF huggingface/transformers, TK huggingface/tokenizers.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.postprocessor import SimilarityPostprocessor
from llama_index.core.schema import Document, MetadataMode
from llama_index.core.tools import RetrieverTool, ToolMetadata

from coinrag_integrations.engine import GenerationConfig, mark
from coinrag_integrations.llamaindex import (
    CoinRAGIndex,
    CoinRAGLLM,
    CoinRAGQueryEngine,
    CoinRAGRetriever,
    CoinRAGSynthesizer,
    NuggetNodeParser,
    add_documents,
)
from coinrag_integrations.rag import CoinRAG
from tests.adapters import QUESTION, TEXTS


def test_no_score_is_none_or_zero_for_all(filled: CoinRAG):
    """LI 12497, 18890."""
    nodes = CoinRAGRetriever(filled).retrieve(QUESTION)
    assert all(node.score is not None for node in nodes)
    assert len({node.score for node in nodes}) > 1
    assert SimilarityPostprocessor(similarity_cutoff=-1.0).postprocess_nodes(nodes) == nodes


def test_our_metadata_is_read_by_nobody_and_changes_no_sizes(filled: CoinRAG, documents):
    """LI 7980, 12200, 9474: "metadata length is longer than chunk size"."""
    nodes = NuggetNodeParser.from_defaults(rag=filled).get_nodes_from_documents(documents)
    for node in (*nodes, *(it.node for it in CoinRAGRetriever(filled).retrieve(QUESTION))):
        for mode in (MetadataMode.LLM, MetadataMode.EMBED):
            assert "coinrag_" not in node.get_content(mode)
    whole = Document(text=TEXTS["organ"], metadata=nodes[0].metadata)
    whole.excluded_llm_metadata_keys = nodes[0].excluded_llm_metadata_keys
    whole.excluded_embed_metadata_keys = nodes[0].excluded_embed_metadata_keys
    bare = Document(text=TEXTS["organ"], metadata={"title": "Organ", "year": 1923})
    splitter = SentenceSplitter(chunk_size=40, chunk_overlap=0)
    sizes = [[len(n.text) for n in splitter.get_nodes_from_documents([d])] for d in (whole, bare)]
    assert sizes[0] == sizes[1]
    long = Document(id_="long", text="A short text.", metadata={"note": "word " * 3000})
    assert NuggetNodeParser.from_defaults(rag=filled).get_nodes_from_documents([long])


def test_none_lists_and_nested_metadata_come_back(rag: CoinRAG):
    """LI 9695, 8583; LC 8556."""
    metadata = {"none": None, "tags": ["a", "b"], "nested": {"x": 1}, "n": 3, "empty": []}
    add_documents(rag, [Document(id_="d", text="The mill is red.", metadata=metadata)])
    found = CoinRAGRetriever(rag).retrieve("mill")[0].node.metadata
    ours = {key: value for key, value in found.items() if not key.startswith("coinrag_")}
    assert ours == {"tags": ["a", "b"], "nested": '{"x": 1}', "n": 3, "empty": "[]"}


def test_ingesting_again_doubles_nothing_and_leaves_nothing_old(filled: CoinRAG, documents):
    """LI 13162, 14711, 13604, 14767."""
    before = filled.index.counts()
    add_documents(filled, documents)
    assert filled.index.counts() == before
    twice = Document(id_="twice", text="The same words. " * 40)
    add_documents(filled, [twice, Document(id_="thrice", text=twice.text)])
    assert {"twice", "thrice"} <= set(filled.engine.catalog.documents())
    changed = Document(id_="light", text="The lighthouse is blue.", metadata={"colour": "blue"})
    add_documents(filled, [changed])
    nodes = [
        it.node
        for it in CoinRAGRetriever(filled).retrieve("lighthouse of Sorn")
        if it.node.ref_doc_id == "light"
    ]
    assert {node.text for node in nodes} == {"The lighthouse is blue."}
    assert all("year" not in node.metadata for node in nodes)


def test_deletes_reach_everything(filled: CoinRAG):
    """LI 13604, 13537, 15082."""
    index = CoinRAGIndex(filled)
    gone = filled.engine.catalog.chunk_ids("light")
    assert index.delete_ref_doc("light")
    assert not index.delete_ref_doc("never there")
    assert not any(chunk_id in filled.engine.store for chunk_id in gone)
    assert all("Sorn" not in node.text for node in index.as_retriever().retrieve("Sorn lighthouse"))


def test_more_hits_than_there_are_rows_and_an_empty_store(rag: CoinRAG):
    """LI 3674, CH 342, 301."""
    assert CoinRAGRetriever(rag).retrieve(QUESTION) == []
    add_documents(rag, [Document(id_="d", text="One mill.")])
    assert len(CoinRAGRetriever(rag, n_chunks=500, n_nuggets=5000).retrieve(QUESTION)) == 1


def test_models_stop_at_every_token_that_ends_an_answer(filled: CoinRAG):
    """LI 17224: local chat models that go on and talk to themselves."""
    model = filled.engine.model
    llm = CoinRAGLLM.from_defaults(filled, max_tokens=6)
    first = filled.engine.chat([_user("Who?")], GenerationConfig(max_new_tokens=1))
    list(first)
    said = first._batch._writers[0].tokens[0]  # a token that the tiny model likes to say
    stops = model.stop_ids
    try:
        object.__setattr__(model, "stop_ids", frozenset({*stops, said}))
        assert llm.complete("Who?").text == ""
    finally:
        object.__setattr__(model, "stop_ids", stops)
    assert llm.complete("Who?").text != ""


def _user(text: str) -> Any:
    from coinrag_integrations.engine import Message

    return Message(role="user", content=text)


def test_a_prompt_begins_once(filled: CoinRAG):
    """HF 31796, 37686: two tokens at the beginning where a rendered template is tokenised again."""
    tokenizer = filled.engine.model.tokenizer
    stream = filled.engine.complete("The organ", GenerationConfig(max_new_tokens=1))
    shown = stream._batch._questions[0]
    (begin,) = tokenizer.encode_template(tokenizer.hf.bos_token)
    assert (shown[0], shown.count(begin)) == (begin, 1)


def test_streams_never_show_half_a_character(filled: CoinRAG):
    """LI 2309, 13289; the tiny model's bytes are mostly no characters at all."""
    llm = CoinRAGLLM.from_defaults(filled, max_tokens=40)
    for seed in range(3):
        options = {"temperature": 3.0, "seed": seed}
        pieces = [it.delta for it in llm.stream_complete("🫖?", **options)]
        assert "".join(pieces) == llm.complete("🫖?", **options).text


def test_threads_that_retrieve_and_chat_get_single_thread_answers(filled: CoinRAG):
    """TK 537: "Already borrowed"."""
    engine = CoinRAGQueryEngine.from_args(filled, n_nuggets=3)
    llm = CoinRAGLLM.from_defaults(filled, max_tokens=4)
    questions = [QUESTION, "Who painted it?", "When?", "Why?"]
    expected = {q: (str(engine.query(q)), llm.complete(q).text) for q in questions}
    barrier = threading.Barrier(8)

    def work(number: int) -> bool:
        barrier.wait(timeout=60)
        mine = questions[number % 4 :] + questions[: number % 4]
        return all((str(engine.query(q)), llm.complete(q).text) == expected[q] for q in mine)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


def test_what_is_stored_is_the_same_after_many_answers(filled: CoinRAG):
    """HF 36151, 37078: a cache that generation writes into."""
    span = filled.retrieve(QUESTION)[0]
    llm = CoinRAGLLM.from_defaults(filled, max_tokens=3)
    marked = mark(filled.engine.handles.handle(span.ref), span.text)

    def entries() -> torch.Tensor:
        stage = filled.engine.store.stage([span.ref])
        assert filled.engine.store.read(stage).errors == {}
        return stage.entries(slice(0, 1)).clone()

    before, answers = entries(), {llm.complete(f"{marked} {i % 5}?").text for i in range(25)}
    assert torch.equal(entries(), before)
    assert len(answers) <= 5


def test_the_answer_is_shorter_than_the_window(filled: CoinRAG):
    """LI 6465, 14722: "available context size … was not non-negative"."""
    metadata = CoinRAGLLM.from_defaults(filled).metadata
    assert metadata.num_output < metadata.context_window


async def test_sources_are_there_on_every_path(filled: CoinRAG):
    """LC 11071: who said it, and where."""
    index = CoinRAGIndex(filled)
    response = index.as_query_engine(n_nuggets=2).query(QUESTION)
    refined = index.as_query_engine(n_nuggets=2, response_mode="compact").query(QUESTION)
    tool = RetrieverTool(index.as_retriever(n_nuggets=2), ToolMetadata(name="x", description="x"))
    found = [response.source_nodes, refined.source_nodes, tool(QUESTION).raw_output]
    for nodes in found:
        for node in nodes:
            text = TEXTS[node.node.ref_doc_id]
            assert text[node.node.start_char_idx : node.node.end_char_idx] == node.node.text
            assert node.node.metadata["title"]
    assert "title: Organ" in tool(QUESTION).content


@pytest.mark.parametrize("odd", ["{x}", "{{y}}", "%s", "{context_str}", "⟦k:", "<|im_end|>"])
def test_braces_and_look_alikes_are_words_on_every_path(rag: CoinRAG, odd: str):
    """LI 8112, 14310, 12816."""
    add_documents(rag, [Document(id_="d", text=f"The mill says {odd} at noon.")])
    index = CoinRAGIndex(rag)
    question = f"What does the mill say, {odd}?"
    rag.generation = GenerationConfig(max_new_tokens=3)
    assert str(index.as_query_engine().query(question)) == rag.ask(question).text
    llm = CoinRAGLLM.from_defaults(rag, max_tokens=3)
    for mode in ("compact", "refine", "tree_summarize"):
        response = index.as_query_engine(llm=llm, response_mode=mode).query(question)
        assert response.source_nodes[0].node.text == f"The mill says {odd} at noon."
    chat = index.as_chat_engine(llm=llm)
    for _ in range(2):
        chat.chat(question)
    assert [it.content for it in chat.chat_history if it.role == "user"] == [question] * 2


def test_every_answer_says_whether_the_cache_was_used(filled: CoinRAG):
    """People want chunk reuse and cannot tell whether it happened (LMCache 167, vllm 9368)."""
    report = CoinRAGQueryEngine.from_args(filled).query(QUESTION).metadata["coinrag"]
    chat = CoinRAGIndex(filled).as_chat_engine().chat(QUESTION).metadata["coinrag"]
    raw = CoinRAGLLM.from_defaults(filled, max_tokens=2).complete("Who?").raw
    for it in (report, chat, raw):
        assert it.keys() >= {"spans", "recomputed", "refused", "usage", "timings"}
        assert it["usage"].keys() >= {"cached", "online", "generated", "kept"}


def test_nodes_of_a_deleted_document_are_read_as_text_and_counted(filled: CoinRAG):
    nodes = CoinRAGRetriever(filled).retrieve(QUESTION)
    gone = [node for node in nodes if node.node.ref_doc_id == nodes[0].node.ref_doc_id]
    filled.delete([nodes[0].node.ref_doc_id])
    report = CoinRAGSynthesizer(filled).synthesize(QUESTION, nodes).metadata["coinrag"]
    assert report["refused"] == {"unknown": len(gone)}
    assert len(report["spans"]) <= len(nodes) - len(gone)
