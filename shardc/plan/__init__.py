"""From a model's name to a plan folder, and what is asked of a folder: prove it again, verify it by running it."""
