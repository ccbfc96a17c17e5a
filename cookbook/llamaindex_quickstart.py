"""Ask a few documents through LlamaIndex, from cached KV. Run: python cookbook/llamaindex_quickstart.py

Needs `pip install 'coinrag-integrations[llamaindex,demo]'`; the first run fetches the demo model.
"""

from __future__ import annotations

import tempfile

from llama_index.core import Document

from coinrag_integrations.demo.data import demo_documents, demo_questions
from coinrag_integrations.demo.model import ensure_demo_model
from coinrag_integrations.llamaindex import CoinRAGQueryEngine, add_documents
from coinrag_integrations.rag import CoinRAG


def main() -> None:
    questions = demo_questions()[:2]
    needed = {name for question in questions for name in question.supporting}
    documents = [
        Document(id_=d.document_id, text=d.text, metadata=dict(d.metadata))
        for i, d in enumerate(demo_documents())
        if i < 6 or d.document_id in needed
    ]
    model = ensure_demo_model(print)
    with tempfile.TemporaryDirectory() as folder, CoinRAG.open(folder, model=model) as rag:
        report = add_documents(rag, documents)
        print(f"{report.n_documents} documents, {report.n_nuggets} nuggets, {report.seconds:.1f} s")

        engine = CoinRAGQueryEngine.from_args(rag, n_nuggets=5)
        for question in questions:
            response = engine.query(question.question)
            print(f"\n{question.question}\n  {response}")
            for node in response.source_nodes:
                where = f"{node.node.ref_doc_id} [{node.node.start_char_idx}]"
                print(f"  {node.score:.2f} {where}: {node.node.get_content()}")
            found = response.metadata["coinrag"]
            print(
                f"  first token after {found['timings']['ttft_ms']:.0f} ms: "
                f"{found['usage']['cached']} tokens from the cache, "
                f"{found['usage']['online']} computed"
            )


if __name__ == "__main__":
    main()
