"""Which failures of remote storage may pass, how often to try again, and what to say at last."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

from coinrag_integrations.errors import ConfigError

NO_BUCKET = "NoSuchBucket"
_TRANSIENT_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504, 509})
_TRANSIENT_CODES = frozenset(
    {"SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "RequestTimeout"}
    | {"InternalError", "ServiceUnavailable", "BadDigest", "XAmzContentSHA256Mismatch"}
)
# By name, in the whole line of base classes: the back ends' modules may not be installed.
_TRANSIENT_CLASSES = frozenset(
    {"ConnectionError", "TimeoutError", "HTTPClientError", "IncompleteRead", "IncompleteReadError"}
    | {"ResponseParserError", "ClientConnectionError", "ClientPayloadError", "ProtocolError"}
    | {"FlexibleChecksumError"}  # S3's checksum of a whole object: bytes that changed on the way
    | {"ServiceRequestError", "ServiceResponseError", "TransportError"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """How often and how long to try: pauses double from `first_pause_s`, and vary by up to a half.

    `total_s` bounds an operation with all its attempts, also one whose answer never comes.
    """

    attempts: int = 6
    first_pause_s: float = 0.1
    longest_pause_s: float = 5.0
    total_s: float = 60.0

    def __post_init__(self) -> None:
        """Refuse to never try."""
        if self.attempts < 1 or min(self.first_pause_s, self.longest_pause_s, self.total_s) <= 0:
            raise ConfigError(f"{self}: attempts and seconds must be above 0")

    def pause(self, attempt: int) -> float:
        """Seconds to wait after the attempt of this number (from 1)."""
        longest = min(self.first_pause_s * 2.0 ** (attempt - 1), self.longest_pause_s)
        return longest * random.uniform(0.5, 1.0)


def is_transient(error: BaseException) -> bool:
    """Whether the same request may succeed in a moment: no answer, half of one, 5xx, too many requests."""
    for link in _causes(error):
        status = _status(link)
        if status is not None:
            return status in _TRANSIENT_STATUS or code_of(link) in _TRANSIENT_CODES
        if any(base.__name__ in _TRANSIENT_CLASSES for base in type(link).__mro__):
            return True
    return False


def _causes(error: BaseException) -> Iterator[BaseException]:
    link: BaseException | None = error
    for _ in range(8):
        if link is None:
            return
        yield link
        link = link.__cause__


def _status(error: BaseException) -> int | None:
    """The HTTP status that an error of any back end carries."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        value = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return value if isinstance(value, int) else None
    for name in ("status", "status_code", "code"):
        value = getattr(error, name, None)
        if isinstance(value, int) and 400 <= value < 600:
            return value
    return None


def code_of(error: BaseException) -> str | None:
    """S3's own name for what is wrong."""
    for link in _causes(error):
        response = getattr(link, "response", None)
        if isinstance(response, dict):
            return str(response.get("Error", {}).get("Code"))
    return None


def reason(error: BaseException) -> str:
    """The error in one line, without the queries of URLs: they may be signed."""
    text = " ".join(re.sub(r"\?\S+", "?…", str(error)).split())
    return f"{type(error).__name__}: {text:.300}" if text else type(error).__name__


def advice(error: BaseException) -> str:
    """What whoever runs this can do about it."""
    names = {base.__name__ for link in _causes(error) for base in type(link).__mro__}
    if is_transient(error):
        return "Check the network and whether the service runs, then try again"
    if code_of(error) == NO_BUCKET:
        return "Create the bucket, or correct the URL"
    if names & {"PermissionError", "NoCredentialsError", "PartialCredentialsError"}:
        return (
            "Check the credentials (environment, profile, fsspec's configuration) and that they may "
            "read, write, list and delete here"
        )
    if code_of(error) == "InvalidRange":
        return "The object is shorter: read again what it holds"
    return "Check the URL and the options of the storage"
