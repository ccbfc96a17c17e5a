"""What a request to a server says of its prefix. Standard library only: knows no store and no tensor.

A request names spans by handles, and nothing else: no path, no triple, no tensor. Whether a handle is
believed is for `checking` to say.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from coinrag_integrations.errors import ConfigError
from coinrag_integrations.types import Scope

VERSION = 1
MAX_HANDLES = 4096
_FIELDS = frozenset({"coinrag", "tenant", "collection", "n_head", "handles"})
_HANDLE = re.compile("([1-9][0-9]?)?:[a-z2-7]{24}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixRequest:
    """The prefix of a request: `n_head` tokens of head, then the spans that the handles name.

    They are names of `engine.handles`: ":…" for entries, "4:…" for slots of four tokens.
    """

    scope: Scope
    n_head: int
    handles: tuple[str, ...]

    def to_params(self) -> dict[str, Any]:
        """The value of `kv_transfer_params`."""
        return {
            "coinrag": VERSION,
            "tenant": self.scope.tenant,
            "collection": self.scope.collection,
            "n_head": self.n_head,
            "handles": list(self.handles),
        }

    @classmethod
    def from_params(cls, params: object) -> PrefixRequest:
        """The inverse of `to_params`, of anything that somebody may have sent.

        Raises:
            ConfigError: a field that we do not write, one that is missing, or a value of another form.
        """
        if not isinstance(params, Mapping):
            raise ConfigError(f"kv_transfer_params is a {type(params).__name__}, not an object")
        if unknown := sorted(map(str, params.keys() - _FIELDS)):
            raise ConfigError(f"kv_transfer_params has unknown fields: {', '.join(unknown)!r:.200}")
        if missing := sorted(_FIELDS - params.keys()):
            raise ConfigError(f"kv_transfer_params lacks {', '.join(missing)}")
        if params["coinrag"] != VERSION or isinstance(params["coinrag"], bool):
            raise ConfigError(
                f"kv_transfer_params is of version {params['coinrag']!r:.40}, this server reads "
                f"{VERSION}: use the same version of coinrag-integrations on both sides"
            )
        names = (params["tenant"], params["collection"])
        if not all(isinstance(name, str) for name in names):
            raise ConfigError("tenant and collection must be texts")
        n_head, handles = params["n_head"], params["handles"]
        if not isinstance(n_head, int) or isinstance(n_head, bool) or n_head < 0:
            raise ConfigError(f"n_head is {n_head!r:.40}: it must be a number of tokens")
        if not isinstance(handles, list | tuple) or len(handles) > MAX_HANDLES:
            raise ConfigError(f"handles must be a list of at most {MAX_HANDLES}")
        if not all(isinstance(it, str) and _HANDLE.fullmatch(it) for it in handles):
            raise ConfigError("a handle is 24 letters behind a colon: nothing else is read")
        return cls(
            scope=Scope(tenant=names[0], collection=names[1]),
            n_head=n_head,
            handles=tuple(handles),
        )
