"""Emission: graphs in, the readable `model.py` of a plan out; and the comparison that proves an edited one."""

from shardc.emit.emit import emit

__all__ = ["emit"]
