"""The ServerApp: it serves the federation in the directory that the app was written for."""

from __future__ import annotations

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the server. A run that stopped early raises, so Flower marks it as failed."""
    from fedveil.federation.flower.serving import run

    run(grid, context.run_config)
