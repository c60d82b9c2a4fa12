"""The Flower app that a federation submits. `writing.write_app` copies these files.

Flower runs the submitter's code on every node, so the client's side imports the standard library
and flwr only, and does nothing but pass bytes to the resident agent.
"""
