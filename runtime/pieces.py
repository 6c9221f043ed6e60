"""Parts of a parameter that dp ranks hold, put together on the first of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shardc.runtime.mesh import Mesh
from shardc.runtime.state import Piece


def gather_pieces(
    pieces: Sequence[Piece | None], own: Tensor | None, mesh: Mesh, *, dtype: torch.dtype
) -> Tensor | None:
    """A flat tensor of all elements on dp coord 0, None on others. All dp ranks of this (pp, tp) call it.

    pieces: of each dp coord, in order; elements that several hold come from the first of them. own: this rank's flat
    tensor of `dtype`, of which its piece is a part; None where it has no piece."""
    here = mesh.dp.coord
    ranks = [mesh.rank_at(dp=coord, pp=mesh.pp.coord, tp=mesh.tp.coord) for coord in range(mesh.dp.size)]
    parts, filled = [], 0
    for coord, piece in enumerate(pieces):
        if piece is None or piece.offset < filled:
            continue
        filled = piece.offset + piece.numel
        if here == coord:
            assert own is not None
            # It may be on the host, and NCCL sends what is on its device.
            part = own[piece.start : piece.start + piece.numel].to(mesh.device)
            if coord == 0:
                parts.append(part)
            else:
                dist.send(part.contiguous(), ranks[0])
        elif here == 0:
            received = torch.empty(piece.numel, dtype=dtype, device=mesh.device)
            dist.recv(received, ranks[coord])
            parts.append(received)
    return torch.cat(parts) if parts else None
