"""The commands, a file each; heavy libraries are loaded when one runs."""
