"""JSON configuration, presets, and ``reader``, which lays them over frozen dataclasses; how programs ``start``."""
