"""A folder on the module search path of the ranks: Python runs its sitecustomize.py as a rank starts."""
