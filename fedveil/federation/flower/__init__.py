"""Flower carries the bytes of a federation: the server's transport, the clients' two ways to join.

This package has no privacy logic. It moves opaque bytes between `Transport` and `Handler`. Import
its modules by name. Only those that talk to Flower import flwr, so fedveil works without it.
"""
