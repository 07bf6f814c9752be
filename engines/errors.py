"""What any engine answers to an order that it does not obey, whatever computes behind it."""

from cache.errors import UnderstudyError

__all__ = ["NotReadyError", "RoleNotPossibleError", "StaleEpochError"]


class NotReadyError(UnderstudyError):
    """The engine is still starting, or has ended or failed."""

    code = "not_ready"


class RoleNotPossibleError(UnderstudyError):
    """This engine cannot take that role, or do what belongs to one."""

    code = "role_not_possible"
    http_status = 412


class StaleEpochError(UnderstudyError):
    """Someone who does not know about a later promotion gives orders."""

    code = "stale_epoch"
    http_status = 409

    def __init__(self, *, ours: int, theirs: int) -> None:
        super().__init__(
            f"epoch {theirs} is older than this engine's epoch {ours}",
            hint="ask the supervisor who is primary",
        )
