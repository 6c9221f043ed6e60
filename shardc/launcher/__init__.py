"""`shardc run`: a command line becomes one torchrun on each machine, and one first error.

Nothing here loads torch but `node`, the process on each machine that holds its ranks.
"""
