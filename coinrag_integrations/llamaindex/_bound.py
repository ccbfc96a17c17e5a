"""What a component works with, where copies share it and pickles leave it behind."""

from __future__ import annotations

from coinrag_integrations.errors import ConfigError
from coinrag_integrations.rag import CoinRAG


class Bound:
    """A CoinRAG, or none after unpickling."""

    def __init__(self, rag: CoinRAG | None) -> None:
        """Hold `rag`."""
        self.rag = rag

    def need(self, owner: object) -> CoinRAG:
        """The CoinRAG.

        Raises:
            ConfigError: `owner` has lost it.
        """
        if self.rag is None:
            name = type(owner).__name__
            raise ConfigError(
                f"this {name} was loaded or unpickled without its CoinRAG: give it one with "
                f"{name}.from_dict(saved.to_dict(), rag=rag), and use num_workers=1 in pipelines"
            )
        return self.rag

    def __deepcopy__(self, _: object) -> Bound:
        """The same: an engine is not copied."""
        return self

    def __reduce__(self) -> tuple[type[Bound], tuple[None]]:
        """Nothing: an engine is not pickled."""
        return (Bound, (None,))
