"""What a record of operations does not show."""

from shardc.errors import ShardcError


class Unseen(ShardcError):
    """The module does what a record of its operations does not show."""

    def __init__(self, where: object, what: str):
        super().__init__(
            f"{where}: {what}, which a comparison of operations does not see",
            "undo the edit, or compile the plan again",
        )
