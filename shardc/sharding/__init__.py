"""Layouts (R, I, S, P): factors, marks, conversions, and the proof."""
