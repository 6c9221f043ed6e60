"""Compile a Hugging Face model for many GPUs, prove its gradients, train it."""

from shardc.runtime.errors import ShardcError

__all__ = ["ShardcError"]
