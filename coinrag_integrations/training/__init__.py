"""Training what reads cached KV. Needs the extra `train`."""

from __future__ import annotations

from coinrag_integrations.training.config import ReaderConfig
from coinrag_integrations.training.examples import mixed
from coinrag_integrations.training.reader import TrainingReport, train_reader
from coinrag_integrations.training.samples import Sample, Sampler

__all__ = ["ReaderConfig", "Sample", "Sampler", "TrainingReport", "mixed", "train_reader"]
