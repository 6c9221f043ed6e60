"""The one exception that a user's mistake raises."""


class ShardcError(Exception):
    """A mistake that the user can mend: what is wrong, and one line of advice.

    problem: one line that names the module, the sizes and the valid choices. advice: one line, what to do.
    The command line prints both and exits with status 2.
    """

    def __init__(self, problem: str, advice: str = ""):
        super().__init__(f"{problem}\n  {advice}" if advice else problem)
        self.problem = problem
        self.advice = advice
