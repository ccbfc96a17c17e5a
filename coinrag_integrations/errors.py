"""Every error this package raises. A message says what is wrong, where, and what to do about it.

CoinRAGError
├── ConfigError(ValueError)           a wrong option, or options that do not go together
├── DocumentError(ValueError)         a file that cannot be read as a document
├── ProposalError(ValueError)         an LLM's nugget reply that cannot be parsed
├── SpanError(ValueError)             a span that is empty, reversed, or outside its chunk
├── BudgetError(ValueError)           a prefix or question larger than its budget or the model's window
├── ModelError                        a model that cannot be found, fetched or loaded
│   └── UnsupportedModelError         a model whose cached keys cannot be moved safely
├── ServingError                      a server of the model that cannot be reached, or that refuses
├── SpanIndexError                    Chroma failed, or returned rows that we did not write
└── StoreError                        the KV store cannot be read or written
    ├── ChunkNotFoundError(KeyError)  the store holds no such chunk, or not that span of it
    ├── FingerprintMismatchError      the store was built by another model, tokenizer or encoding
    ├── CorruptChunkError             a chunk file whose bytes are not the bytes that were written
    ├── RemoteError                   the remote storage cannot be reached or refuses
    └── SlowReadError                 reading a chunk would take longer than encoding it anew
"""

from __future__ import annotations


class CoinRAGError(Exception):
    """Base of every error of this package."""

    def __str__(self) -> str:
        """The message alone, also for the subclasses of KeyError (which would print its repr)."""
        return str(self.args[0]) if self.args else ""


class ConfigError(CoinRAGError, ValueError):
    """A wrong option, or options that do not go together."""


class DocumentError(CoinRAGError, ValueError):
    """A file that cannot be read as a document."""


class ProposalError(CoinRAGError, ValueError):
    """An LLM's reply to the nugget prompt that cannot be parsed."""


class SpanError(CoinRAGError, ValueError):
    """A span that is empty, reversed, or outside its chunk."""


class BudgetError(CoinRAGError, ValueError):
    """A prefix or question larger than its budget or the model's window."""


class ModelError(CoinRAGError):
    """A model that cannot be found, fetched or loaded."""


class UnsupportedModelError(ModelError):
    """A model whose cached keys cannot be moved safely."""


class ServingError(CoinRAGError):
    """A server of the model that cannot be reached, or that refuses."""


class SpanIndexError(CoinRAGError):
    """Chroma failed, or returned rows that we did not write."""


class StoreError(CoinRAGError):
    """The KV store cannot be read or written."""


class ChunkNotFoundError(StoreError, KeyError):
    """The store holds no such chunk, or not that span of it."""


class FingerprintMismatchError(StoreError):
    """The store was built by another model, tokenizer or encoding."""


class CorruptChunkError(StoreError):
    """A chunk file whose bytes are not the bytes that were written."""


class RemoteError(StoreError):
    """The remote storage cannot be reached or refuses."""


class SlowReadError(StoreError):
    """Reading a chunk would take longer than encoding it anew."""
