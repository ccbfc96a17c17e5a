"""How much fits into a prompt, counted as the model counts, without ever cutting a marked passage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

from llama_index.core.indices.prompt_helper import DEFAULT_PADDING, PromptHelper
from llama_index.core.llms import LLM
from llama_index.core.node_parser.text.token import TokenTextSplitter
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.tools import BaseTool

from coinrag_integrations.engine import split_marked, strip_handles
from coinrag_integrations.errors import BudgetError
from coinrag_integrations.llamaindex.llm import CoinRAGLLM
from coinrag_integrations.rag import CoinRAG

_BETWEEN = "\n\n"


class MarkedPromptHelper(PromptHelper):
    """LlamaIndex's `PromptHelper` for prompts that hold handles.

    Handles cost nothing, since the model never sees them. A passage that fits is kept whole when texts
    are packed, and left out whole, from the end, when they are truncated; only one that is longer than
    the window is cut, and then read as text.

        >>> Settings.prompt_helper = MarkedPromptHelper.from_rag(rag)  # or prompt_helper=...
    """

    @classmethod
    def class_name(cls) -> str:
        """The name under which the helper is serialised."""
        return "MarkedPromptHelper"

    @classmethod
    def from_rag(cls, rag: CoinRAG, llm: CoinRAGLLM | None = None, **fields: Any) -> Self:
        """For the model of `rag`, with the window and the answer's length of `llm` if it is given."""
        metadata = (llm or CoinRAGLLM.from_defaults(rag)).metadata
        own = {
            "context_window": metadata.context_window,
            "num_output": metadata.num_output,
            "tokenizer": count_with(rag),
        }
        return cls(**{**own, **fields})

    def repack(
        self,
        prompt: BasePromptTemplate,
        text_chunks: Sequence[str],
        padding: int = DEFAULT_PADDING,
        llm: LLM | None = None,
        tools: list[BaseTool] | None = None,
    ) -> list[str]:
        """Texts joined to as few as fit.

        Raises:
            BudgetError: the prompt leaves no room for a text.
        """
        splitter = self._splitter(prompt, 1, padding, llm, tools)
        packed: list[str] = []
        n_packed, n_between = 0, self._count(_BETWEEN)
        for chunk in text_chunks:
            for text in self._whole(chunk.strip(), splitter):
                n_tokens = self._count(text)
                if packed and n_packed + n_between + n_tokens <= splitter.chunk_size:
                    packed[-1] += _BETWEEN + text
                    n_packed += n_between + n_tokens
                else:
                    packed.append(text)
                    n_packed = n_tokens
        return packed

    def truncate(
        self,
        prompt: BasePromptTemplate,
        text_chunks: Sequence[str],
        padding: int = DEFAULT_PADDING,
        llm: LLM | None = None,
        tools: list[BaseTool] | None = None,
    ) -> list[str]:
        """The beginning of each text, so that all of them fit together.

        Raises:
            BudgetError: the prompt leaves no room for the texts.
        """
        if not text_chunks:
            return []
        splitter = self._splitter(prompt, len(text_chunks), padding, llm, tools)
        return [self._beginning(text, splitter) for text in text_chunks]

    def _beginning(self, text: str, splitter: TokenTextSplitter) -> str:
        kept, n_kept = "", 0
        for part, is_marked in split_marked(text):
            n_tokens = self._count(part)
            if n_kept + n_tokens > splitter.chunk_size:
                if not is_marked and (room := splitter.chunk_size - n_kept) > 0:
                    kept += next(iter(self._cut(part, room)), "")
                break
            kept += part
            n_kept += n_tokens
        return kept.rstrip()

    def _whole(self, text: str, splitter: TokenTextSplitter) -> Iterator[str]:
        """A text, in as many pieces as are needed for each of them to fit."""
        if not text:
            return
        if self._count(text) <= splitter.chunk_size:
            yield text
            return
        piece, n_piece = "", 0
        for part, is_marked in split_marked(text):
            n_tokens = self._count(part)
            if n_piece + n_tokens > splitter.chunk_size and piece.strip():
                yield piece.strip()
                piece, n_piece = "", 0
            if n_tokens <= splitter.chunk_size:
                piece += part
                n_piece += n_tokens
                continue
            words = strip_handles(part) if is_marked else part
            *full, piece = self._cut(words, splitter.chunk_size)
            yield from full
            n_piece = self._count(piece)
        if piece.strip():
            yield piece.strip()

    def _cut(self, words: str, n_tokens: int) -> list[str]:
        splitter = TokenTextSplitter(
            separator=self.separator,
            chunk_size=n_tokens,
            chunk_overlap=0,
            tokenizer=self._token_counter.tokenizer,
        )
        return splitter.split_text(words) or [""]

    def _count(self, text: str) -> int:
        return self._token_counter.get_string_tokens(text)

    def _splitter(
        self,
        prompt: BasePromptTemplate,
        n_texts: int,
        padding: int,
        llm: LLM | None,
        tools: list[BaseTool] | None,
    ) -> TokenTextSplitter:
        try:
            return self.get_text_splitter_given_prompt(
                prompt, num_chunks=n_texts, padding=padding, llm=llm, tools=tools
            )
        except ValueError as error:
            raise BudgetError(
                f"a window of {self.context_window} tokens has no room for {n_texts} texts beside the "
                f"prompt and an answer of {self.num_output} ({error}): lower max_tokens, retrieve less, "
                "or use a larger context_window"
            ) from error


def count_with(rag: CoinRAG) -> Callable[[str], list[int]]:
    """The model's own tokens of a text, for everything in LlamaIndex that counts; handles are none."""
    tokenizer = rag.engine.model.tokenizer
    return lambda text: list(tokenizer.encode(strip_handles(text)).ids)
