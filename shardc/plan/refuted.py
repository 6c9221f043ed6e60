"""The error of a plan that does not compute what the model computes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardc.errors import ShardcError

if TYPE_CHECKING:
    from shardc.sharding.prove import Certificate


class Refuted(ShardcError):
    """The proof failed: the plan is never written. The command line exits with 1, not 2."""

    def __init__(self, certificate: Certificate, advice: str):
        lines = list(dict.fromkeys(map(str, certificate.findings)))
        more = f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""
        super().__init__(f"refuted: {lines[0]}{more}", advice)
        self.certificate = certificate
