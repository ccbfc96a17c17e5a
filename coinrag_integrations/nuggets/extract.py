"""Give a chunk its nuggets: propose, align, keep what was found. Knows no model and no store."""

from __future__ import annotations

import dataclasses
import logging

from coinrag_integrations.errors import ProposalError
from coinrag_integrations.nuggets.align import Alignment, align, align_ranges
from coinrag_integrations.nuggets.propose import NuggetProposer, RangeProposer
from coinrag_integrations.types import Chunk

logger = logging.getLogger(__name__)


def extract_nuggets(chunk: Chunk, proposer: NuggetProposer, *, threshold: float = 0.7) -> Chunk:
    """The chunk with the nuggets that `proposer` suggests and its text confirms.

    Nuggets it had before are replaced. Candidates that cannot be found are logged at DEBUG.

    Raises:
        ProposalError: the proposer returned something other than a list of strings.
    """
    alignment = _aligned(chunk, proposer, threshold)
    for left in alignment.abandoned:
        logger.debug(
            "chunk %s: %s abandoned %r: %s",
            chunk.chunk_id,
            proposer.proposer_id,
            left.text,
            left.reason,
        )
    return dataclasses.replace(chunk, nuggets=alignment.nuggets)


def coverage(chunk: Chunk) -> float:
    """The share of the chunk's tokens that lie in at least one nugget; 0.0 without tokens."""
    covered = {i for nugget in chunk.nuggets for i in range(nugget.span.start, nugget.span.stop)}
    return len(covered) / len(chunk) if len(chunk) else 0.0


def _aligned(chunk: Chunk, proposer: NuggetProposer, threshold: float) -> Alignment:
    if isinstance(proposer, RangeProposer):
        return align_ranges(chunk, proposer.ranges(chunk.text))
    candidates = proposer.propose(chunk.text)
    # A str is a sequence of strings too; its characters would all be found.
    if isinstance(candidates, str) or not all(isinstance(item, str) for item in candidates):
        raise ProposalError(
            f"proposer {proposer.proposer_id} returned {candidates!r:.80} for chunk "
            f"{chunk.chunk_id}: propose() must return a list of strings"
        )
    return align(chunk, candidates, threshold=threshold)
