"""Stages and their schedule: where to cut a model, the stages' graphs, and the order of their work."""

from shardc.pipeline.balance import Costs, check_cuts, choose_cuts, measure_costs
from shardc.pipeline.cut import block_paths, cut

__all__ = ["Costs", "block_paths", "check_cuts", "choose_cuts", "cut", "measure_costs"]
