"""The text of a PDF, from files that may be damaged, or meant to do harm."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from coinrag_integrations.errors import DocumentError

# Characters that a PDF of any size may have; a larger one may have twenty a byte.
_PDF_TEXT = 10_000_000
# What pypdf raises on damaged files besides its own errors: it follows broken references.
_DAMAGED_PDF = (
    *(ValueError, LookupError, TypeError, AttributeError, ArithmeticError, AssertionError),
    *(RecursionError, NotImplementedError, EOFError, OSError, struct.error, zlib.error),
)


def read_pdf(path: Path, data: bytes) -> tuple[str, str, int]:
    """Text, title and number of pages of a PDF.

    Raises:
        DocumentError: it is damaged, encrypted, a scan, or out of proportion.
    """
    import pypdf
    from pypdf.errors import (
        DependencyError,
        DeprecationError,
        FileNotDecryptedError,
        PyPdfError,
    )

    try:
        reader = pypdf.PdfReader(io.BytesIO(data))
        pages = list(_pages(reader, path, len(data)))
        title = (reader.metadata.title if reader.metadata else None) or ""
    except (FileNotDecryptedError, DependencyError) as e:
        raise DocumentError(
            f"{path}: the PDF is encrypted: save a copy without a password, "
            "for example with qpdf --decrypt"
        ) from e
    except DocumentError:
        raise
    except MemoryError as e:
        raise _expands(path) from e
    except (PyPdfError, DeprecationError, *_DAMAGED_PDF) as e:
        raise DocumentError(
            f"{path}: the PDF is damaged ({e}): repair it, for example by printing it to a new PDF"
        ) from e
    text = "\n\n".join(page.strip() for page in pages if page.strip())
    if not text:
        raise DocumentError(
            f"{path}: the PDF has no text on its {len(pages)} pages, so it is probably a scan: "
            "run OCR on it first, for example with ocrmypdf"
        )
    return text, _storable(str(title)).strip(), len(pages)


def _pages(reader: Any, path: Path, n_bytes: int) -> Iterator[str]:
    """The texts of a PDF's pages, as long as they are in proportion to the file."""
    n_characters, most = 0, max(_PDF_TEXT, 20 * n_bytes)
    for page in reader.pages:
        text = _storable(page.extract_text())
        n_characters += len(text)
        if n_characters > most:
            raise _expands(path)
        yield text


def _expands(path: Path) -> DocumentError:
    return DocumentError(
        f"{path}: the PDF is small and expands to an enormous text, so it may be meant to do harm: "
        "save its text as a file if it is not"
    )


def _storable(text: str) -> str:
    """Text of a PDF without what broken fonts leave in it: NUL and unpaired surrogates."""
    pairs = text.replace("\0", "").encode("utf-16-le", "surrogatepass")
    return pairs.decode("utf-16-le", "replace")
