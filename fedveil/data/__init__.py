"""Data sets, their parsers, and the ways to split them over clients."""
