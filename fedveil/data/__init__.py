"""Data sets, their parsers, and partitions of examples over clients."""
