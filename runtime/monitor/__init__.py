"""What a training job tells of itself: loss, speed, memory, to the console, to JSON lines and to TensorBoard."""

from shardc.runtime.monitor.monitor import Monitor

__all__ = ["Monitor"]
