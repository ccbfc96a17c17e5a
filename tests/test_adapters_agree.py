from __future__ import annotations

import pytest
from langchain_core.documents import Document as LangDocument
from llama_index.core.schema import Document as LlamaDocument

from coinrag_integrations import langchain, llamaindex
from coinrag_integrations.engine import GenerationConfig
from coinrag_integrations.langchain import _convert as lang
from coinrag_integrations.llamaindex import _convert as llama
from coinrag_integrations.rag import CoinRAG
from tests.adapters import FIRST, QUESTION, TEXTS, WIDE

QUESTIONS = [QUESTION, FIRST, "When does the café open?", "Where is the wheel?"]


@pytest.fixture
def filled(rag: CoinRAG) -> CoinRAG:
    rag.generation = GenerationConfig(max_new_tokens=8)
    rag.retrieval = WIDE
    documents = [LlamaDocument(id_=n, text=t, metadata={"source": n}) for n, t in TEXTS.items()]
    llamaindex.add_documents(rag, documents)
    return rag


def lang_documents() -> list[LangDocument]:
    return [LangDocument(page_content=t, metadata={"source": n}) for n, t in TEXTS.items()]


@pytest.mark.parametrize("question", QUESTIONS)
def test_both_retrievers_return_the_same_spans(filled: CoinRAG, question: str):
    nodes = llamaindex.CoinRAGRetriever(filled, n_nuggets=6).retrieve(question)
    documents = langchain.CoinRAGRetriever(rag=filled, k=6).invoke(question)
    assert 0 < len(nodes) <= 6
    assert [llama.span_of(node) for node in nodes] == [lang.span_of(doc) for doc in documents]
    assert [node.node.node_id for node in nodes] == [doc.id for doc in documents]


def test_both_answer_alike(filled: CoinRAG):
    response = llamaindex.CoinRAGQueryEngine.from_args(filled).query(QUESTION)
    output = langchain.create_coinrag_chain(filled).invoke(QUESTION)
    assert str(response) == output["answer"] == filled.ask(QUESTION).text
    for key in ("spans", "recomputed", "usage", "finish_reason"):
        assert response.metadata["coinrag"][key] == output["coinrag"][key]


def test_what_one_adds_the_other_knows(filled: CoinRAG):
    report = langchain.add_documents(filled, lang_documents())
    assert (report.n_unchanged, report.n_encoded) == (len(TEXTS), 0)


def test_both_cut_documents_alike(filled: CoinRAG):
    parser = llamaindex.NuggetNodeParser.from_defaults(rag=filled)
    nodes = parser.get_nodes_from_documents(
        [LlamaDocument(id_=name, text=text) for name, text in TEXTS.items()]
    )
    pieces = langchain.NuggetTextSplitter.from_rag(filled).split_documents(lang_documents())
    assert [node.node_id for node in nodes] == [piece.id for piece in pieces]
    for node, piece in zip(nodes, pieces, strict=True):
        assert node.start_char_idx == piece.metadata["start_index"]
        assert llama.nuggets_of(node) == lang.nuggets_of(piece)
