"""GPipe: all forwards, then all backwards (Huang et al., NeurIPS 2019, arXiv:1811.06965)."""

from shardc.pipeline.schedule import Action, Kind


def gpipe(num_stages: int, num_microbatches: int) -> list[list[Action]]:
    """The computations of each rank. Every micro-batch is alive at once; idle share (p-1) / (m+p-1).

    The paper draws the backwards last micro-batch first; here they run in order, so that gradients are added in the
    same order under every schedule.
    """
    ranks = []
    for stage in range(num_stages):
        # Fill: every micro-batch forward.
        forwards = [Action(stage, Kind.F, microbatch) for microbatch in range(num_microbatches)]
        # Drain: every micro-batch backward.
        backwards = [Action(stage, Kind.B, microbatch) for microbatch in range(num_microbatches)]
        ranks.append(forwards + backwards)
    return ranks
