"""Ask a few documents through LangChain, from cached KV. Run: python cookbook/langchain_quickstart.py

Needs `pip install 'coinrag-integrations[langchain,demo]'`; the first run fetches the demo model.
"""

from __future__ import annotations

import tempfile

from langchain_core.documents import Document

from coinrag_integrations.demo.data import demo_documents, demo_questions
from coinrag_integrations.demo.model import ensure_demo_model
from coinrag_integrations.langchain import add_documents, create_coinrag_chain
from coinrag_integrations.rag import CoinRAG


def main() -> None:
    questions = demo_questions()[:2]
    needed = {name for question in questions for name in question.supporting}
    documents = [
        Document(id=d.document_id, page_content=d.text, metadata=dict(d.metadata))
        for i, d in enumerate(demo_documents())
        if i < 6 or d.document_id in needed
    ]
    model = ensure_demo_model(print)
    with tempfile.TemporaryDirectory() as folder, CoinRAG.open(folder, model=model) as rag:
        report = add_documents(rag, documents)
        print(f"{report.n_documents} documents, {report.n_nuggets} nuggets, {report.seconds:.1f} s")

        chain = create_coinrag_chain(rag, k=5)
        for question in questions:
            output = chain.invoke(question.question)
            print(f"\n{output['question']}\n  {output['answer']}")
            for document in output["context"]:
                found = document.metadata
                where = f"{found['coinrag_document_id']} [{found['coinrag_char_start']}]"
                print(f"  {found['coinrag_score']:.2f} {where}: {document.page_content}")
            used = output["coinrag"]
            print(
                f"  first token after {used['timings']['ttft_ms']:.0f} ms: "
                f"{used['usage']['cached']} tokens from the cache, "
                f"{used['usage']['online']} computed"
            )


if __name__ == "__main__":
    main()
