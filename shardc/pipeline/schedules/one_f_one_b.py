"""1F1B: one forward, one backward in turn (PipeDream-Flush: Narayanan et al., ICML 2021, arXiv:2006.09503)."""

from shardc.pipeline.schedule import Action, Kind


def one_f_one_b(num_stages: int, num_microbatches: int) -> list[list[Action]]:
    """The computations of each rank. Stage k keeps min(p-k, m) micro-batches alive; idle share (p-1) / (m+p-1)."""
    ranks = []
    for stage in range(num_stages):
        num_warmup = min(num_stages - 1 - stage, num_microbatches)
        # Warm-up: forwards until the first gradient can come back, fewer when the micro-batches run out.
        actions = [Action(stage, Kind.F, microbatch) for microbatch in range(num_warmup)]
        # Steady state: one forward, then the oldest backward.
        for microbatch in range(num_warmup, num_microbatches):
            actions += [Action(stage, Kind.F, microbatch), Action(stage, Kind.B, microbatch - num_warmup)]
        # Cool-down: the backwards of the warm-up's share.
        for microbatch in range(num_microbatches - num_warmup, num_microbatches):
            actions.append(Action(stage, Kind.B, microbatch))
        ranks.append(actions)
    return ranks
