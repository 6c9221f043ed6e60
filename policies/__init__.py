"""Sharding policies, one YAML file an architecture family (package data)."""
