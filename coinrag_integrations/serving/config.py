"""The options of a server's connector (`kv_connector_extra_config`), checked. Opens nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from coinrag_integrations.engine.kernels import Implementation
from coinrag_integrations.engine.store import scopes
from coinrag_integrations.errors import ConfigError
from coinrag_integrations.types import Scope


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingConfig:
    """Which store a server reads from, and what of it.

    `scopes` are those whose handles are believed; `fingerprint` the first digits of the digest whose
    KV is read, where a scope has several prepared. `n_threads` prefixes are loaded at once, and
    `memory_bytes` of spans kept in host memory. `kernels` are those of `EngineConfig`.
    """

    store: Path
    scopes: tuple[Scope, ...]
    fingerprint: str | None = None
    n_threads: int = 4
    memory_bytes: int = 0
    kernels: Implementation = "auto"

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> Self:
        """Read the options: `store`, and perhaps `scopes` (a list of "tenant.collection") and the others.

        Without `scopes`, all that the store has at this moment are served.

        Raises:
            ConfigError: an unknown option, none of `store`, or a value of another form.
        """
        known = {"store", "scopes", "fingerprint", "n_threads", "memory_bytes", "kernels"}
        if unknown := sorted(options.keys() - known):
            raise ConfigError(
                f"kv_connector_extra_config has unknown options: {', '.join(unknown)}"
            )
        if not isinstance(options.get("store"), str):
            raise ConfigError("kv_connector_extra_config needs 'store': the folder of a store")
        root = Path(options["store"]).expanduser()
        if not root.is_dir():
            raise ConfigError(f"there is no store in {root}: build one with `coinrag build`")
        names = options.get("scopes")
        if names is None:
            served = scopes(root)
        elif isinstance(names, list) and all(isinstance(name, str) for name in names):
            served = [_scope(name) for name in names]
        else:
            raise ConfigError("scopes must be a list of 'tenant.collection'")
        if not served:
            raise ConfigError(f"the store {root} has no documents: build it first")
        fingerprint = options.get("fingerprint")
        if fingerprint is not None and not isinstance(fingerprint, str):
            raise ConfigError("fingerprint must be the first digits of a digest")
        return cls(
            store=root,
            scopes=tuple(served),
            fingerprint=fingerprint,
            n_threads=_number(options, "n_threads", 4, 1),
            memory_bytes=_number(options, "memory_bytes", 0, 0),
            kernels=options.get("kernels", "auto"),
        )


def _scope(name: str) -> Scope:
    tenant, dot, collection = name.partition(".")
    if not dot:
        raise ConfigError(f"scope {name!r:.80} is not of the form 'tenant.collection'")
    return Scope(tenant=tenant, collection=collection)


def _number(options: Mapping[str, Any], name: str, default: int, least: int) -> int:
    value = options.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name} is {value!r:.40}: use a whole number from {least}")
    return value
